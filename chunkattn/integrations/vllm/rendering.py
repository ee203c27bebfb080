"""`ChunkRenderer`: vLLM's renderer of HTTP requests, for requests with documents, chunks or separator text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from chunkattn.errors import RequestError
from chunkattn.integrations.vllm.engine_client import ChunkedInput, vllm_errors
from chunkattn.parsers import DocumentPrompt, PromptParser
from chunkattn.parsers.arguments import check_salt
from chunkattn.parsers.joined import ISOLATED
from chunkattn.schema.generation import Chunks, DocumentOrId, PromptDocuments, named_documents, prompts_of, with_stored

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer

T = TypeVar("T")

_NAMES = {*Chunks.model_fields, *DocumentOrId.model_fields}
"""Names in the place of an error; the other words there are forms of a union."""

_DOCUMENTS: TypeAdapter[list[Any]] = TypeAdapter(PromptDocuments)


class ChunkRenderer:
    """Renderer that turns requests with chunks into `ChunkedInput`s, and leaves other requests to vLLM's renderer.

    Args:
        renderer: vLLM's renderer.
        parser: parser of prompts with chunks.
    """

    def __init__(self, renderer: OnlineRenderer, parser: PromptParser) -> None:
        self._renderer, self._parser = renderer, parser
        self._executor = ThreadPoolExecutor(1, "chunkattn-renderer")  # one: every further thread would copy the tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat(self, request: ChatCompletionRequest, **options: Any) -> Any:
        """Render a chat. `documents` become its chunks; see vLLM's `OnlineRenderer.render_chat`.

        Raises:
            VLLMValidationError: the documents or messages are malformed, or an option cannot be served with documents.
        """
        with vllm_errors():
            _refuse_choices(request)
            if request.documents is None:
                return await self._renderer.render_chat(request, **options)
            _refuse(request, "truncate_prompt_tokens", "use_beam_search", "add_special_tokens")
            documents: Sequence[Any] = _texts(request.documents)
            request.documents = None  # chunks, and no variable of the chat template
            variables = self._renderer.effective_chat_template_kwargs(request)
            if variables.pop("documents", None) is not None:
                text = "documents are chunks on this server; chat_template_kwargs cannot hold documents beside them"
                raise RequestError(text, param="chat_template_kwargs")
            rendered = await self._renderer.render_chat(request, **options)  # also checks tools and adjusts the request
            if not isinstance(rendered, tuple):
                return rendered
            conversation, (plain,) = rendered
            if (template := request.chat_template or self._renderer.chat_template) is not None:
                variables["chat_template"] = template
            if request.tools and not (request.tool_choice == "none" and self._renderer.exclude_tools_when_tool_choice_none):
                variables["tools"] = [tool.model_dump() for tool in request.tools]
            salt = check_salt(request.cache_salt)
            chunked = await self._run(self._parse_chat, conversation, documents, variables, plain.get("prompt"), salt)
            return conversation, [chunked]

    def _parse_chat(
        self,
        conversation: Sequence[Any],
        documents: Sequence[Any],
        variables: dict[str, Any],
        rendered: str | None,
        salt: str | None,
    ) -> ChunkedInput:
        """Return the prompt of a conversation in vLLM's form.

        Args:
            conversation: messages as vLLM hands them to the chat template.
            documents: texts or token ids of the chunks.
            variables: variables of the chat template.
            rendered: vLLM's text of the conversation, which the parts must give again.
            salt: salt of the cache.

        Raises:
            RequestError: the conversation cannot be cut into parts.
        """
        for messages in _flattened(conversation):
            if rendered is not None and self._parser.parse_chat(messages, None, **variables).text == rendered:
                parsed = self._parser.parse_chat(messages, documents, **variables)
                return ChunkedInput(replace(parsed, cache_salt=salt))
        text = (
            "the rendered conversation cannot be cut into parts, because the chat template changes contents, reads lists "
            "or gives token ids; send a completion with chunks instead"
        )
        raise RequestError(text, param="messages")

    async def render_completion(self, request: CompletionRequest, **options: Any) -> Any:
        """Render a completion. `chunks`, and prompts with separators, become prompts with chunks.

        Raises:
            VLLMValidationError: a prompt is malformed, or an option cannot be served with chunks.
        """
        with vllm_errors():
            _refuse_choices(request)
            chunk_aware, chunks = getattr(request, "chunk_aware", None), getattr(request, "chunks", None)
            split = self._parser.chunk_aware if chunk_aware is None else chunk_aware
            if chunks is None and not (split and request.prompt and self._may_split(request.prompt)):
                return await self._renderer.render_completion(request, **options)
            prompts = prompts_of(request.prompt) if chunks is None else [_chunks(chunks)]
            parsed = [await self._run(self._parser.parse, prompt, split) for prompt in prompts]
            if chunks is None and all(prompt.layout.is_plain for prompt in parsed):
                return await self._renderer.render_completion(request, **options)
            _refuse(request, "suffix", "prompt_embeds", "truncate_prompt_tokens", "use_beam_search")
            if not request.add_special_tokens:
                raise RequestError("add_special_tokens false is not offered with chunks", param="add_special_tokens")
            inputs, salt = [], check_salt(request.cache_salt)
            for prompt, sent in zip(parsed, prompts, strict=True):
                if chunks is None and prompt.layout.is_plain:
                    alone = sent if isinstance(sent, str) else sent["prompt_token_ids"]  # type: ignore[index]
                    result = await self._renderer.render_completion(request.model_copy(update={"prompt": alone}), **options)
                    if not isinstance(result, list):
                        return result
                    inputs += result
                else:
                    inputs.append(ChunkedInput(replace(prompt, cache_salt=salt)))
            return inputs

    def _may_split(self, prompt: Any) -> bool:
        """Return whether a prompt is token ids, or has two separators. It is quick, so that plain texts are parsed once."""
        texts = [prompt] if isinstance(prompt, str) else prompt
        return any(not isinstance(text, str) or text.count(self._parser.separator) >= 2 for text in texts)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *arguments))


def _texts(documents: Any) -> list[Any]:
    """Return documents as texts and token ids; an object's title becomes the line before its text."""
    listed = _validated(_DOCUMENTS.validate_python, documents, "documents")
    _refuse_ids(listed, "documents")
    return with_stored(listed, {})


