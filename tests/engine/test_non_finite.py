"""A request with a value that is NaN or infinite fails alone, and nothing that it computed is kept."""

import shutil
from contextlib import contextmanager

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.cli import app, prompts
from chunkattn.engine.messages import (
    GenerateRequest,
    PrecomputeRequest,
    PromptLogprobsOutput,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
    TokenOutput,
)
from chunkattn.errors import NonFiniteError
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.rope.positions import make_layout
from chunkattn.server.app import create_app
from tests.checkpoints import VOCAB
from tests.engine.test_parity import check_greedy
from tests.server_helpers import SMALL, ServerProcess, is_idle, wait_until

pytest_plugins = ["tests.told_engine"]

BAD = 7
"""Token whose embedding or logit is damaged; no other prompt has it."""
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def part(rng, length):
    return rng.integers(BAD + 1, VOCAB, length).tolist()


RNG = np.random.default_rng(0)
PREFIX, GOOD, OTHER, QUESTION = part(RNG, 20), part(RNG, 33), part(RNG, 18), part(RNG, 5)
SPOILT = [*OTHER[:4], BAD, *OTHER[4:]]


@contextmanager
def damaged(core, name, value, row=BAD):
    """A row of the first array of a name is `value` in the loaded model."""
    runner = core.runner
    place = next(place for place, found in enumerate(runner._names) if name in found)
    kept = runner._params[place]
    runner._params[place] = kept.at[row].set(value)
    try:
        yield
    finally:
        runner._params[place] = kept


@pytest.fixture
def core(engine):
    return fresh(engine("llama"))


def fresh(llm):
    """The core of an engine without requests and cached blocks."""
    for name in [*llm.core.requests]:
        llm.core.abort(name)
    llm.core.step()  # checks a step that still ran
    assert llm.reset_prefix_cache()
    return llm.core


def run(core, *messages, after=None):
    """Answers by request, and the requests of every step."""
    answers, steps, count = {}, [], core.metrics.count_step

    def noted(step):
        steps.append([s.sample.request.request_id for s in step.spans])
        count(step)

    for message in messages:
        core.add(message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.metrics, "count_step", noted)
        while core.has_work:
            for event in core.step():
                name = event.request_id
                if isinstance(event, TokenOutput):
                    said = answers.get(name)
                    answers[name] = [*(said if isinstance(said, list) else []), *event.token_ids]
                elif not isinstance(event, PromptLogprobsOutput):
                    answers[name] = event
            core.scheduler.check()
            if after:
                after()
    assert core.scheduler.trie.num_available == core.limits.num_pages
    for block in core.scheduler.trie.blocks():
        if block.size == core.limits.block_size:
            assert all(np.isfinite(np.asarray(leaf)[block.page]).all() for leaf in jax.tree.leaves(core.runner.pool.caches))
    return answers, steps


def failed(answer):
    return isinstance(answer, RequestFailed) and not answer.finite


def cached(core, prefix, chunks):
    """Cached tokens of the prefix and of each chunk."""
    found = core.look_up(PrecomputeRequest("look", make_layout(prefix, chunks, [])))
    return found.prefix, *found.chunks


def neighbour(name="good", **fields):
    return GenerateRequest(name, make_layout(PREFIX, [GOOD, OTHER], QUESTION), GREEDY, **fields)


def check_neighbour(oracle, tokens):
    """The answer is transformers' greedy one."""
    layout = neighbour().layout
    assert isinstance(tokens, list), tokens
    assert len(tokens) == GREEDY.max_tokens
    check_greedy(oracle("llama").chunked(layout, tokens), len(layout), tokens)


PLACES = {
    "prefix": make_layout([*PREFIX, BAD], [GOOD], QUESTION),
    "chunk": make_layout(PREFIX, [GOOD, SPOILT], QUESTION),
    "question": make_layout(PREFIX, [GOOD], [BAD, *QUESTION]),
    "last token": make_layout(PREFIX, [GOOD], [*QUESTION, BAD]),
    "plain": make_layout([], [], [*PREFIX, BAD, *GOOD]),
}
SAMPLING = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3, "top_k": 5, "top_p": 0.9},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "bias": {"temperature": 0, "logit_bias": {9: 100.0, BAD: -100.0}},
    "penalties": {"seed": 3, "repetition_penalty": 1.2, "logprobs": 2},
    "banned": {"temperature": 0, "min_tokens": 3, "stop_token_ids": [BAD]},
    "samples": {"seed": 5, "n": 3},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
}
SCORES = {
    "labels": {"label_token_ids": ((3, 4),)},
    "many labels": {"label_token_ids": (tuple(range(20, 60)),)},
    "vocabulary": {"label_token_ids": (tuple(range(20, 60)) * 7,)},
    "shared prefix": {"label_token_ids": ((3,),), "share_prefix": True, "algorithm": "prefill_extend"},
    "packed_dense": {"label_token_ids": ((3, 4),), "backend": "packed_dense", "algorithm": "packed_dense"},
}


