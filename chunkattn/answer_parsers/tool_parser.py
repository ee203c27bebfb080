"""`ToolParser`: how a family of models writes calls of tools; and the parsers by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from secrets import choice, token_hex
from string import ascii_letters, digits
from typing import ClassVar, TypeVar

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.grammar import ANY_TEXT, Grammar, TokenId, either, quoted
from chunkattn.answer_parsers.parser_registry import ParserRegistry
from chunkattn.answer_parsers.source import Source, Wait
from chunkattn.answer_parsers.tools import Tool, Tools
from chunkattn.errors import RequestError

P = TypeVar("P", bound="ToolParser")


class ToolParser(ABC):
    """Form in which a family of models writes calls of tools.

    Attributes:
        traces: texts in the chat templates of the family; a template has one of them.
        openings: texts that begin calls, the usual one first; empty for calls that begin with the answer.
        markers: further texts of the form that may be special tokens, which texts leave out by default.
    """

    traces: ClassVar[tuple[str, ...]] = ()
    openings: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read what stands at an opening, with the opening.

        Returns:
            Whether a call has begun. The caller rewinds text that is none.
        """

    @abstractmethod
    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of one to `tools.most_calls` calls, without the first opening.

        Raises:
            RequestError: a schema cannot be enforced in this form.
        """

    def read(self, source: Source, sink: Sink, tools: Tools) -> Wait[None]:
        """Read an answer: content, with calls at the openings. A text that is no call is content.

        The beginning of a call that the end cuts off is none, where calls come alone or behind another one.
        """
        while True:
            drops_cut = sink.calls > 0 or tools.mode == "required"
            found = yield from source.until(self.openings, sink.content, drops_cut=drops_cut)
            if found is None:
                return
            source.mark()
            if not (yield from self.read_calls(source, sink, tools)):
                if drops_cut and (yield from source.cut_off()):
                    return
                source.rewind()
                sink.content(found)
                yield from source.took(found)
            source.release()

    def grammar(
        self,
        tools: Tools,
        token_id: TokenId,
        before: Callable[[Grammar], str] | None = None,
        shape: str | None = None,
    ) -> str:
        """Return the grammar of answers that make the calls they must make, and that hold all calls to their schemas.

        Args:
            tools: tools of the request.
            token_id: function from a text to the id of its special token, or None.
            before: function that returns the expression of what stands before the answer, such as reasoning.
            shape: grammar of an answer without calls; None for any text, which calls may follow.

        Raises:
            RequestError: as `calls`, or the form has no opening that tells calls from a shape.
        """
        grammar = Grammar(token_id)
        start = [] if before is None else [before(grammar)]
        calls = self.calls(grammar, tools)
        opening = [grammar.marker(self.openings[0])] if self.openings else []
        if tools.mode == "required":
            answer = " ".join([*opening, calls])
        elif shape is not None:
            if not opening:
                text = "this model's calls begin like JSON, so an answer has either a shape or tools that it may call"
                raise RequestError(f"{text}; set tool_choice to required or none", param="tool_choice")
            answer = f"({grammar.rule(' '.join([*opening, calls]))} | {grammar.nested(shape)})"
        else:
            answer = self.maybe(grammar, calls)
        return grammar.text(" ".join([*start, answer]))

    def maybe(self, grammar: Grammar, calls: str) -> str:
        """Return the expression of a text that may end with calls."""
        opening = self.openings[0]
        head, text = grammar.before(opening), grammar.terminal(ANY_TEXT)
        if not grammar.is_token(opening):
            text = grammar.terminal(f"{ANY_TEXT} & ~({ANY_TEXT} {either([*map(quoted, self.openings)])} {ANY_TEXT})")
        return f"({grammar.rule(f'{head} {calls}')} | {grammar.rule(text)})"

    def new_id(self) -> str:
        """Return a random id of a call, in OpenAI's format."""
        return f"call_{token_hex(12)}"


class CallsAtBeginning(ToolParser):
    """Form in which calls begin with the answer, in place of any other text.

    Attributes:
        first: character with which calls begin.
    """

    first: ClassVar[str]

    def read(self, source: Source, sink: Sink, tools: Tools) -> Wait[None]:
        """Read an answer: calls at its beginning, or content."""
        source.mark()
        if not (yield from self.read_calls(source, sink, tools)):
            source.rewind()
        source.release()
        yield from source.until((), sink.content)

    def maybe(self, grammar: Grammar, calls: str) -> str:
        """Return an expression that matches calls, or text that does not start like a call."""
        text = grammar.terminal(f"/[^\\{self.first}\\s]/ {ANY_TEXT}")
        return f"({grammar.rule(calls)} | {grammar.rule(text)})"


def short_id() -> str:
    """Return a random id of nine letters and digits, as Mistral's templates want."""
    return "".join(choice(ascii_letters + digits) for _ in range(9))


def one_of_tools(grammar: Grammar, tools: Tools, call: Callable[[Tool], str]) -> str:
    """Return the expression of a call of any function that may be called.

    Args:
        grammar: grammar of the rules.
        tools: tools of the request.
        call: function that returns the expression of a function's call.
    """
    return grammar.rule(either([grammar.rule(call(tool)) for tool in tools.callable]))


def repeated(grammar: Grammar, tools: Tools, first: str, further: str) -> str:
    """Return the expression of one to `tools.most_calls` calls.

    Args:
        grammar: grammar of the rules.
        tools: tools of the request.
        first: expression of the first call.
        further: expression of a call behind another one.
    """
    return first if tools.most_calls == 1 else f"{first} {grammar.rule(further)}{{0,{tools.most_calls - 1}}}"


TOOL_PARSERS: ParserRegistry[ToolParser] = ParserRegistry("tool_call_parser")


def register_tool_parser(*names: str) -> Callable[[type[P]], type[P]]:
    """Return a decorator that registers a class under names of the option `tool_call_parser`. Later classes win.

    Args:
        *names: names, the main one first.
    """

    def register(kind: type[P]) -> type[P]:
        TOOL_PARSERS.add(kind(), *names)
        return kind

    return register
