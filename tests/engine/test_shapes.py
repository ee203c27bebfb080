"""Shapes of texts in the engine: preemption, forks, other hosts, compilation in a thread, and errors on the way."""

import threading
from itertools import count

import numpy as np
import pytest

from chunkattn import LLM, SamplingParams, StructuredOutputsParams
from chunkattn.engine import grammars
from chunkattn.engine.follower import Follower
from chunkattn.engine.grammars import Grammars
from chunkattn.engine.host_calls import ReadSample
from chunkattn.engine.messages import GenerateRequest, RequestFailed, TokenOutput
from tests.engine.test_follower import Told, lead, pools

SMALL = {"max_num_batched_tokens": 128, "num_scheduler_steps": 4, "decide_method": "letters"}
WORDS = StructuredOutputsParams(regex="([a-z]{3} ){30}")
LIMITED = StructuredOutputsParams(regex="((a{0,100}){0,100}){0,100}")


def shaped(shape, **options):
    return SamplingParams(structured_outputs=shape, **{"max_tokens": 60, "seed": 5, "logprobs": 1, **options})


def request(llm, name, params):
    (parsed,) = llm.frontend.parse(["Where does Ana live?"], None)
    return GenerateRequest(name, parsed.layout, params, llm.frontend.eos_token_ids)


def outputs_of(core):
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


def test_preempted_texts_go_on():
    prompts, params = ["Where does Ana live?", "Who?", "A word"], [shaped(WORDS, n=2), shaped(WORDS), shaped(WORDS)]
    roomy = LLM(kv_cache_memory_bytes=8 << 20, **SMALL)
    page = roomy.limits.page_bytes
    tight = LLM(kv_cache_memory_bytes=11 * page, max_model_len=128, **SMALL)
    expected = [output.outputs for output in roomy.generate(prompts, params, use_tqdm=False)]
    assert [output.outputs for output in tight.generate(prompts, params, use_tqdm=False)] == expected
    assert tight.core.scheduler.preemptions
    assert len({sample.text for sample in expected[0]}) == 2


def test_another_host_draws_the_same():
    told = Told()
    first, other = LLM(kv_cache_memory_bytes=2 << 20, **SMALL), LLM(kv_cache_memory_bytes=2 << 20, **SMALL)
    lead(first, told)
    first.generate(["Where?", "x"], [shaped(WORDS, n=2), SamplingParams(max_tokens=9, seed=1)], use_tqdm=False)
    follower = Follower(other.core)
    for call in told.calls:
        follower.run(call)
    assert any(isinstance(call, ReadSample) and call.mask is not None for call in told.calls)
    for own, theirs in zip(pools(first), pools(other), strict=True):
        np.testing.assert_array_equal(own, theirs)
    assert first.core.runner.compiles == other.core.runner.compiles


def test_a_step_does_not_wait_for_a_grammar(demo, monkeypatch):
    demo.core.shapes.know(demo.frontend.vocabulary)
    may_compile, compile_shape = threading.Event(), Grammars.compile

    def compile_late(self, shape):
        assert may_compile.wait(60)
        return compile_shape(self, shape)

    monkeypatch.setattr(Grammars, "compile", compile_late)
    core = demo.core
    core.add(request(demo, "shaped", shaped(StructuredOutputsParams(choice=["red", "green"]), logprobs=None)))
    core.add(request(demo, "aborted", shaped(StructuredOutputsParams(choice=["blue"]))))
    core.add(request(demo, "refused", shaped(StructuredOutputsParams(regex="("))))
    core.add(request(demo, "free", SamplingParams(max_tokens=5, ignore_eos=True, seed=1)))
    outputs = []
    while "free" in core.requests:
        outputs += core.step()
    assert {output.request_id for output in outputs} == {"free"}
    core.abort("aborted")
    may_compile.set()
    outputs = outputs_of(core)
    assert {output.request_id for output in outputs} == {"shaped", "refused"}
    (refusal,) = [output for output in outputs if isinstance(output, RequestFailed)]
    assert (refusal.request_id, refusal.param) == ("refused", "structured_outputs")
    assert "unclosed group" in refusal.reason
    text = demo.tokenizer.decode([t for output in outputs if isinstance(output, TokenOutput) for t in output.token_ids])
    assert text in ("red", "green")


def test_a_limit_on_the_way_fails_its_request_alone(demo):
    core = demo.core
    core.shapes.know(demo.frontend.vocabulary).compile(LIMITED)
    a = demo.tokenizer.convert_tokens_to_ids("a")
    free = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    core.add(request(demo, "alone", free))
    alone = outputs_of(core)
    core.add(request(demo, "limited", shaped(LIMITED, n=2, max_tokens=400, logit_bias={a: 100.0})))
    core.add(request(demo, "free", free))
    outputs = outputs_of(core)
    (failure,) = [output for output in outputs if isinstance(output, RequestFailed)]
    assert (failure.request_id, failure.param) == ("limited", "structured_outputs")
    assert "too many" in failure.reason
    tokens = [
        [t for o in some if o.request_id == name for t in o.token_ids] for some, name in ((alone, "alone"), (outputs, "free"))
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 40


def test_a_text_that_takes_long_to_follow_fails_its_request_alone(demo, monkeypatch):
    core = demo.core
    core.shapes.know(demo.frontend.vocabulary)
    ambiguous = StructuredOutputsParams(grammar='start: s\ns: s s s | s s | "a" |')
    core.add(request(demo, "ambiguous", shaped(ambiguous, n=2, logprobs=None)))
    core.add(request(demo, "free", SamplingParams(max_tokens=5, ignore_eos=True, seed=1)))
    monkeypatch.setattr(grammars, "thread_time", count().__next__)  # a second for each token
    outputs = outputs_of(core)
    (failure,) = [output for output in outputs if isinstance(output, RequestFailed)]
    assert (failure.request_id, failure.param) == ("ambiguous", "structured_outputs")
    assert (
        failure.reason == "structured_outputs: the grammar is too ambiguous: a text of 0 tokens took 1.00 s of processor time"
    )
    assert sum(len(o.token_ids) for o in outputs if isinstance(o, TokenOutput) and o.request_id == "free") == 5


def test_slow_texts_take_turns_and_draw_the_same(demo, monkeypatch):
    demo.core.shapes.know(demo.frontend.vocabulary)
    prompts, params = ["Where does Ana live?", "Who?", "A word", "x"], shaped(WORDS, max_tokens=20)
    expected = [output.outputs for output in demo.generate(prompts, params, use_tqdm=False)]
    rows, masks = list[int](), Grammars.masks
    monkeypatch.setattr(Grammars, "masks", lambda self, texts: rows.append(len(texts)) or masks(self, texts))
    monkeypatch.setattr(grammars, "thread_time", count(0, 0.02).__next__)  # two texts fill a step
    monkeypatch.setattr(grammars, "_TEXT_S", float("inf"))
    assert [output.outputs for output in demo.generate(prompts, params, use_tqdm=False)] == expected
    assert sum(number > 2 for number in rows) <= 2  # the first tokens, and the step that is planned meanwhile
    assert sum(rows) == sum(len(sample.token_ids) for outputs in expected for sample in outputs)


def test_an_engine_that_does_not_know_its_vocabulary_refuses(engine):
    llm = engine("qwen3")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate({"prompt_token_ids": [3, 4]}, shaped(WORDS), use_tqdm=False)
