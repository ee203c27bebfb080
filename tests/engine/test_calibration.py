"""Chunk gap, chunk temperature and chunk scale: against transformers, in the cache, and as options."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from chunkattn import LLM, ChunkedPrompt, SamplingParams, make_layout
from chunkattn.calibration import FILE_NAME, Calibration
from chunkattn.calls.likelihood import likelihood_job
from chunkattn.config import make_config
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import BackendError, CapacityError, ConfigError, RequestError
from chunkattn.rope.positions import shared_positions
from tests.checkpoints import CHUNKABLE, VOCAB, random_parts
from tests.engine.test_parity import FAMILIES, GREEDY, check_greedy, engine_logits

QUICK = [pytest.param(n, marks=() if n in ("llama", "qwen3") else pytest.mark.slow) for n in CHUNKABLE]


def gapped_positions(parts, gap):
    """Position ids by the definition, part by part."""
    prefix, chunks, question = parts
    first = len(prefix) + (gap if chunks else 0)
    positions = [*range(len(prefix))]
    for chunk in chunks:
        positions += [first + t for t in range(len(chunk))]
    after = first + max((len(c) for c in chunks), default=0)
    return positions + [after + t for t in range(len(question))]


def gapped_layouts(rng, count, most):
    """Random prompts with random gaps, `(parts, layout)`, whose positions leave room for 32 tokens below `most`."""
    found = []
    while len(found) < count:
        parts, gap = random_parts(rng), int(rng.choice([0, 1, rng.integers(2, 100)]))
        layout = make_layout(*parts, gap=gap)
        assert layout.positions.tolist() == gapped_positions(parts, gap)
        if layout.next_position + 32 <= most:
            found.append((parts, layout))
    return found


# The gap


@pytest.mark.parametrize("name", QUICK)
def test_prompts_with_gaps_equal_transformers(name, engine, oracle):
    """30 random layouts with random gaps in one engine: raw logits of every token."""
    llm = engine(name)
    for _, layout in gapped_layouts(np.random.default_rng(5), 30, llm.limits.max_model_len):
        np.testing.assert_allclose(engine_logits(llm, layout), oracle(name).chunked(layout), atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "qwen3" else pytest.mark.slow) for n in FAMILIES])
def test_greedy_tokens_with_a_gap_equal_transformers(name, engine, oracle):
    """The option reaches prompts, and generated tokens go on from the question; cold, warm, and in another order."""
    rng, gap = np.random.default_rng(6), 37
    llm = engine(name, chunk_position_gap=gap)
    kept = [parts for parts in (random_parts(rng) for _ in range(20)) if parts[1]]
    llm.reset_prefix_cache()
    for order in (1, 1, -1):
        outs = llm.generate([ChunkedPrompt(p, chunks[::order], q) for p, chunks, q in kept], GREEDY)
        for (prefix, chunks, question), out in zip(kept, outs, strict=True):
            layout = make_layout(prefix, chunks[::order], question, gap=gap)
            tokens = out.outputs[0].token_ids
            check_greedy(oracle(name).chunked(layout, tokens), len(layout), tokens)


def test_a_chunk_of_one_gap_never_serves_another(engine, checkpoint, tmp_path):
    """Neither in memory nor on disk."""
    rng = np.random.default_rng(7)
    prefix, chunks = rng.integers(0, VOCAB, 20).tolist(), [rng.integers(0, VOCAB, 40).tolist() for _ in range(3)]
    prompt = ChunkedPrompt(prefix, chunks, [1, 2, 3])
    one = SamplingParams(temperature=0, max_tokens=1)

    def cached(gap):
        options = {
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 8 << 20,
        }
        llm = LLM(str(checkpoint("qwen3")), chunk_position_gap=gap, kv_store=str(tmp_path), **options)
        found = llm.precompute(prefix, chunks)
        llm.close()
        return [document.was_cached for document in found.documents]

    never, again = [False] * 3, [True] * 3
    assert [cached(gap) for gap in (16, 32, 0, 32)] == [never, never, never, again]
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    for gap, tokens in ((0, 0), (5, 20), (6, 20), (5, 20 + 120)):  # the prefix serves every gap
        llm.parser.gap = gap
        assert llm.generate(prompt, one)[0].num_cached_tokens == tokens, gap
    llm.parser.gap = 0


@pytest.mark.parametrize("gap", [2**31 - 3, 2**31, 2**32, 10**400], ids=["int32", "2**31", "2**32", "10**400"])
def test_positions_never_wrap(gap):
    with pytest.raises(CapacityError, match="exceed int32"):
        make_layout([1], [[2]], [3, 4], gap=gap)


def test_the_largest_position_is_that_of_int32():
    assert make_layout([1], [[2]], [3, 4], gap=2**31 - 4).positions.tolist() == [0, *range(2**31 - 3, 2**31)]


def test_only_chunks_have_a_gap():
    assert shared_positions(3, [], 2, 50).tolist() == [0, 1, 2, 3, 4]
    assert shared_positions(0, [2, 1], 1, 50).tolist() == [50, 51, 50, 52]


def test_scores_have_no_gap(engine):
    query, items = [3, 1, 4, 1, 5], [[9, 2], [6], [5, 3, 5]]
    plain = engine("qwen3").score(query, items, label_token_ids=[7, 8])
    for options in ({"chunk_position_gap": 37}, {"chunk_temperature": 0.5, "chunk_scale": 0.5}):
        assert engine("qwen3", **options).score(query, items, label_token_ids=[7, 8]).scores == plain.scores


def test_a_position_limit_names_the_gap(engine):
    llm = engine("qwen3", chunk_position_gap=37)
    limit = llm.limits.max_model_len
    with pytest.raises(
        CapacityError, match=rf"chunk 0 of 230 tokens reaches position \d+ after a chunk_position_gap of 37, .*{limit}"
    ):
        llm.generate(ChunkedPrompt([1], [[2] * 230], [3]), GREEDY)


# Temperature and scale


def weighed_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Eager attention with the scores of chunk slots replaced, in question rows, as the definition says."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    if getattr(module, "sliding_window", None) is not None:  # layers with a window weigh nothing
        return (torch.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None
    chunk, question, temperature, scale = WEIGHED
    rows = scores[:, :, question]
    tempered = rows[..., chunk] / temperature
    total = torch.logsumexp(tempered, -1, keepdim=True)
    rows[..., chunk] = tempered + (scale - 1) * total
    scores[:, :, question] = rows
    return (torch.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("weighed", weighed_attention)
WEIGHED = ()


def weighed_logits(oracle, layout, generated, temperature, scale):
    """Logits of transformers under the calibration."""
    global WEIGHED
    part = np.array([*layout.chunk_ids.tolist(), *[-2] * len(generated)])
    WEIGHED = (torch.as_tensor(part >= 0), torch.as_tensor(part == -2), temperature, scale)
    oracle.model.set_attn_implementation("weighed" if (part >= 0).any() else "eager")
    try:
        return oracle.chunked(layout, generated)
    finally:
        oracle.model.set_attn_implementation("eager")


def _calibrated():
    for name in (*FAMILIES, "qwen2-window"):
        for backend in ("xla", "reference", "pallas_tpu", "cpu"):
            quick, in_ci = (name, backend) == ("qwen3", "xla"), (name, backend) == ("qwen2-window", "cpu")
            yield pytest.param(name, backend, marks=() if quick else pytest.mark.ci if in_ci else pytest.mark.slow)


@pytest.mark.parametrize(("name", "backend"), list(_calibrated()))
def test_calibrated_prompts_equal_transformers(name, backend, engine, oracle):
    """Random layouts, temperatures and scales: logits of the prompt, then greedy tokens and their log-probabilities."""
    if backend == "pallas_tpu":
        name = "qwen3-64"
    rng = np.random.default_rng(8)
    llm = engine(name, attention_backend=backend, chunk_temperature=0.7, chunk_scale=1.3)
    layouts = gapped_layouts(rng, 12 if backend != "pallas_tpu" else 3, llm.limits.max_model_len)
    for _, layout in layouts:
        wanted = weighed_logits(oracle(name), layout, (), 0.7, 1.3)
        np.testing.assert_allclose(engine_logits(llm, layout), wanted, atol=1e-4)
    kept = [parts for parts, layout in layouts if layout.max_position < 150]
    params = SamplingParams(temperature=0, max_tokens=16 if backend != "pallas_tpu" else 3, logprobs=0)
    for parts, out in zip(kept, llm.generate([ChunkedPrompt(*p) for p in kept], params), strict=True):
        layout, tokens = make_layout(*parts), out.outputs[0].token_ids
        logits = weighed_logits(oracle(name), layout, tokens, 0.7, 1.3)
        check_greedy(logits, len(layout), tokens)
        wanted = torch.log_softmax(torch.as_tensor(logits), -1).numpy()[len(layout) - 1 : -1]
        found = [entry[token].logprob for entry, token in zip(out.outputs[0].logprobs, tokens, strict=True)]
        np.testing.assert_allclose(found, wanted[range(len(tokens)), tokens], atol=1e-4)


def test_cached_chunks_serve_every_temperature_and_scale(engine, oracle):
    """Only the question and the answer are computed again, and the log-probabilities equal transformers'."""
    rng = np.random.default_rng(9)
    llm = engine("qwen3", chunk_temperature=0.7, chunk_scale=1.3)
    parts = rng.integers(0, VOCAB, 20).tolist(), [rng.integers(0, VOCAB, n).tolist() for n in (40, 17, 40)], [1, 2, 3]
    answer = [5, 6]
    prompts = llm.frontend.parse([ChunkedPrompt(*parts)], None)
    llm.reset_prefix_cache()
    for weighing in ((1.0, 1.0), (0.5, 0.8), (0.7, 1.3), (2.0, 2.0)):
        job = likelihood_job(llm.frontend, prompts, [answer], weighing)
        before = llm.core.metrics.tokens.labels("prefill")._value.get()
        (found,) = llm.run(job)
        computed = llm.core.metrics.tokens.labels("prefill")._value.get() - before
        assert computed == (len(parts[2]) + len(answer) if weighing != (1.0, 1.0) else len(prompts[0].layout) + len(answer))
        logits = weighed_logits(oracle("qwen3"), prompts[0].layout, answer, *weighing)
        wanted = torch.log_softmax(torch.as_tensor(logits), -1).numpy()[[-3, -2], answer]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_question_is_cached_with_its_temperature_and_scale(engine):
    llm = engine("qwen3", chunk_temperature=0.7, chunk_scale=1.3)
    llm.reset_prefix_cache()
    prompt, one = ChunkedPrompt([1] * 16, [[2] * 16], list(range(40))), SamplingParams(temperature=0, max_tokens=1)
    layout = llm.parser.parse(prompt).layout

    def cached(weighing):
        llm.core.add(GenerateRequest("q", layout, one, weighing=weighing))
        (output,) = [o for _ in range(9) if llm.core.has_work for o in llm.core.step()]
        return output.cached.question

    assert [cached(w) for w in (None, None, (0.7, 1.3), (0.7, 1.2), (0.7, 1.2))] == [0, 32, 32, 0, 32]


