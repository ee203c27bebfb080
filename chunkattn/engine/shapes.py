"""`Shapes`: compiles the grammars of requests in a thread, before the requests are queued."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from llguidance import LLMatcher

from chunkattn.engine.grammars import Grammars, refused
from chunkattn.engine.request import Request
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError


class Shapes:
    """Requests whose grammars are being compiled.

    Attributes:
        grammars: grammars of the engine; None before its vocabulary is known.
    """

    def __init__(self) -> None:
        self.grammars: Grammars | None = None
        self._threads = ThreadPoolExecutor(1, "grammar")
        self._waiting: dict[Request, Future[LLMatcher]] = {}

    @property
    def waiting(self) -> frozenset[Request]:
        """Return the requests that wait for their grammars."""
        return frozenset(self._waiting)

    def know(self, vocabulary: Vocabulary) -> Grammars:
        """Take the vocabulary of the model, unless it is known, and return the grammars of the engine."""
        if self.grammars is None:
            self.grammars = Grammars(vocabulary)
        return self.grammars

    def begin(self, request: Request) -> bool:
        """Give a request its grammar, and return whether it has to wait for it.

        Raises:
            RequestError: the engine does not know its vocabulary.
        """
        if request.sampling is None or (shape := request.sampling.structured_outputs) is None:
            return False
        if self.grammars is None:
            raise refused("the vocabulary of the model is unknown to the engine")
        request.grammar = self.grammars.get(shape)
        if request.grammar is None:
            self._waiting[request] = self._threads.submit(self.grammars.compile, shape)
        return request.grammar is None

    def take(self, timeout: float) -> list[tuple[Request, RequestError | None]]:
        """Return the requests whose grammars are compiled, or refused with an error.

        Args:
            timeout: seconds to wait for one.
        """
        if not self._waiting:
            return []
        wait(self._waiting.values(), timeout, FIRST_COMPLETED)
        taken: list[tuple[Request, RequestError | None]] = []
        for request, compiled in [(r, c) for r, c in self._waiting.items() if c.done()]:
            del self._waiting[request]
            try:
                request.grammar = compiled.result()
                taken.append((request, None))
            except RequestError as error:
                taken.append((request, error))
            except Exception as error:  # a defect must fail this request alone
                taken.append((request, refused(f"{type(error).__name__}: {error}")))
        return taken

    def drop(self, request: Request) -> None:
        """Forget a request that has ended."""
        if (compiled := self._waiting.pop(request, None)) is not None:
            compiled.cancel()
