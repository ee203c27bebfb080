"""Count the mutants that the tests kill.

    python -m benchmarks.mutants [--count 20] [--seed 0] [--limit-s 900] [-- COMMAND ...]

A mutant is the source with one expression changed. Each mutant is run in a temporary copy of the tree. It is killed when
the command fails or exceeds the time limit. The default command runs the quick tests until the first failure, the files
that name the mutated module first.
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
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = "engine", "cache", "backends", "scoring", "parsers", "server"
QUICK = "not slow and not exhaustive and not tpu and not browser"
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Div: ast.Mult,
}


def mutate(node: ast.AST) -> ast.AST | None:
    """Return the changed form of an expression or statement, or None where no operator applies."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            return ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC and not isinstance(right, ast.Constant | ast.JoinedStr):
            return ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            return ast.Return(ast.Constant(None))
    return None


def expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside function bodies; annotations and defaults are no behaviour of a call."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting: list[ast.AST] = list(function.body)
            while waiting:
                node = waiting.pop()
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue  # found by the walk itself
                yield node
                waiting += [child for name, child in _children(node) if name not in ("annotation", "returns")]


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def draw(count: int, seed: int) -> list[tuple[Path, int, int, str, str]]:
    """Draw mutants: file, start and end offset in its bytes, old source and new source."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / "chunkattn" / package).rglob("*.py")):
            source = path.read_bytes()
            starts = [0, *(i + 1 for i, byte in enumerate(source) if byte == ord("\n"))]
            for node in expressions(ast.parse(source)):
                if (changed := mutate(node)) is not None:
                    begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
                    end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
                    text = ast.unparse(ast.fix_missing_locations(changed))
                    new = text if isinstance(node, ast.stmt) else f"({text})"
                    found.append((path.relative_to(ROOT), begin, end, source[begin:end].decode(), new))
    return random.Random(seed).sample(sorted(found), count)


def default_command(path: Path) -> list[str]:
    """Return the quick tests, the files that name the mutated module or its package first."""
    module = ".".join(path.with_suffix("").parts)
    words = module, module.rpartition(".")[0], path.stem
    files = sorted((ROOT / "tests").glob("test_*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    files.sort(key=lambda file: next((rank for rank, word in enumerate(words) if word in texts[file]), len(words)))
    names = [str(file.relative_to(ROOT)) for file in files]
    return [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *names]


def killed_by(path: Path, begin: int, end: int, new: str, command: list[str], limit_s: float) -> str | None:
    """Run the command on one mutant. Return what killed the mutant, or None when the mutant survived."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".mypy_cache"))
        source = (ROOT / path).read_bytes()
        (tree / path).write_bytes(source[:begin] + new.encode() + source[end:])
        # A process group of its own: engines and servers that a stopped run leaves behind end with it.
        with (Path(folder) / "log").open("w+", encoding="utf-8") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            run = subprocess.Popen(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, **options)
            try:
                code = run.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"the limit of {limit_s:.0f} s"
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
            log.seek(0)
            failed = [line for line in log if line.startswith(("FAILED", "ERROR"))]
    return None if code == 0 else (failed[0].strip()[:100] if failed else f"exit status {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds draw equal mutants of equal sources")
    parser.add_argument("--limit-s", type=float, default=900, help="seconds until a run counts as killed")
    parser.add_argument("command", nargs="*", help="command to run instead of the quick tests")
    args = parser.parse_args()
    killed = 0
    for path, begin, end, old, new in draw(args.count, args.seed):
        reason = killed_by(path, begin, end, new, args.command or default_command(path), args.limit_s)
        killed += reason is not None
        line = (ROOT / path).read_bytes()[:begin].count(b"\n") + 1
        print(f"{path}:{line}: {' '.join(old.split())} -> {new}: {f'killed by {reason}' if reason else 'SURVIVED'}", flush=True)
    print(f"{killed} of {args.count} mutants killed")


if __name__ == "__main__":
    main()
