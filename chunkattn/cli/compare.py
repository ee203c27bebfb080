"""Comparison of two prompts for `chunkattn inspect --compare`: where they part, and what the second can reuse."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkattn.errors import ConfigError
from chunkattn.layout import ChunkLayout, Segment
from chunkattn.parsers import ParsedPrompt, PromptParser
from chunkattn.parsers.joined import in_mode
from chunkattn.terminal.files import is_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AROUND = 24
"""Characters shown before and behind a difference."""
_SHOWN = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}
_TIME = re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\b\d{10}\b|\b(?:19|20)\d{2}\b")
_FILE_NAME = re.compile(r"\S*[/\\]\S*|\S+\.(?:json|jsonl|txt)", re.IGNORECASE)
"""Argument that is meant as a file rather than as a text: no whitespace, and a separator of paths or the ending of a file."""
DEFAULT_BLOCK_SIZE = 16
"""Tokens of a block where the option leaves it to the platform; GPUs have 64."""


@dataclass(frozen=True)
class Side:
    """One of two prompts.

    Attributes:
        prompt: the parsed prompt.
        salt: salt of the cache; None without one.
        tells_time: whether a chat template with the current time has rendered the prompt.
    """

    prompt: ParsedPrompt
    salt: str | None = None
    tells_time: bool = False


def read_side(source: str, parser: PromptParser, tokenizer: PreTrainedTokenizerBase) -> Side:
    """Return the prompt of an argument: a text, a file with a text, or a file with a saved JSON body.

    Args:
        source: text, split at the separator, or path.
        parser: parser of the prompts.
        tokenizer: tokenizer with the chat template.

    Raises:
        ConfigError: the file is missing or cannot be read, or the JSON object is no completion of one prompt and no chat.
        RequestError: the prompt is malformed.
    """
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8") if is_file(path) else source
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        if not body.keys() & {"messages", "prompt", "chunks"}:
            raise ConfigError("the JSON object is no body of a completion or chat; it needs `messages`, `prompt` or `chunks`")
        return _of_body(body, parser, tokenizer)
    if not is_file(path) and _FILE_NAME.fullmatch(source):
        raise ConfigError(f"no such file: {source} (an argument without spaces that looks like a path is one)")
    return Side(parser.parse(text, True))


def _of_body(source: dict[str, Any], parser: PromptParser, tokenizer: PreTrainedTokenizerBase) -> Side:
    from pydantic import ValidationError

    from chunkattn.schema.generation import ChatBody, CompletionBody, named_documents

    try:
        if "messages" in source:
            chat = ChatBody.model_validate(source)
            _refuse_ids(named_documents(chat.documents))
            messages = [message.plain() for message in chat.messages]
            parsed = parser.parse_chat(messages, chat.chunks({}), **chat.template_options())
            parsed = in_mode(parsed, chat.chunk_mode, parser.strategy, parser.gap)
            return Side(parsed, chat.cache_salt, "strftime_now" in str(getattr(tokenizer, "chat_template", None)))
        body = CompletionBody.model_validate(source)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"the saved body cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    _refuse_ids(named_documents(body.chunks.documents) if body.chunks is not None else {})
    body_parser = parser if body.add_special_tokens else parser.without_leading()
    chunk_aware = True if body.chunk_aware is None else body.chunk_aware
    prompts = body.prompts({})
    if len(prompts) != 1:
        raise ConfigError(f"the saved body has {len(prompts)} prompts; save one body for each prompt to compare them")
    parsed = in_mode(body_parser.parse(prompts[0], chunk_aware), body.chunk_mode, parser.strategy, parser.gap)
    return Side(parsed, body.cache_salt)


def _refuse_ids(named: Any) -> None:
    if named:
        raise ConfigError("the saved body names stored documents by id; put their texts in their place to compare them")


@dataclass(frozen=True)
class PartMatch:
    """A part of the second prompt beside its counterpart in the first.

    Attributes:
        name: name of the part in the second prompt.
        reused: number of its tokens whose K/V the cache can have from the first prompt.
        text: what to say about the part.
        first: counterpart as token ids; None if there is none.
        second: the part as token ids.
    """

    name: str
    reused: int
    text: str
    first: list[int] | None
    second: list[int]


def match_parts(first: Side, second: Side, block_size: int) -> list[PartMatch]:
    """Return the parts of the second prompt, each with what it could reuse if the first was computed just before.

    The rules are those of the cache: a part follows everything it depends on, a part that is equal is reused whole, any other
    in full blocks, and the last token of a prompt is always computed.

    Args:
        first: the earlier prompt.
        second: the later prompt.
        block_size: tokens of a block.
    """
    a, b = first.prompt.layout, second.prompt.layout
    prefix_a, *chunks_a, question_a = (a.part(segment).tolist() for segment in a.segments)
    prefix_b, *chunks_b, question_b = (b.part(segment).tolist() for segment in b.segments)
    salted, kinds = first.salt == second.salt, a.is_plain == b.is_plain
    start_a = question_a if a.is_plain else prefix_a  # a plain prompt is cached as a prefix is
    matches = []
    follows = salted and kinds and prefix_a == prefix_b
    otherwise = ", but what comes before it differs" if salted else ", but the salt differs"

    def blocks(first: Sequence[int], second: Sequence[int]) -> int:
        """Return the tokens of the full blocks at the start of both."""
        return _common(first, second) // block_size * block_size

    if not b.is_plain:
        text = "differs" if prefix_a != prefix_b else "equal" if salted else f"equal{otherwise}"
        reused = 0 if not salted else len(prefix_b) if follows else blocks(start_a, prefix_b)
        matches.append(PartMatch("prefix", reused, text, prefix_a, prefix_b))
        starts = [_position(a, segment) for segment in a.segments[1:-1]]
        for number, (chunk, segment) in enumerate(zip(chunks_b, b.segments[1:-1], strict=True)):
            places = [place for place, other in enumerate(chunks_a) if other == chunk]
            start = _position(b, segment)
            at_start = [other for other, begin in zip(chunks_a, starts, strict=True) if follows and begin == start]
            reused = len(chunk) if chunk in at_start else max((blocks(other, chunk) for other in at_start), default=0)
            text = f"equal to chunk {places[0]}" if places else "differs"
            if reused < len(chunk) and places:
                text += ", but its position differs" if follows else otherwise
            other = None if places or number >= len(chunks_a) else chunks_a[number]
            matches.append(PartMatch(segment.name, reused, text, other, chunk))
    # A plain prompt is reused as a prefix is, and a question behind the same chunks alone.
    same_chunks = sorted(filter(None, chunks_a)) == sorted(filter(None, chunks_b))
    earlier, follows = (start_a, salted) if b.is_plain else (question_a, follows and same_chunks)
    reused = blocks(earlier, question_b[:-1]) if follows else 0
    text = "equal" if question_a == question_b else "differs"
    if text == "equal" and not follows:
        text += otherwise
    elif text == "equal" and reused < len(question_b) and kinds:
        text += ", reused in full blocks without its last token"
    matches.append(PartMatch("prompt" if b.is_plain else "question", reused, text, question_a, question_b))
    return matches


def _position(layout: ChunkLayout, segment: Segment) -> int:
    """Return the position of the first token of a part; 0 for an empty one."""
    return int(layout.positions[segment.start]) if segment.end > segment.start else 0


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def compared(first: Side, second: Side, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Iterator[str]:
    """Yield the lines of a comparison.

    Args:
        first: the earlier prompt, A.
        second: the later prompt, B.
        tokenizer: tokenizer of both.
        block_size: tokens of a block.
    """
    parts = match_parts(first, second, block_size)
    if first.salt != second.salt:
        salts = ["none" if side.salt is None else repr(side.salt) for side in (first, second)]
        yield f"salt: A has {salts[0]}, B has {salts[1]}; prompts of different salts share nothing"
    if first.prompt.layout.is_plain != second.prompt.layout.is_plain:
        kinds = ["plain" if side.prompt.layout.is_plain else "in parts" for side in (first, second)]
        yield f"kind: A is {kinds[0]}, B is {kinds[1]}; they share the blocks at their start alone"
    for part in parts:
        yield f"{part.name}: {part.text}; {part.reused} of {len(part.second)} tokens could come from the cache"
        if part.first is not None and part.first != part.second:
            yield from (f"  {line}" for line in _difference(part.first, part.second, tokenizer))
    total, reused = sum(len(part.second) for part in parts), sum(part.reused for part in parts)
    yield f"B after A, in blocks of {block_size}: {reused} of {total} tokens could come from the cache, {total - reused} not"
    yield from _hints(first, second, parts, tokenizer)


def _difference(first: list[int], second: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield where two parts differ, in characters and in tokens."""
    from chunkattn.server.texts import TokenTexts

    a, b = str(tokenizer.decode(first)), str(tokenizer.decode(second))
    place = _common(a, b)
    token = _common(first, second)
    if place == len(a) == len(b):
        yield f"the texts are equal, and token {token} differs: the parts come as other token ids"
    else:
        yield f"from character {place}, token {token}: A {_name(a, place)}, B {_name(b, place)}"
    texts = TokenTexts(tokenizer, ())
    for name, text, ids in (("A", a, first), ("B", b, second)):
        piece = f"'{visible(texts.piece(ids[token]))}'" if token < len(ids) else "no token"
        yield f"{name}: {_excerpt(text, place)}   token {token}: {piece}"


