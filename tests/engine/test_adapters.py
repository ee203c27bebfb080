"""Adapters by request: PEFT is the witness, and no company, cache or history moves a bit of a row."""

import asyncio
import json
import os
import shutil
import signal
import threading

import numpy as np
import pytest
import torch

from chunkattn import LLM, AsyncLLM, ChunkedPrompt, LoRARequest, SamplingParams, make_layout
from chunkattn.adapter_salt import salted
from chunkattn.calls import frontend
from chunkattn.config import EngineConfig
from chunkattn.engine import request as requests
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import CapacityError, ConfigError, ModelError, RequestError
from chunkattn.models.loader import open_files
from tests.adapter_files import linears, make_adapter, make_peft
from tests.async_helpers import last, until
from tests.checkpoints import VOCAB

OPTIONS = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 128, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
A, B = LoRARequest("a", 1), LoRARequest("b", 2)
WHICH = [None, A, B, A, None, B]


@pytest.fixture(scope="module")
def adapters(oracle, tmp_path_factory):
    """Folders of two adapters of a checkpoint, of unlike ranks and matrices, and the models with them, by name."""
    made = {}

    def get(name):
        if name not in made:
            model, folder = oracle(name).model, tmp_path_factory.mktemp("adapters")
            ends = sorted({module.rpartition(".")[2] for module in linears(model)} - {"gate", "shared_expert_gate"})
            models = {
                "a": make_peft(folder / "a", model, target_modules=ends, seed=1),
                "b": make_peft(folder / "b", model, target_modules=ends[:2], seed=2, r=7, use_rslora=True),
            }
            made[name] = folder, models
        return made[name]

    return get


def modules_of(folder):
    return (f"a={folder / 'a'}", f"b={folder / 'b'}")


@pytest.fixture(scope="module")
def build(checkpoint, adapters):
    """A new engine with the adapters of a checkpoint."""

    def make(name="qwen3", **options):
        return LLM(str(checkpoint(name)), **{**OPTIONS, "lora_modules": modules_of(adapters(name)[0]), **options})

    return make


@pytest.fixture(scope="module")
def llm(build):
    made = build()
    yield made
    made.core.scheduler.check()
    assert made.reset_prefix_cache(), "pages leaked"


def prompts_of(rng):
    """Chunked prompts that share a prefix and a document."""
    prefix, shared = rng.integers(0, VOCAB, 20).tolist(), rng.integers(0, VOCAB, 33).tolist()
    return [ChunkedPrompt(prefix, [shared, rng.integers(0, VOCAB, 9).tolist()], [n, 5]) for n in range(len(WHICH))]


def values(output):
    """Tokens and the bits of their log-probabilities."""
    (sample,) = output.outputs
    return sample.token_ids, [[entry.logprob for entry in place.values()] for place in sample.logprobs]


def log_softmax(logits):
    return torch.log_softmax(torch.as_tensor(logits, dtype=torch.float64), -1).numpy()


OTHER_FAMILIES = [pytest.param(name, marks=pytest.mark.ci) for name in ("phi3", "granite4", "gemma3-window")]


