"""`ChunkLLM`: the Python API of chunk-aware prompts over `vllm.LLM`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from numbers import Integral
from typing import Any, NoReturn, TypeAlias, TypeVar

import vllm
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput as EngineOutput
from vllm.sampling_params import RequestOutputKind

from chunkattn.calls.job import drive
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, RequestError
from chunkattn.focus import FocusLike
from chunkattn.integrations.vllm.chunk_options import check_parallel, parts_of, refused_param, take_options
from chunkattn.integrations.vllm.composer import AnsweredTask, Flow, HeldKeys, PromptTask, Submission, answer, save
from chunkattn.integrations.vllm.focus_reads import choose_documents
from chunkattn.integrations.vllm.requests import EngineRequest, PromptPlan, adapter_key
from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput
from chunkattn.parsers import ChunkedPrompt, ParsedPrompt
from chunkattn.parsers.arguments import chat_options, check_salt, list_chats, one_each
from chunkattn.parsers.chat_template import load_chat_template
from chunkattn.parsers.choice import longest
from chunkattn.parsers.prompt import Documents, Prefix, Prompt, list_prompts
from chunkattn.sampling_params import SamplingParams

Params: TypeAlias = "SamplingParams | vllm.SamplingParams"
"""Sampling parameters of either package."""

T = TypeVar("T")

_QUIET = 8
"""Requests up to which no progress bar is shown."""
_NOT_OFFERED = ("score", "rerank", "lookup", "forget", "unpin", "warm_up", "metrics")
"""Methods of `chunkattn.LLM` without a counterpart in vLLM."""


class ChunkLLM:
    """vLLM's engine for chunk-aware prompts, with the prompts, names and outputs of `chunkattn.LLM`.

    Threads may share one instance; their calls run one at a time.

    Example:
        >>> llm = ChunkLLM("Qwen/Qwen3-0.6B", enable_chunk_aware=True)  # doctest: +SKIP
        >>> llm.generate("Read. # # A document. # # Another. # # A question?")  # doctest: +SKIP

    Args:
        model: local Hugging Face folder or hub id.
        **options: fields of `ChunkOptions` and of `ConnectorOptions` (`max_store_bytes`), and every option of `vllm.LLM`.

    Attributes:
        llm: the `vllm.LLM`.
        options: the chunk options.
        parser: parser from prompts to layouts.

    Raises:
        ConfigError: an option is invalid, or asks for what vLLM cannot do.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.options, config, rest = take_options(model, options)
        _check_vllm_options(rest)
        self.llm = vllm.LLM(model, kv_transfer_config=config, **rest)
        self.tokenizer = None if rest.get("skip_tokenizer_init") else self.llm.get_tokenizer()
        self.parser = self.options.parser(self.tokenizer)
        self._held = HeldKeys()
        self._lock = threading.Lock()  # two threads in `vllm.LLM` take each other's outputs

    def __getattr__(self, name: str) -> NoReturn:
        if name in _NOT_OFFERED:
            raise AttributeError(f"ChunkLLM has no {name}, which is not offered in vLLM; use chunkattn.LLM")
        raise AttributeError(f"ChunkLLM has no attribute {name!r}; the vllm.LLM is ChunkLLM.llm")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        chunk_aware: bool | None = None,
        focus: FocusLike | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many. Chunk-aware and plain prompts may be mixed.

        Args:
            prompts: text, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, `ChunkedPrompt` or `DocumentPrompt`, one or a list.
            sampling_params: one set of parameters for all prompts, or one each; None uses the defaults.
            chunk_aware: split text and token ids at the separator; None takes the option `enable_chunk_aware`.
            focus: number of documents that each prompt chooses by its question, or a `chunkattn.Focus` of the score
                `"likelihood"`; for prompts that have none of their own. None shows all documents alike.
            cache_salt: salt of the cache; only requests of equal salt share K/V.
            priority: one priority for all prompts, or one each, under vLLM's priority scheduling; lower goes first.
            use_tqdm: show vLLM's progress bar on calls of more than 8 prompts when stderr is a terminal.
            lora_request: vLLM's LoRA request for all prompts.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is invalid, or cannot be served with chunks. The error comes before any prompt
                runs.
            CapacityError: a prompt is too long, or its documents do not fit the store.
        """
        parsed = [self.parser.parse(prompt, chunk_aware, focus) for prompt in list_prompts(prompts)]
        return self._answer(parsed, sampling_params, cache_salt, priority, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        documents: Sequence[str | Sequence[int]] | None = None,
        focus: FocusLike | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: one conversation, or a list of conversations.
            sampling_params: see `generate`; one set of parameters for all conversations, or one each.
            documents: texts or token ids that become the chunks of every conversation, texts in the `document_template`. The
                text before the content of the first user message is the prefix, and the rest is the question.
            focus: see `generate`; needs documents.
            cache_salt: see `generate`.
            priority: see `generate`.
            use_tqdm: see `generate`.
            chat_template: chat template in place of the tokenizer's own: a file, or the template itself.
            add_generation_prompt: whether the prompt ends with the beginning of an answer; None says so unless the last message
                is continued.
            continue_final_message: whether the prompt ends with the content of the last message, which the model continues.
            tools: functions that the chat template shows to the model, each `{"type": "function", "function": {"name", ...}}`.
            chat_template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`.
            lora_request: see `generate`.

        Raises:
            RequestError: the chat template is missing or unusable, documents have no user message to stand before, or as
                `generate`.
            CapacityError: as `generate`.
        """
        options = chat_options(chat_template_kwargs, chat_template, add_generation_prompt, continue_final_message, tools=tools)
        if chat_template is not None:
            options["chat_template"] = load_chat_template(chat_template)
        parsed = [self.parser.parse_chat(m, documents, focus, **options) for m in list_chats(messages)]
        return self._answer(parsed, sampling_params, cache_salt, priority, use_tqdm, lora_request)

    def precompute(
        self,
        prefix: Prefix,
        documents: Documents,
        *,
        pin: bool = False,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> None:
        """Compute the K/V of a prefix and documents ahead of use.

        Documents that the store holds already count as used. The store keeps the latest documents that fit it, and may evict
        them again. Nothing is returned, because vLLM does not tell which documents its store holds.

        Args:
            prefix: text or token ids exactly as in the later prompts; for `chat`, the messages before the first user message.
            documents: texts or token ids, of the same kind as the prefix. Texts get the `document_template`. An empty list
                computes the prefix alone.
            pin: not offered; an error if it is set.
            cache_salt: see `generate`.
            chat_template_kwargs: the same options as in the later calls of `chat`.
            use_tqdm: see `generate`.
            lora_request: see `generate`.

        Raises:
            RequestError: a part is malformed, or there is neither a prefix nor a document. The error comes before anything is
                computed.
            CapacityError: a document or the prefix is too long, or the engine ends a request with an error.
        """
        if pin:
            raise RequestError("pin is not offered in vLLM; use chunkattn.LLM", param="pin")
        first, chunks = self.parser.parse_cache(prefix, documents, chat_template_kwargs)
        if not first and not chunks:
            raise RequestError("there is neither a prefix nor a document", param="documents")
        parsed = [self.parser.parse(ChunkedPrompt(first, [chunk], [0])) for chunk in chunks]  # the question is not sent
        adapter = adapter_key(lora_request)
        salt, limit = check_salt(cache_salt), self._max_model_len
        plans = [self.options.plan_prefix(first, limit, salt, adapter)] if first and not any(chunks) else []
        for number, prompt in enumerate(parsed):
            try:
                plans.append(self.options.plan(prompt, limit, salt, adapter))
            except RequestError as error:
                whole = error.part == "the prompt"
                part = f"a prompt with document {number}" if whole else f"document {number}"
                raise type(error)(error.message, param="documents", part=part) from None
        self._run(save(plans, self._held, lora_request), use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget all K/V, in vLLM's prefix cache and in the store.

        Returns:
            Whether vLLM's prefix cache is empty.
        """
        with self._lock:
            self._held = HeldKeys()
            return self.llm.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        """End the engine. No other call may follow."""
        with self._lock:
            self.llm.llm_engine.engine_core.shutdown()

    def _run(self, flow: Flow[T], use_tqdm: bool) -> T:
        """Run a flow alone.

        Raises:
            RequestError: vLLM refuses a request.
        """
        with self._lock:
            try:
                return drive(flow, partial(self._send, use_tqdm=use_tqdm))
            except VLLMValidationError as error:
                raise _refused(error) from error

    @property
    def _max_model_len(self) -> int:
        return self.llm.model_config.max_model_len

    def _answer(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Params | Sequence[Params] | None,
        cache_salt: str | None,
        priority: int | Sequence[int],
        use_tqdm: bool,
        lora_request: Any,
    ) -> list[RequestOutput]:
        count, salt = len(prompts), check_salt(cache_salt)
        chosen = SamplingParams() if params is None else params
        kind = vllm.SamplingParams if _is_vllm(chosen) else SamplingParams
        listed = [_engine_params(p) for p in one_each(chosen, kind, count, "sampling_params")]
        adapter, ranks = adapter_key(lora_request), one_each(priority, Integral, count, "priority")

        def plan(prompt: ParsedPrompt) -> PromptPlan:
            return self.options.plan(prompt, self._max_model_len, salt, adapter)

        for prompt, param in zip(prompts, listed, strict=True):
            composed = plan(longest(prompt, self.options.gap)).composed
            if composed.kv_transfer_params is not None and (name := refused_param(param)):
                raise RequestError(f"{name} of a prompt with chunks is not offered in vLLM; use chunkattn.LLM", param=name)

        def flow() -> Flow[list[RequestOutput]]:
            mode, held = self.llm.model_config.logprobs_mode, self._held
            shown = yield from choose_documents(prompts, self.options, mode, plan, ranks, held, lora_request)
            planned = zip(shown, listed, ranks, strict=True)
            answers = yield from answer([PromptTask(plan(p), param, rank, lora_request) for p, param, rank in planned], held)
            return [_output(prompt, answered) for prompt, answered in zip(shown, answers, strict=True)]

        return self._run(flow(), use_tqdm)

    def _send(self, submissions: Sequence[Submission], use_tqdm: bool) -> list[EngineOutput]:
        """Run requests in vLLM, in order of submission."""
        adapters = [submission.lora_request for submission in submissions]
        return self.llm.generate(
            [_engine_prompt(submission.request) for submission in submissions],
            [submission_params(submission) for submission in submissions],
            use_tqdm=use_tqdm and len(submissions) > _QUIET and sys.stderr.isatty(),
            priority=[submission.priority for submission in submissions],
            lora_request=adapters if any(adapters) else None,
        )


def _engine_prompt(request: EngineRequest) -> Any:
    """Return a request's prompt in vLLM's form."""
    salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
    return {"prompt_token_ids": request.token_ids, **salt}


def submission_params(submission: Submission) -> vllm.SamplingParams:
    """Return a submission's sampling parameters, with the connector's parameters in them."""
    if submission.params is None:
        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
    else:
        params = submission.params.clone()
    if (transfer := submission.request.kv_transfer_params) is not None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
    return params


def _check_vllm_options(options: Mapping[str, Any]) -> None:
    """Refuse options that contradict the connector, and options of `chunkattn.LLM` that do not exist in vLLM.

    Raises:
        ConfigError: an option cannot be served.
    """
    if "kv_transfer_config" in options:
        raise ConfigError(
            "kv_transfer_config is set by ChunkLLM; give max_store_bytes and chunk_position_gap as options, or start vllm.LLM "
            "with ChunkConnector and send the requests of plan_prompt"
        )
    check_parallel(options.get("data_parallel_size"))
    names = {f.name for f in fields(EngineConfig)}
    known = {f.name for f in fields(vllm.EngineArgs)}
    if unknown := sorted((set(options) & names) - known):
        raise ConfigError(f"option {unknown[0]!r} of chunkattn.LLM does not exist in vLLM")


def _is_vllm(params: Any) -> bool:
    return isinstance(params[0] if isinstance(params, (list, tuple)) and params else params, vllm.SamplingParams)


def _engine_params(params: Params) -> vllm.SamplingParams:
    """Return sampling parameters in vLLM's form."""
    if isinstance(params, vllm.SamplingParams):
        return params
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values["stop"], values["stop_token_ids"] = list(params.stop), list(params.stop_token_ids)
    values["logit_bias"] = dict(params.logit_bias) or None
    if not values["skip_reading_prefix_cache"]:
        del values["skip_reading_prefix_cache"]  # vLLM then chooses, by prompt_logprobs
    try:
        return vllm.SamplingParams(**values)
    except VLLMValidationError as error:
        raise _refused(error) from error


def _refused(error: VLLMValidationError) -> RequestError:
    """Return vLLM's refusal of a request as an error of this package."""
    return RequestError(str(error.args[0]), param=error.parameter)


def _output(prompt: ParsedPrompt, answer: AnsweredTask) -> RequestOutput:
    """Return an answer in the caller's order of chunks."""
    output, costs = answer
    cached, by_chunk = costs.cached(output, parts_of(prompt))
    listed = output.prompt_logprobs
    return RequestOutput(
        request_id=output.request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.layout.token_ids.tolist(),
        outputs=[_completion(completion) for completion in output.outputs],
        prompt_logprobs=None if listed is None else [None if entry is None else _logprobs(entry) for entry in listed],
        chunk_lens=prompt.layout.chunk_lens,
        num_cached_tokens=cached,
        num_cached_chunk_tokens=by_chunk,
        prefix_len=prompt.layout.prefix_len if prompt.layout.chunk_lens else 0,
        focus=prompt.chosen,
    )


def _completion(completion: Any) -> CompletionOutput:
    """Return a sample in the form of this package."""
    values = {f.name: getattr(completion, f.name) for f in fields(CompletionOutput) if hasattr(completion, f.name)}
    values["token_ids"] = list(completion.token_ids)
    values["logprobs"] = None if completion.logprobs is None else [_logprobs(entry) for entry in completion.logprobs]
    return CompletionOutput(**values)


def _logprobs(entry: Mapping[int, Any]) -> dict[int, Logprob]:
    return {token: Logprob(value.logprob, value.rank, value.decoded_token) for token, value in entry.items()}
