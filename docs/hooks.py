"""Reference tables, which `make reference` writes into the pages from the code, and hooks of MkDocs.

A line `<!-- table: NAME -->` begins the table `NAME` of a page, and a line `<!-- end of table -->` ends it. What is between the
two lines is generated: after a merge conflict in it, run `make reference`. `tests/test_docs.py` checks that the pages are up to
date.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

ROOT = Path(__file__).parent.parent
REPOSITORY_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "readme.md"}
"""Files of the repository that are pages of the site, and their place there."""


@cache
def commands() -> dict[str, Any]:
    """Return every command of `chunkattn` by its name, such as `cache build`."""
    from chunkattn.cli import app

    def walk(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
        if subcommands := getattr(command, "commands", None):
            for name, subcommand in subcommands.items():
                yield from walk(subcommand, *names, name)
        else:
            yield " ".join(names), command

    return dict(walk(typer.main.get_command(app)))


def metrics(of: str = "server") -> list[Any]:
    """Return the Prometheus collectors of engine and server, or of the gateway."""
    from prometheus_client import CollectorRegistry

    from chunkattn.engine.metrics import EngineMetrics
    from chunkattn.gateway.metrics import GatewayMetrics
    from chunkattn.server.engine_gauges import EngineGauges
    from chunkattn.web.http_state import HttpMetrics

    holders: tuple[Any, ...] = (EngineMetrics(), EngineGauges(), HttpMetrics())
    if of == "gateway":
        holders = (GatewayMetrics(CollectorRegistry()),)
    return [value for holder in holders for value in vars(holder).values() if hasattr(value, "describe")]


def routes() -> list[tuple[str, str, str]]:
    """Return method, path and purpose of every route of the server."""
    from fastapi.routing import APIRoute

    from chunkattn.documents.routes import documents_router
    from chunkattn.server.routes import (
        decisions,
        generation,
        messages,
        page,
        reports,
        responses,
        scoring,
        status,
        systemone,
        tokens,
    )

    routers = [module.router for module in (generation, responses, messages, scoring, decisions, systemone)]
    routers += [documents_router(APIRoute), *(module.router for module in (reports, tokens, status, page))]
    found = [("GET", "/openapi.json", "This API as an OpenAPI document.")]
    for router in routers:
        for route in router.routes:
            path = re.sub(r":\w+}", "}", route.path)  # {name:path}
            found += [(method, path, _first_line(route.description)) for method in sorted(route.methods)]
    return found


@cache
def bodies() -> dict[str, Any]:
    """Return every request body by its name."""
    from chunkattn.schema import anthropic, decisions, documents, generation, responses, scoring, systemone
    from chunkattn.server.routes import tokens

    listed = (
        generation.CompletionBody,
        generation.ChatBody,
        responses.ResponsesBody,
        anthropic.MessagesBody,
        scoring.ScoreBody,
        scoring.GenerativeScoringBody,
        scoring.RerankBody,
        decisions.DecisionsBody,
        systemone.SystemOneBody,
        documents.CacheBody,
        documents.ForgetBody,
        documents.ChangeBody,
        tokens.TokenizeBody,
        tokens.DetokenizeBody,
        tokens.InspectBody,
    )
    return {body.__name__: body for body in listed}


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _code_with_pipes(span: str) -> str:
    """Return a code span as HTML, since renderers disagree about an escaped pipe within backticks."""
    return f"<code>{html.escape(span, quote=False).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    """Return a text as a table cell; a line break stays one."""
    lines = [" ".join(line.split()) for line in text.strip().split("\n")]
    parts = re.split(r"`([^`]*)`", "<br>".join(lines))
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = _code_with_pipes(part) if "|" in part else f"`{part}`"
        else:
            parts[place] = re.sub(r"<(?!br>)", "&lt;", part).replace("|", r"\|")
    return "".join(parts)


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = ("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _sentence(text: str | None) -> str:
    text = " ".join((text or "").split())
    return text[:1].upper() + text[1:]


def _default(value: Any) -> str:
    """Return the default of a Python argument; None gives an empty text."""
    return "" if value is None or callable(value) else f"`{value!r}`"


def _flag_default(value: Any) -> str:
    """Return the default of a flag, as one would type it; None gives an empty text, and so does an empty list."""
    if value in (None, []) or callable(value):
        return ""
    if isinstance(value, list):
        return ", ".join(map(_flag_default, value))
    return f"`{'on' if value is True else 'off' if value is False else shlex.quote(str(value))}`"


def _json_default(value: Any) -> str:
    """Return the default of a field of a body; null gives an empty text."""
    return "" if value is None else f"`{json.dumps(value)}`"


def _python_type(annotation: Any) -> str:
    """Describe an annotation, such as `str | None` or `Annotated[list[int] | None, ...]`, in code spans."""
    while "Annotated" in str(get_origin(annotation)):
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and not get_args(annotation):
        return f"`{annotation.__name__}`"
    return " or ".join(f"`{re.sub(r'[a-z_]+[.](?=[A-Z])', '', kind)}`" for kind in str(annotation).split(" | "))


def _flags(parameter: Any) -> str:
    return ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))


def _command_table(name: str) -> str:
    """Arguments and flags of one command; flags that another place describes alike are listed below the table, with links."""
    command, rows, listed = commands()[name], [("argument or flag", "default", "meaning")], _Listed()
    for parameter in command.params:
        default = "required" if parameter.required else _flag_default(parameter.default)
        if parameter.param_type_name == "argument":
            rows.append((f"`{parameter.name.upper()}`", default, parameter.help or ""))
        elif place := _option_place(parameter) or _earlier_place(name, parameter):
            listed.add(place, _flags(parameter))
        else:
            rows.append((_flags(parameter), default, parameter.help or ""))
    table = _table(*rows) if len(rows) > 1 else "" if listed else "It takes no flags."
    return "\n\n".join(filter(None, (_first_line(command.help), table, str(listed))))


class _Listed(dict[str, list[str]]):
    """Names of flags or fields by the place that describes them."""

    def add(self, place: str, names: str) -> None:
        self.setdefault(place, []).append(names)

    def __str__(self) -> str:
        lines = []
        for place, names in self.items():
            has_all = _flags_of(place) == {flag for text in names for flag in text.split(", ")}
            lines.append(f"- {place}: {'all' if has_all else ', '.join(names)}")
        return "\n".join(lines)


@cache
def _flags_of(place: str) -> set[str]:
    """Return every flag that the options page shows behind a link, in code spans; none for other links."""
    if place == "[Gateway](options.md#gateway)":  # its table has no flags
        return set()
    parameters = [p for command in commands().values() for p in command.params if p.param_type_name == "option"]
    return {flag for p in parameters if _option_place(p) == place for flag in _flags(p).split(", ")}


def _option_place(parameter: Any) -> str:
    """Return a link to the option that a flag sets, with the option's default and meaning."""
    from chunkattn.config import EngineConfig
    from chunkattn.gateway.options import GatewayOptions
    from chunkattn.options import options_of
    from chunkattn.web.options import ServerConfig

    groups = {"[Gateway](options.md#gateway)": GatewayOptions, "[Server](options.md#server)": ServerConfig}
    for place, cls in (groups | {"[Engine](options.md)": EngineConfig}).items():
        if option := options_of(cls).get(parameter.name):
            default = list(option.default) if option.kind is tuple else option.default
            if (option.help, default) == (parameter.help, parameter.default):
                return place
    return ""


