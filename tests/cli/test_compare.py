"""`chunkattn inspect --compare`: where two prompts part, and what it says the cache can reuse beside what the engine reuses."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkattn import SamplingParams
from chunkattn.cli import app
from chunkattn.cli.compare import match_parts, read_side, visible

PREFIX = "Read the documents and answer the question. Be brief, and name the document that says so."
ANA, BO, LONG = "Ana lives in Oslo.", "Bo likes honey.", "Ana lives in Oslo. " * 12
QUESTION = "Where does Ana live? " * 8
PAIRS = {
    "equal": ([PREFIX, ANA, BO, QUESTION], [PREFIX, ANA, BO, QUESTION]),
    "order of chunks": ([PREFIX, ANA, BO, QUESTION], [PREFIX, BO, ANA, QUESTION]),
    "one chunk more": ([PREFIX, ANA, QUESTION], [PREFIX, BO, ANA, QUESTION]),
    "another question": ([PREFIX, ANA, BO, QUESTION], [PREFIX, ANA, BO, "Who likes honey?"]),
    "longer question": ([PREFIX, ANA, QUESTION], [PREFIX, ANA, QUESTION + " Be brief."]),
    "space behind the prefix": ([PREFIX, ANA, QUESTION], [PREFIX + " ", ANA, QUESTION]),
    "space before the prefix": ([PREFIX, ANA, QUESTION], [" " + PREFIX, ANA, QUESTION]),
    "chunk with another end": ([PREFIX, LONG, QUESTION], [PREFIX, LONG + "Bo.", QUESTION]),
    "chunk cut short": ([PREFIX, LONG, QUESTION], [PREFIX, LONG[: len(LONG) // 2], QUESTION]),
    "plain": ([LONG + "Ana"], [LONG + "Bo"]),
    "plain, equal": ([LONG], [LONG]),
    "plain after parts": ([PREFIX, ANA, QUESTION], [PREFIX + ANA + QUESTION]),
    "parts after plain": ([PREFIX + ANA + QUESTION], [PREFIX, ANA, QUESTION]),
    "no prefix": (["", ANA, QUESTION], ["", BO, QUESTION]),
}


@pytest.fixture(scope="module")
def llm(demo):
    return demo


@pytest.mark.parametrize("name", PAIRS)
def test_what_it_predicts_is_what_the_engine_reuses(llm, name):
    texts = [" # # ".join(parts) for parts in PAIRS[name]]
    first, second = (read_side(text, llm.parser, llm.tokenizer) for text in texts)
    matches = match_parts(first, second, llm.limits.block_size)
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, temperature=0)
    found = [llm.generate(text, params, chunk_aware=True)[0] for text in texts][1]
    llm.reset_prefix_cache()
    assert sum(part.reused for part in matches) == found.num_cached_tokens
    assert [part.reused for part in matches[1:-1]] == list(found.num_cached_chunk_tokens)


def compare(a, b, *options):
    result = CliRunner().invoke(app, ["inspect", "--compare", str(a), str(b), *options])
    return result.output


def body(tmp_path, name, **fields):
    path = tmp_path / name
    path.write_text(json.dumps(fields))
    return path


def chunks(prefix):
    return {"prefix": prefix, "documents": [ANA], "question": "Where?"}


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (PREFIX, PREFIX + " ", ["B has · (U+0020 space)", "A ends", "hint: the prefix differs in spaces"]),
        ("Read\tthis.", "Read this.", ["A has → (U+0009 control character)", "Read⟦→this.⟧"]),
        ("Read\u00a0this.", "Read this.", ["<U+00A0>", "no-break space"]),
        ("Caf\u00e9.", "Cafe\u0301.", ["hint: the prefix differs in the form of its Unicode characters"]),
        ("At 11:52, read.", "At 11:53, read.", ["hint: the prefix differs in a time, date or number alone"]),
        ("Be kind.", "Be rude.", ["put what changes from request to request into the question"]),
    ],
)
def test_a_difference_of_prefixes_is_shown_in_visible_characters(tmp_path, a, b, said):
    shown = compare(body(tmp_path, "a", chunks=chunks(a)), body(tmp_path, "b", chunks=chunks(b)))
    for text in said:
        assert text in shown, shown
    assert "chunk 0: equal to chunk 0, but what comes before it differs" in shown


def test_salts_files_and_faults(tmp_path):
    a, b = (body(tmp_path, name, chunks=chunks(PREFIX), cache_salt=name) for name in "ab")
    shown = compare(a, b)
    assert "salt: A has 'a', B has 'b'" in shown
    assert "chunk 0: equal to chunk 0, but the salt differs; 0 of" in shown
    assert "hint: the cache_salt differs" in shown
    assert "could come from the cache" in compare(a, f"{PREFIX} # # {ANA} # # Where?")
    assert "names stored documents by id" in compare(a, body(tmp_path, "c", chunks={**chunks("x"), "documents": [{"id": "d"}]}))
    assert "the saved body cannot be read: max_tokens" in compare(a, body(tmp_path, "d", prompt="x", max_tokens="many"))
    assert "the saved body has 2 prompts" in compare(a, body(tmp_path, "e", prompt=["x", "y"]))
    for fields in ({}, {"input": "x"}, {"model": "m", "texts": ["x"]}):
        assert "is no body of a completion or chat" in compare(a, body(tmp_path, "f", **fields))
    assert "leave the other prompt" in compare("a", "b", "--prefix", "c")


def test_a_chat_template_takes_the_place_of_the_tokenizers(tmp_path):
    chats = [body(tmp_path, name, messages=[{"role": "user", "content": text}]) for name, text in (("a", ANA), ("b", BO))]
    shown = compare(*chats, "--chat-template", "At {{ strftime_now('%H') }}. Hi! {{ messages[0]['content'] }}")
    assert "Hi!·⟦Ana" in shown
    assert "the chat template writes the current time" in shown
    assert "chat_template has a fault in line 1" in compare(*chats, "--chat-template", "{{")


@pytest.mark.parametrize("name", ["nosuch.json", "NOSUCH.JSONL", "nosuch.txt", "folder/nosuch", "./a", "folder\\nosuch"])
def test_a_missing_file_is_an_error(name):
    result = CliRunner().invoke(app, ["inspect", "--compare", PREFIX, name])
    assert result.exit_code != 0
    assert f"no such file: {name}" in " ".join(result.output.split())


@pytest.mark.parametrize("text", ["Read", "Read a/b", "in nosuch.json", '{"prompt":"a/b"}', "1.5"])
def test_a_text_is_no_missing_file(llm, text):
    assert read_side(text, llm.parser, llm.tokenizer).prompt.layout.is_plain


def test_a_body_decides_whether_its_prompt_is_split(llm, tmp_path):
    prompt = f"{PREFIX} # # {ANA} # # Where?"
    for fields, plain in (({}, False), ({"chunk_aware": True}, False), ({"chunk_aware": False}, True)):
        side = read_side(str(body(tmp_path, "a", prompt=prompt, **fields)), llm.parser, llm.tokenizer)
        assert side.prompt.layout.is_plain is plain


def test_hidden_characters_become_visible():
    assert visible("a b\n\t\r\u200b\u00a0é\u0301") == "a·b↵→␍<U+200B><U+00A0>é<U+0301>"


def test_the_guide_shows_what_it_prints(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "slow.md").read_text()
    texts = re.findall(r'^  "(Read .*?)"', page, flags=re.MULTILINE)
    assert compare(*texts) in page
    (given,) = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL))
    later = json.loads(json.dumps(given).replace("09:15", "09:16"))
    a, b, c = body(tmp_path, "a", **given), body(tmp_path, "b", **later), body(tmp_path, "c", **given, cache_salt="team-b")
    assert compare(a, b) in page
    assert "hint: the cache_salt differs" in compare(a, c)