def _name(text: str, place: int) -> str:
    """Return the name of a character, or the end of a text."""
    if place >= len(text):
        return "ends"
    character = text[place]
    return f"has {visible(character)} (U+{ord(character):04X} {unicodedata.name(character, 'control character').lower()})"


def _excerpt(text: str, place: int) -> str:
    begin, end = max(0, place - _AROUND), place + _AROUND
    before, behind = visible(text[begin:place]), visible(text[place:end])
    return f"{'…' if begin else ''}{before}⟦{behind}{'…' if end < len(text) else ''}⟧"


def visible(text: str) -> str:
    """Return a text with every space, line end and character without a glyph in a form that can be seen.

    Args:
        text: any text.
    """
    shown = []
    for character in text:
        hidden = unicodedata.category(character)[0] in "ZC" or unicodedata.combining(character)
        shown.append(_SHOWN.get(character) or (f"<U+{ord(character):04X}>" if hidden else character))
    return "".join(shown)


def _hints(first: Side, second: Side, parts: Sequence[PartMatch], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield what to change, for the first part that differs."""
    if first.tells_time or second.tells_time:
        yield "hint: the chat template writes the current time (strftime_now), so the prefix changes with it; pass a fixed date"
    if first.salt != second.salt:
        yield "hint: the cache_salt differs; send the same one with requests that may share the cache"
    part = next((part for part in parts if part.first is not None and part.first != part.second), None)
    if part is None or part.first is None or part.name == "question":
        return
    a, b = str(tokenizer.decode(part.first)), str(tokenizer.decode(part.second))
    if a.split() == b.split():
        yield f"hint: the {part.name} differs in spaces or line ends alone; send the same bytes each time"
    elif unicodedata.normalize("NFKC", a) == unicodedata.normalize("NFKC", b):
        yield f"hint: the {part.name} differs in the form of its Unicode characters alone; normalise it (NFC) before sending"
    elif _TIME.sub("", a) == _TIME.sub("", b):
        yield f"hint: the {part.name} differs in a time, date or number alone; move it into the question"
    elif part.name == "prefix":
        yield "hint: documents follow the whole prefix; put what changes from request to request into the question"
