"""Choice among the documents of prompts by the likelihood of their questions behind each document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import vllm
from vllm.sampling_params import RequestOutputKind

from chunkattn.errors import RequestError
from chunkattn.integrations.vllm.chunk_options import ChunkOptions, parts_of
from chunkattn.integrations.vllm.composer import Flow, HeldKeys, PromptTask, answer
from chunkattn.integrations.vllm.requests import PromptPlan
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.choice import answered, behind_one, candidates_of, check_likelihood, read_from

_SCORES = ("likelihood",)
_MODES = ("raw_logprobs", "processed_logprobs")


def choose_documents(
    prompts: Sequence[ParsedPrompt],
    options: ChunkOptions,
    logprobs_mode: str,
    plan: Callable[[ParsedPrompt], PromptPlan],
    priorities: Sequence[int],
    held: HeldKeys,
    lora_request: Any = None,
) -> Flow[list[ParsedPrompt]]:
    """Read the question of prompts behind each of their documents.

    A request loads the document's K/V from the store, and vLLM computes the question alone. The flow returns the prompts, each
    with the layout that shows its choice, and the choice.

    Args:
        prompts: parsed prompts. Those without a focus stay as they are.
        options: the chunk options.
        logprobs_mode: vLLM's option.
        plan: function that returns the requests of a parsed prompt.
        priorities: rank of each prompt.
        held: content keys that the engine is believed to hold.
        lora_request: vLLM's LoRA request, or None.

    Raises:
        RequestError: a prompt cannot be judged, or the engine's options exclude the score.
        CapacityError: a document with the question cannot fit.
    """
    read: list[tuple[int, ParsedPrompt]] = []
    tasks: list[PromptTask] = []
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    for place, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True)):
        if prompt.focus is None:
            continue
        _check(prompt.focus.score, options.position_strategy, logprobs_mode)
        check_likelihood(prompt)
        for number in candidates_of(prompt.layout):
            names = prompt.names._replace(listed=(prompt.names.of(number),))
            alone = replace(prompt, layout=behind_one(prompt.layout, number, options.gap), names=names, focus=None)
            requests = plan(alone)
            tasks.append(PromptTask(replace(requests, composed=requests.composed.read()), params, priority, lora_request))
            read.append((place, alone))
    answers = yield from answer(tasks, held)
    scores: dict[int, list[float]] = {}
    computed: dict[int, int] = {}
    for (place, alone), (output, costs) in zip(read, answers, strict=True):
        first, ids, logprobs = read_from(alone, alone.layout), alone.layout.token_ids.tolist(), output.prompt_logprobs
        assert logprobs is not None
        scores.setdefault(place, []).append(fmean(logprobs[index][ids[index]].logprob for index in range(first, len(ids))))
        cached, _ = costs.cached(output, parts_of(alone))
        computed[place] = computed.get(place, 0) + len(ids) - cached
    return [
        prompt
        if prompt.focus is None
        else answered(prompt, candidates_of(prompt.layout), scores.get(place, []), computed.get(place, 0), options.gap)
        for place, prompt in enumerate(prompts)
    ]


def _check(score: str, position_strategy: str, logprobs_mode: str) -> None:
    """Check that vLLM can compute a score.

    Raises:
        RequestError: the score or an option of the engine excludes it.
    """
    if score not in _SCORES:
        raise RequestError(f"focus score must be {', '.join(_SCORES)} in vLLM, got {score!r}; use chunkattn.LLM", param="focus")
    if position_strategy != "shared":
        text = f"focus needs position_strategy 'shared', this engine has {position_strategy!r}"
        raise RequestError(text, param="focus")
    if logprobs_mode not in _MODES:
        raise RequestError(f"focus needs logprobs_mode 'raw_logprobs', this engine has {logprobs_mode!r}", param="focus")
