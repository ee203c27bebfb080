"""The process that checks shapes, `python -m chunkattn.remote.shape_process`, which `ShapeChecker` starts.

A shape that passes the limits here is far from those of an engine: its threads have stacks of at least 2 MiB.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Sequence

from chunkattn.engine.grammars import Grammars, TextMatcher
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError
from chunkattn.remote.shape_checker import Verdict, read_frame, write_frame
from chunkattn.structured_outputs import PARAM, StructuredOutputsParams

_CPU_S = 2
"""Seconds of processor time for one shape, rounded up to the next second."""
_MEMORY_BYTES = 128 << 20
"""Bytes of memory that the process may take beyond what it has when a shape arrives."""
_STACK_BYTES = 1 << 20
_STEPS = 24
"""Tokens of the text that is tried."""
_NICE = 10


def check(grammars: Grammars, shape: StructuredOutputsParams) -> str:
    """Return why a shape is refused, or an empty text.

    Args:
        grammars: grammars of the model.
        shape: shape of a text.
    """
    try:
        matcher = TextMatcher(grammars.compile(shape))
    except RequestError as error:
        return str(error)
    text: list[int] = []
    for step in range(_STEPS):
        words, _ = grammars.masks([matcher])
        if matcher.error:
            return f"{PARAM}: {matcher.error}"
        allowed = _allowed(words[0].tolist())
        if matcher.is_complete or not allowed:
            break
        text.append(allowed[step * 7919 % len(allowed)])
        matcher.follow(text)
    return ""


def _allowed(words: Sequence[int]) -> list[int]:
    """Return some of the token ids of a mask: of each word at most one."""
    return [32 * place + (word & -word).bit_length() - 1 for place, word in enumerate(words) if word]


def _limit() -> None:
    """Limit processor time and memory of the next shape."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + 1 + _CPU_S, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (data + _MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _serve() -> None:
    """Answer every shape, until the stream ends."""
    vocabulary = read_frame(sys.stdin.buffer)
    if not isinstance(vocabulary, Vocabulary):
        return
    grammars = Grammars(vocabulary)
    while isinstance(shape := read_frame(sys.stdin.buffer), StructuredOutputsParams):
        _limit()
        write_frame(sys.stdout.buffer, Verdict(check(grammars, shape)))


def main() -> None:
    """Serve in a thread with a small stack."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