@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe", "llama-bias", *OTHER_FAMILIES])
def test_an_adapter_by_request_is_peft(name, build, llm, adapters, oracle, rng):
    ids, items = rng.integers(0, VOCAB, 11).tolist(), [rng.integers(0, VOCAB, n).tolist() for n in (3, 6)]
    llm = llm if name == "qwen3" else build(name)
    models = {"base": oracle(name).model, **adapters(name)[1]}
    seen = []
    for who, request in (("base", None), ("a", A), ("b", B)):
        scores = llm.score(ids, items, label_token_ids=[*range(VOCAB)], lora_request=request).logprobs
        for item, found in zip(items, scores, strict=True):
            with torch.no_grad():
                expected = models[who](torch.as_tensor([ids + item])).logits[0, -1]
            np.testing.assert_allclose(found, log_softmax(expected), atol=1e-4)
        seen.append(np.asarray(scores))
    assert min(np.abs(one - other).max() for one, other in zip(seen, [*seen[1:], seen[0]], strict=True)) > 0.01


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.ci)])
def test_no_company_moves_a_bit(dtype, build, llm, checkpoint, rng):
    """One batch of both adapters and the base model, each alone in a new cache, and the base alone in a plain engine."""
    together = llm if dtype == "float32" else build(dtype=dtype)
    plain = LLM(str(checkpoint("qwen3")), dtype=dtype, **OPTIONS)
    together.reset_prefix_cache()
    prompts = prompts_of(rng)
    found = [values(output) for output in together.generate(prompts, GREEDY, lora_request=WHICH)]
    assert len({str(tokens) for tokens, _ in found}) > 3
    warm = [values(output) for output in together.generate(prompts, GREEDY, lora_request=WHICH)]
    assert warm == found
    for prompt, request, expected in zip(prompts, WHICH, found, strict=True):
        together.reset_prefix_cache()
        assert values(*together.generate(prompt, GREEDY, lora_request=request)) == expected
        if request is None:
            assert values(*plain.generate(prompt, GREEDY)) == expected


def test_preemption_moves_no_bit(llm, rng):
    """Pinned documents leave fewer pages than the prompts need together."""
    prompts, params = prompts_of(rng), SamplingParams(temperature=0, max_tokens=60, logprobs=1)
    expected = [values(o) for o in llm.generate(prompts, params, lora_request=WHICH)]
    size, before = llm.limits.block_size, llm.core.scheduler.preemptions
    documents = [rng.integers(0, VOCAB, size).tolist() for _ in range(llm.limits.num_pages - 42)]
    pinned = llm.precompute([1], documents, pin=True)
    assert [values(o) for o in llm.generate(prompts, params, lora_request=WHICH)] == expected
    assert llm.core.scheduler.preemptions > before
    llm.unpin(pinned)


def test_a_store_on_disk_knows_the_adapter(build, rng, tmp_path):
    """A second process reads each document under its own adapter alone."""
    prompts, outputs = prompts_of(rng)[:3], []
    for _ in range(2):
        llm = build(kv_store=str(tmp_path))
        outputs.append(llm.generate(prompts, GREEDY, lora_request=WHICH[:3]))
        llm.close()
    first, second = ([values(o) for o in some] for some in outputs)
    assert first == second
    assert [o.num_cached_tokens for o in outputs[1]] == [20 + 33 + 9] * 3


def test_documents_of_one_adapter_serve_no_other(llm, rng):
    prefix, document = rng.integers(0, VOCAB, 20).tolist(), rng.integers(0, VOCAB, 40).tolist()
    llm.precompute(prefix, [document], lora_request=A)
    cached = [llm.lookup(prefix, [document], lora_request=who).documents[0].was_cached for who in (None, A, B)]
    assert cached == [False, True, False]
    llm.forget(prefix, [document], lora_request=B)
    assert llm.lookup(prefix, [document], lora_request=A).documents[0].was_cached
    llm.forget(prefix, [document], lora_request=A)
    assert not llm.lookup(prefix, [document], lora_request=A).documents[0].was_cached


def test_a_broken_key_shows(llm, rng, monkeypatch):
    """Without the digest in the key, a prompt reads the K/V of another adapter, and its values move."""
    prompt = prompts_of(rng)[0]
    expected = [values(*llm.generate(prompt, GREEDY, lora_request=who)) for who in (A, B)]
    whole = requests.Request.__init__

    def broken(self, message, limits, **options):
        whole(self, message, limits, **options)
        self.salt_key = None

    monkeypatch.setattr(requests.Request, "__init__", broken)
    llm.reset_prefix_cache()
    assert [values(*llm.generate(prompt, GREEDY, lora_request=who)) for who in (A, B)] != expected
    llm.reset_prefix_cache()


