"""K/V on disk: what a restarted engine serves is what computing anew gives."""

import logging
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.cli import app
from chunkattn.errors import ConfigError, EngineError
from tests.checkpoints import VOCAB
from tests.engine.test_cache import COLD, GREEDY, check_same
from tests.engine_writer import OPTIONS, PREFIX, document

QUESTION = [5, 6, 7]
PROMPT = ChunkedPrompt(PREFIX, [document(n) for n in range(4)], QUESTION)
TOKENS = len(PREFIX) + sum(len(document(n)) for n in range(4))


@pytest.fixture
def start(checkpoint, tmp_path):
    """Starts engines on one store, each closed before the next begins."""
    engines = []

    def get(name="qwen3", **options):
        for llm in engines:
            llm.close()
        engines.append(LLM(str(checkpoint(name)), max_logprobs=VOCAB, **{"kv_store": tmp_path / "kv", **OPTIONS, **options}))
        return engines[-1]

    yield get
    for llm in engines:
        llm.close()


def counts(llm):
    """Hits, misses and parts written once the writer has caught up; none was refused."""
    assert llm.core.disk.writer.flush(30)
    found = llm.core.disk.counts
    assert not found["refused"]
    return found["hit"], found["miss"], found["written"]


def test_documents_survive_a_restart(start):
    cold = start().generate(PROMPT, GREEDY)
    assert cold[0].num_cached_tokens == 0
    llm = start()
    assert llm.generate(PROMPT, COLD)[0].num_cached_tokens == 0  # who opts out reads no disk
    warm = llm.generate(ChunkedPrompt(PREFIX, PROMPT.chunks[::-1], QUESTION), GREEDY)
    assert warm[0].num_cached_tokens == TOKENS
    assert counts(llm) == (5, 0, 0)
    check_same(warm, cold)
    # In new company, a part of it new; the new part is kept as well.
    wider = ChunkedPrompt(PREFIX, [document(9), *PROMPT.chunks[1:3]], QUESTION)
    expected = start().generate(wider, COLD)
    llm = start()
    check_same(llm.generate(wider, GREEDY), expected)
    assert counts(llm) == (3, 1, 1)
    llm = start()
    check_same(llm.generate(wider, GREEDY), expected)
    assert counts(llm)[0] == 4


@pytest.mark.slow
def test_an_fp8_pool_and_another_do_not_share_entries(start):
    """Each finds its own documents on disk, and none of the other's: its keys are others."""
    cold = start().generate(PROMPT, GREEDY)
    fp8 = {"kv_cache_dtype": "fp8"}
    expected = start(**fp8).generate(PROMPT, GREEDY)
    llm = start(**fp8)
    assert llm.core.disk.counts["damaged"] == 0
    assert len(llm.core.disk.store.entries()) == 10
    for options, wanted in ((fp8, expected), ({}, cold), ({"kv_cache_dtype": "fp8_e4m3"}, expected)):
        llm = start(**options)
        check_same(llm.generate(PROMPT, GREEDY), wanted)
        assert counts(llm) == (5, 0, 0)


def test_a_forgotten_document_is_gone_from_disk(start):
    documents = [document(n) for n in range(3)]
    start().precompute(PREFIX, documents)
    start().forget(PREFIX, documents[:2])
    warm = start().generate(ChunkedPrompt(PREFIX, documents, QUESTION), GREEDY)
    assert warm[0].num_cached_chunk_tokens == (0, 0, len(documents[2]))


@pytest.mark.parametrize("deleted", [False, True])
def test_a_document_forgotten_while_it_is_read_is_not_served(start, deleted):
    """A request whose document is forgotten between reading and placing computes it, `deleted` from disk by then or not yet."""
    start().precompute(PREFIX, [document(0)])
    llm = start()
    disk, forgotten = llm.core.disk, []
    take = disk.take_read

    def take_read(timeout=0.0):
        if disk.reading and not forgotten:
            time.sleep(0.2)  # the part is read, and not handed on yet
            forgotten.extend(disk.reading)
            disk.forget(forgotten[0])
            assert not deleted or disk.writer.flush(30)
        return take(timeout)

    disk.take_read = take_read
    output = llm.generate(ChunkedPrompt(PREFIX, [document(0)], QUESTION), GREEDY)[0]
    assert forgotten
    assert output.num_cached_chunk_tokens == (0,)


