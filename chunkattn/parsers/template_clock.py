"""The clock of a chat template: `strftime_now` over one fixed time."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

_FUNCTION, _TABLE = "strftime_now", "chunkattn_times"
# transformers takes no functions as variables, so the template gets its clock as a macro over a table of texts, in place of the
# function of the same name. `trim_blocks` removes the line break at the end, as if the template began behind it.
_MACRO = (
    f"{{% macro {_FUNCTION}(format) %}}{{% if format in {_TABLE} %}}{{{{ {_TABLE}[format] }}}}{{% else %}}"
    "{% set s = namespace(open='') %}{% for c in format %}{% if s.open %}{% set s.open = s.open + c %}"
    f"{{% if c not in '-_0^#EO' %}}{{{{ {_TABLE}.get(s.open, s.open) }}}}{{% set s.open = '' %}}{{% endif %}}"
    "{% elif c == '%' %}{% set s.open = c %}{% else %}{{ c }}{% endif %}{% endfor %}{{ s.open }}{% endif %}{% endmacro %}\n"
)
_DIRECTIVES = tuple(f"%{flag}{c}" for flag in ("", *"-_0^#EO") for c in "%aAbBcCdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ")


def fixed_clock(template: str, now: datetime) -> tuple[str, Mapping[str, Any]]:
    """Return a template in which `strftime_now` shows one time, and the variables that it needs.

    Args:
        template: text of a chat template.
        now: time that the template shows.
    """
    if _FUNCTION not in template:
        return template, {}
    times = {}
    for directive in (*_formats(template), *_DIRECTIVES):
        try:
            times[directive] = now.strftime(directive)
        except ValueError:  # a directive that this platform does not know
            continue
    return _MACRO + template, {_TABLE: times}


@lru_cache(maxsize=64)
def _formats(template: str) -> tuple[str, ...]:
    """Return the constant texts in a template that may be formats, which need no table of directives."""
    formats = []
    try:
        for _, kind, value in Environment().lex(template):
            if kind == "string" and "%" in value:
                formats.append(ast.literal_eval(value))
    except (TemplateSyntaxError, SyntaxError, ValueError):  # rendering raises the error
        pass
    return tuple(formats)
