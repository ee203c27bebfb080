"""Texts of given shapes over two devices: the tokens of one device, and in any company the same bits."""

import numpy as np
import pytest

from tests.shaped_texts import alone, asks, in_company, teach


def texts(found):
    """Tokens and ends of answers, without log-probabilities."""
    return [[(tokens, reason) for tokens, _, reason in samples] for samples in found]


def logprobs(found):
    """Log-probability of every token of answers."""
    rows = [(row, token) for samples in found for tokens, own, _ in samples for row, token in zip(own, tokens, strict=True)]
    return [row[token].logprob for row, token in rows]


def compare(one, two, *, chunked=True):
    asked = asks(chunked=chunked)
    single, expected = alone(one, asked), alone(two, asked)
    assert texts(expected) == texts(single)
    np.testing.assert_allclose(logprobs(expected), logprobs(single), atol=1e-4)
    assert in_company(two, asked) == expected


@pytest.mark.ci
def test_two_devices(wide, start, monkeypatch):
    one, two = (teach(start(wide("qwen3"), size), monkeypatch) for size in (1, 2))
    compare(one, two)


@pytest.mark.ci
def test_two_devices_of_a_hybrid(checkpoint, start, monkeypatch):
    one, two = (teach(start(checkpoint("qwen3_5"), size), monkeypatch) for size in (1, 2))
    compare(one, two, chunked=False)