def test_what_memory_serves_is_kept_on_disk_too(start):
    """A prefix that came from a plain prompt is written; what is used from memory counts as used on disk."""
    llm = start()
    llm.generate({"prompt_token_ids": [*range(40)]}, GREEDY)
    prompt = ChunkedPrompt([*range(32)], [document(1), document(2)], QUESTION)
    llm.generate(prompt, GREEDY)
    assert counts(llm) == (0, 2, 3)
    llm.generate(ChunkedPrompt([*range(32)], [document(3)], QUESTION), GREEDY)
    llm.core.disk.writer.flush(30)
    oldest = [entry.kind for entry in llm.core.disk.store.entries()]
    assert oldest == ["chunk", "chunk", "prefix", "chunk"] or oldest == ["chunk", "chunk", "chunk", "prefix"]
    llm = start()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 32 + len(document(1)) + len(document(2))


def test_many_small_documents_are_all_kept(start):
    llm = start()
    llm.generate(ChunkedPrompt(PREFIX, [[n, n + 1] for n in range(60)], QUESTION), GREEDY)
    assert counts(llm) == (0, 1, 61)  # below a prefix that is not there nothing is looked for


def test_the_engine_goes_on_without_a_closed_store(start):
    llm = start()
    expected = llm.generate(PROMPT, GREEDY)
    llm.close()
    check_same(llm.generate(PROMPT, GREEDY), expected)


def test_a_failing_read_from_disk_fails_a_request_and_nothing_else(start, monkeypatch):
    expected = start().generate(PROMPT, GREEDY)
    llm = start()
    original = llm.core.runner.pool.write_pages

    def failing(*args):
        original(*args)  # consumes the pool
        raise RuntimeError("injected")

    monkeypatch.setattr(llm.core.runner.pool, "write_pages", failing)
    with pytest.raises(EngineError, match="injected"):
        llm.generate(PROMPT, GREEDY)
    monkeypatch.undo()
    check_same(llm.generate(PROMPT, GREEDY), expected)


def test_no_salt_or_prefix_is_mistaken_for_another(start):
    start().generate(PROMPT, GREEDY)
    assert start().generate(PROMPT, GREEDY, cache_salt="a")[0].num_cached_tokens == 0
    other = start().generate(ChunkedPrompt([*PREFIX[:-1], 9], PROMPT.chunks, QUESTION), GREEDY)
    assert other[0].num_cached_tokens == 0
    assert start().generate(PROMPT, GREEDY)[0].num_cached_tokens == TOKENS


@pytest.mark.slow
def test_nothing_is_mistaken_for_another(start):
    """Other models, dtypes, page sizes and positions find nothing."""
    start().generate(PROMPT, GREEDY)
    for options in ({"name": "qwen2"}, {"dtype": "bfloat16"}, {"block_size": 8}):
        assert start(**options).generate(PROMPT, GREEDY)[0].num_cached_tokens == 0
    llm = start(position_strategy="offset")
    out = llm.generate(PROMPT, GREEDY)[0]
    assert out.num_cached_chunk_tokens[1:] == (0, 0, 0)  # the first begins where it did before
    assert start().generate(PROMPT, GREEDY)[0].num_cached_tokens == TOKENS


def test_a_damaged_entry_is_computed_again_and_reported(start, tmp_path, caplog):
    expected = start().generate(PROMPT, GREEDY)
    start().close()
    file = tmp_path / "kv" / "data.mdb"
    data = bytearray(file.read_bytes())
    chunk = np.random.default_rng(0)
    # The K/V itself: anywhere behind the first pages, every few hundred bytes.
    for place in chunk.integers(len(data) // 2, len(data), 200):
        data[place] ^= 0x10
    file.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING):
        llm = start()
        out = llm.generate(PROMPT, GREEDY)
    check_same(out, expected)
    assert out[0].num_cached_tokens < TOKENS
    assert "damaged" in caplog.text
    llm = start()
    check_same(llm.generate(PROMPT, GREEDY), expected)  # written anew
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == TOKENS


