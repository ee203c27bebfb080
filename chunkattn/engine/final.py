"""Outputs of requests whose caller wants the last one alone: kept back, so that nobody wakes up for the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from chunkattn.engine.messages import EngineOutput, GenerateRequest, RequestFailed, TokenOutput

MOST_HELD = 256
"""Outputs of a request: more are sent before it ends, so that reading them at once does not keep others waiting."""


@dataclass
class _Held:
    going: int
    outputs: list[EngineOutput] = field(default_factory=list)


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
        """What can be sent now, in order."""
        sent: list[EngineOutput] = []
        for output in outputs:
            if isinstance(output, RequestFailed):
                self.forget(output.request_id)
            held = self._held.get(output.request_id)
            if held is None:
                sent.append(output)
                continue
            held.outputs.append(output)
            held.going -= isinstance(output, TokenOutput) and output.finish_reason is not None
            if not held.going or len(held.outputs) == MOST_HELD:
                sent += held.outputs
                held.outputs = []
            if not held.going:
                self.forget(output.request_id)
        return sent
