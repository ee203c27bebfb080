"""Readers of what the compilers say about a Mosaic kernel: registers, spills, shared memory and the costs of its loops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.nvidia.sass import PRODUCT, SPILL, Loop, Sass

SLOTS = 128
"""Slots of the tile that instructions are counted per."""
_BARRIER_BYTES = 8


class UnknownDump(ValueError):
    """A compiler's text in a form that this module cannot read."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: name of the kernel's function.
        registers: registers of a thread, before warpgroups trade them.
        spill_bytes: bytes that a thread stores to and loads from memory because registers run out.
        shared_bytes: bytes of shared memory of a block of threads.
        products: tensor core products in the code.
        loops: loops that multiply or copy.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    products: int
    loops: list[Loop]

    def facts(self, slots: int) -> dict[str, Any]:
        """Return the kernel for JSON: instructions and stalls of a tile of 64 rows and `SLOTS` slots.

        `clear` and `masked` are turns of the loop that multiplies, `producer` of the one that copies. A producer that may also
        clean a tile has `producer_cleaning`.

        Args:
            slots: slots of the KV tile of one turn.

        Raises:
            UnknownDump: the kernel has no loop that multiplies, or not one that copies.
        """
        multiplying, copying = ([loop for loop in self.loops if bool(loop.longest.products) == is_] for is_ in (True, False))
        if not multiplying or len(copying) != 1:
            sizes = len(multiplying), len(copying)
            raise UnknownDump(f"{self.name} has {sizes[0]} loops that multiply and {sizes[1]} that copy")
        turns = [turn for loop in multiplying for turn in (loop.shortest, loop.longest)]
        ways = {
            "clear": min(turns, key=lambda turn: turn.instructions),
            "masked": max(turns, key=lambda turn: turn.instructions),
            "producer": copying[0].shortest,
            "producer_cleaning": copying[0].longest,
        }
        if ways["producer"] == ways["producer_cleaning"]:
            del ways["producer_cleaning"]
        return {
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "slots": slots,
            "products": sorted({turn.products for turn in turns}),
            **{name: round(turn.instructions * SLOTS / slots) for name, turn in ways.items()},
            **{f"{name}_stalls": round(turn.stalls * SLOTS / slots) for name, turn in ways.items()},
        }


def read_kernels(folder: Path) -> list[Kernel]:
    """Return the kernels compiled since the last call, in order, and delete the files.

    Args:
        folder: folder given to `hopper.prepare`.

    Raises:
        UnknownDump: a file is missing or has another form.
        UnknownSass: the machine code cannot be read.
    """
    stems = [file.with_suffix("") for file in folder.glob("*.ptxas")]
    try:
        return [_read(stem) for stem in sorted(stems, key=lambda stem: int(stem.name.rsplit("_", 1)[-1]))]
    finally:
        forget_kernels(folder)


def forget_kernels(folder: Path) -> None:
    """Delete the files of kernels, of which a failed compilation may leave some."""
    for file in folder.iterdir():
        file.unlink()


def _read(stem: Path) -> Kernel:
    def text(suffix: str) -> str:
        file = stem.with_name(stem.name + suffix)
        if not file.exists():
            raise UnknownDump(f"{file.name} is missing")
        return file.read_text()

    sass = Sass(text(".sass_ctrl"))
    log, resources = text(".ptxas"), text(".resources.txt")
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    scratch = re.search(r"smem_scratch_bytes=(\d+)", resources)
    if not registers or not spills or not scratch:
        raise UnknownDump(f"{stem.name} names no registers, spills or shared memory: {log!r}, {resources!r}")
    barriers = sum(int(n) * int(times) for n, times in re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources))
    return Kernel(
        stem.name.rsplit("_", 1)[0],
        int(registers[1]),
        # ptxas counts spills; local memory in the code without a counted spill is an array that registers cannot hold.
        max(sum(map(int, spills)), 4 * sass.count(*SPILL)),
        int(scratch[1]) + _BARRIER_BYTES * barriers,
        sass.count(PRODUCT),
        sass.loops,
    )