def _earlier_place(name: str, parameter: Any) -> str:
    """Return a link to the first command above `name` on the page that has the same flag."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    above = takewhile(lambda other: other != name, re.findall(r"^## chunkattn (.*)$", page, flags=re.MULTILINE))

    def described(flag: Any) -> tuple[Any, ...]:
        return flag.opts, flag.secondary_opts, flag.default, flag.help, flag.required, flag.multiple

    first = next((other for other in above if described(parameter) in map(described, commands()[other].params)), "")
    return first and f"As in [{first}](#chunkattn-{first.replace(' ', '-')})"


def _option_texts() -> dict[str, str]:
    """Return the description of every option of engine and server; the help of commands has no code spans."""
    from chunkattn.config import EngineConfig
    from chunkattn.web.options import ServerConfig

    return _described(ServerConfig) | _described(EngineConfig)


def _options_table(panel: str) -> str:
    """Options of one group of `chunkattn serve`, as its dataclass has them."""
    from chunkattn.config import EngineConfig
    from chunkattn.web.options import ServerConfig

    options = {option.name: option for cls in (ServerConfig, EngineConfig) for option in fields(cls)}
    texts = _option_texts()
    rows = [("option", "type", "default", "meaning")]
    for parameter in commands()["serve"].params:
        if getattr(parameter, "rich_help_panel", None) == panel:
            option = options[parameter.name]
            name = f"`{option.name}`\n{_flags(parameter)}"
            rows.append((name, _python_type(option.type), _default(option.default), _sentence(texts[option.name])))
    return _table(*rows)


def _fields_table(path: str) -> str:
    """Fields of a dataclass, such as `chunkattn.SamplingParams`."""
    cls = _imported(path)
    texts, rows = _described(cls), [("field", "type", "default", "meaning")]
    for field in fields(cls):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "required" if default is MISSING else _default(default)
        rows.append((f"`{field.name}`", _python_type(field.type), shown, _sentence(texts[field.name])))
    return _table(*rows)


def _imported(path: str) -> Any:
    """Return the module, or the member of a module, at a dotted path."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(path) if found is None else found


