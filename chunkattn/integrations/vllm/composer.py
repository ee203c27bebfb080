"""Flows that send missing documents, then composed requests, and send both again when the store lost a document."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from chunkattn.errors import CapacityError
from chunkattn.integrations.vllm.requests import EngineRequest, PromptPlan

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

T = TypeVar("T")

RETRIES = 2
"""Times that a refused composed request is sent again, each time after its documents."""
_MAX_HELD = 1 << 16


class HeldKeys:
    """Content keys that the engine is believed to hold, bounded in number. The oldest are forgotten first.

    A forgotten key costs one more request for its document. A key that the engine has evicted costs one refused request.

    Args:
        limit: number of keys to remember.
    """

    def __init__(self, limit: int = _MAX_HELD) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._limit = limit

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[str]) -> None:
        """Remember keys as the latest."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        """Forget keys, known or not."""
        for key in keys:
            self._keys.pop(key, None)


@dataclass(frozen=True)
class Submission:
    """One request to send to the engine.

    Attributes:
        request: prompt and protocol parameters.
        params: vLLM's sampling parameters of a composed or plain request; None for a request that saves K/V.
        priority: priority of the request; lower goes first.
        lora_request: vLLM's LoRA request, or None.
    """

    request: EngineRequest
    params: Any = None
    priority: int = 0
    lora_request: Any = None


@dataclass(frozen=True)
class PromptTask:
    """One prompt to answer.

    Attributes:
        plan: requests of the prompt.
        params: vLLM's sampling parameters.
        priority: priority of all of its requests.
        lora_request: vLLM's LoRA request, or None.
    """

    plan: PromptPlan
    params: Any
    priority: int = 0
    lora_request: Any = None

    def submission(self, request: EngineRequest) -> Submission:
        """Return the submission of one of the plan's requests."""
        params = self.params if request is self.plan.composed else None
        return Submission(request, params, self.priority, self.lora_request)


class Costs:
    """Prompt tokens that prefix and save requests computed for one prompt. vLLM counts them as cached in its answer.

    Attributes:
        keys: content keys of what these requests save.
    """

    def __init__(self) -> None:
        self.keys = set[str]()
        self.prefix = 0
        self.chunks: dict[tuple[int, ...], int] = {}

    def add(self, request: EngineRequest, output: RequestOutput) -> None:
        """Count the tokens of a prefix or save request.

        Args:
            request: the request.
            output: its output.
        """
        chunk = tuple(request.token_ids[request.save_start :])
        computed = len(request.token_ids) - (output.num_cached_tokens or 0)
        self.chunks[chunk] = min(len(chunk), computed)
        self.prefix = max(self.prefix, computed - self.chunks[chunk])

    def cached(self, output: RequestOutput, parts: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...]]:
        """Return how many tokens of the whole prompt, and of each chunk, were not computed for this prompt.

        Args:
            output: output of the composed request.
            parts: token ids of prefix, chunks and question, in the caller's order.
        """
        left = dict(self.chunks)  # a repeated chunk is computed once
        chunks = tuple(len(chunk) - left.pop(tuple(chunk), 0) for chunk in parts[1:-1])
        computed = sum(map(len, parts[1:-1])) - sum(chunks) + min(self.prefix, len(parts[0]))
        return max(0, (output.num_cached_tokens or 0) - computed), chunks


AnsweredTask = tuple["RequestOutput", Costs]
"""Answer to a task: vLLM's output of the composed request, and the tokens that other requests computed for the task."""

Flow = Generator[Sequence[Submission], Sequence["RequestOutput"], T]
"""Call on its way: yields submissions that run together, and is sent their outputs in order."""


def answer(tasks: Sequence[PromptTask], held: HeldKeys) -> Flow[list[AnsweredTask]]:
    """Answer prompts together. A prompt that lost a document is sent again alone, after its documents.

    Args:
        tasks: prompts to answer.
        held: content keys that the engine is believed to hold.

    Raises:
        CapacityError: the engine ends one prompt with an error each time.
    """
    answers = yield from _round(tasks, held)
    for number, task in enumerate(tasks):
        for _ in range(RETRIES):
            if not may_have_lost(task.plan, answers[number][0]):
                break
            held.discard(task.plan.composed.keys)
            (answers[number],) = yield from _round([task], held)
        if may_have_lost(task.plan, answers[number][0]):
            raise CapacityError(refusal(task.plan), param="prompt")
    return answers


