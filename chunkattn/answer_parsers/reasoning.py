"""`ReasoningParser`: how a family of models marks its reasoning before the answer; and the parsers by name."""

from __future__ import annotations

from dataclasses import dataclass

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.grammar import Grammar, TokenId
from chunkattn.answer_parsers.parser_registry import ParserRegistry
from chunkattn.answer_parsers.source import Source, Wait


@dataclass(frozen=True)
class ReasoningParser:
    """Reasoning between two markers at the beginning of an answer. The prompt may end with the first marker.

    Attributes:
        start: marker before the reasoning.
        end: marker behind it, which chat templates of the family have.
        is_implied: whether answers begin inside the reasoning, without the first marker, unless the prompt ends it.
    """

    start: str
    end: str
    is_implied: bool = False

    @property
    def traces(self) -> tuple[str, ...]:
        """Return the texts in the chat templates of the family: the marker behind the reasoning."""
        return (self.end,)

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Return whether a prompt ends inside the reasoning.

        Args:
            prompt: end of the prompt.
            continued: text of the message that the answer continues.
        """
        if (last := self._last(continued)) is not None:
            return last == self.start
        return prompt.rstrip().endswith(self.start) or (self.is_implied and not self.is_over(prompt))

    def is_over(self, prompt: str, continued: str = "") -> bool:
        """Return whether a prompt ends behind the reasoning. The arguments are those of `is_open`."""
        if (last := self._last(continued)) is not None:
            return last == self.end
        return prompt.rstrip().endswith(self.end)

    def _last(self, text: str) -> str | None:
        """Return the last marker in a text, or None."""
        place, marker = max((text.rfind(marker), marker) for marker in (self.start, self.end))
        return None if place < 0 else marker

    def read(self, source: Source, sink: Sink, is_open: bool) -> Wait[None]:
        """Read the reasoning and its end.

        Args:
            source: text of the answer.
            sink: collector of the events.
            is_open: whether the answer begins inside the reasoning.
        """
        source.mark()
        yield from source.space()
        has_start = yield from source.took(self.start)
        if not (is_open or has_start):
            source.rewind()
            return
        source.release()
        yield from source.space()
        inner = _Trimmed(sink)
        if (yield from source.until((self.end,), inner.add)) is not None:
            yield from source.took(self.end)
        sink.reasoning("")

    def before(self, grammar: Grammar, is_open: bool) -> str:
        """Return the expression of the reasoning before an answer that a grammar holds to a form.

        Args:
            grammar: grammar of the answer.
            is_open: whether the answer begins inside the reasoning, which then must end.
        """
        rest = f"{grammar.before(self.end)} /\\n{{0,2}}/"
        return rest if is_open else f"({grammar.rule(f'{grammar.marker(self.start)} {rest}')})?"

    def before_shape(self, shape: str, token_id: TokenId, *, is_open: bool) -> str:
        """Return the grammar of reasoning, and of an answer of a shape behind it.

        Args:
            shape: grammar of the answer.
            token_id: function from a text to the id of its special token, or None.
            is_open: whether the answer begins inside the reasoning.
        """
        grammar = Grammar(token_id)
        return grammar.text(f"{self.before(grammar, is_open)} {grammar.nested(shape)}")


class _Trimmed:
    """Text without the white space at its end, passed on in pieces."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._space = sink, ""

    def add(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._sink.reasoning(shown)


REASONING_PARSERS: ParserRegistry[ReasoningParser] = ParserRegistry("reasoning_parser")
REASONING_PARSERS.add(ReasoningParser("<think>", "</think>", is_implied=True), "deepseek_r1")
REASONING_PARSERS.add(ReasoningParser("<think>", "</think>"), "qwen3")
REASONING_PARSERS.add(ReasoningParser("[THINK]", "[/THINK]"), "mistral")
REASONING_PARSERS.add(ReasoningParser("<|channel>thought", "<channel|>"), "gemma4")

find_reasoning_parser = REASONING_PARSERS.find
