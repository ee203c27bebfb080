"""Answers without their markers, and the citations in them, however the text arrives."""

import random
import re

import pytest

from chunkattn import Citation, Citations, CitationSource, Document
from chunkattn.calls.cited_text import CitedText, last_gap, statement_ends
from chunkattn.layout import Names
from chunkattn.parsers.markers import cited_documents
from chunkattn.server.cited_blocks import StatementCutter

DOCUMENTS = [Document("x", "a"), Document("y", "b c"), Document("z", "ab")]
CITED = cited_documents(DOCUMENTS, Citations(), Names())
A, B, C = CITED.markers
SOURCES = [CitationSource(name, number) for number, name in enumerate(("a", "b c", "ab"))]


def read(answer, options=None, shown=None, ended=True):
    cited = CITED if options is None else cited_documents(DOCUMENTS, options, Names())
    made = CitedText(cited, shown)
    made.read(answer, ended=ended)
    return made.text, made.citations


def spans(answer):
    text, citations = read(answer)
    assert all(citation.text == text[citation.start : citation.end] for citation in citations)
    return text, [(citation.text, [source.index for source in citation.sources]) for citation in citations]


@pytest.mark.parametrize(
    ("answer", "text", "found"),
    [
        (f"Nila sings {A}.", "Nila sings.", [("Nila sings", [0])]),
        (f"Nila sings. {A}", "Nila sings.", [("Nila sings.", [0])]),
        (
            f"Nila sings.{A} Rumi writes!{B}{C} End.",
            "Nila sings. Rumi writes! End.",
            [("Nila sings.", [0]), ("Rumi writes!", [1, 2])],
        ),
        (f"One. Two {A} {A} \t{B}, three{C}", "One. Two, three", [("Two", [0, 1]), (", three", [2])]),
        (f"- One\n- Two {A}\n- Three {B}", "- One\n- Two\n- Three", [("- Two", [0]), ("- Three", [1])]),
        (f"Nila sings. {A}\n{B}", "Nila sings.\n", [("Nila sings.", [0]), ("Nila sings.", [1])]),
        (f"{A} Nila", " Nila", [("", [0])]),
        (f"In 3.5 years {A}", "In 3.5 years", [("In 3.5 years", [0])]),
        (f"“唱歌。写作{A}", "“唱歌。写作", [("写作", [0])]),
        ("[x](y) [doc:q] [doc", "[x](y) [doc:q] [doc", []),
        ("Nila [doc:", "Nila", []),
        ("Nila [doc:a", "Nila", []),
        (f"Nila {A}", "Nila", [("Nila", [0])]),
        ("", "", []),
    ],
)
def test_spans(answer, text, found):
    assert spans(answer) == (text, found)


def test_a_text_reads_alike_in_any_pieces_and_never_takes_anything_back():
    rng = random.Random(2)
    pieces = ["[", "[doc:", "[doc:a", "d", " ", "  ", ". ", "\n", "Nila", "é", "[doc:q]", A, B, C]
    for keep in (False, True):
        options = Citations(keep_markers=keep)
        cited = cited_documents(DOCUMENTS, options, Names())
        for _ in range(1500):
            answer = "".join(rng.choices(pieces, k=rng.randint(0, 10)))
            whole = read(answer, options)
            made, place, before = CitedText(cited), 0, ("", [])
            while place < len(answer):
                place += rng.randint(1, 5)
                made.read(answer[:place], ended=False)
                assert made.text.startswith(before[0])
                assert made.citations[: len(before[1])] == before[1]
                assert all(citation.end <= len(made.text) for citation in made.citations)
                before = made.text, list(made.citations)
            made.read(answer, ended=True)
            made.read(answer, ended=True)
            assert (made.text, made.citations) == whole, answer
            assert whole[0].startswith(before[0])
            assert whole[1][: len(before[1])] == before[1]


def test_markers_can_be_kept():
    text, citations = read(f"Nila sings {A}. Rumi {B}", Citations(keep_markers=True))
    assert text == f"Nila sings {A}. Rumi {B}"
    assert citations == [Citation(0, 10, "Nila sings", (SOURCES[0],)), Citation(20, 24, "Rumi", (SOURCES[1],))]


def test_documents_that_the_prompt_leaves_out_have_no_markers():
    assert read(f"Nila {A} {C}", shown=[2]) == (f"Nila {A}", [Citation(0, 12, f"Nila {A}", (SOURCES[2],))])


def test_a_stop_string_may_cut_what_was_read():
    made = CitedText(CITED)
    made.read(f"Nila sings {A}. Rumi wri", ended=False)
    made.read(f"Nila sings {A}. Rumi", ended=True)
    assert made.text == "Nila sings. Rumi"
    assert len(made.citations) == 1
    made = CitedText(CITED)
    made.read(f"Nila sings {A}. Rumi", ended=False)
    made.read("Nila", ended=True)
    assert (made.text, made.citations) == ("Nila", [])


def test_long_runs_of_white_space_are_read_in_linear_time():
    """Two million characters: a search that starts anew at every one does not end."""
    size = 2_000_000
    assert read(f"Nila{' ' * size}") == (f"Nila{' ' * size}", [])
    text, (citation,) = read(f"Nila.{' ' * size}x {A}")
    assert (len(text), citation.text) == (size + 6, "x")
    assert [*statement_ends("\n" * size, 0)] == []
    cutter = StatementCutter(0)
    assert [piece for piece in cutter.take(f"Nila{chr(10) * size}") if piece is None] == []
    assert [*cutter.take("x")][-2:] == [None, "x"]


@pytest.mark.parametrize("seed", range(20))
def test_statements_end_where_a_plain_search_finds_it(seed):
    plain = re.compile(r"""(?:[.!?]["')\]]*\s+|[\u3002\uff01\uff1f\n]\s*)(?=\S)""")
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices([".", "!", '"', ")", " ", "\n", "\t", "\u3002", "x", "["], k=rng.randint(0, 14)))
        begin = rng.randint(0, len(text))
        assert [*statement_ends(text, begin)] == [found.end() for found in plain.finditer(text, begin)], text
        more = text + "".join(rng.choices([" ", "\n", '"', "x"], k=3))
        new = {found.end() for found in plain.finditer(more)} - {found.end() for found in plain.finditer(text)}
        assert new <= {*statement_ends(more, last_gap(text, 0))}, (text, more)