def _names_table() -> str:
    """Names of the page `reference/python.md` that need no vLLM, and the errors, by source file."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    names: dict[str, list[str]] = {}
    for path in re.findall(r"^::: (?!chunkattn\.integrations)(\S+)$", page, flags=re.MULTILINE):
        thing = _imported(path)
        members = [thing] if callable(thing) else [v for v in vars(thing).values() if inspect.getmodule(v) is thing]
        for member in members:
            source = Path(inspect.getsourcefile(member) or "").relative_to(ROOT)
            names.setdefault(f"`{source}`", []).append(f"`{member.__name__}`")
    return _table(("source", "names"), *((source, ", ".join(listed)) for source, listed in names.items()))


def _metrics_table(of: str) -> str:
    rows = [("metric", "type", "labels", "meaning")]
    for collector in metrics(of or "server"):
        (metric,) = collector.describe()
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        rows.append((f"`{name}`", metric.type, labels, metric.documentation))
    return _table(*rows)


def _routes_table() -> str:
    paths: dict[str, list[str]] = {}
    for method, path, purpose in routes():
        paths.setdefault(purpose, []).append(f"`{method} {path}`")
    return _table(("route", "purpose"), *((", ".join(listed), purpose) for purpose, listed in paths.items()))


def _kind(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "$ref" in schema:
        return "object"
    if "const" in schema:
        return f'"{schema["const"]}"'
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(s) for s in branches if s.get("type") != "null")) or "null"
    if schema.get("type") == "array":
        entry = _kind(schema.get("items", {}))
        return rf"({entry})\[\]" if " or " in entry else rf"{entry}\[\]"  # else the first pair of brackets is a link
    return str(schema.get("type", "any"))


_CALLS = {
    "ChatBody": "chat",
    "ResponsesBody": "chat",
    "MessagesBody": "chat",
    "ScoreBody": "score",
    "GenerativeScoringBody": "score",
    "RerankBody": "rerank",
    "DecisionsBody": "decide",
    "SystemOneBody": "decide",
    "CacheBody": "precompute",
}
"""Method of `LLM` that a body is for: its docstring describes the fields that the body does not."""


@cache
def _body_fields(name: str) -> dict[str, tuple[str, str, str]]:
    """Return kind, default and meaning of every field of a body that has an effect.

    The meaning is that of the body, of the method of `LLM` that it is for, or of the method's options.
    """
    from chunkattn.calls.decide import DecideOptions
    from chunkattn.calls.rerank import RerankOptions
    from chunkattn.calls.score_inputs import ScoreOptions
    from chunkattn.llm import LLM
    from chunkattn.sampling_params import SamplingParams

    call = _CALLS.get(name, "generate")
    options = {"score": ScoreOptions, "rerank": RerankOptions, "decide": DecideOptions}.get(call, SamplingParams)
    texts = _described(getattr(LLM, call)) | _described(options)
    schema, listed = bodies()[name].model_json_schema(), {}
    for field, about in schema["properties"].items():
        if "accepted" not in about:  # `_no_effect_table` has the others
            default = "required" if field in schema.get("required", ()) else _json_default(about.get("default"))
            text = _MEANINGS.get(f"{name}.{field}") or about.get("description") or _MEANINGS.get(field) or texts.get(field, "")
            listed[field] = (_kind(about), default, _sentence(text))
    return listed


_GENERATING = ("CompletionBody", "ChatBody", "ResponsesBody", "MessagesBody")
EVERY_BODY = ("model", "user")
"""Fields of every body, which its table leaves out."""


def _body_table(name: str) -> str:
    """Fields of one request body; fields that another place describes alike are listed below the table, with links."""
    from chunkattn.sampling_params import SamplingParams

    sampling = {field: _sentence(text) for field, text in _described(SamplingParams).items()}
    earlier = [other for other in takewhile(lambda other: other != name, bodies()) if other in _HEADINGS]
    rows, listed = [("field", "type", "default", "meaning")], _Listed()
    for field, described in _body_fields(name).items():
        same = [other for other in earlier if _body_fields(other).get(field) == described]
        if field in EVERY_BODY:
            continue
        if described[2] == sampling.get(field) and name in _GENERATING and field != "max_tokens":
            listed.add("[Sampling](options.md#sampling-parameters)", f"`{field}`")
        elif same:
            listed.add(f"As in [{_HEADINGS[same[0]]}](#{_HEADINGS[same[0]].lower()})", f"`{field}`")
        else:
            rows.append((f"`{field}`", *described))
    return "\n\n".join(filter(None, (_table(*rows) if len(rows) > 1 else "", str(listed))))


_HEADINGS = {"CompletionBody": "Completions", "ChatBody": "Chat", "ScoreBody": "Scores", "RerankBody": "Reranking"}
"""Sections of the page about HTTP with the bodies whose fields other bodies share."""


def _no_effect_table() -> str:
    """Fields that are accepted and have no effect, and the bodies and objects that take them."""
    from chunkattn.schema import anthropic, responses
    from chunkattn.schema.decisions import FunctionCall, InputText
    from chunkattn.schema.generation import ContentPart, Message

    places = {
        "completions": bodies()["CompletionBody"],
        "chats": bodies()["ChatBody"],
        "responses": bodies()["ResponsesBody"],
        "messages API": bodies()["MessagesBody"],
        "messages": Message,
        "parts": ContentPart,
        "items of a response's input": responses.SaidMessage,
        "its reasoning items": responses.Reasoned,
        "its texts of the assistant": responses.SaidText,
        "`reasoning` of responses": responses.ReasoningOptions,
        "`text` of responses": responses.TextOptions,
        "`stream_options` of responses": responses.EventOptions,
        "text blocks": anthropic.TextBlock,
        "thinking blocks": anthropic.ThinkingBlock,
        "tool results": anthropic.ToolResultBlock,
        "tools of messages": anthropic.Tool,
        "`thinking` of messages": anthropic.Thinking,
        "decisions": bodies()["DecisionsBody"],
        "parts of a decision's input": InputText,
        "calls in a decision's input": FunctionCall,
    }
    values: dict[tuple[str, str], list[str]] = {}
    for place, model in places.items():
        for name, field in model.model_fields.items():
            extra = field.json_schema_extra or {}
            if "accepted" in extra:
                values.setdefault((name, extra["accepted"]), []).append(place)
    names: dict[tuple[str, str], list[str]] = {}
    for (name, accepted), where in values.items():
        names.setdefault((", ".join(where), accepted), []).append(f"`{name}`")
    return _table(("in", "accepted values", "fields"), *((*key, ", ".join(listed)) for key, listed in names.items()))


_MEANINGS = {
    "stream": "Send server-sent events.",
    "stream_options": "`include_usage`, `continuous_usage_stats`; with `stream` alone.",
    "priority": "The lower goes first.",
    "algorithm": "Name of a scoring algorithm; by default the engine's `score_algorithm`.",
    "chat_template_kwargs": "Variables of the chat template.",
    "ChatBody.logprobs": "Whether log-probabilities are returned.",
    "ChatBody.top_logprobs": "Number of likeliest tokens at each step; needs `logprobs`.",
    "ChatBody.max_completion_tokens": "Another name of `max_tokens`.",
    "ChatBody.messages": "The conversation.",
    "ScoreBody.labels": "Texts of one token each; this or `label_token_ids`. One list for all items, or one list per item.",
    "ScoreBody.label_token_ids": "Token ids of the labels; this or `labels`, in the same forms.",
    "ScoreBody.text_1": "Pairs: the first text, or texts.",
    "ScoreBody.text_2": "Pairs: the second text, or texts.",
    "ScoreBody.queries": "Pairs: another name of `text_1`.",
    "ScoreBody.documents": 'Pairs: another name of `text_2`; also `{"id"}` of stored documents.',
    "ScoreBody.instruction": "Pairs: as in reranking.",
    "ScoreBody.template": "Pairs: as in reranking.",
    "ScoreBody.max_tokens_per_doc": "Pairs: as in reranking.",
    "ScoreBody.order": "Pairs: as in reranking.",
    "GenerativeScoringBody.query": "Text or token ids.",
    "GenerativeScoringBody.items": "Texts or token ids, as the query is.",
    "GenerativeScoringBody.label_token_ids": "Token ids of the labels.",
    "RerankBody.documents": 'Texts, objects with a `text`, or `{"id"}` of stored documents.',
    "RerankBody.return_documents": "Return the documents with the results.",
    "RerankBody.template": "Name of a rerank template; by default the model's.",
    "CacheBody.documents": "Texts, token ids, or objects with an `id` and a `text`.",
    "CacheBody.ttl_s": "Seconds until a document is deleted.",
    "ChangeBody.pinned": "Whether the document is pinned.",
    "TokenizeBody.prompt": "Text; this or `messages`.",
    "TokenizeBody.messages": "A conversation; this or `prompt`.",
    "TokenizeBody.add_special_tokens": "Begin with the tokenizer's leading special tokens.",
    "TokenizeBody.return_token_strs": "Return the text of every token too.",
    "DetokenizeBody.tokens": "Token ids.",
    "InspectBody.prompt": "Text or token ids; this or `chunks`.",
    "InspectBody.chunks": "The prompt in parts; this or `prompt`.",
    "InspectBody.cache_salt": "Salt of the stored documents that the chunks name.",
    "InspectBody.add_special_tokens": "Begin a text with the tokenizer's leading special tokens.",
    "InspectBody.chunk_aware": "Split the prompt at the separator; the engine's default when absent.",
}
"""Meanings of fields that the code does not describe, by field, or by `body.field`; a `body.field` entry comes first."""


def _described(thing: Any) -> dict[str, str]:
    """Return the description of every attribute or argument, from a docstring."""
    from chunkattn.options import descriptions

    return {name: text for name, text in descriptions(thing).items() if not text.startswith("see `")}


TABLES: dict[str, Callable[[str], str]] = {
    "command": _command_table,
    "options": _options_table,
    "fields": _fields_table,
    "names": lambda _: _names_table(),
    "metrics": _metrics_table,
    "routes": lambda _: _routes_table(),
    "body": _body_table,
    "no-effect": lambda _: _no_effect_table(),
}
_END = "<!-- end of table -->"
_TABLE = re.compile(rf"<!-- table: ([\w-]+) ?(.*?) ?-->\n(?:(?:(?!<!-- table:).)*?{_END}\n)?", re.DOTALL)


def expand(markdown: str) -> str:
    """Return a page with its tables as the code has them now."""

    def table(found: re.Match[str]) -> str:
        name = f"{found[1]} {found[2]}".strip()
        return f"<!-- table: {name} -->\n\n{TABLES[found[1]](found[2])}\n\n{_END}\n"

    return _TABLE.sub(table, markdown)


def main() -> None:
    """Write the tables of all pages, and print the pages that change."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (expanded := expand(text)) != text:
            page.write_text(expanded, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the repository's own pages."""
    from mkdocs.structure.files import File

    for source, target in REPOSITORY_PAGES.items():
        text = (
            (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](").replace("[examples/](examples)", "`examples/`")
        )
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Check the tables of a page, and turn links to the repository's own pages into links within the site.

    Raises:
        PluginError: a table differs from the code.
    """
    from mkdocs.exceptions import PluginError

    if expand(markdown) != markdown:
        raise PluginError(f"the tables of docs/{page.file.src_uri} are out of date; run `make reference`")
    up = "../" * page.file.src_uri.count("/")
    for source, target in REPOSITORY_PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{target}", markdown)
    return re.sub(rf"<!-- table: .*? -->\n|{_END}\n", "", markdown)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