@pytest.mark.ci
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killing_an_engine_leaves_a_clean_store(start, checkpoint, tmp_path, kills):
    """`kill -9` at random moments while an engine computes, writes and evicts; then everything served is right."""
    rng = random.Random(kills)
    for _ in range(kills):
        command = [sys.executable, "-m", "tests.engine_writer", str(checkpoint("qwen3")), str(tmp_path / "kv")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "started\n"
            time.sleep(rng.uniform(1.5, 4))
            writer.kill()
        llm = start()
        hits = 0
        for first in range(0, 100, 5):
            prompt = ChunkedPrompt(PREFIX, [document(n) for n in range(first, first + 5)], QUESTION)
            warm = llm.generate(prompt, GREEDY, use_tqdm=False)
            check_same(warm, llm.generate(prompt, COLD, use_tqdm=False))
            hits += warm[0].num_cached_tokens
        assert hits > 0
        assert llm.core.disk.store.damaged == 0


def test_what_waits_for_the_disk_is_accounted_for(start, monkeypatch):
    """Bytes waiting go back to nothing whether an entry was written, there already, asked for twice or dropped."""
    llm = start()
    disk = llm.core.disk
    llm.generate(PROMPT, GREEDY)
    assert disk.writer.flush(30)
    assert disk.writer.pending_bytes == 0
    disk._stored.clear()  # as another engine's store would be
    llm.generate(PROMPT, GREEDY)
    assert disk.writer.flush(30)
    assert disk.writer.pending_bytes == 0
    monkeypatch.setattr(disk.store, "put", lambda *args, **options: False)
    prompt = ChunkedPrompt(PREFIX, [document(50)], QUESTION)
    llm.generate(prompt, GREEDY)
    assert disk.writer.flush(30)
    assert disk.writer.pending_bytes == 0
    assert disk.counts["failed"] == 1
    monkeypatch.undo()
    llm.generate(prompt, GREEDY)  # what could not be written is tried again when it is used again
    assert disk.writer.flush(30)
    assert llm.core.disk.counts["written"] == 6


def test_another_programs_folder_is_left_alone(start, tmp_path):
    import lmdb

    folder = tmp_path / "theirs"
    with lmdb.open(str(folder), max_dbs=3) as theirs:
        for name in (b"data", b"meta"):
            with theirs.begin(write=True, db=theirs.open_db(name)) as txn:
                txn.put(b"key", b"value")
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"no KV store of chunkattn's"):
        start(kv_store=str(folder))
    assert CliRunner().invoke(app, ["cache", "ls", "--kv-store", str(folder)]).exit_code == 2
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


@pytest.mark.slow
def test_cache_commands(tmp_path):
    runner, store = CliRunner(), ["--kv-store", str(tmp_path / "kv")]
    (tmp_path / "docs").mkdir()
    texts = ["Nila lives in Tunise.", "Rumi is a poet."]
    for number, text in enumerate(texts):
        (tmp_path / "docs" / f"{number}.txt").write_text(text + "\n")
    build = ["cache", "build", str(tmp_path / "docs"), *store, "--prefix", "Read the documents and answer the question."]
    first, again = runner.invoke(app, build), runner.invoke(app, build)
    assert "written 3, there already 0" in " ".join(first.output.split())
    assert "written 0, there already 3" in " ".join(again.output.split())
    listed = runner.invoke(app, ["cache", "ls", *store])
    assert "3 entries" in listed.output
    assert listed.output.count("chunk") == 2
    assert len(runner.invoke(app, ["cache", "ls", *store, "--json"]).output.splitlines()) == 3
    with_store = LLM(enable_chunk_aware=True, kv_store=store[1], kv_cache_memory_bytes=8 << 20, max_num_batched_tokens=256)
    prompt = ChunkedPrompt("Read the documents and answer the question.", texts[::-1], "Where does Nila live? Answer:")
    out = with_store.generate(prompt, SamplingParams(temperature=0, max_tokens=4))[0]
    assert all(out.num_cached_chunk_tokens)
    with_store.close()
    tag = listed.output.splitlines()[3].split()[1]
    assert "3 entries removed, 0 left" in runner.invoke(app, ["cache", "gc", *store, "--model", tag]).output
    assert "0 left" in runner.invoke(app, ["cache", "gc", *store, "--all"]).output
    # Which file is at fault, and what does not fit, is said; an empty file is no harm.
    (tmp_path / "docs" / "2.txt").write_text("\n")
    assert runner.invoke(app, ["cache", "build", str(tmp_path / "docs"), *store]).exit_code == 0
    (tmp_path / "docs" / "3.txt").write_text("word " * 9000)
    result = runner.invoke(app, build)
    assert result.exit_code == 2
    assert "3.txt of 45000 characters has" in result.stderr
    (tmp_path / "docs" / "3.txt").unlink()
    for number in range(40):
        (tmp_path / "docs" / f"x{number}.txt").write_text(f"Nila lives in {number} " * 40)
    build[3:5] = ["--kv-store", str(tmp_path / "little")]
    result = runner.invoke(app, [*build, "--max-bytes", str(4 << 20)])
    assert result.exit_code == 2
    assert "are not kept" in result.stderr
    for arguments, message in (
        (["gc", *store], "say what to remove"),
        (["ls", "--kv-store", str(tmp_path)], "holds no KV store"),
        (["build", str(tmp_path / "kv"), *store], "no file of"),
        (["build", str(tmp_path / "none"), *store], "is no folder"),
        (["build", str(tmp_path / "docs"), *store, "--pattern", "/*"], "--pattern is relative"),
        (["gc", *store, "--max-bytes", "-5"], "must not be negative"),
        (["gc", *store, "--max-age-days", "nan"], "must not be negative"),
        (["gc", *store, "--model", "zz"], "0 models of"),
    ):
        result = runner.invoke(app, ["cache", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
