"""An event loop on which waiting takes no time: its clock jumps to the next timer whenever nothing else is to do."""

import asyncio
import selectors


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with a clock of its own, in seconds.

    Attributes:
        now: current time.
    """

    def __init__(self):
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self):
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        assert timeout is not None, "nothing is left that could end the wait"
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


def run_virtually(work, loop_factory=VirtualLoop):
    """Run `work(loop)` to its end on a new loop and return its result."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()

        async def main():
            return await work(loop)

        return runner.run(main())
