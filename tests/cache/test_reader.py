"""Parts are read from disk beside the steps: a slow disk delays those who want something of it, and nobody else."""

import threading

import numpy as np
import pytest

from chunkattn.cache.disk.reader import Lookup, StoreReader
from chunkattn.cache.disk.store import KVStore, entry_key
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.rope.positions import make_layout
from tests.engine.test_cache import GREEDY, check_same
from tests.engine.test_offload import PROMPT, QUESTION, TOKENS, start  # noqa: F401
from tests.engine_writer import PREFIX

LIKE = [((2, 3), np.dtype(np.float32))]


def run(core, name, tokens):
    while core.has_work and tokens.get(name, [None])[-1] != "ended":
        for event in core.step():
            if isinstance(event, TokenOutput):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.finish_reason:
                    tokens[event.request_id].append("ended")
                if event.cached:
                    tokens.setdefault("cached", {})[event.request_id] = event.cached.total


@pytest.fixture
def gated(start, monkeypatch):  # noqa: F811
    """An engine on a filled store, whose reads wait for an event."""
    expected = start().generate(PROMPT, GREEDY, use_tqdm=False)
    llm, gate, began = start(), threading.Event(), threading.Event()
    original = llm.core.disk.store.get

    def slow(*args):
        began.set()
        assert gate.wait(60)
        return original(*args)

    monkeypatch.setattr(llm.core.disk.store, "get", slow)
    yield llm, gate, began, expected
    gate.set()


def add_prompt(core, name):
    core.add(GenerateRequest(name, make_layout(PREFIX, PROMPT.chunks, QUESTION), GREEDY))


def test_others_go_on_while_the_disk_is_read(gated):
    llm, gate, began, expected = gated
    core, tokens = llm.core, {}
    add_prompt(core, "waits")
    core.add(GenerateRequest("goes", make_layout([], [], [1, 2, 3]), GREEDY))
    run(core, "goes", tokens)
    assert began.wait(60)
    assert tokens["goes"][-1] == "ended"
    assert "waits" not in tokens
    assert core.has_work
    gate.set()
    run(core, "waits", tokens)
    assert tokens["waits"][:-1] == expected[0].outputs[0].token_ids
    assert tokens["cached"]["waits"] == TOKENS
    assert core.disk.reader._held == 0


def test_who_leaves_while_the_disk_is_read_leaves_nothing(gated):
    llm, gate, began, expected = gated
    add_prompt(llm.core, "leaves")
    llm.core.step()
    assert began.wait(60)
    llm.core.abort("leaves")
    assert not llm.core.has_work
    gate.set()
    check_same(llm.generate(PROMPT, GREEDY, use_tqdm=False), expected)
    assert llm.core.disk.reader._held == 0
    assert llm.reset_prefix_cache()


def test_what_is_forgotten_while_it_is_read_is_computed(gated):
    llm, gate, began, expected = gated
    core, tokens = llm.core, {}
    add_prompt(core, "waits")
    core.step()
    assert began.wait(60)
    llm.forget(PREFIX, PROMPT.chunks)
    gate.set()
    run(core, "waits", tokens)
    assert tokens["waits"][:-1] == expected[0].outputs[0].token_ids


def test_closing_the_store_lets_waiting_requests_go_on(gated):
    llm, gate, began, expected = gated
    core, tokens = llm.core, {}
    add_prompt(core, "waits")
    core.step()
    assert began.wait(60)
    gate.set()
    llm.close()
    run(core, "waits", tokens)
    assert tokens["waits"][:-1] == expected[0].outputs[0].token_ids


def test_the_reader_pauses_at_its_bound_and_stops_at_a_required_miss(tmp_path):
    keys = [entry_key(b"f", None, np.asarray([n]), None, 0) for n in range(4)]
    with KVStore(tmp_path / "kv") as store:
        for n, key in enumerate(keys[:3]):
            assert store.put(key, [np.full((2, 3), n, np.float32)], tokens=1, kind="prefix")
        reader = StoreReader(store, max_bytes=20)
        reader.submit("miss", [Lookup(keys[3], LIKE, True), Lookup(keys[0], LIKE, False)])
        assert reader.take(60) == [("miss", {keys[3]: None})]
        for n, owner in enumerate("ab"):
            reader.submit(owner, [Lookup(keys[n], LIKE, False)])
        ((owner, found),) = reader.take(60)
        assert owner == "a"
        assert found[keys[0]][0].tolist() == [[0.0] * 3] * 2
        assert reader.take(0.2) == []  # 24 bytes are held
        reader.release(found)
        assert [owner for owner, _ in reader.take(60)] == ["b"]
        assert reader.close() == []