def test_plain_prompts_keep_every_bit(engine):
    rng = np.random.default_rng(11)
    layout = make_layout([], [], rng.integers(0, VOCAB, 90))
    plain, weighed = (engine_logits(engine("qwen3", **o), layout) for o in ({}, {"chunk_temperature": 0.5, "chunk_scale": 0.5}))
    np.testing.assert_array_equal(plain, weighed)


def test_one_and_one_compile_to_the_program_without_weighing(engine, checkpoint, monkeypatch):
    """The optimised program equals that of an engine in which every function of weighing raises."""

    def text(llm):
        """The instructions, without the places in the source that they come from."""
        whole = llm.core.runner.lower(llm.core.builder.empty(8, 32), 16, None).compile().as_text()
        return re.sub(r",? metadata=\{.*?\}", "", whole[re.search(r"^(%|ENTRY)", whole, re.MULTILINE).start() :])

    ones, weighed = (text(engine("qwen3", **o)) for o in ({"chunk_temperature": 1.0, "chunk_scale": 1}, {"chunk_scale": 0.5}))

    def never(*_, **__):
        raise AssertionError("weighing is built")

    monkeypatch.setattr("chunkattn.engine.step.Weighing", never)
    monkeypatch.setattr("chunkattn.backends.base.RowWeighing", never)
    for name in ("RowWeighing", "cut_at_questions"):
        monkeypatch.setattr(f"chunkattn.backends.xla.{name}", never)
    monkeypatch.setattr("chunkattn.backends.softmax.as_one_slot", never)
    with pytest.raises(AssertionError, match="weighing is built"):
        text(engine("qwen3", chunk_scale=0.5))
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256, "max_num_seqs": 16, "max_logprobs": 128}
    without = text(LLM(str(checkpoint("qwen3")), **options, kv_cache_memory_bytes=8 << 20))
    assert "fusion" in without
    assert ones == without
    assert weighed != without


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_temperature": 0}, "chunk_temperature must be between 0.01 and 100, got 0"),
        ({"chunk_temperature": 1e-46}, "chunk_temperature must be between 0.01 and 100, got 1e-46"),
        ({"chunk_temperature": 10**5000}, "chunk_temperature must be between 0.01 and 100, got an integer of 16610 bits"),
        ({"chunk_scale": float("nan")}, "chunk_scale must be between 0.01 and 100, got nan"),
        ({"chunk_scale": float("inf")}, "chunk_scale must be between 0.01 and 100, got inf"),
        ({"chunk_scale": 1e39}, r"chunk_scale must be between 0.01 and 100, got 1e\+39"),
        ({"chunk_position_gap": -1}, "chunk_position_gap must be between 0 and 2147483646, got -1"),
        ({"chunk_position_gap": 2**31 - 1}, "chunk_position_gap must be between 0 and 2147483646, got 2147483647"),
        ({"chunk_position_gap": 2**32}, "chunk_position_gap must be between 0 and 2147483646, got 4294967296"),
        ({"chunk_position_gap": 10**400}, "chunk_position_gap must be between 0 and 2147483646, got an integer of 1329 bits"),
        ({"chunk_position_gap": 256}, "chunk_position_gap 256 leaves no position for a chunk; max_model_len is 256"),
        ({"chunk_position_gap": 99, "max_model_len": 99}, "chunk_position_gap 99 leaves no position .* max_model_len is 99"),
        ({"chunk_position_gap": True}, "chunk_position_gap must be of type int"),
        ({"chunk_position_gap": 4, "position_strategy": "offset"}, "chunk_position_gap needs position_strategy 'shared'"),
        ({"chunk_calibration": "nowhere.json"}, "chunk_calibration nowhere.json cannot be read"),
    ],
)
def test_bad_options_are_refused(options, message, checkpoint):
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, **options)


