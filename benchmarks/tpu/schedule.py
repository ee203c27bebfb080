"""Reading the schedules that libtpu's compiler writes: bundles of the loops that multiply, and the slots they use.

A TPU core issues one bundle (a very long instruction word) a cycle at most, so the bundles of a loop's body are the
cycles of one iteration when nothing waits for memory. `dump_schedules` asks the compiler for them; it must be
called before JAX loads libtpu.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_LINE = re.compile(r"^\s*0x([0-9a-f]+)\s*([A-Z]{2})?:\s*(>*)\s*\{")
_UNITS = "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU"
_KNOWN = {
    "libtpu 0.0.42 to 0.0.50": ("MXU", *_UNITS),
    "libtpu 0.0.52": ("MATMUL", "MATPUSH", *_UNITS),
}
"""Units of a bundle, as versions of libtpu name them. MATMUL, the products, is told as MXU here."""


def dump_schedules() -> Path:
    """A new folder, into which every later compilation of this process writes its schedules."""
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    flags += " --xla_jf_dump_llo_html=false --xla_jf_dump_llo_static_gaps=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return folder


@dataclass(frozen=True)
class Block:
    """Neighbouring bundles without a label among them: a loop's body, or one branch in it.

    Attributes:
        depth: loops around it, the grid's included.
        first, last: its bundles, `[first, last)`.
        slots: how many slots of each unit they use.
    """

    depth: int
    first: int
    last: int
    slots: dict[str, int]

    @property
    def bundles(self) -> int:
        """Bundles in it."""
        return self.last - self.first

    def shares(self, capacity: dict[str, int]) -> dict[str, float]:
        """Of each unit's slots, what is used."""
        return {unit: round(count / (capacity[unit] * self.bundles), 3) for unit, count in self.slots.items()}


@dataclass(frozen=True)
class Schedule:
    """One kernel's schedule.

    Attributes:
        kernel: its name.
        capacity: slots of each unit in a bundle.
        blocks: all of it, in order of address.
        smem_bytes: scalar memory it takes.
    """

    kernel: str
    capacity: dict[str, int]
    blocks: list[Block]
    smem_bytes: int

    @property
    def multiplying(self) -> list[Block]:
        """Blocks that use the MXU."""
        return [block for block in self.blocks if block.slots["MXU"]]


def read_schedules(folder: Path, *, keep: bool = False) -> dict[str, Schedule]:
    """Return the Pallas kernels whose schedules lie in `folder`, by name; the files are then deleted.

    Raises:
        ValueError: another libtpu than those known has written them.
    """
    found = {}
    for bundles in sorted(folder.glob("*-final_bundles.txt")):
        stem = re.match(r"(\d+-(.+?)[.\d]*)-\d+-final_bundles", bundles.name)
        usage = list(folder.glob(f"{bundles.name.rsplit('-', 2)[0]}-*final_hlo-static-per-bundle-utilization.txt"))
        if stem and usage and "custom-call" in bundles.read_text(errors="replace")[:20000]:
            source = next(folder.glob(f"{stem[1]}-*-original.txt"))
            found[stem[2]] = _read(stem[2], bundles, usage[0], _smem_bytes(source))
    if not keep:
        for file in folder.iterdir():
            file.unlink()
    return found


def _smem_bytes(source: Path) -> int:
    sizes = re.findall(r"space=smem, size = 0x([0-9a-f]+)", source.read_text(errors="replace"))
    return sum(int(size, 16) for size in sizes)


def _read(kernel: str, bundles: Path, usage: Path, smem_bytes: int) -> Schedule:
    rows = usage.read_text().splitlines()
    at = next((i for i, row in enumerate(rows) if row.startswith("== UTILIZATION")), 0)
    named = tuple(name.strip() for name in rows[at - 2].split(",")) if at > 1 else ()
    if named not in _KNOWN.values():
        raise ValueError(
            f"the schedule of {kernel} names the units {', '.join(named) or 'nowhere'}, as no known libtpu does; "
            f"install one of {', '.join(_KNOWN)}"
        )
    units = ["MXU" if name == "MATMUL" else name for name in named]
    capacity = dict(zip(units, map(int, rows[at - 1].split()), strict=True))
    used = [tuple(map(int, row.split())) for row in rows[at + 1 :] if row.strip()]
    depths, labels = [0] * len(used), {0, len(used)}
    with open(bundles, encoding="utf-8", errors="replace") as file:
        for match in filter(None, map(_LINE.match, file)):
            if (address := int(match[1], 16)) < len(used):
                depths[address] = len(match[3])
                if match[2]:
                    labels.add(address)
    edges = sorted(labels | {i for i in range(1, len(depths)) if depths[i] != depths[i - 1]})
    return Schedule(
        kernel,
        capacity,
        [
            Block(depths[first], first, last, dict(zip(units, map(sum, zip(*used[first:last])), strict=True)))
            for first, last in pairwise(edges)
        ],
        smem_bytes,
    )
