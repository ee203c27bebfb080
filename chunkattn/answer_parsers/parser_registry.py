"""`ParserRegistry`: parsers by the names of an option, which the chat template may choose."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from chunkattn.errors import ConfigError

AUTO, OFF = "auto", "none"
"""Values of options: choose by the chat template, and read nothing."""


class Traced(Protocol):
    """Parser of a family of models.

    Attributes:
        traces: texts in the chat templates of the family; a template has one of them.
    """

    @property
    def traces(self) -> tuple[str, ...]: ...  # noqa: D102


T = TypeVar("T", bound=Traced)


class ParserRegistry(Generic[T]):
    """Parsers by name. Of two whose traces a template has, the later one is chosen.

    Args:
        option: option that names a parser, for error messages.
    """

    def __init__(self, option: str) -> None:
        self._option = option
        self._parsers: dict[str, T] = {}

    def add(self, parser: T, *names: str) -> None:
        """Register a parser under names of the option. Later parsers win."""
        self._parsers.update(dict.fromkeys(names, parser))

    def names(self) -> list[str]:
        """Return the names of all parsers."""
        return sorted(self._parsers)

    def find(self, name: str, template: str) -> T | None:
        """Return a parser by its name, or by the chat template.

        Args:
            name: name of a parser, `"auto"` or `"none"`.
            template: text of the chat template, which decides under `"auto"`.

        Returns:
            The parser; None for `"none"`, and under `"auto"` for a template without known traces.

        Raises:
            ConfigError: there is no such parser.
        """
        if name == OFF:
            return None
        if name == AUTO:
            found = reversed(self._parsers.values())
            return next((parser for parser in found if any(trace in template for trace in parser.traces)), None)
        if name not in self._parsers:
            raise ConfigError(f"{self._option} {name!r} is unknown; choose auto, none, {', '.join(self.names())}")
        return self._parsers[name]
