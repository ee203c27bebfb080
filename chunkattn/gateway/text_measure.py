"""`TextMeasure`: bytes of text per token of KV cache, measured on documents of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class TextMeasure:
    """Measure of the bytes of text per slot of KV cache, from a few documents of requests.

    Args:
        count: function that returns the number of tokens of a text, or None if no replica tells it.
        page: tokens of a page; a document fills whole pages.
    """

    _WANTED, _SHORTEST, _LONGEST = 16, 200, 20_000

    def __init__(self, count: Callable[[str], Awaitable[int | None]], page: int = 16) -> None:
        self._count, self._page = count, page
        self._samples: list[str] = []
        self._seen = 0

    def offer(self, text: object) -> None:
        """Take every 2^n-th document as a sample, until there are enough."""
        if len(self._samples) >= self._WANTED or not isinstance(text, str) or not self._SHORTEST <= len(text) <= self._LONGEST:
            return
        self._seen += 1
        if self._seen & (self._seen - 1) == 0 or self._seen <= self._WANTED // 2:
            self._samples.append(text)

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    async def bytes_per_token(self) -> float | None:
        """Return the bytes of text per slot, or None if it cannot be measured now."""
        size = slots = 0
        for text in list(self._samples):
            tokens = await self._count(text)
            if tokens:
                size += len(text.encode("utf-8", "surrogatepass"))
                slots += -(-tokens // self._page) * self._page
        return size / slots if slots else None
