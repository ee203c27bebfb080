"""Data of `chunkattn eval` and `chunkattn calibrate`: lines of a file, or questions that a recipe makes from passages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from chunkattn.errors import ConfigError
from chunkattn.options import options_of
from chunkattn.terminal.commands import template_options
from chunkattn.terminal.files import check_file, check_overwrites
from chunkattn.terminal.flags import check_positive, options_for

if TYPE_CHECKING:
    from chunkattn.tools.eval.data import Line
    from chunkattn.tools.eval.results import Results

T = TypeVar("T")

Data = Annotated[
    Path,
    typer.Argument(
        help="File of JSON lines: questions with documents and answers, rankings, or decisions; with --recipe, passages."
    ),
]
ENGINE = (
    "tokenizer document_template chat_template dtype weights activations quantization adapter kv_cache_dtype "
    "attention_backend tensor_parallel_size kv_cache_memory_bytes state_cache_memory_bytes"
)
"""Options of the engines of both commands."""
NO_CHUNK_LIMIT = (1 << 31) - 1
"""`max_chunk_len` of the engines: the control joins all documents into one chunk, which only the model's positions bound."""
_ANSWER_TOKENS = 32


@dataclass(frozen=True)
class RecipeOptions:
    """Options of questions that a recipe makes.

    Attributes:
        recipe: recipe that makes questions from DATA, whose lines then have a question and its gold passage: `random`, `bm25`
            or `two-hop`.
        documents: number of documents of a question of the recipe, by default 5.
        count: number of questions of the recipe, by default 200.
        skip: number of questions of the recipe to skip, by default 0.
        seed: seed of the recipe, by default 0.
        first_line: number of the first line of DATA whose question the recipe may take, by default 1. Passages come from all
            lines.
        save_data: file to write the questions of the recipe to.
    """

    recipe: str | None = None
    documents: int | None = None
    count: int | None = None
    skip: int | None = None
    seed: int | None = None
    first_line: int | None = None
    save_data: Path | None = None


@dataclass(frozen=True)
class EvalOptions:
    """Options of both commands.

    Attributes:
        max_tokens: number of tokens of a greedy answer at most, by default 32; every prompt leaves room for them.
        focus: also try a focus on 1 to this many documents, in both modes; 0 tries none.
        focus_score: score by which a focus chooses documents; repeatable. By default likelihood.
        chat_template_kwargs: variables of the chat template, as a JSON object.
        limit: number of lines of DATA to read; by default all.
        results: file of single results, so that a run can stop and continue; by default DATA.results.jsonl here.
    """

    max_tokens: int | None = None
    focus: int = 0
    focus_score: tuple[str, ...] = ()
    chat_template_kwargs: str | None = None
    limit: int | None = None
    results: Path | None = None


@dataclass(frozen=True)
class EvalData:
    """Lines to evaluate, where they come from, and how to ask them.

    Attributes:
        lines: questions, rankings or decisions.
        name: name of the file, and the recipe.
        facts: fields of reports.
        options: options of the command.
        results: earlier results.
    """

    lines: Sequence[Line]
    name: str
    facts: dict[str, Any]
    options: EvalOptions
    results: Results

    def of(self, kind: type[T]) -> list[T]:
        """Return the lines of a kind: all, or none."""
        return [line for line in self.lines if isinstance(line, kind)]

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens of a greedy answer."""
        return _ANSWER_TOKENS if self.options.max_tokens is None else self.options.max_tokens

    @property
    def focus_scores(self) -> Sequence[str]:
        """Return the scores by which a focus chooses."""
        return self.options.focus_score or ["likelihood"]

    @property
    def template_options(self) -> dict[str, Any] | None:
        """Return the variables of the chat template."""
        return template_options(self.options.chat_template_kwargs)


def take_data(path: Path, values: Mapping[str, Any]) -> EvalData:
    """Read or make the lines of an evaluation.

    Args:
        path: data file, or source of the recipe.
        values: options of the command, by name.

    Raises:
        ConfigError: an option is bad, does not suit the lines, or needs a recipe.
        RequestError: the file is bad, or has too few questions for the recipe.
    """
    from chunkattn.calls.focus_scores import get_score
    from chunkattn.tools.eval.data import Decisions, Question, read_data
    from chunkattn.tools.eval.results import Results

    options = options_for(EvalOptions, values)
    check_positive({"limit": options.limit})
    if options.focus < 0:
        raise ConfigError(f"--focus must be at least 0; got {options.focus}")
    if options.focus_score and not options.focus:
        raise ConfigError("--focus-score needs --focus, the number of documents to choose")
    for score in options.focus_score:
        get_score(score)
    recipe = {name: value for name in options_of(RecipeOptions) if (value := values[name]) is not None}
    if "recipe" in recipe:
        lines, name, facts = _made(path, options.limit, recipe)
    elif recipe:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in recipe)
        raise ConfigError(f"{flags} need{'s' * (len(recipe) == 1)} --recipe")
    else:
        lines, name, facts = read_data(path, options.limit), path.name, {"data": path.name}
    kind = type(lines[0])
    if (options.max_tokens is not None or options.focus) and kind is not Question:
        raise ConfigError(f"--max-tokens and --focus are for questions over documents; {path} holds {kind.kind}")
    if options.chat_template_kwargs is not None and kind is not Decisions:
        raise ConfigError(f"--chat-template-kwargs is for decisions; {path} holds none")
    results = options.results or Path(f"{Path(path.name.removesuffix('.gz')).stem}.results.jsonl")
    return EvalData(lines, name, facts, options, Results(results))


def _made(path: Path, limit: int | None, options: dict[str, Any]) -> tuple[Sequence[Line], str, dict[str, Any]]:
    """Return the lines of a recipe, their name, and fields of reports."""
    from chunkattn.tools.eval.data import questions_from
    from chunkattn.tools.eval.recipes import Recipe, make_lines, read_source

    save_data = options.pop("save_data", None)
    if save_data is not None:
        check_overwrites(save_data, [("DATA", path)], flag="--save-data")
        check_file(save_data)
    recipe = Recipe(options.pop("recipe"), **options)
    source = read_source(path, limit)
    lines = make_lines(source, recipe)
    if save_data is not None:
        try:
            save_data.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{save_data} cannot be written: {error}") from None
    shown = {name: value for name, value in asdict(recipe).items() if name in options_of(RecipeOptions)}
    name = f"{path.name} (recipe {recipe.name}, {', '.join(f'{key} {value}' for key, value in shown.items())})"
    facts = {"data": path.name, "recipe": {"name": recipe.name, **shown, "passages": len(source)}}
    return questions_from(lines, name), name, facts


def model_name(model: str | None) -> str:
    """Return the name of a model in reports."""
    return "the demo model" if model is None else Path(model).name
