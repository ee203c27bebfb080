"""The ledger: turns, answers and snapshots, against a naive model."""

import random

import pytest

from chunkattn.schema.ledger import _ENTRY_BYTES, Ledger


def test_pieces_take_turns():
    ledger = Ledger(1 << 20)
    ledger.note([(n, 10) for n in range(5)], "abcde")
    assert ledger.batch(2) == [(0, "a"), (1, "b")]
    ledger.note([(0, 10)], "A")
    assert ledger.batch(2) == [(2, "c"), (3, "d")]
    assert ledger.batch(9) == [(4, "e"), (0, "A"), (1, "b"), (2, "c"), (3, "d")]
    assert Ledger(1 << 20).batch(3) == []


def test_a_piece_that_was_sent_again_is_not_gone():
    ledger = Ledger(1 << 20)
    ledger.note([(1, 10), (2, 20)], "ab")
    ledger.batch(2)
    ledger.note([(1, 10)], "a")
    ledger.found(1, False)
    ledger.found(2, False)
    assert ledger.snapshot() == ({}, {2})
    ledger.batch(2)
    ledger.found(1, False)
    assert ledger.snapshot() == ({}, {1, 2})
    ledger.note([(2, 20)], "b")
    assert ledger.snapshot() == ({}, {1})


def test_memory_is_bounded_and_the_oldest_leave():
    ledger = Ledger(3 * (_ENTRY_BYTES + 10))
    for n in range(5):
        ledger.note([(n, 10)], [n])
    ledger.note([(2, 10)], [2])
    ledger.note([(5, 10)], [5])
    assert sorted(ledger.batch(9)) == [(2, 2), (4, 4), (5, 5)]
    ledger.note([(6, 1 << 20)], [6])
    assert len(ledger) == 0
    assert ledger.batch(9) == []


@pytest.mark.parametrize("seed", range(10))
def test_snapshots_against_a_naive_model(seed):
    rng = random.Random(seed)
    ledger, answers, versions = Ledger(1 << 30), {}, [0]  # key: (version, size or None)
    present = {}
    for _ in range(400):
        action = rng.randrange(8)
        if action < 3:
            key, size = rng.randrange(20), rng.randrange(1, 9)
            ledger.note([(key, size)], [None])
            present[key] = size
            if key in answers and answers[key][1] is None:
                del answers[key]
        elif action < 7:
            for key, _ in ledger.batch(rng.randrange(4)):
                is_held = rng.random() < 0.7
                ledger.found(key, is_held)
                answers[key] = ledger.version, is_held or None
                if not is_held:
                    del present[key]
        elif rng.random() < 0.1:
            ledger.clear()
            answers, present = {}, {}
        versions.append(ledger.version)
        since = rng.choice(versions)
        held = {key: present[key] for key, (version, is_held) in answers.items() if is_held and version > since}
        gone = {key for key, (version, is_held) in answers.items() if not is_held and version > since}
        assert ledger.snapshot(since) == (held, gone)
        assert len(ledger) == len(present)
    assert ledger.snapshot(ledger.version + 1) == ledger.snapshot(0)
