"""MkDocs hooks: reference tables made from the code, and pages made from the files beside `docs/`.

A line `<!-- table: NAME -->` in a page becomes the table `NAME`. `tests/test_docs.py` uses the same functions without MkDocs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parent.parent
REPOSITORY_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "readme.md"}
"""Files of the repository that are pages of the site, and their place there."""


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


def metrics() -> list[Any]:
    """Return the Prometheus collectors of the engine and of the server."""
    from chunkattn.engine.metrics import EngineMetrics
    from chunkattn.server.middleware import HttpMetrics

    holders = (EngineMetrics(), HttpMetrics())
    return [value for holder in holders for value in vars(holder).values() if hasattr(value, "describe")]


def routes() -> list[tuple[str, str, str]]:
    """Return method, path and purpose of every route of the server."""
    from chunkattn.server.routes import documents, generation, page, scoring, status, tokens

    found = [("GET", "/openapi.json", "This API as an OpenAPI document.")]
    for module in (generation, scoring, documents, tokens, status, page):
        for route in module.router.routes:
            path = re.sub(r":\w+}", "}", route.path)  # {name:path}
            found += [(method, path, _first_line(route.description)) for method in sorted(route.methods)]
    return found


def bodies() -> dict[str, Any]:
    """Return every request body by its name."""
    from chunkattn.server.protocol import documents, generation, scoring
    from chunkattn.server.routes import tokens

    listed = (
        generation.CompletionBody,
        generation.ChatBody,
        scoring.ScoreBody,
        scoring.GenerativeScoringBody,
        scoring.RerankBody,
        documents.CacheBody,
        documents.ChangeBody,
        tokens.TokenizeBody,
        tokens.DetokenizeBody,
        tokens.InspectBody,
    )
    return {body.__name__: body for body in listed}


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = ("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _default(value: Any) -> str:
    shown = str(value) if isinstance(value, Path) else value
    return "" if value is None or callable(value) else f"`{shown!r}`"


def _command_table(name: str) -> str:
    """Arguments and flags of one command."""
    command = commands()[name]
    rows = [("argument or flag", "default", "meaning")]
    for parameter in command.params:
        flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            flags = f"`{parameter.name.upper()}`"
        rows.append((flags, _default(parameter.default), parameter.help or ""))
    return "\n\n".join([_first_line(command.help), _table(*rows) if len(rows) > 1 else "It takes no flags."])


def _options_table(panel: str) -> str:
    """Options of one group of `chunkattn serve`."""
    rows = [("option", "default", "meaning")]
    for parameter in commands()["serve"].params:
        if getattr(parameter, "rich_help_panel", None) == panel:
            flags = " ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
            rows.append((f"`{parameter.name}`<br>{flags}", _default(parameter.default), parameter.help or ""))
    return _table(*rows)


def _metrics_table() -> str:
    rows = [("metric", "type", "labels", "meaning")]
    for collector in metrics():
        (metric,) = collector.describe()
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        rows.append((f"`{name}`", metric.type, labels, metric.documentation))
    return _table(*rows)


def _routes_table() -> str:
    rows = ((f"`{method} {path}`", purpose) for method, path, purpose in routes())
    return _table(("route", "purpose"), *rows)


def _kind(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "$ref" in schema:
        return "object"
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(s) for s in schema["anyOf"] if s.get("type") != "null")) or "null"
    if schema.get("type") == "array":
        return f"list of ({_kind(schema.get('items', {}))})"
    return str(schema.get("type", "any"))


_CALLS = {
    "ChatBody": "chat",
    "ScoreBody": "score",
    "GenerativeScoringBody": "score",
    "RerankBody": "rerank",
    "CacheBody": "precompute",
}
"""Method of `LLM` that a body is for: its docstring describes the fields that the body does not."""


def _body_table(name: str) -> str:
    """Fields of one request body, described by the body, by `SamplingParams`, or by the method of `LLM` it is for."""
    from chunkattn.config import SamplingParams
    from chunkattn.llm import LLM

    texts = _described(getattr(LLM, _CALLS.get(name, "generate"))) | _described(SamplingParams)
    schema = bodies()[name].model_json_schema()
    rows = [("field", "type", "default", "meaning")]
    for field, about in schema["properties"].items():
        if "accepted" in about:  # `_no_effect_table` has it
            continue
        default = "required" if field in schema.get("required", ()) else _default(about.get("default"))
        text = _MEANINGS.get(f"{name}.{field}") or about.get("description") or _MEANINGS.get(field) or texts.get(field, "")
        rows.append((f"`{field}`", _kind(about), default, text[:1].upper() + text[1:]))
    return _table(*rows)


def _no_effect_table() -> str:
    """Fields that are accepted and have no effect, and the bodies and objects that take them."""
    from chunkattn.server.protocol.generation import ContentPart, Message

    places = {
        "completions": bodies()["CompletionBody"],
        "chats": bodies()["ChatBody"],
        "messages": Message,
        "parts": ContentPart,
    }
    found: dict[tuple[str, str, str], list[str]] = {}
    for place, model in places.items():
        for name, field in model.model_fields.items():
            extra = field.json_schema_extra or {}
            if "accepted" in extra:
                found.setdefault((name, extra["accepted"], extra["effect"]), []).append(place)
    rows = ((f"`{name}`", ", ".join(where), accepted, reason) for (name, accepted, reason), where in found.items())
    return _table(("field", "in", "accepted values", "why it has no effect"), *rows)


_MEANINGS = {
    "stream": "Send server-sent events.",
    "stream_options": "`include_usage`, `continuous_usage_stats`; with `stream` alone.",
    "priority": "The lower goes first.",
    "algorithm": "Name of a scoring algorithm; by default the engine's `score_algorithm`.",
    "include_stop_str_in_output": "Leave the stop string in the text.",
    "chat_template_kwargs": "Variables of the chat template.",
    "add_generation_prompt": "End the prompt with the beginning of the answer.",
    "ChatBody.logprobs": "Whether log-probabilities are returned.",
    "ChatBody.top_logprobs": "Number of likeliest tokens at each step; needs `logprobs`.",
    "ChatBody.max_completion_tokens": "Another name of `max_tokens`.",
    "ChatBody.messages": "The conversation.",
    "ChatBody.response_format": '`{"type": "text"}` alone.',
    "ScoreBody.labels": "Texts of one token each; this or `label_token_ids`.",
    "ScoreBody.label_token_ids": "Token ids of the labels; this or `labels`.",
    "ScoreBody.text_1": "Pairs: the first text, or texts.",
    "ScoreBody.text_2": "Pairs: the second text, or texts.",
    "ScoreBody.queries": "Pairs: another name of `text_1`.",
    "ScoreBody.documents": 'Pairs: another name of `text_2`; also `{"id"}` of stored documents.',
    "ScoreBody.instruction": "Pairs: as in reranking.",
    "ScoreBody.template": "Pairs: as in reranking.",
    "ScoreBody.max_tokens_per_doc": "Pairs: as in reranking.",
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
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(thing.__doc__ or ""), re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    return {name: text for name, text in texts.items() if not text.startswith("see `")}


TABLES: dict[str, Callable[[str], str]] = {
    "command": _command_table,
    "options": _options_table,
    "metrics": lambda _: _metrics_table(),
    "routes": lambda _: _routes_table(),
    "body": _body_table,
    "no-effect": lambda _: _no_effect_table(),
}


def expand(markdown: str) -> str:
    """Return a page with its tables."""
    return re.sub(r"<!-- table: ([\w-]+) ?(.*?) ?-->", lambda found: TABLES[found[1]](found[2]), markdown)


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
    """Make the tables of a page, and turn links to the repository's own pages into links within the site."""
    up = "../" * page.file.src_uri.count("/")
    for source, target in REPOSITORY_PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{target}", markdown)
    return expand(markdown)
