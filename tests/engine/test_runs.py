"""Runs of decodes: the tokens, log-probabilities, ends and bits of single steps, and what a run may not do."""

import dataclasses
import math

import numpy as np
import pytest

from chunkattn import LLM, SamplingParams
from chunkattn.engine.messages import GenerateRequest, RequestFailed, TokenOutput
from chunkattn.rope.positions import make_layout
from tests.checkpoints import VOCAB
from tests.fuzz.plants import OF_RUNS, planted

OPTIONS = {"skip_tokenizer_init": True, "max_num_seqs": 12, "max_num_batched_tokens": 64, "block_size": 4}
FAMILIES = {
    "qwen3": {"chunk_temperature": 0.8, "chunk_scale": 1.3},
    "mistral-window": {},
    "qwen3-moe": {},
    "llama": {"quantization": "int8"},
    "qwen2": {"attention_backend": "xla", "dtype": "bfloat16"},
    "qwen2-window": {"attention_backend": "xla"},
}


def start(folder, steps=16, **options):
    """An engine whose runs are as long as they may be."""
    llm = LLM(str(folder), **{**OPTIONS, **options}, num_scheduler_steps=steps)
    llm.core.runs.limit_s = math.inf
    return llm


def ids(rng, count):
    return rng.integers(5, VOCAB, count).tolist()


def draw(rng):
    """Parts of a prompt, and parameters of any kind that runs may have, and of some kinds that single steps have."""
    parts = [], [], ids(rng, int(rng.integers(2, 30)))
    if rng.random() < 0.5:
        chunks = [ids(rng, int(rng.integers(0, 12))) for _ in range(int(rng.integers(1, 4)))]
        parts = ids(rng, 5), chunks, ids(rng, 3)
    least = int(rng.choice([0, 0, 6]))
    return parts, SamplingParams(
        n=int(rng.choice([1, 1, 3])),
        temperature=float(rng.choice([0, 0.7, 1.3])),
        top_k=int(rng.choice([-1, 20])),
        top_p=float(rng.choice([1, 0.8])),
        seed=int(rng.integers(0, 1 << 40)),
        max_tokens=max(least, int(rng.integers(1, 40))),
        min_tokens=least,
        stop_token_ids=ids(rng, int(rng.choice([0, 3, 12, 80]))),
        logprobs=None if rng.random() < 0.2 else int(rng.integers(0, 4)),
        repetition_penalty=float(rng.choice([1, 1, 1, 1.2])),
    )


def run(llm, seed, requests=14):
    """Every token, log-probability and end, by request and sample. Requests arrive between steps, and some answers go on."""
    rng, core, later = np.random.default_rng(seed), llm.core, np.random.default_rng(seed + 1)
    left = {str(number): length for number, length in zip(rng.permutation(requests)[:2], (10, 25))}
    waiting, asked, steps = [], {}, 0
    for number in range(requests):
        parts, params = draw(rng)
        layout, priority = make_layout(*parts), int(rng.integers(0, 2))
        message = GenerateRequest(str(number), layout, params, eos_token_ids=(7, 9), priority=priority)
        waiting.append((message, parts))
    more = [ids(later, 3) for _ in range(requests)]
    found = {}
    while waiting or core.has_work:
        if waiting and (not core.has_work or steps % 3 == 0):
            message, parts = waiting.pop(0)
            asked[message.request_id] = message, parts
            core.add(message)
        steps += 1
        for event in core.step():
            assert isinstance(event, TokenOutput), event
            tokens, values, ends = found.setdefault((event.request_id, event.sample), ([], [], []))
            assert not ends
            tokens += event.token_ids
            if event.logprobs is not None:
                values += [[np.asarray(x)[row].tolist() for x in event.logprobs] for row in range(len(event.token_ids))]
            if event.finish_reason:
                ends += [event.finish_reason, event.stop_reason]
                message, (prefix, chunks, question) = asked[event.request_id]
                if not event.sample and len(event.request_id) < 4:  # the next turn finds the text in the cache
                    turn = prefix, chunks, [*question, *tokens, *more[int(event.request_id[:2].strip("+"))]]
                    name = f"{event.request_id}++"[:4]
                    waiting.append((dataclasses.replace(message, request_id=name, layout=make_layout(*turn)), turn))
        core.scheduler.check()
        for name, length in left.items():
            if len(found.get((name, 0), ([],))[0]) >= length:
                core.abort(name)
    assert llm.reset_prefix_cache(), "pages leaked"
    return {key: value for key, value in found.items() if key[0].strip("+") not in left}


def _marked(name):
    """Windows come with mistral-window, and the backend of qwen2-window with qwen2."""
    return pytest.param(name, marks={"qwen3": (), "qwen2-window": pytest.mark.slow}.get(name, pytest.mark.ci))


@pytest.mark.parametrize("name", list(map(_marked, FAMILIES)))
def test_answers_have_the_bits_of_single_steps(checkpoint, name):
    """Beside others that come and go, with documents, weighing, windows, experts, packed weights, in any pool."""
    folder, options = checkpoint(name), FAMILIES[name]
    single = start(folder, 1, **options)
    expected = run(single, seed=7)
    assert sum(len(tokens) for tokens, _, _ in expected.values()) > 100
    assert {end[0] for _, _, end in expected.values()} == {"stop", "length"}
    for steps, pages in ((16, 400), (3, 60)):
        llm = start(folder, steps, **options, kv_cache_memory_bytes=pages * single.limits.page_bytes)
        assert run(llm, seed=7) == expected
        assert llm.core.runner.compiles["decode"] or pages < 100  # in so few pages a request may always wait


