"""`Footprint`: the number of KV pages that a request needs, computed from the lengths of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from chunkattn.cache.slots import num_slots
from chunkattn.engine.messages import EngineLimits, GenerateRequest, Message, PrecomputeRequest, ScoreRequest


@dataclass(frozen=True)
class Footprint:
    """Number of KV pages that one request needs when the cache is empty.

    Attributes:
        end: slots of the prompt, including unused slots at the ends of pages.
        repeated_pages: page table entries that repeat a page, because a chunk is repeated.
        samples: number of sequences that share the prompt's full pages.
        block_size: slots per page.
    """

    end: int
    repeated_pages: int
    samples: int
    block_size: int

    @property
    def shared_pages(self) -> int:
        """Return the number of full pages of the prompt, which all samples share."""
        return self.end // self.block_size

    def pages_per_sample(self, max_tokens: int) -> int:
        """Return the entries in the page table of one sample at its longest. The last generated token is never computed."""
        return -(-(self.end + max(max_tokens - 1, 0)) // self.block_size)

    def total_pages(self, max_tokens: int) -> int:
        """Return the number of pages of all samples at their longest."""
        own = self.pages_per_sample(max_tokens) - self.shared_pages
        return self.shared_pages - self.repeated_pages + self.samples * own

    def most_tokens(self, num_pages: int) -> int:
        """Return how many tokens each sample can generate in a pool of `num_pages` pages."""
        room = num_pages - self.shared_pages + self.repeated_pages
        pages = room // self.samples + self.shared_pages
        return pages * self.block_size - self.end + 1


def slot_options(message: Message, limits: EngineLimits) -> dict[str, bool]:
    """Return the arguments `aligned` and `packed_chunks` of `plan_slots` for a request.

    Parts begin on new pages, so that their pages can be shared. A plain prompt shares its beginning only and needs no
    alignment. Scored items share only the prefix, if `share_prefix`; they begin on pages where `limits` demand it.
    """
    scores = isinstance(message, ScoreRequest)
    if scores and limits.items_on_pages:
        return {"aligned": True, "packed_chunks": False}
    shares = message.layout.num_chunks > 0 and (not isinstance(message, ScoreRequest) or message.share_prefix)
    return {"aligned": shares, "packed_chunks": scores}


def footprint_of(message: Message, limits: EngineLimits) -> Footprint:
    """Return the footprint of a request within the limits of an engine."""
    layout, block_size, options = message.layout, limits.block_size, slot_options(message, limits)
    aligned, repeated = options["aligned"], 0
    # Log-probabilities need every prompt token computed, including the tokens of a repeated chunk.
    distinct = isinstance(message, GenerateRequest) and message.distinct
    if aligned and not distinct and isinstance(message, (GenerateRequest, PrecomputeRequest)):
        seen: set[tuple[int, bytes]] = set()
        for segment in layout.segments[1:-1]:
            if segment.start < segment.end:
                key = int(layout.positions[segment.start]), layout.part(segment).tobytes()
                repeated += -(-(segment.end - segment.start) // block_size) if key in seen else 0
                seen.add(key)
    end = num_slots(layout, block_size, **options)
    samples = message.sampling.n if isinstance(message, GenerateRequest) else 1
    return Footprint(end, repeated, samples, block_size)