def test_backends_that_cannot_weigh_are_refused_by_name(checkpoint):
    with pytest.raises(BackendError, match=r"'packed_dense' cannot serve this model: .* no chunk_temperature"):
        LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, chunk_scale=0.8, attention_backend="packed_dense")


def test_an_engine_without_calibration_refuses_a_weighed_request(engine):
    llm = engine("qwen3")
    prompts = llm.frontend.parse([ChunkedPrompt([1], [[2]], [3])], None)
    with pytest.raises(RequestError, match="built without chunk_temperature"):
        likelihood_job(llm.frontend, prompts, [[4]], (0.5, 1.0))


def test_a_calibration_file_sets_what_no_option_sets(checkpoint, tmp_path):
    """Named, found in the model's folder, overridden, turned off, and damaged."""
    folder = tmp_path / "model"
    folder.symlink_to(checkpoint("qwen3"), target_is_directory=True)
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"chunk_position_gap": 9, "chunk_temperature": 0.5, "data": "made up"}))

    def calibration(**options):
        return LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20, **options).config.calibration

    named = {"chunk_calibration": str(file)}
    assert calibration(**named) == Calibration(9, 0.5, 1.0)
    assert calibration(**named, chunk_position_gap=0, chunk_scale=2) == Calibration(0, 0.5, 2.0)
    assert calibration(**named, position_strategy="offset") == Calibration(0, 0.5, 1.0)
    assert calibration() == Calibration()
    found = checkpoint("qwen3") / FILE_NAME
    found.write_text(file.read_text())
    try:
        assert calibration() == Calibration(9, 0.5, 1.0)
        assert calibration(chunk_calibration="off") == Calibration()
        for text, message in (
            ("[]", "must be a JSON object"),
            ("null", "must be a JSON object"),
            ("{", "cannot be read"),
            ("", "cannot be read"),
            ("[" * 10**6, "nest too deep"),
            ('{"chunk_scale": 1, "note": ' + '{"a": ' * 10**6, "nest too deep"),
            ('{"chunk_scale": ' + "[" * 400 + "]" * 400 + "}", "must be a number, got a list"),
            ('{"chunk_scale": {"a": 1}}', "must be a number, got a dict"),
            ('{"chunk_scale": NaN}', "must be between"),
            ('{"chunk_scale": -Infinity}', "must be between"),
            ('{"chunk_scale": true}', "must be a number, got True"),
            ('{"chunk_scale": null}', "must be a number, got None"),
            (f'{{"chunk_scale": "{"x" * 10**6}"}}', "must be a number, got 'x{40}'$"),
            ('{"chunk_scale": 1' + "0" * 5000 + "}", "cannot be read"),
            ('{"chunk_scale": 1, "chunk_scale": 2}', "'chunk_scale' is there twice"),
            (" " * (1 << 24) + "{}", "larger than 16 MiB"),
            (b"\xff\xfe{}", "cannot be read"),
            (b'{"chunk_scale": 1, "note": "\xe9"}', "cannot be read"),
            ('{"chunk_scale": "x"}', "must be a number"),
            (f'{{"chunk_scale": {10**400}}}', "must be between 0.01 and 100"),
            (f'{{"chunk_position_gap": {2**31}}}', "must be between 0 and 2147483646"),
        ):
            found.write_bytes(text if isinstance(text, bytes) else text.encode())
            with pytest.raises(ConfigError, match=message) as caught:
                calibration()
            assert FILE_NAME in str(caught.value)
            assert len(str(caught.value)) < 500
    finally:
        found.unlink()
    with pytest.raises(ConfigError, match=r"chunk_calibration.*cannot be read: .*Is a directory"):
        calibration(chunk_calibration=str(tmp_path))