def messages_of(layout):
    """A request of every kind, all with one layout, by name."""
    made = {name: GenerateRequest(name, layout, SamplingParams(max_tokens=4, **given)) for name, given in SAMPLING.items()}
    read = SamplingParams(max_tokens=1, prompt_logprobs=0)
    made["likelihood"] = GenerateRequest("likelihood", layout, read, logprobs_from=len(layout) - 2, prompt_only=True)
    rows = np.asarray([len(layout) - 1])
    made |= {name: ScoreRequest(name, layout, rows, **given) for name, given in SCORES.items()}
    return made


@pytest.mark.parametrize("place", PLACES)
def test_every_kind_fails_alone(core, oracle, place):
    """A neighbour of the same step, which shares prefix and chunk, answers as transformers does."""
    messages, counted = messages_of(PLACES[place]), core.metrics.value("non_finite_requests_total")
    with damaged(core, "embed_tokens", np.nan):
        answers, steps = run(core, *messages.values(), neighbour())
    check_neighbour(oracle, answers.pop("good"))
    assert answers.keys() == messages.keys()
    assert all(map(failed, answers.values())), answers
    assert all(f"token id {BAD} " in answer.reason for answer in answers.values())
    assert core.metrics.value("non_finite_requests_total") - counted == len(messages)
    assert any("good" in step and messages.keys() & {*step} for step in steps)
    assert cached(core, PREFIX, [SPOILT])[1] == 0
    again, _ = run(core, neighbour(), *messages.values())  # the weight is repaired, and nothing of before is left
    check_neighbour(oracle, again["good"])
    assert not any(map(failed, again.values()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_and_leave_nothing(core, value):
    """Hidden states are finite and the head is damaged: a ban, a bias or a penalty of that token hides nothing."""
    healthy = make_layout(PREFIX, [GOOD, OTHER], QUESTION)
    messages = messages_of(healthy)
    with damaged(core, "lm_head", value):
        answers, _ = run(core, *messages.values())
    assert answers.keys() == messages.keys()
    assert all(map(failed, answers.values())), answers
    assert not [*core.scheduler.trie.blocks()]


def test_a_generated_token_fails_its_request(core, oracle):
    """The others go on, and what they have said stays."""
    forced = GenerateRequest("bad", neighbour().layout, SamplingParams(temperature=0, max_tokens=4, logit_bias={BAD: 100.0}))
    with damaged(core, "embed_tokens", np.nan):
        answers, steps = run(core, forced, neighbour())
    assert failed(answers["bad"])
    assert sum("bad" in step for step in steps) == 2
    check_neighbour(oracle, answers["good"])


@pytest.mark.parametrize("pin", [False, True])
def test_a_document_that_is_not_finite_is_not_kept(core, pin):
    """Nothing of it is read, so its hidden states decide."""
    fine = PrecomputeRequest("fine", make_layout(PREFIX, [GOOD], []), pin=pin)
    bad = PrecomputeRequest("bad", make_layout(PREFIX, [SPOILT], []), pin=pin)
    with damaged(core, "embed_tokens", np.nan):
        core.add(bad)
        core.add(fine)
        events = []
        while core.has_work:
            events += core.step()
    assert {e.request_id: isinstance(e, RequestFailed) for e in events} == {"bad": True, "fine": False}
    assert core.pins == (["fine"] if pin else [])
    assert cached(core, PREFIX, [GOOD, SPOILT]) == (len(PREFIX), len(GOOD), 0)
    core.unpin(core.pins)
    core.scheduler.check()


@pytest.fixture
def slow_core(engine):
    """An engine whose steps are shorter than a chunk, so that most steps read nothing."""
    return fresh(engine("llama", max_num_batched_tokens=32, max_num_seqs=8))


def test_requests_that_wait_for_a_spoilt_chunk_fail_by_themselves(slow_core, oracle):
    """They share it in flight, and steps that read nothing compute it."""
    chunk = [*OTHER[:4], BAD, *GOOD, *OTHER, *GOOD]
    names = [f"bad{n}" for n in range(3)]
    bad = [GenerateRequest(n, make_layout(PREFIX, [GOOD, chunk], [i]), GREEDY) for i, n in enumerate(names, 10)]
    with damaged(slow_core, "embed_tokens", np.nan):
        answers, _ = run(slow_core, *bad, neighbour())
    assert all(failed(answers[n]) for n in names)
    check_neighbour(oracle, answers["good"])
    assert cached(slow_core, PREFIX, [GOOD, OTHER, chunk]) == (len(PREFIX), len(GOOD), len(OTHER), 0)
    again, _ = run(slow_core, *bad)
    for message in bad:
        tokens = again[message.request_id]
        check_greedy(oracle("llama").chunked(message.layout, tokens), len(message.layout), tokens)


@pytest.mark.parametrize("left", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_who_leaves_in_flight_leaves_nothing_spoilt(slow_core, oracle, left):
    """A step that reads nothing still runs when its request is aborted. The same id may be used again at once."""
    chunk = [*OTHER[:4], BAD, *GOOD, *OTHER]
    layout, steps = make_layout(PREFIX, [chunk], QUESTION), []

    def leave():
        steps.append(1)
        if len(steps) == left:
            slow_core.abort("bad")
            slow_core.add(neighbour("bad"))

    with damaged(slow_core, "embed_tokens", np.nan):
        answers, _ = run(slow_core, GenerateRequest("bad", layout, GREEDY), after=leave)
    check_neighbour(oracle, answers["bad"])
    assert cached(slow_core, PREFIX, [chunk])[1] == 0


def test_a_step_is_checked_without_waiting_for_it(slow_core, monkeypatch):
    """The flags of a step that reads nothing are read once the next step is on its way."""
    order, forward, commit = [], slow_core.runner.forward, slow_core.scheduler.fills.commit
    monkeypatch.setattr(slow_core.runner, "forward", lambda batch: order.append("run") or forward(batch))
    monkeypatch.setattr(slow_core.scheduler.fills, "commit", lambda: order.append("commit") or commit())
    run(slow_core, PrecomputeRequest("fill", make_layout(part(RNG, 90), [], [])))
    assert order == ["run", "run", "commit", "run", "commit", "commit"]


def test_nothing_spoilt_stays_on_disk(checkpoint, tmp_path):
    """Neither a spoilt document, nor what a request with damaged logits has written before."""
    llm = LLM(
        str(checkpoint("llama")),
        skip_tokenizer_init=True,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_memory_bytes=8 << 20,
        kv_store=str(tmp_path),
    )
    core = llm.core
    with damaged(core, "embed_tokens", np.nan), pytest.raises(NonFiniteError):
        llm.precompute([], [SPOILT])
    with damaged(core, "lm_head", np.inf), pytest.raises(NonFiniteError):
        llm.generate(ChunkedPrompt(PREFIX, [GOOD, OTHER], QUESTION), GREEDY)
    assert core.disk.writer.flush(30)
    assert core.disk.counts["written"] > 0
    assert not core.disk.store.entries()
    llm.generate(ChunkedPrompt(PREFIX, [GOOD, OTHER], QUESTION), GREEDY)
    assert core.disk.writer.flush(30)
    assert len(core.disk.store.entries()) == 3
    llm.close()


# Errors in Python, on the command line and over HTTP


@pytest.mark.parametrize(
    "call",
    [
        lambda llm, bad: llm.generate([{"prompt_token_ids": QUESTION}, {"prompt_token_ids": [1, *bad]}], GREEDY),
        lambda llm, bad: llm.score([1, 2], [[3], bad], label_token_ids=[4, 5]),
        lambda llm, bad: llm.precompute([1, 2], [[3], bad], pin=True),
    ],
    ids=["generate", "score", "precompute"],
)
def test_the_error_names_the_cause_and_the_engine_goes_on(engine, call):
    llm = engine("llama")
    llm.reset_prefix_cache()
    with damaged(llm.core, "embed_tokens", np.nan), pytest.raises(NonFiniteError, match="weight of the checkpoint"):
        call(llm, [9, BAD])
    assert not llm.core.requests
    assert not llm.core.pins
    assert llm.core.scheduler.trie.num_available == llm.limits.num_pages
    assert call(llm, [9, 10])


@pytest.fixture(scope="module")
def overflowing(checkpoint, tmp_path_factory):
    """A checkpoint of finite float16 weights whose MLP overflows float16 for one token; and transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # no layer writes to dimension 0, and one token alone begins with a value there
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[BAD, 0] = 50
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.layers[0].mlp.gate_proj.weight[:, 0] = 1000
        model.model.layers[0].mlp.up_proj.weight[:, 0] = 1000
    folder = tmp_path_factory.mktemp("overflowing")
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.mark.ci
def test_float16_overflows(overflowing):
    """One token overflows in float16 alone; transformers, and the engine in float32, compute finite logits."""
    folder, model = overflowing
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20}
    narrow = LLM(str(folder), dtype="float16", **options)
    good, bad = [*PREFIX, 9], [*PREFIX, BAD, 9]
    answers, steps = run(
        narrow.core,
        *(
            ScoreRequest(n, make_layout([], [], ids), np.asarray([len(ids) - 1]), ((3, 4),))
            for n, ids in (("bad", bad), ("good", good))
        ),
    )
    assert steps == [["bad", "good"]] or steps == [["good", "bad"]]
    assert failed(answers["bad"])

    def expected(ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.as_tensor([ids])).logits[0, -1], -1)[3:5].numpy()

    assert isinstance(answers["good"], ScoreResult)
    np.testing.assert_allclose(answers["good"].logprobs[0], expected(good), atol=0.02)
    with pytest.raises(NonFiniteError, match='dtype="float16" probably overflows; use dtype="bfloat16" or "float32"'):
        narrow.score(bad[:-1], [bad[-1:]], label_token_ids=[3, 4])
    wide = LLM(str(folder), **options).score(bad[:-1], [bad[-1:]], label_token_ids=[3, 4])
    np.testing.assert_allclose(wide.logprobs[0], expected(bad), atol=1e-3)


def test_the_command_line_says_so_in_one_line(demo, monkeypatch):
    for name in ("generate", "score"):
        monkeypatch.setattr(prompts, "make_llm", lambda *_, **__: demo)
        arguments = {"generate": ["x"], "score": ["x", "y", "--label", "yes"]}[name]
        with damaged(demo.core, "norm", np.nan):
            result = CliRunner().invoke(app, [name, *arguments])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: request ")
        assert "NaN or infinite" in result.stderr
        assert len(result.stderr.splitlines()) == 1


ROUTES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/score": {"query": "x", "items": ["y"], "label_token_ids": [1, 2]},
    "/v1/rerank": {"query": "x", "documents": ["y", "z"]},
    "/v1/cache/documents": {"documents": ["y"]},
}


@pytest.mark.parametrize("stream", [False, True])
def test_http_answers_500_with_a_code(llm, monkeypatch, stream):
    """The engine's process is played by one that fails every request so."""

    def fail(messages):
        for message in messages:
            if isinstance(message, GenerateRequest | ScoreRequest | PrecomputeRequest):
                engine._reply(RequestFailed(message.request_id, "the model's values are NaN or infinite", finite=False))

    engine = llm.client._worker
    monkeypatch.setattr(engine, "send", fail)
    client = TestClient(create_app(llm), base_url="http://localhost", raise_server_exceptions=False)
    for path, body in ROUTES.items():
        if stream and "completions" not in path:
            continue
        answer = client.post(path, json=body | ({"stream": True} if stream else {}))
        assert answer.status_code == 500, path
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("non_finite", "server_error")
        assert "NaN or infinite" in error["message"]


@pytest.mark.ci
def test_the_engine_in_its_process_over_http(demo, tmp_path):
    """A real engine, in float16, over the demo model with one token that overflows. Its other requests are answered."""
    (bad,) = demo.frontend.tokenizer("?", add_special_tokens=False).input_ids[-1:]
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    weights = {name: array.astype(np.float32) for name, array in load_file(DEMO_FOLDER / "model.safetensors").items()}
    for name in weights:  # no layer writes to dimension 0
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][bad, 0] = 1000
    weights["model.layers.0.mlp.gate_proj.weight"][:, 0] = 30_000
    weights["model.layers.0.mlp.up_proj.weight"][:, 0] = 30_000
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    server = ServerProcess(str(tmp_path / "model"), "--dtype=float16", *SMALL)
    try:
        with server.client() as http:
            body = {"prompt": "Where does Ana live?", "max_tokens": 2, "temperature": 0}
            answers = [http.post("/v1/completions", json=body), http.post("/v1/completions", json=body | {"stream": True})]
            for answer in answers:
                assert answer.status_code == 500
                assert answer.json()["error"]["code"] == "non_finite"
                assert 'dtype="float16" probably overflows' in answer.json()["error"]["message"]
            assert "chunkattn_non_finite_requests_total 2.0" in http.get("/metrics").text
            assert http.post("/v1/completions", json=body | {"prompt": "Ana lives in"}).status_code == 200
            wait_until(lambda: is_idle(http))
    finally:
        server.close()