def turns(llm):
    """Second turns, whose prompts end on a page in some cases, behind what a run has left in the cache."""
    found, free = [], {"temperature": 1.0, "seed": 2, "ignore_eos": True, "logprobs": 0}
    for length in range(4, 12):
        prompt = [*range(length, length + 9)]
        (first,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=length, **free))
        turn = [*prompt, *first.outputs[0].token_ids, 50, 60]
        (second,) = llm.generate({"prompt_token_ids": turn}, SamplingParams(max_tokens=6, **free))
        found += [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in (first, second)]
    return found


@pytest.fixture(scope="module")
def turns_of_single_steps(checkpoint):
    return turns(start(checkpoint("qwen3"), 1))


@pytest.mark.parametrize("plant", [None, *OF_RUNS])
def test_second_turns_have_the_bits_of_single_steps(checkpoint, turns_of_single_steps, plant):
    """But not if the last token of a text counts as computed, or the random numbers of a run stand still."""
    with planted(plant):
        assert (turns(start(checkpoint("qwen3"))) == turns_of_single_steps) == (plant is None)


def test_stop_strings_end_a_text_in_the_middle_of_a_run(chat_folder):
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    one, many = (LLM(str(chat_folder), **options, num_scheduler_steps=steps) for steps in (1, 16))
    many.core.runs.limit_s = math.inf
    prompts = [{"prompt_token_ids": [*range(number + 3, number + 20)]} for number in range(4)]
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=0)
    texts = [output.outputs[0].text for output in one.generate(prompts, free)]
    stops = [dataclasses.replace(free, stop=[text[len(text) // 2 :][:3]]) for text in texts]
    found = [[[vars(o) for o in output.outputs] for output in llm.generate(prompts, stops)] for llm in (one, many)]
    assert found[0] == found[1]
    assert [output[0]["finish_reason"] for output in found[0]] == ["stop"] * 4
    assert many.reset_prefix_cache()


def test_a_request_that_arrives_during_a_run_waits_for_that_run_alone(checkpoint):
    """The step after it computes the new prompt."""
    llm = start(checkpoint("qwen3"))
    core, steps, forward = llm.core, [], llm.core.runner.forward
    core.runner.forward = lambda arrays: (steps.append("prompt"), forward(arrays))[1]
    read = core.runs.read
    core.runs.read = lambda run: (steps.append("run"), read(run))[1]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    core.add(GenerateRequest("long", make_layout([], [], [*range(9, 20)]), params))
    for _ in range(8):
        core.step()
    assert steps[-3:] == ["run"] * 3
    assert core.runs.current is not None  # the next run is on the device, or planned
    del steps[:]
    core.add(GenerateRequest("late", make_layout([], [], [*range(30, 50)]), params))
    events = [core.step(), core.step()]
    assert steps[:2] in (["run", "prompt"], ["prompt", "run"])
    assert "late" in {event.request_id for outputs in events for event in outputs}


def test_a_value_that_is_not_finite_ends_a_run_and_fails_its_request_alone(checkpoint):
    """The tokens before it are handed out, and the other requests go on as alone."""
    folder = checkpoint("llama")
    prompts = [[*range(10 * number + 9, 10 * number + 19)] for number in range(3)]
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    texts = [o.outputs[0].token_ids for o in start(folder, 1).generate([{"prompt_token_ids": p} for p in prompts], params)]
    at, bad = next(
        (at, token)
        for at, token in enumerate(texts[1])
        if at > 6 and token not in texts[1][:at] + texts[0] + texts[2] and all(token not in prompt for prompt in prompts)
    )
    found = []
    for steps in (1, 16):
        llm = start(folder, steps)
        runner = llm.core.runner
        place = next(place for place, name in enumerate(runner._names) if "embed_tokens" in name)
        runner._params[place] = runner._params[place].at[bad].set(np.nan)
        for number, prompt in enumerate(prompts):
            llm.core.add(GenerateRequest(str(number), make_layout([], [], prompt), params))
        tokens, failed = {}, {}
        while llm.core.has_work:
            for event in llm.core.step():
                if isinstance(event, RequestFailed):
                    failed[event.request_id] = event.reason
                else:
                    tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert llm.reset_prefix_cache()
        found.append((tokens, failed))
    assert found[0] == found[1]
    tokens, failed = found[1]
    assert [*failed] == ["1"]
    assert tokens == {"0": texts[0], "1": texts[1][: at + 1], "2": texts[2]}


def test_what_a_run_cannot_do_is_computed_step_by_step(checkpoint):
    """Hybrids, padded steps of one size, classifiers; and rows whose logits are edited."""
    for name, options in (("qwen3_5", {}), ("qwen3", {"attention_backend": "reference"})):
        assert not LLM(str(checkpoint(name)), **OPTIONS, **options).core.runner.decodes
    llm = start(checkpoint("qwen3"))
    edited = SamplingParams(temperature=0, max_tokens=9, logit_bias={11: 1.0})
    llm.generate({"prompt_token_ids": [*range(9, 20)]}, edited)
    assert not llm.core.runner.compiles["decode"]
