"""Tokens of requests whose caller wants the last output alone: kept back, so that nobody wakes up for the others.

Those of a sample are sent as one, for a message of one token takes as long to read as a message of many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain

import numpy as np

from chunkattn.engine.messages import EngineOutput, GenerateRequest, RequestFailed, TokenLogprobs, TokenOutput

MOST_HELD = 256
"""Tokens of a request: more are sent before it ends, so that reading them at once does not keep others waiting."""


@dataclass
class _Held:
    going: int
    tokens: list[TokenOutput] = field(default_factory=list)


class FinalOnly:
    """Holds back the tokens of `GenerateRequest`s that are `final_only`, `MOST_HELD` at most, while samples of them go on."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Requests held back."""
        return len(self._held)

    def expect(self, request: GenerateRequest) -> None:
        """A request that has been taken."""
        if request.final_only:
            self._held[request.request_id] = _Held(request.sampling.n)

    def forget(self, request_id: str) -> None:
        """A request that has been aborted, or any other."""
        self._held.pop(request_id, None)

    def passed(self, outputs: Iterable[EngineOutput]) -> list[EngineOutput]:
        """What can be sent now, each sample's in order."""
        sent: list[EngineOutput] = []
        for output in outputs:
            if isinstance(output, RequestFailed):
                self.forget(output.request_id)
            held = self._held.get(output.request_id)
            if held is None or not isinstance(output, TokenOutput):
                sent.append(output)
                continue
            held.tokens.append(output)
            held.going -= output.finish_reason is not None
            if not held.going or len(held.tokens) == MOST_HELD:
                samples: dict[int, list[TokenOutput]] = {}
                for token in held.tokens:
                    samples.setdefault(token.sample, []).append(token)
                sent += map(_joined, samples.values())
                held.tokens = []
            if not held.going:
                self.forget(output.request_id)
        return sent


def _joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """The outputs of a sample as one."""
    first, logprobs = outputs[0], None
    if first.logprobs is not None:  # then all have them
        rows = ([getattr(o.logprobs, part.name) for o in outputs] for part in fields(TokenLogprobs))
        logprobs = TokenLogprobs(*map(np.concatenate, rows))
    token_ids = tuple(chain.from_iterable(o.token_ids for o in outputs))
    return replace(outputs[-1], token_ids=token_ids, logprobs=logprobs, cached=first.cached)
