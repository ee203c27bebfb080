"""Reader of SASS, the machine code of an NVIDIA GPU: the loops of a kernel, and the instructions of one turn.

`nvdisasm` prints the code with the control bits of every instruction, among them its stall: the cycles until the warp may
issue its next instruction. The figures are static. A warp also waits for memory, barriers, tensor cores and other warps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"^\s*(?P<control>[^/]*?)\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>\S.*)$")
_PREDICATE = re.compile(r"^@!?U?P[T\d]+\s+")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
PRODUCT, COPY, SPILL = "HGMMA", ("UTMALDG", "UBLKCP"), ("STL", "LDL")
"""Opcodes of tensor core products, of TMA copies into shared memory, and of registers spilled to memory."""
_WAIT = "NANOSLEEP"
"""Opcode in the branch that a warp takes while a barrier makes it wait."""


class UnknownSass(ValueError):
    """Machine code in a form that this module cannot read."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: name without its modifiers.
        predicated: whether a predicate can turn the instruction off.
        target: label that a branch goes to, or None.
        stall: cycles until the next instruction of the warp.
    """

    opcode: str
    predicated: bool
    target: str | None
    stall: int


@dataclass(frozen=True, order=True)
class Turn:
    """Instructions that a warp issues on one way through a loop.

    Attributes:
        products: tensor core products.
        copies: TMA copies.
        instructions: all instructions.
        stalls: cycles of these instructions' stalls.
    """

    products: int = 0
    copies: int = 0
    instructions: int = 0
    stalls: int = 0

    def __add__(self, other: Turn) -> Turn:
        """Return the sum of two parts of a way."""
        return Turn(
            self.products + other.products,
            self.copies + other.copies,
            self.instructions + other.instructions,
            self.stalls + other.stalls,
        )


@dataclass(frozen=True)
class Loop:
    """One loop, from its first block to the branch back.

    The ways leave out the branches that a warp takes only while it waits. Among ways of equally many products and copies,
    `shortest` and `longest` differ by the work that a branch skips, such as a mask. An inner loop counts once.

    Attributes:
        first: index of the first instruction.
        shortest: turn with the most products and copies and the fewest instructions.
        longest: turn with the most products and copies and the most instructions.
    """

    first: int
    shortest: Turn
    longest: Turn


@dataclass
class _Block:
    first: int
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        names = [i.opcode for i in self.instructions]
        copies = sum(name in COPY for name in names)
        return Turn(names.count(PRODUCT), copies, len(names), sum(i.stall for i in self.instructions))

    @property
    def waits(self) -> bool:
        return any(i.opcode == _WAIT for i in self.instructions)


class Sass:
    """One kernel's machine code.

    Args:
        text: output of `nvdisasm`, with or without control bits.

    Attributes:
        instructions: all instructions in order of address.

    Raises:
        UnknownSass: the text has no instructions, or a branch leads nowhere.
    """

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                self._labels[label[1]] = len(self.instructions)
            elif match := _LINE.match(line):
                self.instructions.append(_instruction(match["text"], match["control"]))
        if not self.instructions:
            raise UnknownSass("the disassembly has no instructions")

    def count(self, *opcodes: str) -> int:
        """Return the number of instructions of some opcodes."""
        return sum(i.opcode in opcodes for i in self.instructions)

    @cached_property
    def loops(self) -> list[Loop]:
        """Return the innermost loops that multiply, and the innermost loops that copy and do not multiply, by address."""
        bodies = self._natural_loops()
        blocks = self._blocks
        loops = []
        for head, body in bodies.items():
            whole = [blocks[b] for b in body]
            products, copies = (sum(n) for n in zip(*((b.turn.products, b.turn.copies) for b in whole)))
            if not products and not copies:
                continue
            kind = PRODUCT, *(() if products else COPY)
            inner = [other for other in bodies if other != head and other in body]
            if any(i.opcode in kind for other in inner for b in bodies[other] for i in blocks[b].instructions):
                continue
            shortest, longest = self._ways(head, body)
            loops.append(Loop(blocks[head].first, shortest, longest))
        return sorted(loops, key=lambda loop: loop.first)

    @cached_property
    def _blocks(self) -> list[_Block]:
        """Return the basic blocks, linked by branches and by falling through."""
        edges = {0, *self._labels.values()}
        edges |= {n + 1 for n, i in enumerate(self.instructions) if i.target or i.opcode in ("EXIT", "RET", "BRX", "JMX")}
        starts = sorted(edge for edge in edges if edge < len(self.instructions))
        number = {start: n for n, start in enumerate(starts)}
        blocks = []
        for first, last in zip(starts, [*starts[1:], len(self.instructions)], strict=True):
            block = _Block(first, self.instructions[first:last])
            end = block.instructions[-1]
            if end.target is not None:
                if self._labels.get(end.target) not in number:
                    raise UnknownSass(f"a branch to {end.target}, which is no instruction")
                block.successors.append(number[self._labels[end.target]])
            leaves = end.opcode in ("EXIT", "RET", "BRX", "JMX") or (end.target is not None and end.opcode == "BRA")
            if (end.predicated or not leaves) and last in number:
                block.successors.append(number[last])
            blocks.append(block)
        return blocks

    def _natural_loops(self) -> dict[int, set[int]]:
        """Return the blocks of every loop, by its first block.

        Source: Aho, Lam, Sethi, Ullman, Compilers, 2nd edition, section 9.6.
        """
        blocks = self._blocks
        before: dict[int, list[int]] = defaultdict(list)
        for n, block in enumerate(blocks):
            for after in block.successors:
                before[after].append(n)
        dominators = _dominators(len(blocks), before, self._reached())
        loops: dict[int, set[int]] = {}
        for n in dominators:
            for head in blocks[n].successors:
                if head in dominators[n]:
                    body = loops.setdefault(head, {head})
                    pending = [n]
                    while pending:
                        if (at := pending.pop()) not in body:
                            body.add(at)
                            pending += [b for b in before[at] if b in dominators]
        return loops

    def _reached(self) -> list[int]:
        """Return the blocks that the kernel's entry reaches, each after at least one block that leads to it."""
        order: list[int] = []
        seen, pending = {0}, [(0, iter(self._blocks[0].successors))]
        while pending:
            at, after = pending[-1]
            follower = next((n for n in after if n not in seen), None)
            if follower is None:
                order.append(at)
                pending.pop()
            else:
                seen.add(follower)
                pending.append((follower, iter(self._blocks[follower].successors)))
        return order[::-1]

    def _ways(self, head: int, body: set[int]) -> tuple[Turn, Turn]:
        """Return the shortest and the longest turn of a loop, from its head to a branch back."""
        blocks = self._blocks
        place = {n: i for i, n in enumerate(self._reached())}
        best: dict[int, tuple[Turn, Turn]] = {}
        ends: list[tuple[Turn, Turn]] = []
        for n in sorted(body, key=place.__getitem__):
            if n == head:
                best[n] = blocks[n].turn, blocks[n].turn
            if n not in best or blocks[n].waits:
                continue
            for after in blocks[n].successors:
                if after == head:
                    ends.append(best[n])
                elif after in body and place[after] > place[n]:
                    turn = blocks[after].turn
                    way = [(least + turn, most + turn) for least, most in [best[n]]]
                    best[after] = _better([*way, *([best[after]] if after in best else [])])
        if not ends:
            raise UnknownSass("no way through a loop avoids waiting")
        return _better(ends)


