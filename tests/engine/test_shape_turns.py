"""Turns of the texts with slow grammars within a step."""

from itertools import count
from types import SimpleNamespace
from typing import Any

from chunkattn.engine.shape_turns import STEP_S, held_back


class Text(SimpleNamespace):
    __hash__ = object.__hash__


def text(token_s: float, last_token_at: float, number: int = 0, *, is_slow: bool = True) -> Any:
    return Text(number=number, last_token_at=last_token_at, matcher=SimpleNamespace(token_s=token_s, is_slow=is_slow))


def test_the_texts_that_waited_longest_go_first():
    free, fast = Text(number=0, matcher=None), text(STEP_S, 0.0, is_slow=False)
    slow = [text(STEP_S / 2, at) for at in (0.4, 0.1, 0.3, 0.2)]
    assert held_back([free, slow[0], fast, *slow[1:]]) == {slow[0], slow[2]}


def test_one_text_goes_whatever_it_takes():
    first, second = text(3 * STEP_S, 1.0, 0), text(3 * STEP_S, 1.0, 1)
    assert held_back([second, first]) == {second}
    assert held_back([second]) == set()
    assert held_back([]) == set()


def test_new_texts_delay_no_old_text_for_long():
    old, clock = [text(STEP_S / 3, 0.0, number) for number in range(7)], count(1.0)
    waits, longest = [0] * 7, 0
    for _ in range(70):
        held = held_back([*old, text(STEP_S / 3, next(clock), 7)])
        for one in old:
            waits[one.number] = waits[one.number] + 1 if one in held else 0
            if one not in held:
                one.last_token_at = next(clock)
        longest = max(longest, *waits)
    assert longest == 2
