"""`Composer`: sends missing documents, then composed requests, and sends both again when the store lost a document."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunkattn.errors import CapacityError
from chunkattn.integrations.vllm.requests import PARAMS_KEY, EngineRequest, PromptPlan

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

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
class Job:
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
class Task:
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

    def job(self, request: EngineRequest, *, saves: bool) -> Job:
        """Return one of the plan's requests as a job."""
        return Job(request, None if saves else self.params, self.priority, self.lora_request)


class Costs:
    """Prompt tokens that requests computed on behalf of a composed request. Its own counter does not include them."""

    def __init__(self) -> None:
        self.prefix = 0
        self.chunks: dict[tuple[int, ...], int] = {}

    def add(self, request: EngineRequest, output: RequestOutput) -> None:
        """Count the tokens of a prefix or save request.

        Args:
            request: the request.
            output: its output.
        """
        start = (request.kv_transfer_params or {})[PARAMS_KEY]["save"]
        chunk = tuple(request.token_ids[start:])
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


@dataclass(frozen=True)
class Answer:
    """Answer to a task.

    Attributes:
        output: vLLM's output of the composed request.
        costs: tokens computed for the task by other requests.
    """

    output: RequestOutput
    costs: Costs


Send = Callable[[Sequence[Job]], "Sequence[RequestOutput]"]


class Composer:
    """Sender of chunked prompts to one engine that runs a list of requests at a time.

    Args:
        send: function that runs jobs together and returns their outputs in order.
        held: content keys that the engine is believed to hold.
    """

    def __init__(self, send: Send, held: HeldKeys | None = None) -> None:
        self._send = send
        self.held = HeldKeys() if held is None else held

    def run(self, tasks: Sequence[Task]) -> list[Answer]:
        """Answer prompts together. A prompt that is refused is sent again alone, after its documents.

        Args:
            tasks: prompts to answer.

        Raises:
            CapacityError: the store does not hold all documents of one prompt.
        """
        answers = self._round(tasks)
        for number, task in enumerate(tasks):
            for _ in range(RETRIES):
                if not is_refused(answers[number].output):
                    break
                self.held.discard(task.plan.composed.keys)
                answers[number] = self._round([task])[0]
            if is_refused(answers[number].output):
                raise CapacityError(refusal(task.plan), param="prompt")
        return answers

    def save(self, plans: Sequence[PromptPlan], lora_request: Any = None) -> None:
        """Compute and save the missing documents of prompts.

        Args:
            plans: the prompts; their composed requests are not sent.
            lora_request: vLLM's LoRA request, or None.
        """
        self._run_saves([Task(plan, None, lora_request=lora_request) for plan in plans], [])

    def _round(self, tasks: Sequence[Task]) -> list[Answer]:
        outputs, costs = self._run_saves(tasks, [task.job(task.plan.composed, saves=False) for task in tasks])
        for task, output in zip(tasks, outputs, strict=True):
            if not is_refused(output):
                self.held.add(task.plan.composed.keys)
        return [Answer(output, costs[number]) for number, output in enumerate(outputs)]

    def _run_saves(self, tasks: Sequence[Task], last: Sequence[Job]) -> tuple[list[RequestOutput], Mapping[int, Costs]]:
        """Send what the tasks miss, each request once, and then the last jobs, all in one call."""
        stages: tuple[dict[tuple[str, ...], Job], ...] = ({}, {})
        payers: dict[tuple[str, ...], int] = {}
        for number, task in enumerate(tasks):
            for stage in task.plan.missing(self.held):
                for request in stage:
                    found = stages[request is not task.plan.prefix].setdefault(request.keys, task.job(request, saves=True))
                    if task.priority < found.priority:
                        stages[request is not task.plan.prefix][request.keys] = task.job(request, saves=True)
                    payers.setdefault(request.keys, number)
        first = [job for stage in stages for job in stage.values()]
        costs = {number: Costs() for number in range(len(tasks))}
        if not first and not last:
            return [], costs
        outputs = self._send([*first, *last])
        for job, output in zip(first, outputs):
            costs[payers[job.request.keys]].add(job.request, output)
            if not is_refused(output):
                self.held.add(job.request.keys)
        return list(outputs[len(first) :]), costs


def is_refused(output: RequestOutput) -> bool:
    """Return whether the engine ended a request with an error, as when the store has lost a document."""
    return any(completion.finish_reason == "error" for completion in output.outputs)


def refusal(plan: PromptPlan) -> str:
    """Return the message for a prompt whose documents do not stay in the store until it is answered."""
    tokens = sum(len(save.token_ids) - (save.kv_transfer_params or {})[PARAMS_KEY]["save"] for save in plan.saves)
    return (
        f"the engine lost documents of this prompt ({len(plan.saves)} documents, {tokens} tokens) before it was answered, "
        f"{RETRIES + 1} times; raise the bytes of the chunk store, or send fewer documents at once"
    )