def test_scores_and_salts_know_the_adapter(llm, rng):
    """Remembered scores are of one adapter; a prompt's own salt keeps the adapter of the call."""
    query, items = rng.integers(0, VOCAB, 9).tolist(), [rng.integers(0, VOCAB, 5).tolist()]
    by_one = [llm.score(query, items, label_token_ids=[3, 7], lora_request=who).logprobs for who in (None, A, B, None, A, B)]
    assert by_one[:3] == by_one[3:]
    assert len({str(one) for one in by_one}) == 3
    prompt = {"prompt_token_ids": query}
    expected = values(*llm.generate(prompt, GREEDY, lora_request=A))
    assert values(*llm.generate({**prompt, "cache_salt": "own"}, GREEDY, lora_request=A)) == expected
    assert values(*llm.generate(prompt, GREEDY, cache_salt="own", lora_request=A)) == expected


# Adapters that calls bring


def test_calls_bring_adapters_that_take_turns(checkpoint, adapters, oracle, rng):
    folder, prompt = adapters("qwen3")[0], {"prompt_token_ids": rng.integers(0, VOCAB, 30).tolist()}
    make_adapter(folder / "c", oracle("qwen3").model, ("v_proj",), target_modules=["v_proj"], seed=3)
    llm = LLM(str(checkpoint("qwen3")), **OPTIONS, enable_lora=True, max_loras=2)
    brought = [LoRARequest(name, n, str(folder / name)) for n, name in enumerate("abc", 1)]
    first = [values(*llm.generate(prompt, GREEDY, lora_request=one)) for one in brought]
    llm.reset_prefix_cache()
    assert [values(*llm.generate(prompt, GREEDY, lora_request=one)) for one in reversed(brought)] == first[::-1]
    assert len({str(one) for one in first}) == 3
    with pytest.raises(RequestError, match="'a' stands for other contents"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("a", 1, str(folder / "c")))
    with pytest.raises(RequestError, match="'x' is not loaded"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("x", 9))


@pytest.fixture(scope="module")
def one_slot(checkpoint, adapters):
    """An engine that holds one adapter at a time, and the adapters as calls bring them."""
    made, folder = LLM(str(checkpoint("qwen3")), **OPTIONS, enable_lora=True), adapters("qwen3")[0]
    yield made, [LoRARequest(name, n, str(folder / name)) for n, name in enumerate("ab", 1)]
    made.core.scheduler.check()
    assert not made.core.scheduler.holders()
    assert made.reset_prefix_cache(), "pages leaked"


def test_documents_of_an_adapter_that_gave_its_slot_away_are_found_and_forgotten(one_slot, rng):
    one, (a, b) = one_slot
    prefix, document = (rng.integers(0, VOCAB, n).tolist() for n in (5, 20))
    one.precompute(prefix, [document], lora_request=a)
    one.generate({"prompt_token_ids": document}, GREEDY, lora_request=b)
    for call, cached in ((one.lookup, True), (one.forget, True), (one.lookup, False)):
        assert call(prefix, [document], lora_request=A).documents[0].was_cached == cached


def test_adapters_of_one_call_take_turns(one_slot, llm, rng):
    one, (a, b) = one_slot
    prompts, which = prompts_of(rng), [None, a, b, a, None, b]
    expected = [values(output) for output in llm.generate(prompts, GREEDY, lora_request=WHICH)]
    assert [values(output) for output in one.generate(prompts, GREEDY, lora_request=which)] == expected
    query, items = rng.integers(0, VOCAB, 9).tolist(), [rng.integers(0, VOCAB, 5).tolist()]
    dense = {"label_token_ids": [3, 7], "algorithm": "packed_dense"}  # without pages
    for who in (a, b):
        np.testing.assert_allclose(
            one.score(query, items, lora_request=who, **dense).logprobs,
            llm.score(query, items, lora_request=who, **dense).logprobs,
        )