def found_calibration(model, caplog, **options):
    """The calibration of a model, and the warnings."""
    caplog.clear()
    return make_config(str(model), options).calibration, caplog.text


def test_a_calibration_of_another_model_is_ignored(tmp_path, caplog):
    """A file beside several GGUF models is for one of them. A file that names no model is for all."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()

    def write(place, **fields):
        (place / FILE_NAME).write_text(json.dumps({"chunk_position_gap": 9, **fields}))

    write(tmp_path, model="a.gguf")
    assert found_calibration(tmp_path / "a.gguf", caplog) == (Calibration(9), "")
    ignored, told = found_calibration(tmp_path / "b.gguf", caplog)
    assert ignored == Calibration()
    assert "is ignored: it is the calibration of 'a.gguf', not of b.gguf" in told
    named = {"chunk_calibration": str(tmp_path / FILE_NAME)}
    assert found_calibration(tmp_path / "b.gguf", caplog, **named) == (Calibration(9), "")
    for fields in ({}, {"model": tmp_path.name}, {"model": 3}, {"model": "/elsewhere/b.gguf"}):
        write(tmp_path, **fields)
        assert found_calibration(tmp_path / "b.gguf", caplog) == (Calibration(9), "")
    write(tmp_path, model="a.gguf")
    assert found_calibration(tmp_path, caplog) == (Calibration(9), "")  # a folder has one model, under whatever name


def test_a_calibration_on_the_hub_is_found(tmp_path, monkeypatch, caplog):
    """By hub id and revision, in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--tiny"
    for number, revision in enumerate(("main", "v2")):
        snapshot = folder / "snapshots" / (str(number) * 40)
        snapshot.mkdir(parents=True)
        (snapshot / FILE_NAME).write_text(json.dumps({"chunk_position_gap": 9 + number, "model": "tiny"}))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(str(number) * 40)
    assert found_calibration("someone/tiny", caplog) == (Calibration(9), "")
    assert found_calibration("someone/tiny", caplog, revision="v2") == (Calibration(10), "")
    assert found_calibration("someone/tiny", caplog, chunk_calibration="off") == (Calibration(), "")
    assert found_calibration("someone/other", caplog) == (Calibration(), "")
