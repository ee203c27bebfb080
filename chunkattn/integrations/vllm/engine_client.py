"""`ChunkEngineClient`: vLLM's engine client, for handlers whose prompts may have chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from chunkattn.errors import RequestError
from chunkattn.integrations.vllm.chunk_options import ChunkOptions, parts_of, refused_param
from chunkattn.integrations.vllm.composer import RETRIES, Costs, HeldKeys, Submission, ended_with_error, may_have_lost, refusal
from chunkattn.integrations.vllm.llm import submission_params
from chunkattn.integrations.vllm.requests import PARAMS_KEY, EngineRequest, PromptPlan, adapter_key
from chunkattn.parsers import ParsedPrompt

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@contextmanager
def vllm_errors() -> Iterator[None]:
    """Raise each `RequestError` as vLLM's error of a request, until a `with` statement ends.

    Raises:
        VLLMValidationError: in place of a `RequestError`.
    """
    try:
        yield
    except RequestError as error:
        raise VLLMValidationError(str(error), parameter=error.param) from None


class ChunkedInput(dict):
    """Prompt in the form of vLLM's engine inputs, with its chunks. The handlers see prefix + chunks + question.

    Attributes:
        parsed: prompt with its parts.
    """

    def __init__(self, parsed: ParsedPrompt) -> None:
        ids = parsed.layout.token_ids.tolist()
        super().__init__(tokens_input(ids, prompt=parsed.text, cache_salt=parsed.cache_salt))
        self.parsed = parsed


class _Save:
    """Save request in flight, with the number of prompts that need it. It is aborted with the last of them."""

    def __init__(self, task: asyncio.Task[RequestOutput], priority: int) -> None:
        self.task, self.priority, self.users = task, priority, 0

    @property
    def running(self) -> bool:
        """Return whether another prompt may still join."""
        return self.users > 0 and not self.task.done()

    def release(self) -> None:
        """Count one user less."""
        self.users -= 1
        if not self.running:
            self.task.cancel()  # without effect on a task that has ended


class ChunkEngineClient:
    """Engine client that answers a `ChunkedInput` by the requests of its plan, and passes on everything else.

    Args:
        client: vLLM's engine client.
        options: how prompts become chunks.
    """

    def __init__(self, client: EngineClient, options: ChunkOptions) -> None:
        self._client, self._options = client, options
        self._held = HeldKeys()
        self._saves: dict[tuple[str, ...], _Save] = {}
        self._counter = 0
        self._gate = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate outputs for a prompt; see vLLM's `EngineClient.generate`.

        Raises:
            VLLMValidationError: the prompt cannot be served, or a client wrote the connector's parameters itself.
        """
        with vllm_errors():
            _check_transfer_params((sampling_params.extra_args or {}).get("kv_transfer_params"))
            if not isinstance(prompt, ChunkedInput):
                return self._client.generate(prompt, sampling_params, request_id, **options)
            if name := refused_param(sampling_params):
                raise RequestError(f"{name} of a prompt with chunks is not offered", param=name)
            adapter = adapter_key(options.get("lora_request"))
            plan = self._options.plan(prompt.parsed, self._client.model_config.max_model_len, adapter=adapter)
        return self._answer(prompt.parsed, plan, sampling_params, request_id, options)

    async def _answer(
        self, prompt: ParsedPrompt, plan: PromptPlan, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        ids, parts = prompt.layout.token_ids.tolist(), parts_of(prompt)
        whole = params.output_kind == RequestOutputKind.FINAL_ONLY
        for attempt in range(RETRIES + 1):
            started = False
            completions: dict[int, CompletionOutput] = {}
            async with AsyncExitStack() as gate:
                if attempt:  # alone with its documents until they are loaded, so that no other prompt evicts them meanwhile
                    await gate.enter_async_context(self._gate)
                elif plan.missing(self._held):
                    async with self._gate:
                        pass
                costs = await self._save(plan, options)
                composed = submission_params(Submission(plan.composed.after(costs.keys), params))
                if attempt:
                    composed.output_kind = RequestOutputKind.CUMULATIVE if whole else params.output_kind
                outputs = self._client.generate(_input(plan.composed, prompt.text), composed, request_id, **options)
                async with aclosing(outputs):
                    async for output in outputs:
                        if may_have_lost(plan, output):
                            break
                        await gate.aclose()
                        if whole:  # an output of a retry holds the sample that has changed alone
                            completions.update((completion.index, completion) for completion in output.outputs)
                            if not output.finished:
                                continue
                            output.outputs = [completions[index] for index in sorted(completions)]
                        started = True
                        output.num_cached_tokens, _ = costs.cached(output, parts)
                        if output.prompt_token_ids is not None:
                            output.prompt_token_ids = ids  # in the caller's order of chunks
                        yield output
                    else:
                        self._held.add(plan.composed.keys)
                        return
            self._held.discard(plan.composed.keys)
            logger.info("request %s ended with an error, perhaps without a document (attempt %d)", request_id, attempt + 1)
            if started:  # the client has tokens already, and a second answer may begin with others
                text = (
                    "the engine ended this prompt with an error while its answer was streamed, perhaps for want of a document"
                )
                raise RetryableRequestError(f"{text}; please retry")
        raise RetryableRequestError(refusal(plan))

    async def _save(self, plan: PromptPlan, options: dict[str, Any]) -> Costs:
        """Compute the missing documents of a prompt, or wait until another prompt has."""
        costs = Costs()
        for stage in plan.missing(self._held):
            saves = [self._join(request, options, costs) for request in stage]
            try:
                for save in saves:
                    await asyncio.shield(save.task)  # its other users keep it when this prompt is aborted
            finally:
                for save in saves:
                    save.release()
        return costs

    def _join(self, request: EngineRequest, options: dict[str, Any], costs: Costs) -> _Save:
        """Return the save request of a document, started now if none of this priority runs. The starter bears its costs."""
        save, priority = self._saves.get(request.keys), options.get("priority", 0)
        if save is None or not save.running or priority < save.priority:  # a lower value goes first
            self._counter += 1
            costs.keys.update(key for key in request.keys if key not in self._held)
            task = asyncio.create_task(self._run(request, f"chunkattn-save-{self._counter}", options, costs))
            save = self._saves[request.keys] = _Save(task, priority)
            task.add_done_callback(partial(self._forget, request.keys, save))
        save.users += 1
        return save

    def _forget(self, keys: tuple[str, ...], save: _Save, _: Any) -> None:
        if self._saves.get(keys) is save:
            del self._saves[keys]

    async def _run(self, request: EngineRequest, request_id: str, options: dict[str, Any], costs: Costs) -> RequestOutput:
        kept = {name: options[name] for name in ("lora_request", "priority", "data_parallel_rank") if name in options}
        outputs = self._client.generate(_input(request), submission_params(Submission(request)), request_id, **kept)
        last = None
        async with aclosing(outputs):
            async for output in outputs:
                last = output
        assert last is not None
        costs.add(request, last)
        if not ended_with_error(last):
            self._held.add(request.keys)
        return last


def _check_transfer_params(value: Any) -> None:
    """Check a client's `kv_transfer_params`.

    Raises:
        RequestError: the value is no object, or has the connector's key.
    """
    name = "kv_transfer_params"
    if not isinstance(value, dict | None):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", param=name)
    if value and PARAMS_KEY in value:
        text = f"{name}[{PARAMS_KEY!r}] is set by the server; send documents, chunks or separator text instead"
        raise RequestError(text, param=name)


def _input(request: EngineRequest, text: str | None = None) -> Any:
    return tokens_input(request.token_ids, prompt=text, cache_salt=request.cache_salt)
