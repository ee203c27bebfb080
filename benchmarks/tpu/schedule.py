"""Readers of the schedules that libtpu's compiler writes: bundles of the loops that multiply, and the slots they use.

A TPU core issues at most one bundle (a very long instruction word) a cycle, so the bundles of a loop's body are the cycles
of one iteration when no operation waits for memory. `dump_schedules` makes the compiler write the schedules; call it
before JAX loads libtpu.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

_LINE = re.compile(r"^\s*0x([0-9a-f]+)\s*([A-Z]{2})?:\s*(>*)\s*\{")
_UNITS = {"MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU"}
_RENAMED = {"MATMUL": "MXU"}  # libtpu 0.0.52 uses this name for the same instructions, and counts pushes of weights separately
KNOWN = "0.0.42.1", "0.0.46.3", "0.0.48.1", "0.0.50.1", "0.0.52"
"""Versions of libtpu; this module reads their schedules."""


class UnknownSchedule(ValueError):
    """A schedule in a form that this module cannot read."""


def unknown(what: str) -> UnknownSchedule:
    """Return the error that says `what` is wrong with a schedule, and names the installed and the known libtpu."""
    try:
        installed = version("libtpu")
    except PackageNotFoundError:
        installed = "of an unknown version"
    return UnknownSchedule(f"schedules of libtpu {installed} are not understood: {what}; known: {', '.join(KNOWN)}")


def dump_schedules() -> Path:
    """Make a folder into which every later compilation of this process writes its schedules."""
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    flags += " --xla_jf_dump_llo_html=false --xla_jf_dump_llo_static_gaps=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return folder


@dataclass(frozen=True)
class Block:
    """Contiguous bundles without a label among them: a loop's body, or one branch in it.

    Attributes:
        depth: number of loops around the block, the grid's included.
        first: first bundle.
        last: end of the bundles.
        slots: number of slots of each unit that the block uses.
    """

    depth: int
    first: int
    last: int
    slots: dict[str, int]

    @property
    def bundles(self) -> int:
        """Return the number of bundles."""
        return self.last - self.first

    def shares(self, capacity: dict[str, int]) -> dict[str, float]:
        """Return the used share of each unit's slots."""
        return {unit: round(count / (capacity[unit] * self.bundles), 3) for unit, count in self.slots.items()}


@dataclass(frozen=True)
class Schedule:
    """One kernel's schedule.

    Attributes:
        kernel: name of the kernel.
        capacity: slots of each unit in a bundle.
        blocks: all blocks, in order of address.
        smem_bytes: bytes of scalar memory.
    """

    kernel: str
    capacity: dict[str, int]
    blocks: list[Block]
    smem_bytes: int

    @property
    def multiplying(self) -> list[Block]:
        """Return the blocks that use the MXU."""
        return [block for block in self.blocks if block.slots["MXU"]]


def read_schedules(folder: Path, *, keep: bool = False) -> dict[str, Schedule]:
    """Return the Pallas kernels whose schedules are in `folder`, by name. The files are then deleted unless `keep` is set."""
    by_name = {}
    for bundles in sorted(folder.glob("*-final_bundles.txt")):
        stem = re.match(r"(\d+-(.+?)[.\d]*)-\d+-final_bundles", bundles.name)
        usage = list(folder.glob(f"{bundles.name.rsplit('-', 2)[0]}-*final_hlo-static-per-bundle-utilization.txt"))
        if stem and usage and "custom-call" in bundles.read_text(errors="replace")[:20000]:
            source = next(folder.glob(f"{stem[1]}-*-original.txt"))
            by_name[stem[2]] = _read(stem[2], bundles, usage[0], _smem_bytes(source))
    if not keep:
        for file in folder.iterdir():
            file.unlink()
    return by_name


def pick(by_name: dict[str, Schedule], *names: str) -> Schedule:
    """Return the first schedule whose kernel's name contains one of `names`.

    Raises:
        UnknownSchedule: no kernel has such a name.
    """
    for kernel, schedule in by_name.items():
        if any(name in kernel for name in names):
            return schedule
    raise unknown(f"no dump for {names[0]} among {sorted(by_name)}")


def _smem_bytes(source: Path) -> int:
    sizes = re.findall(r"space=smem, size = 0x([0-9a-f]+)", source.read_text(errors="replace"))
    return sum(int(size, 16) for size in sizes)


def _read_usage(usage: Path) -> tuple[list[str], dict[str, int], list[tuple[int, ...]]]:
    """Return the units, the slots of each in a bundle, and the slots that every bundle uses, in the order of the units."""
    rows = usage.read_text().splitlines()
    at = next((i for i, row in enumerate(rows) if row.startswith("== UTILIZATION")), 0)
    if at < 2:
        raise unknown(f"{usage.name} has no table of units before its utilization")
    units = [_RENAMED.get(name, name) for name in rows[at - 2].split(", ")]
    if missing := _UNITS - set(units):
        raise unknown(f"{usage.name} has no column {', '.join(sorted(missing))} among {rows[at - 2]!r}")
    used = [tuple(map(int, row.split())) for row in rows[at + 1 :] if row.strip()]
    if any(len(row) != len(units) for row in used):
        raise unknown(f"rows of {usage.name} have not the {len(units)} columns of its header")
    return units, dict(zip(units, map(int, rows[at - 1].split()), strict=True)), used


def _read(kernel: str, bundles: Path, usage: Path, smem_bytes: int) -> Schedule:
    units, capacity, used = _read_usage(usage)
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
