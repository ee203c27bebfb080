"""Layouts, positions and slots against their definitions, written out pair by pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn import make_layout
from chunkattn.cache.slots import plan_slots
from chunkattn.layout import PREFIX_ID, QUESTION_ID

LENS = st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9))


def build(lens, strategy="shared"):
    prefix, chunks, question = lens
    ids = np.arange(prefix + sum(chunks) + question) * 7 % 50
    parts = np.split(ids, np.cumsum([prefix, *chunks]))
    return make_layout(parts[0], parts[1:-1], parts[-1], strategy)


def test_the_definition_s_example():
    layout = build((10, [10, 10, 10], 9))
    expected = [*range(10), *range(10, 20), *range(10, 20), *range(10, 20), *range(20, 29)]
    assert layout.positions.tolist() == expected
    assert build((10, [10, 10, 10], 9), "offset").positions.tolist() == list(range(49))


@given(LENS)
def test_positions_and_visibility(lens):
    prefix, chunks, question = lens
    layout = build(lens)
    kinds = [PREFIX_ID] * prefix + [c for c, n in enumerate(chunks) for _ in range(n)] + [QUESTION_ID] * question
    assert layout.chunk_ids.tolist() == kinds
    within = [list(range(prefix)), *(list(range(n)) for n in chunks)]
    expected = within[0] + [prefix + t for w in within[1:] for t in w]
    expected += [prefix + max(chunks, default=0) + t for t in range(question)]
    assert layout.positions.tolist() == expected
    visible = layout.visible()
    for i, ki in enumerate(kinds):
        for k, kk in enumerate(kinds):
            assert visible[i, k] == (k <= i and (kk in (PREFIX_ID, ki) or ki == QUESTION_ID))


@given(LENS, st.randoms())
def test_reordering_keeps_every_token_s_position(lens, random):
    layout = build(lens)
    order = list(range(layout.num_chunks))
    random.shuffle(order)
    moved, index = layout.with_chunk_order(order), layout.reorder_index(order)
    assert moved.chunk_lens == tuple(lens[1][c] for c in order)
    np.testing.assert_array_equal(moved.token_ids, layout.token_ids[index])
    np.testing.assert_array_equal(moved.positions, layout.positions[index])
    np.testing.assert_array_equal([order[c] if c >= 0 else c for c in moved.chunk_ids], layout.chunk_ids[index])
    # The canonical order does not depend on the order it starts from.
    a, b = (x.with_chunk_order(x.canonical_order()) for x in (layout, moved))
    np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_order_must_be_a_permutation():
    with pytest.raises(ValueError, match="permutation"):
        build((1, [2, 2], 1)).with_chunk_order([0, 0])


@settings(max_examples=200)
@given(LENS, st.sampled_from([1, 4, 8]), st.booleans())
def test_slots(lens, block, aligned):
    layout = build(lens)
    plan = plan_slots(layout, block, aligned=aligned)
    slots = plan.slots.tolist()
    assert slots == sorted(set(slots))
    assert len(plan.page_len) * block >= plan.end
    if not aligned:
        assert slots == list(range(len(layout)))
    valid = {p * block + s for p, n in enumerate(plan.page_len) for s in range(n)}
    for segment in layout.segments:
        if segment.end == segment.start:
            continue
        first, last = slots[segment.start], slots[segment.end - 1]
        assert slots[segment.start : segment.end] == list(range(first, last + 1))
        assert (plan.row_start[segment.start : segment.end] == (first if segment.chunk_id >= 0 else 0)).all()
        if aligned:
            assert first % block == 0
            if segment.chunk_id != QUESTION_ID:  # what lies behind a closed part is a hole
                assert set(range(last + 1, -(-(last + 1) // block) * block)).isdisjoint(valid)
    assert set(slots) <= valid
    assert plan.prefix_end == (layout.prefix_len if layout.num_chunks else 0)
    if not layout.num_chunks:  # the same slots, and the prefix apart
        apart = plan_slots(layout, block, aligned=aligned, apart=True)
        assert apart.slots.tolist() == slots
        assert apart.prefix_end == layout.prefix_len
