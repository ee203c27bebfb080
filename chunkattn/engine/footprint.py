"""`Footprint`: the KV pages that a request needs, from the lengths of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from chunkattn.cache.slots import num_slots
from chunkattn.engine.messages import GenerateRequest, Message, PrecomputeRequest, ScoreRequest


@dataclass(frozen=True)
class Footprint:
    """KV pages of one request, whatever the cache holds.

    Attributes:
        end: slots of the prompt, with the unused ones at the end of pages.
        repeated_pages: entries of the page table that name a page again, for a repeated chunk.
        samples: sequences that share the prompt's full pages.
        block_size: slots of a page.
    """

    end: int
    repeated_pages: int
    samples: int
    block_size: int

    @property
    def shared_pages(self) -> int:
        """Full pages of the prompt, which all samples share."""
        return self.end // self.block_size

    def pages_per_sample(self, max_tokens: int) -> int:
        """Return the entries of one sample's page table at its longest; the last token generated is never computed."""
        return -(-(self.end + max(max_tokens - 1, 0)) // self.block_size)

    def total_pages(self, max_tokens: int) -> int:
        """Return the pages of all samples at their longest."""
        own = self.pages_per_sample(max_tokens) - self.shared_pages
        return self.shared_pages - self.repeated_pages + self.samples * own

    def most_tokens(self, num_pages: int) -> int:
        """Return how many tokens each sample can have in a pool of `num_pages`."""
        room = num_pages - self.shared_pages + self.repeated_pages
        pages = room // self.samples + self.shared_pages
        return pages * self.block_size - self.end + 1


def is_aligned(message: Message) -> bool:
    """Return whether every part of a prompt begins on a page of its own, so that its pages can be shared.

    A prompt without chunks has none to share but its beginning. Scored items share the prefix alone, where asked for.
    """
    return message.layout.num_chunks > 0 and (not isinstance(message, ScoreRequest) or message.share_prefix)


def footprint_of(message: Message, block_size: int) -> Footprint:
    """Return the footprint of a request in pages of `block_size` slots."""
    layout, aligned, repeated = message.layout, is_aligned(message), 0
    # The log-probability of a prompt token needs the token computed, in a repeated chunk as well.
    distinct = isinstance(message, GenerateRequest) and message.sampling.prompt_logprobs is not None
    if aligned and not distinct and isinstance(message, (GenerateRequest, PrecomputeRequest)):
        seen: set[tuple[int, bytes]] = set()
        for segment in layout.segments[1:-1]:
            if segment.start < segment.end:
                key = int(layout.positions[segment.start]), layout.part(segment).tobytes()
                repeated += -(-(segment.end - segment.start) // block_size) if key in seen else 0
                seen.add(key)
    end = num_slots(layout, block_size, aligned=aligned, packed_chunks=isinstance(message, ScoreRequest))
    samples = message.sampling.n if isinstance(message, GenerateRequest) else 1
    return Footprint(end, repeated, samples, block_size)
