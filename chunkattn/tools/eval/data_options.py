"""Data of `chunkattn eval` and `chunkattn calibrate`: lines of a file, or questions that a recipe makes from passages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkattn.errors import ConfigError
from chunkattn.terminal.files import check_file, check_overwrites

if TYPE_CHECKING:
    from chunkattn.tools.eval.data import Decisions, Question, Ranking


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
    save_data: str | None = None


@dataclass(frozen=True)
class EvalData:
    """Lines to evaluate, and where they come from.

    Attributes:
        lines: questions, rankings or decisions.
        name: name of the file, and the recipe.
        facts: fields of reports.
    """

    lines: Sequence[Question] | Sequence[Ranking] | Sequence[Decisions]
    name: str
    facts: dict[str, Any]


def take_data(path: Path, limit: int | None, options: dict[str, Any]) -> EvalData:
    """Read or make the lines of an evaluation.

    Args:
        path: data file, or source of the recipe.
        limit: number of lines of the file to read; None reads all.
        options: options of the command, from which those of `RecipeOptions` are removed.

    Raises:
        ConfigError: an option is bad, or needs a recipe.
        RequestError: the file is bad, or has too few questions for the recipe.
    """
    from chunkattn.tools.eval.data import questions_from, read_data
    from chunkattn.tools.eval.recipes import Recipe, make_lines, read_source

    given = {name: value for name in RecipeOptions.__annotations__ if (value := options.pop(name)) is not None}
    if "recipe" not in given:
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{flags} need{'s' * (len(given) == 1)} --recipe")
        return EvalData(read_data(path, limit), path.name, {"data": path.name})
    saved = Path(given.pop("save_data")) if "save_data" in given else None
    if saved is not None:
        check_overwrites(saved, [("DATA", path)], flag="--save-data")
        check_file(saved)
    recipe = Recipe(given.pop("recipe"), **given)
    source = read_source(path, limit)
    lines = make_lines(source, recipe)
    if saved is not None:
        _write(lines, saved)
    shown = {name: value for name, value in asdict(recipe).items() if name in RecipeOptions.__annotations__}
    name = f"{path.name} (recipe {recipe.name}, {', '.join(f'{key} {value}' for key, value in shown.items())})"
    facts = {"data": path.name, "recipe": {"name": recipe.name, **shown, "passages": len(source)}}
    return EvalData(questions_from(lines, name), name, facts)


def results_file(path: Path) -> Path:
    """Return the default file of single results.

    Args:
        path: data file, or source of a recipe.
    """
    return Path(f"{Path(path.name.removesuffix('.gz')).stem}.results.jsonl")


def _write(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
