"""Change the source in one place at a time and count the changes that a test command detects.

    python -m tests.soak.mutants [--count 20] [--seed 0] [--seconds 300] [--under chunkattn/cache] -- tests/engine/test_cache.py

The command draws places at random, applies each change to a temporary copy of the tree, and runs pytest there with the
given arguments. A mutant is killed if pytest fails or exceeds the time limit. A survivor shows a line that no test checks,
or a change without effect.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [f"chunkattn/{name}" for name in ("engine", "cache", "backends", "calls", "parsers", "server")]
LEFT_OUT = {".git", ".venv", ".cache", "__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One change: bytes `start` to `end` of a file become `text`."""

    path: Path
    line: int
    start: int
    end: int
    text: str
    kind: str

    def describe(self) -> str:
        """Return a line with the place, the kind of change, the old and the new text."""
        old = (ROOT / self.path).read_bytes()[self.start : self.end].decode()
        return f"{self.path}:{self.line} {self.kind}: {' '.join(old.split())} -> {' '.join(self.text.split())}"


def changed(node: ast.AST, random_step: int) -> tuple[str, ast.AST] | None:
    """Return the kind of change and the node that replaces `node`, or None if no operator applies."""
    match node:
        case ast.Compare(left, [op, *rest], comparators) if type(op) in COMPARISONS:
            return "comparison", ast.Compare(left, [COMPARISONS[type(op)](), *rest], comparators)
        case ast.Constant(bool(value)):
            return "boolean", ast.Constant(not value)
        case ast.Constant(int(value)):
            return "constant", ast.Constant(value + random_step)
        case ast.BoolOp(op, values):
            return "boolean", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return "boolean", operand
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            return "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.Expr(ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise():
            return "dropped", ast.Pass()
    return None


def code_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run, without annotations and the parts of f-strings."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from code_nodes(child)


def mutants_of(path: Path, rng: random.Random) -> Iterator[Mutant]:
    """Yield every change of one file; `path` is relative to the root."""
    source = (ROOT / path).read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in code_nodes(ast.parse(source)):
        if change := changed(node, rng.choice((-1, 1))):
            kind, new = change
            start, end = (
                starts[line - 1] + column
                for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
            )
            text = ast.unparse(ast.fix_missing_locations(new))
            yield Mutant(path, node.lineno, start, end, text if kind == "dropped" else f"({text})", kind)


def draw(folders: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants; a file's weight is the number of its changes."""
    rng = random.Random(seed)
    files = sorted(file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(file, rng)]
    return rng.sample(every, min(count, len(every)))


def run_tests(tree: Path, arguments: list[str], seconds: float) -> str:
    """Run pytest in a tree; return "passed", "failed" or "timeout"."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    # A session of its own lets a timeout also kill the engines that tests started.
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "mutants")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "timeout"
    if status not in (0, 1, 2, 4):  # 2 and 4: the mutant breaks the import of a test or of conftest.py
        raise SystemExit(f"pytest ended with status {status}: {' '.join(command)}")
    return "failed" if status else "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one run, in seconds")
    parser.add_argument("--under", action="append", help="folder to draw from; repeatable; default: six of chunkattn's")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=lambda _, names: LEFT_OUT.intersection(names))
        if (verdict := run_tests(tree, args.pytest, args.seconds)) != "passed":
            raise SystemExit(f"the unchanged tree: {verdict}; mutants would show nothing")
        killed = 0
        mutants = draw(args.under or FOLDERS, args.count, args.seed)
        for mutant in mutants:
            file = tree / mutant.path
            source = file.read_bytes()
            file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
            verdict = run_tests(tree, args.pytest, args.seconds)
            file.write_bytes(source)
            killed += verdict != "passed"
            print(f"{'SURVIVED' if verdict == 'passed' else 'killed'} ({verdict}) {mutant.describe()}", flush=True)
    print(f"{killed} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