def save(plans: Sequence[PromptPlan], held: HeldKeys, lora_request: Any = None) -> Flow[None]:
    """Compute and save the documents of prompts, also those that the engine is believed to hold.

    Args:
        plans: the prompts; their composed requests are not sent.
        held: content keys that the engine is believed to hold.
        lora_request: vLLM's LoRA request, or None.

    Raises:
        CapacityError: the engine ended a request with an error.
    """
    tasks = [PromptTask(plan, None, lora_request=lora_request) for plan in plans]
    outputs, _, _ = yield from _submit(tasks, [], held, ())
    if failed := sum(map(ended_with_error, outputs)):
        text = f"the engine ended {failed} of the {len(outputs)} requests that compute prefix and documents with an error"
        raise CapacityError(f"{text}; the chunk store may need more bytes", param="documents")


def _round(tasks: Sequence[PromptTask], held: HeldKeys) -> Flow[list[AnsweredTask]]:
    composed = [task.submission(task.plan.composed) for task in tasks]
    _, outputs, costs = yield from _submit(tasks, composed, held, held)
    for task, output in zip(tasks, outputs, strict=True):
        if not ended_with_error(output):
            held.add(task.plan.composed.keys)
    return [*zip(outputs, costs, strict=True)]


def _submit(
    tasks: Sequence[PromptTask], composed: Sequence[Submission], held: HeldKeys, present: Container[str]
) -> Flow[tuple[Sequence[RequestOutput], Sequence[RequestOutput], list[Costs]]]:
    """Send the requests that the tasks miss, each once, and then the composed requests, all in one call.

    Args:
        tasks: the tasks.
        composed: composed request of each task, or none.
        held: content keys that the engine is believed to hold; those of the new requests are added.
        present: content keys that need no request.

    Returns:
        Outputs of the requests before the composed ones, those of the composed ones, and the costs of every task.
    """
    stages: tuple[dict[tuple[str, ...], Submission], ...] = ({}, {})
    payers: dict[tuple[str, ...], int] = {}
    costs, paid = [Costs() for _ in tasks], set[str]()
    for number, task in enumerate(tasks):
        for requests in task.plan.missing(present):
            for request in requests:
                stage, submission = stages[request is not task.plan.prefix], task.submission(request)
                if task.priority < stage.setdefault(request.keys, submission).priority:
                    stage[request.keys] = submission
                payers.setdefault(request.keys, number)
                costs[number].keys.update(key for key in request.keys if key not in present and key not in paid)
        paid |= costs[number].keys
    saves = [submission for stage in stages for submission in stage.values()]
    marked = [replace(one, request=one.request.after(cost.keys)) for one, cost in zip(composed, costs)]
    outputs = (yield [*saves, *marked]) if saves or marked else []
    for submission, output in zip(saves, outputs):
        costs[payers[submission.request.keys]].add(submission.request, output)
        if not ended_with_error(output):
            held.add(submission.request.keys)
    return outputs[: len(saves)], outputs[len(saves) :], costs


def ended_with_error(output: RequestOutput) -> bool:
    """Return whether the engine ended a request with an error."""
    return any(completion.finish_reason == "error" for completion in output.outputs)


def may_have_lost(plan: PromptPlan, output: RequestOutput) -> bool:
    """Return whether the engine may have ended a composed request because the store had lost a document.

    vLLM reports every failure of a request in this form, so another failure of a composed request looks the same.

    Args:
        plan: plan of the prompt. A prompt that loads nothing cannot have lost a document.
        output: output of the composed request.
    """
    return plan.composed.kv_transfer_params is not None and ended_with_error(output)


def refusal(plan: PromptPlan) -> str:
    """Return the message for a prompt that the engine ends with an error each time."""
    tokens = sum(len(save.token_ids) - save.save_start for save in plan.saves)
    return (
        f"the engine ended this prompt ({len(plan.saves)} documents, {tokens} tokens) with an error {RETRIES + 1} times; raise "
        "the bytes of the chunk store, or send fewer documents at once; the engine's log tells other causes"
    )
