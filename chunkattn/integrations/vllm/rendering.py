"""`ChunkRenderer`: vLLM's renderer of HTTP requests, for requests with documents, chunks or separator text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from vllm.exceptions import VLLMValidationError

from chunkattn.errors import RequestError
from chunkattn.integrations.vllm.engine_client import ChunkedInput
from chunkattn.parsers import DocumentPrompt, ParsedPrompt, PromptParser
from chunkattn.parsers.arguments import check_salt
from chunkattn.parsers.prompt import Prompt
from chunkattn.server.protocol.generation import Chunks, PromptDocuments, named_documents, with_stored

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer

_DOCUMENTS: TypeAdapter[list[Any]] = TypeAdapter(PromptDocuments)


class ChunkRenderer:
    """Renderer that turns requests with chunks into `ChunkedInput`s, and leaves other requests to vLLM's renderer.

    Args:
        renderer: vLLM's renderer.
        parser: parser of prompts with chunks.
    """

    def __init__(self, renderer: OnlineRenderer, parser: PromptParser) -> None:
        self._renderer, self._parser = renderer, parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat(self, request: ChatCompletionRequest, **options: Any) -> Any:
        """Render a chat. `documents` become its chunks; see vLLM's `OnlineRenderer.render_chat`.

        Raises:
            VLLMValidationError: the documents or messages are malformed, or an option cannot be served with documents.
        """
        if request.documents is None:
            return await self._renderer.render_chat(request, **options)
        documents: Sequence[Any] = _texts(request.documents)
        request.documents = None  # chunks, and no variable of the chat template
        rendered = await self._renderer.render_chat(request, **options)  # also checks tools and adjusts the request
        if not isinstance(rendered, tuple):
            return rendered
        _refuse(request, "truncate_prompt_tokens", "use_beam_search")
        conversation, (plain,) = rendered
        variables = self._renderer.effective_chat_template_kwargs(request)
        variables = {name: value for name, value in variables.items() if name != "documents"}
        if (template := request.chat_template or self._renderer.chat_template) is not None:
            variables["chat_template"] = template
        if request.tools and not (request.tool_choice == "none" and self._renderer.exclude_tools_when_tool_choice_none):
            variables["tools"] = [tool.model_dump() for tool in request.tools]
        messages = [_plain(message) for message in request.messages]
        try:
            text = self._parser.parse_chat(messages, None, **variables).text
            parsed = self._parser.parse_chat(messages, documents, **variables)
        except RequestError as error:
            raise _invalid(error) from None
        if plain.get("prompt") != text:
            text = (
                "this server renders the conversation in a form that cannot be cut into chunks; send a completion with chunks"
            )
            raise VLLMValidationError(text, parameter="messages")
        return conversation, [ChunkedInput(_salted(parsed, request.cache_salt))]

    async def render_completion(self, request: CompletionRequest, **options: Any) -> Any:
        """Render a completion. `chunks`, and prompts with separators, become prompts with chunks.

        Raises:
            VLLMValidationError: a prompt is malformed, or an option cannot be served with chunks.
        """
        chunk_aware, chunks = getattr(request, "chunk_aware", None), getattr(request, "chunks", None)
        split = self._parser.chunk_aware if chunk_aware is None else chunk_aware
        if chunks is None and not split:
            return await self._renderer.render_completion(request, **options)
        try:
            prompts = _prompts(request.prompt) if chunks is None else [_chunks(chunks)]
            parsed = [self._parser.parse(prompt, split) for prompt in prompts]
        except RequestError as error:
            raise _invalid(error) from None
        if all(prompt.layout.is_plain for prompt in parsed):
            return await self._renderer.render_completion(request, **options)
        _refuse(request, "suffix", "prompt_embeds", "truncate_prompt_tokens", "use_beam_search")
        if not request.add_special_tokens:
            raise VLLMValidationError("add_special_tokens false is not offered with chunks", parameter="add_special_tokens")
        inputs = []
        for prompt, given in zip(parsed, prompts, strict=True):
            if prompt.layout.is_plain:
                alone = given if isinstance(given, str) else given["prompt_token_ids"]  # type: ignore[index]
                result = await self._renderer.render_completion(request.model_copy(update={"prompt": alone}), **options)
                if not isinstance(result, list):
                    return result
                inputs += result
            else:
                inputs.append(ChunkedInput(_salted(prompt, request.cache_salt)))
        return inputs


def _texts(documents: Any) -> list[Any]:
    """Return documents as texts and token ids; an object's title becomes the line before its text."""
    try:
        listed = _DOCUMENTS.validate_python(documents)
    except ValidationError as error:
        raise VLLMValidationError(f"documents: {error.errors()[0]['msg']}", parameter="documents") from None
    if named_documents(listed):
        raise VLLMValidationError("documents: this server stores no documents by id; send their texts", parameter="documents")
    return with_stored(listed, {})


def _chunks(chunks: Any) -> DocumentPrompt:
    """Return the prompt of a completion's `chunks`."""
    try:
        parts = Chunks.model_validate(chunks)
    except ValidationError as error:
        raise RequestError(f"chunks: {error.errors()[0]['msg']}", param="chunks") from None
    except Exception as error:  # an unknown name inside
        raise RequestError(f"chunks: {error}", param="chunks") from None
    if named_documents(parts.documents):
        raise RequestError("chunks: this server stores no documents by id; send their texts", param="chunks")
    return parts.prompt({})


def _prompts(prompt: Any) -> list[Prompt]:
    """Return the prompts of a completion, which is a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompt]


def _plain(message: Any) -> dict[str, Any]:
    """Return a message with its text parts joined by line breaks, as vLLM joins them."""
    found = dict(message)
    content = found.get("content")
    if content is not None and not isinstance(content, str):
        parts = list(content)
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
            raise VLLMValidationError("with documents, contents of messages must be texts", parameter="messages")
        found["content"] = "\n".join(part["text"] for part in parts)
    return found


def _refuse(request: Any, *names: str) -> None:
    """Refuse fields that cannot be served with chunks.

    Raises:
        VLLMValidationError: one of the fields is set.
    """
    for name in names:
        if getattr(request, name, None):
            raise VLLMValidationError(f"{name} is not offered with chunks", parameter=name)


def _salted(prompt: ParsedPrompt, salt: str | None) -> ParsedPrompt:
    return replace(prompt, cache_salt=check_salt(salt))


def _invalid(error: RequestError) -> VLLMValidationError:
    return VLLMValidationError(str(error), parameter=error.param)
