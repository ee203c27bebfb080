"""The messages and the measures of `benchmarks.tool_choice`."""

from collections import Counter

import jsonschema
import pytest

from benchmarks import tool_choice
from benchmarks.tool_choice import OWN, Chosen, fitted, rows_of
from benchmarks.tool_choice_data import Message, draw_messages, group_of


@pytest.fixture(scope="module")
def messages():
    return draw_messages(1)


def test_every_message_has_its_tool_among_three_to_eight(messages):
    for message in messages:
        names = [tool["function"]["name"] for tool in message.tools]
        assert 3 <= len(names) <= 8
        assert len({*names}) == len({tool["function"]["description"] for tool in message.tools}) == len(names)
        assert (message.right in names) == (message.kind == "tool") == (message.right is not None)
        for tool in message.tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


def test_a_quarter_of_each_domain_has_no_right_tool(messages):
    kinds = Counter((message.domain, message.kind) for message in messages)
    assert len({message.domain for message in messages}) == 12
    for domain, _ in kinds:
        counts = {kind: kinds[domain, kind] for kind in ("tool", "near", "plain", "lacking")}
        assert counts == {"tool": 15, "near": 2, "plain": 2, "lacking": 1}
    assert len({message.text for message in messages if message.kind != "lacking"}) == 12 * 19


def test_a_lacking_tool_is_the_right_one_of_the_same_text(messages):
    right = {message.text: message.right for message in messages if message.kind == "tool"}
    lacking = [message for message in messages if message.kind == "lacking"]
    for message in lacking:
        assert right[message.text] not in [tool["function"]["name"] for tool in message.tools]


def test_a_seed_gives_the_same_messages(messages):
    assert draw_messages(1) == messages != draw_messages(2)


def test_no_tool_is_found_by_its_place(messages):
    places = Counter(
        [tool["function"]["name"] for tool in message.tools].index(message.right) for message in messages if message.right
    )
    assert max(places.values()) < 0.35 * sum(places.values())


def of_domains(*rights):
    return [Message("text", (), right, "tool" if right else "near", domain) for domain, right in rights]


def test_a_way_and_its_bias_are_judged_on_other_domains(monkeypatch):
    told = []
    monkeypatch.setattr(tool_choice, "say", told.append)
    messages = of_domains(("a", "x"), ("a", None), ("b", "x"), ("b", None))
    assert group_of(messages) == [0, 0, 1, 1]
    gaps = {"sure of a": (5, 4, 1, 1), "sure of b": (-1, -1, 2, -3)}
    chosen = {way: [Chosen("x", 1.0, gap, "x") for gap in listed] for way, listed in gaps.items()}
    chosen[OWN] = [Chosen(None, 1.0)] * 4
    names = [one.name for one in fitted(messages, chosen)]
    # "sure of b" is best on group 1, and finds no tool in group 0. "sure of a" is best on group 0, with the bias 4.
    assert names == [None, None, None, None]
    assert [line.split(", ")[1] for line in told] == ["group 0: sure of b", "group 1: sure of a"]
    assert told[1].endswith("bias 4.00")


def test_figures_are_shares_and_paired_differences():
    messages = of_domains(*[("a", "x"), ("b", None)] * 40)
    chosen = {OWN: [Chosen(None, 2.0)] * 80, "decision": [Chosen("x", 1.0), Chosen(None, 1.0)] * 39 + [Chosen("y", 1.0)] * 2}
    own, decision = rows_of(messages, chosen)
    assert (own.all.mean, own.with_tool, own.without, own.seconds) == (0.5, 0.0, 1.0, 2.0)
    assert decision.all.mean == 78 / 80
    assert decision.change.mean == pytest.approx(78 / 80 - 0.5)
    assert decision.change.low > 0.3
    assert (decision.with_tool, decision.without) == (39 / 40, 39 / 40)
