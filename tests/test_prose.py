"""The first words of docstrings: a verb or a noun phrase, never a dangling clause."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DANGLING = {"Of", "What", "Which", "Who", "Whose", "How", "Whether", "Those", "Whatever", "Whoever"}


_STRING = re.compile(rf"[\"'](?:\s|\\n)*(?:{'|'.join(sorted(DANGLING))})\b")
"""A string that begins with such a word. Few sources have one, and only those are parsed."""


def dangling(source):
    """Return the lines of docstrings, of constants and attributes too, that begin with a word of `DANGLING`."""
    if not _STRING.search(source):
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.split(r"\W", node.value.value.strip(), maxsplit=1)[0] in DANGLING
    ]


def test_no_docstring_begins_with_a_dangling_clause():
    files = [
        f
        for folder in ("chunkattn", "benchmarks", "training", "examples", "tests")
        for f in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert files
    found = [f"{f.relative_to(ROOT)}:{line}" for f in files for line in dangling(f.read_text(encoding="utf-8"))]
    assert not found, "docstrings begin with a dangling clause:\n" + "\n".join(found)


def test_the_check_sees_modules_functions_classes_and_constants():
    source = '"""Whether."""\nX = 1\n"""Of a thing."""\nclass A:\n    """What."""\n    def f(self):\n        """How, then."""\n'
    assert sorted(dangling(source)) == [1, 3, 5, 7]
    assert dangling('"""Offer a word."""\ndef f():\n    """Return whatever there is."""\n') == []