def test_a_request_has_its_slot_until_it_ends(one_slot, rng):
    """Others wait for the slot and keep their order, a better priority takes it, and an abort frees it."""
    one, brought = one_slot
    core, ended, ids = one.core, [], rng.integers(0, VOCAB, 30).tolist()
    for request in brought:
        core.load_adapter(request.lora_name, request.lora_path)

    def add(name, adapter, tokens, priority=0):
        params = SamplingParams(temperature=0, max_tokens=tokens)
        core.add(GenerateRequest(name, make_layout([], [], ids), params, salt_key=salted(adapter, None), priority=priority))

    def run(steps=1000):
        while core.has_work and steps:
            ended.extend(output.request_id for output in core.step() if getattr(output, "finish_reason", True))
            steps -= 1

    add("a1", "a", 20), add("b1", "b", 2), add("a2", "a", 2)
    run(5)
    assert [r.request_id for r in core.scheduler.running] == ["a1"]
    run()
    assert ended == ["a1", "b1", "a2"]
    ended.clear()
    before = core.scheduler.preemptions
    add("a3", "a", 20, priority=1)
    run(5)
    add("b2", "b", 2)
    run()
    assert (ended, core.scheduler.preemptions) == (["b2", "a3"], before + 1)
    ended.clear()
    add("a4", "a", 20), add("b3", "b", 2)
    run(3)
    core.abort("a4")
    run()
    assert ended == ["b3"]


def test_an_adapter_that_changes_while_it_has_no_slot_fails_its_request(checkpoint, oracle, one_slot, tmp_path):
    one, (a, _) = one_slot
    changing, prompt = LoRARequest("changing", 3, str(tmp_path)), {"prompt_token_ids": [1, 2, 3]}
    make_adapter(tmp_path, oracle("qwen3").model, seed=7)
    one.generate(prompt, GREEDY, lora_request=changing)
    make_adapter(tmp_path, oracle("qwen3").model, seed=8)
    one.generate(prompt, GREEDY, lora_request=a)
    with pytest.raises(RequestError, match=f"{tmp_path} has changed since it was loaded; pass it under a new lora_name"):
        one.generate([prompt] * 2, GREEDY, lora_request=[changing, a])
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(RequestError, match="cannot be read again"):
        one.precompute([1], [[2]], lora_request=changing)
    assert one.generate(prompt, GREEDY, lora_request=a)[0].outputs[0].finish_reason


def test_two_names_may_stand_for_equal_contents(checkpoint, adapters, one_slot, tmp_path):
    """Each has a folder of its own, and one that is gone does not matter to the other."""
    one, (a, b) = one_slot
    twin, prompt = LoRARequest("twin", 4, str(tmp_path / "twin")), {"prompt_token_ids": [1, 2, 3]}
    shutil.copytree(a.lora_path, twin.lora_path)
    expected = values(one.generate(prompt, GREEDY, lora_request=a)[0])
    assert values(one.generate(prompt, GREEDY, lora_request=twin)[0]) == expected
    shutil.rmtree(twin.lora_path)
    reads = one.core.adapters.num_read
    assert values(one.generate([prompt] * 2, GREEDY, lora_request=[b, a])[1]) == expected
    assert one.core.adapters.num_read > reads
    fixed = LLM(str(checkpoint("qwen3")), **OPTIONS, lora_modules=(f"a={a.lora_path}", f"b={a.lora_path}"))
    assert values(fixed.generate(prompt, GREEDY, lora_request=a)[0]) == expected