def _better(ways: Iterable[tuple[Turn, Turn]]) -> tuple[Turn, Turn]:
    """Return the shortest and the longest way among those with the most products and copies."""
    ways = list(ways)

    def short(turn: Turn) -> tuple[int, int, int]:
        return -turn.products, -turn.copies, turn.instructions

    return min((least for least, _ in ways), key=short), max(most for _, most in ways)


def _instruction(text: str, control: str) -> Instruction:
    predicated = _PREDICATE.match(text)
    text = text[predicated.end() :] if predicated else text
    name = text.split()[0].rstrip(";")
    target = _TARGET.search(text) if name.startswith(("BRA", "JMP")) else None
    # Some branches name their predicate after the opcode: `BRA.U UP0, target`, `BRA.DIV UR4, target`.
    conditional = bool(predicated) or (target is not None and "," in text[: target.start()])
    stall = control.rsplit(":", 1)[-1]
    return Instruction(name.split(".")[0], conditional, target and target[1], int(stall) if stall.isdigit() else 0)


def _dominators(count: int, before: dict[int, list[int]], order: list[int]) -> dict[int, set[int]]:
    """Return the blocks that every way from block 0 to a block passes, for all blocks in `order`."""
    everything = set(order)
    dominators = {n: everything if n else {0} for n in order}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            new = {n} | set.intersection(*(dominators[b] for b in before[n] if b in everything))
            if new != dominators[n]:
                dominators[n], changed = new, True
    return dominators
