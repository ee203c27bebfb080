"""Outputs of requests whose caller wants the last one alone: kept until then, so that nobody wakes up for the others."""

from __future__ import annotations

from collections.abc import Iterable

from chunkattn.engine.messages import EngineOutput, GenerateRequest, RequestFailed, TokenOutput


class FinalOnly:
    """Holds back the tokens of `GenerateRequest`s that are `final_only` until all of their samples have ended."""

    def __init__(self) -> None:
        self._held: dict[str, list[EngineOutput]] = {}
        self._going: dict[str, int] = {}

    def __len__(self) -> int:
        """Requests held back."""
        return len(self._held)

    def expect(self, request: GenerateRequest) -> None:
        """A request that has been taken."""
        if request.final_only:
            self._held[request.request_id], self._going[request.request_id] = [], request.sampling.n

    def forget(self, request_id: str) -> None:
        """A request that has been aborted, or any other."""
        self._held.pop(request_id, None)
        self._going.pop(request_id, None)

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
            held.append(output)
            if isinstance(output, TokenOutput) and output.finish_reason is not None:
                self._going[output.request_id] -= 1
                if not self._going[output.request_id]:
                    sent += held
                    self.forget(output.request_id)
        return sent