def test_the_adapters_of_lora_modules_may_leave_no_slot(build, adapters, oracle):
    folder = adapters("qwen3")[0]
    make_adapter(folder / "d", oracle("qwen3").model, seed=4)
    with pytest.raises(CapacityError, match="have all 2 slots; raise max_loras"):
        build(enable_lora=True).score([1], [[2]], label_token_ids=[3], lora_request=LoRARequest("d", 4, str(folder / "d")))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LoRARequest("c", 3, "/nowhere"), "needs the option enable_lora"),
        (7, "must be a LoRARequest, got 7"),
        (LoRARequest(7), "printable characters, got 7"),
        (LoRARequest("x" * 200), "1 to 128 printable characters"),
        ([A], "1 lora_request for 2 prompts"),
        (LoRARequest("missing"), "'missing' is not loaded"),
    ],
)
def test_a_wrong_request_is_refused(request_, message, llm):
    prompts = [{"prompt_token_ids": [1, 2]}] * 2
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY, lora_request=request_)


def test_what_no_request_can_choose_is_refused(checkpoint, adapters, oracle, tmp_path):
    start = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20}
    make_adapter(tmp_path / "head", oracle("qwen3").model, ("lm_head",), target_modules=["lm_head"])
    make_adapter(tmp_path / "high", oracle("qwen3").model, r=17)
    make_adapter(tmp_path / "odd", oracle("qwen3").model, rank=lambda name: 5)
    for name, error, message in (
        ("head", ConfigError, "changes 'lm_head.weight', which no request can choose"),
        ("high", ConfigError, "rank 17 exceeds max_lora_rank 16"),
        ("odd", ModelError, r"shape \[5, 64\], base model and adapter_config.json say \[4, 64\]"),
    ):
        config = EngineConfig(model=str(checkpoint("qwen3")), skip_tokenizer_init=True, lora_modules=(f"x={tmp_path / name}",))
        with pytest.raises(error, match=message):  # before the weights are loaded
            open_files(config)
    with pytest.raises(RequestError, match="this engine has no adapters"):
        LLM(str(checkpoint("qwen3")), **start).generate({"prompt_token_ids": [1]}, GREEDY, lora_request=A)
    with pytest.raises(ConfigError, match=r"num_hosts=2; merge one at the load"):
        LLM(str(checkpoint("qwen3")), **start, enable_lora=True, num_hosts=2, tensor_parallel_size=2, coordinator="h:1")
    with pytest.raises(ConfigError, match="must be of the form name=folder, got 'x'"):
        LLM(str(checkpoint("qwen3")), lora_modules=("x",))


@pytest.mark.ci
def test_an_engine_process_takes_turns_and_may_die(checkpoint, adapters, llm, rng, monkeypatch):
    """Hub ids are resolved in this process, off the event loop. A new engine learns the adapters when they are named."""
    prompt, folder, asked = {"prompt_token_ids": rng.integers(0, VOCAB, 30).tolist()}, adapters("qwen3")[0], []
    a, b, none = (LoRARequest(name, 1, f"hub/{name}") for name in ("a", "b", "none"))

    def find(place):
        asked.append((place, threading.current_thread()))
        return folder / place.removeprefix("hub/")

    async def answers():
        async with AsyncLLM(str(checkpoint("qwen3")), **OPTIONS, enable_lora=True, warmup=False) as other:

            async def answer(who):
                return values(await last(other.generate(prompt, GREEDY, lora_request=who)))

            found = await asyncio.gather(*map(answer, (None, a, b) * 3))
            with pytest.raises(RequestError, match=r"none: no adapter_config\.json"):
                await other.score([1], [[2]], label_token_ids=[3], lora_request=none)
            os.kill(other.client.pid, signal.SIGKILL)
            await until(lambda: other.client.restarts == 1 and other.is_ready)
            return [*found, await answer(None), await answer(A), await answer(B)]

    monkeypatch.setattr(frontend, "adapter_folder", find)
    expected = [values(*llm.generate(prompt, GREEDY, lora_request=who)) for who in (None, A, B)]
    assert asyncio.run(answers()) == expected * 4
    assert {place for place, _ in asked} == {"hub/a", "hub/b", "hub/none"}
    assert len(asked) <= 7  # calls that run at once may each ask
    assert threading.main_thread() not in [thread for _, thread in asked]
