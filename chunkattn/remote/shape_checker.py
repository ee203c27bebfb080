"""`ShapeChecker`: compiles shapes in a process that may run out of time, memory or stack, before an engine compiles them."""

from __future__ import annotations

import select
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from chunkattn.engine.kept_shapes import KeptShapes
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError
from chunkattn.remote.frames import Frames
from chunkattn.remote.process import environment
from chunkattn.structured_outputs import PARAM, StructuredOutputsParams

_WAIT_S = 60.0
"""Seconds after which a process counts as hung. Its limit is one of processor time, so a busy machine refuses nothing."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Verdict:
    """Answer of the process: why a shape is refused, or an empty text."""

    reason: str


FRAMES = Frames([Vocabulary, StructuredOutputsParams, Verdict])


def write_frame(stream: IO[bytes], message: Vocabulary | StructuredOutputsParams | Verdict) -> None:
    """Write one message with its length."""
    frame = FRAMES.encode([message])
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Vocabulary | StructuredOutputsParams | Verdict | None:
    """Read one message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    frame = stream.read(*_LENGTH.unpack(head))
    (message,) = FRAMES.decode(frame)
    return message


class ShapeChecker:
    """Owner of the process, which begins with the first shape. One thread uses the object at a time.

    The library that compiles shapes bounds most of its work, and not all: a chain of a thousand references overflows its stack.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts = KeptShapes[str]()

    def check(self, shape: StructuredOutputsParams, vocabulary: Vocabulary) -> None:
        """Check that a shape compiles within the limits.

        Args:
            shape: shape of a text.
            vocabulary: vocabulary of the model, always the same.

        Raises:
            RequestError: the shape is refused.
        """
        if (reason := self._verdicts.get(shape)) is None:
            reason = self._ask(shape, vocabulary)
            self._verdicts.put(shape, reason)
        if reason:
            raise RequestError(reason, param=PARAM)

    def _ask(self, shape: StructuredOutputsParams, vocabulary: Vocabulary) -> str:
        """Return why the process refuses a shape; an empty text if it does not.

        Raises:
            RequestError: the machine is too slow, or has killed the process.
        """
        try:
            process = self._process or self._start(vocabulary)
            assert process.stdin is not None
            assert process.stdout is not None
            write_frame(process.stdin, shape)
            if not select.select([process.stdout], [], [], _WAIT_S)[0]:
                self.close()  # says more about the machine than about the shape: the next request asks again
                raise RequestError(f"{PARAM}: it does not compile within {_WAIT_S:g} s", param=PARAM)
            answer = read_frame(process.stdout)
        except (UnicodeEncodeError, OverflowError) as error:
            return f"{PARAM}: it holds a value that cannot be sent: {error}"
        except BrokenPipeError:
            answer = None
        if isinstance(answer, Verdict):
            return answer.reason
        status = process.wait()
        self.close()
        if status == -signal.SIGKILL:
            raise RequestError(f"{PARAM}: the process that compiles it was killed", param=PARAM)
        if status == -signal.SIGXCPU:
            return f"{PARAM}: it takes too long to compile"
        return f"{PARAM}: it is too complex: compiling it takes too much memory or nests too deep"

    def _start(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chunkattn.remote.shape_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            process_group=0,
        )
        assert self._process.stdin is not None
        write_frame(self._process.stdin, vocabulary)
        return self._process

    def close(self) -> None:
        """End the process. A later check begins another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
            process.wait()