def _chunks(chunks: Any) -> DocumentPrompt:
    """Return the prompt of a completion's `chunks`."""
    parts = _validated(Chunks.model_validate, chunks, "chunks")
    _refuse_ids(parts.documents, "chunks")
    return parts.prompt({})


def _validated(validate: Callable[[Any], T], value: Any, name: str) -> T:
    """Return the value of a field as its type."""
    try:
        return validate(value)
    except ValidationError as error:
        raise RequestError(_reason(error, name), param=name) from None
    except Exception as error:  # an unknown name inside
        raise RequestError(f"{name}: {error}", param=name) from None


def _refuse_ids(documents: Any, name: str) -> None:
    if named_documents(documents):
        raise RequestError(f"{name}: this server stores no documents by id; send their texts", param=name)


def _reason(error: ValidationError, name: str) -> str:
    """Return the error of a field. A union reports an error for every form; the deepest are about the form that was sent."""
    details = error.errors()
    depth = max(len(one["loc"]) for one in details)
    deepest = [one for one in details if len(one["loc"]) == depth]
    place = [str(part) for part in deepest[0]["loc"] if isinstance(part, int) or part in _NAMES]
    reasons = dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in deepest)
    return f"{'.'.join([name, *place])}: {' or '.join(reasons)}"


def _flattened(conversation: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages with every list of text parts as one text: joined by nothing, then by line breaks.

    vLLM leaves such lists to chat templates that read them, and a template may join them either way.

    Raises:
        RequestError: a part is no text.
    """
    lists = [message["content"] for message in conversation if isinstance(message.get("content"), list)]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for parts in lists for part in parts):
        raise RequestError("with documents, contents of messages must be texts", param="messages")
    for glue in ("", "\n") if any(len(parts) > 1 for parts in lists) else ("",):
        yield [
            {**message, "content": glue.join(part["text"] for part in message["content"])}
            if isinstance(message.get("content"), list)
            else dict(message)
            for message in conversation
        ]


def _refuse(request: Any, *names: str) -> None:
    """Refuse fields that cannot be served with chunks.

    Raises:
        RequestError: one of the fields is set.
    """
    for name in names:
        if getattr(request, name, None):
            raise RequestError(f"{name} is not offered with chunks", param=name)


def _refuse_choices(request: Any) -> None:
    """Refuse the field `focus`, and modes of chunks.

    Raises:
        RequestError: `focus` is set, or `chunk_mode` joins documents.
    """
    if getattr(request, "chunk_mode", None) not in (None, ISOLATED):
        raise RequestError("chunk_mode is not offered by vLLM's server; use chunkattn serve", param="chunk_mode")
    if getattr(request, "focus", None) is not None:
        text = (
            "focus is not offered by vLLM's server: its answers have no place for the choice; use ChunkLLM or chunkattn serve"
        )
        raise RequestError(text, param="focus")
