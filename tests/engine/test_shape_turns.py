"""Turns of the texts with slow grammars within a step."""

from types import SimpleNamespace
from typing import Any

from chunkattn.engine.shape_turns import FAST_S, STEP_S, held_back


class Text(SimpleNamespace):
    __hash__ = object.__hash__


def text(token_s: float, spent_s: float, number: int = 0) -> Any:
    return Text(number=number, matcher=SimpleNamespace(token_s=token_s, spent_s=spent_s))


def test_the_texts_that_took_least_go_first():
    free, fast = Text(number=0, matcher=None), text(FAST_S, 9.0)
    slow = [text(STEP_S / 2, spent) for spent in (0.4, 0.1, 0.3, 0.2)]
    assert held_back([free, slow[0], fast, *slow[1:]]) == {slow[0], slow[2]}


def test_one_text_goes_whatever_it_takes():
    first, second = text(3 * STEP_S, 1.0, 0), text(3 * STEP_S, 1.0, 1)
    assert held_back([second, first]) == {second}
    assert held_back([second]) == set()
    assert held_back([]) == set()


def test_every_text_gets_its_turn():
    texts, turns = [text(STEP_S / 3, 0.0, number) for number in range(7)], [0] * 7
    for _ in range(70):
        for one in {*texts} - held_back(texts):
            one.matcher.spent_s += one.matcher.token_s
            turns[one.number] += 1
    assert max(turns) - min(turns) <= 1
    assert sum(turns) >= 2 * 70
