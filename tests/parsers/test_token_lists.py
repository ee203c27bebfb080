"""`TokenLists`: arrays of lists of token ids, against the lists themselves."""

import numpy as np
import pytest

from chunkattn.parsers.arguments import plain_ids
from chunkattn.parsers.token_lists import TokenLists

LISTS = [[5, 1], [], [7], [2**31 - 1, 0, 3]]


@pytest.mark.parametrize("lists", [TokenLists(LISTS), plain_ids(LISTS, None)])
def test_arrays_hold_the_lists(lists):
    assert lists == LISTS
    assert lists.lens == [2, 0, 1, 3]
    assert lists.flat.dtype == np.int32
    assert lists.flat.tolist() == [5, 1, 7, 2**31 - 1, 0, 3]
    assert [np.frombuffer(data, np.int32).tolist() for data in lists.encoded] == LISTS
    assert TokenLists.of(lists) is lists


@pytest.mark.parametrize("places", [[], [1], [0, 1, 2], [0, 2], [1, 3], [0, 1, 2, 3]])
def test_some_lists_are_joined_in_order(places):
    assert TokenLists(LISTS).joined(places).tolist() == [token for place in places for token in LISTS[place]]


def test_nothing():
    assert TokenLists().flat.tolist() == TokenLists().encoded == []
    assert TokenLists([[]]).joined([0]).tolist() == []


@pytest.mark.parametrize("token", [2**31, 2**63, -1])
def test_ids_beyond_int32_are_left_to_the_slow_check(token):
    assert plain_ids([[1], [token]], None) is None
