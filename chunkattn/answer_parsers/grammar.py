"""Grammars in llguidance's dialect of Lark, built rule by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TokenId = Callable[[str], int | None]
"""Function from a text to the id of the special token that has it, or None. Patterns and literals match no special token."""

ANY_TEXT = "/(?s:.*)/"
"""Pattern of any text."""
_AS_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in JSON as chat templates write it."""


def quoted(text: str) -> str:
    """Return a text as a literal of a grammar; an empty one matches nothing else."""
    return json.dumps(text, ensure_ascii=False)


def json_of(schema: Mapping[str, Any] | bool) -> str:
    """Return the expression of JSON that fits a schema, written as chat templates write it."""
    own = {} if schema is True else {"not": {}} if schema is False else dict(schema)
    return f"%json {json.dumps({**own, 'x-guidance': _AS_TEMPLATES}, ensure_ascii=False)}"


class Grammar:
    """Rules of a grammar.

    Args:
        token_id: see `TokenId`.
    """

    def __init__(self, token_id: TokenId) -> None:
        self._token_id, self._lines = token_id, list[str]()
        self._names = dict[str, str]()

    def marker(self, text: str) -> str:
        """Return the expression of a text that is one special token of the model, or else of its letters."""
        token = self._token_id(text)
        return quoted(text) if token is None else f"<[{token}]>"

    def is_token(self, text: str) -> bool:
        """Return whether a text is one special token, which no pattern matches."""
        return self._token_id(text) is not None

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return its name. Rules of one body share it.

        Args:
            body: expression of the rule.
            options: options of the rule's lexeme, such as `lazy`.
        """
        return self._add("r", f"{f'[{options}]' if options else ''}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal, and return its name. Terminals of one body share it."""
        return self._add("T", f": {body}")

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """Add a rule of JSON that fits a schema, and return its name."""
        return self.rule(json_of(schema))

    def before(self, marker: str) -> str:
        """Add a rule of any text up to a marker and with it, and return its name."""
        if self.is_token(marker):
            return self.rule(f"{ANY_TEXT} {self.marker(marker)}")
        return self.rule(self.terminal(f"{ANY_TEXT} {quoted(marker)}"), "lazy")

    def listed(self, entries: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the expression of entries in their order, with a separator between two.

        Args:
            entries: expression of each entry, and whether the list must have it.
            separator: text between two entries.
        """
        empty = quoted("")
        behind, first = empty, empty  # what may follow an entry, and what may begin the list
        for entry, is_required in reversed(entries):
            alone = self.rule(f"{entry} {behind}")
            first = alone if is_required else self.rule(f"{alone} | {first}")
            more = f"{quoted(separator)} {entry} {behind}"
            behind = self.rule(more if is_required else f"{more} | {behind}")
        return first

    def nested(self, grammar: str) -> str:
        """Add a rule of what another grammar describes, and return its name."""
        name = self.forward()
        self.define(name, f"%lark {{\n{grammar}\n}}")
        return name

    def forward(self) -> str:
        """Return the name of a rule whose body `define` adds later, since it refers to itself."""
        name = f"f{len(self._names)}"
        self._names[name] = name
        return name

    def define(self, name: str, body: str) -> None:
        """Add the body of a rule from `forward`."""
        self._lines.append(f"{name}: {body}")

    def text(self, start: str) -> str:
        """Return the grammar that begins with an expression."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _add(self, kind: str, line: str) -> str:
        if (name := self._names.get(kind + line)) is None:
            name = self._names[kind + line] = f"{kind}{len(self._names)}"
            self._lines.append(f"{name}{line}")
        return name


def either(bodies: Sequence[str]) -> str:
    """Return the expression of one of several."""
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"
