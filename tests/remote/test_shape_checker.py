"""The process that compiles shapes before an engine does: shapes that end it, verdicts that are kept, its next shapes."""

import pytest

from chunkattn.engine.kept_shapes import MOST, MOST_CHARS, KeptShapes
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError
from chunkattn.remote import shape_checker
from chunkattn.remote.shape_checker import ShapeChecker
from chunkattn.structured_outputs import StructuredOutputsParams

VOCABULARY = Vocabulary(tuple(bytes([n]) for n in range(128)), ())
CHAIN = {f"k{n}": {"$ref": f"#/$defs/k{n + 1}"} for n in range(2000)} | {"k2000": {"type": "null"}}


@pytest.fixture
def checker():
    made = ShapeChecker()
    yield made
    made.close()


def test_a_shape_that_ends_the_process_is_refused_alone(checker):
    deep = StructuredOutputsParams(json={"$ref": "#/$defs/k0", "$defs": CHAIN})
    wide = StructuredOutputsParams(json={"type": "object", "required": [f"k{n}" for n in range(10_000)]})
    for shape in (deep, wide):
        checker.check(StructuredOutputsParams(choice=["a"]), VOCABULARY)
        with pytest.raises(RequestError, match="structured_outputs: it is too complex: compiling it takes too much memory"):
            checker.check(shape, VOCABULARY)
    checker.check(StructuredOutputsParams(choice=["b"]), VOCABULARY)


def test_shapes_that_the_engine_has_dropped_are_checked_again(checker, monkeypatch):
    asked = []
    monkeypatch.setattr(checker, "_ask", lambda shape, vocabulary: asked.append(shape) or "")
    shapes = [StructuredOutputsParams(regex=f"a{n}") for n in range(MOST + 1)]
    for shape in [*shapes, shapes[-1], shapes[1]]:
        checker.check(shape, VOCABULARY)
    assert asked == shapes
    checker.check(shapes[0], VOCABULARY)
    assert asked == [*shapes, shapes[0]]


def test_long_shapes_leave_no_room_for_others():
    kept = KeptShapes[int]()
    shapes = [
        StructuredOutputsParams(regex="a" * (MOST_CHARS // 4)),
        StructuredOutputsParams(json={"enum": ["a" * (MOST_CHARS // 5)]}),
        StructuredOutputsParams(choice=["a" * (MOST_CHARS // 8), "b" * (MOST_CHARS // 8)]),
        StructuredOutputsParams(grammar="a" * (MOST_CHARS // 5)),
        StructuredOutputsParams(regex="b" * (MOST_CHARS // 5)),
    ]
    for number, shape in enumerate(shapes[:4]):
        kept.put(shape, number)
    assert kept.get(shapes[0]) == 0
    kept.put(shapes[4], 4)
    assert [kept.get(shape) for shape in shapes] == [0, None, 2, 3, 4]


@pytest.mark.parametrize("end", ["slow", "killed"])
def test_a_refusal_for_the_machines_sake_is_not_kept(checker, monkeypatch, end):
    shape, start = StructuredOutputsParams(regex="[ab]+"), ShapeChecker._start

    def start_and_kill(self, vocabulary):
        process = start(self, vocabulary)
        process.kill()
        process.wait()
        return process

    if end == "killed":
        monkeypatch.setattr(ShapeChecker, "_start", start_and_kill)
    else:
        monkeypatch.setattr(shape_checker, "_WAIT_S", 0.0)
    with pytest.raises(RequestError, match="within 0 s" if end == "slow" else "was killed"):
        checker.check(shape, VOCABULARY)
    monkeypatch.undo()
    checker.check(shape, VOCABULARY)
