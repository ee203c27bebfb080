"""Command `chunkattn decide`: typed questions about one state, or about every line of a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkattn.calls.decide_files import StateLine, as_json, read_questions, read_states
from chunkattn.calls.decide_table import csv_line, table_header, table_row
from chunkattn.config import EngineConfig
from chunkattn.decisions import ChoiceAnswer, DecisionOutput, PredicateAnswer, Question
from chunkattn.errors import ConfigError, RequestError
from chunkattn.parsers.joined import ISOLATED
from chunkattn.parsers.states import OneState, read_state
from chunkattn.terminal.commands import (
    Documents,
    Model,
    TemplateOptions,
    Verbose,
    app,
    command,
    console,
    figures,
    log_to_stderr,
    make_llm,
    template_options,
)
from chunkattn.terminal.files import check_file, check_overwrites, read_document
from chunkattn.terminal.flags import with_options
from chunkattn.terminal.progress import Steps

if TYPE_CHECKING:
    from chunkattn.llm import LLM

_STATES = 64
"""States of one call of `LLM.decide`. Their answers are written when all of them are known."""

_FORMATS = ("jsonl", "csv")
_CALIBRATE = {"off": False, "on": True, "fitted": "fitted"}
_ENGINE = (
    "tokenizer chat_template chunk_calibration dtype weights activations quantization adapter kv_cache_dtype "
    "attention_backend tensor_parallel_size kv_cache_memory_bytes state_cache_memory_bytes max_model_len kv_store"
)


@command(app)
@with_options((EngineConfig, None, _ENGINE))
def decide(
    state: Annotated[str | None, typer.Argument(show_default=False)] = None,
    *,
    questions: Annotated[Path, typer.Option(show_default=False)],
    state_file: Path | None = None,
    input_file: Annotated[Path | None, typer.Option("--input")] = None,
    output: Path | None = None,
    output_format: str | None = None,
    document: Documents = None,
    document_file: list[Path] | None = None,
    chunk_mode: str = ISOLATED,
    method: str = "auto",
    calibrate: str = "off",
    system: str | None = None,
    chat_template_kwargs: TemplateOptions = None,
    cache_salt: str | None = None,
    model: Model = None,
    verbose: Verbose = False,
    **engine: Any,
) -> None:
    """Answer typed questions about one state, or about every state of a file.

    The answers about one state are a table, or JSON or CSV with --output or --output-format. Those about a file are JSON lines
    or CSV, one line for each state, in the file's order. The whole file is checked before the first state is computed.

    Args:
        state: text of the state; '-' reads standard input.
        questions: file of questions, YAML or JSON.
        state_file: file of one state: text, or JSON if its name ends in .json.
        input_file: file of JSON lines, one state a line, perhaps with its documents; '-' reads standard input.
        output: file to write, one line for each state; '-' is standard output.
        output_format: `jsonl` or `csv`; by default `csv` if the name of --output ends in .csv, else `jsonl`.
        document: see `Documents`.
        document_file: file of a document before every state; repeatable.
        chunk_mode: documents as `isolated` chunks, or one `joined` chunk.
        method: `auto`, `head`, `letters`, `likelihood` or `separate`.
        calibrate: `off`; `on`: divide probabilities by those behind 'N/A'; `fitted`: the labels of the calibration file.
        system: content of a system message before the state.
        chat_template_kwargs: see `TemplateOptions`.
        cache_salt: salt of the cache; calls of one salt share cached K/V.
        model: see `Model`.
        verbose: see `Verbose`.
        **engine: other fields of `EngineConfig`.
    """
    log_to_stderr(verbose)
    if sum(source is not None for source in (state, state_file, input_file)) != 1:
        raise RequestError("give one of a state, --state-file and --input")
    if calibrate not in _CALIBRATE:
        raise ConfigError(f"--calibrate must be one of {', '.join(_CALIBRATE)}; got {calibrate}")
    if output_format not in (None, *_FORMATS):
        raise ConfigError(f"--output-format must be one of {', '.join(_FORMATS)}; got {output_format}")
    is_csv = output_format == "csv" or (output_format is None and output is not None and output.suffix.lower() == ".csv")
    if output is not None and str(output) != "-":
        check_file(output)
        paths = {"model": model} | {name: engine[name] for name in ("tokenizer", "chat_template", "chunk_calibration")}
        inputs: dict[str, Path | None] = {"--questions": questions, "--state-file": state_file, "--input": input_file}
        inputs |= {f"--{name.replace('_', '-')}": Path(os.path.expanduser(path)) for name, path in paths.items() if path}
        check_overwrites(output, [*inputs.items(), *(("--document-file", file) for file in document_file or [])])
    asked = read_questions(questions)
    source = _Lines(input_file) if input_file is not None else _one_state(state, state_file)
    documents = [*(document or []), *map(read_document, document_file or [])]
    options: dict[str, Any] = {
        "documents": documents,
        "chunk_mode": chunk_mode,
        "system": system,
        "method": method,
        "calibrate": _CALIBRATE[calibrate],
        "chat_template_kwargs": template_options(chat_template_kwargs),
        "cache_salt": cache_salt,
    }
    llm = make_llm(model, **engine)
    if isinstance(source, _Lines):
        _decide_lines(llm, source, asked, questions, output, options, is_csv=is_csv)
    else:
        with _named(questions):
            decision = llm.decide(source, asked, use_tqdm=False, **options)
        if output is None and output_format is None:
            _show(asked, decision)
        else:
            with _opened(output) as file:
                rows = table_header(asked), table_row(decision)
                _write(file, [*map(csv_line, rows)] if is_csv else [_json_line(as_json(decision))])
    llm.close()


class _Lines:
    """States of a file of JSON lines, one at a time. Standard input and pipes are read once and kept.

    Args:
        path: file to read; '-' is standard input.

    Attributes:
        name: name of the file, for error messages.
        count: number of states.

    Raises:
        RequestError: the file cannot be read or holds no line, or a line is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.name = "standard input" if str(path) == "-" else str(path)
        self._path = path
        self._kept: list[StateLine] | None = None if path.is_file() and str(path) != "-" else []
        if self._kept is not None:
            self._kept += list(self._read())
        self.count = sum(1 for _ in self)
        if not self.count:
            raise RequestError(f"{self.name} holds no line")

    def __iter__(self) -> Iterator[StateLine]:
        return self._read() if self._kept is None else iter(self._kept)

    def windows(self) -> Iterator[list[StateLine]]:
        """Yield the states of one call after the other."""
        states = iter(self)
        while window := [*islice(states, _STATES)]:
            yield window

    def _read(self) -> Iterator[StateLine]:
        if str(self._path) == "-":
            yield from read_states(sys.stdin.buffer, self.name)
            return
        try:
            with self._path.open("rb") as file:
                yield from read_states(file, self.name)
        except OSError as error:
            raise RequestError(f"{self.name} cannot be read: {error.strerror or error}") from None


def _decide_lines(
    llm: LLM,
    lines: _Lines,
    asked: Sequence[Question],
    questions: Path,
    output: Path | None,
    options: dict[str, Any],
    *,
    is_csv: bool,
) -> None:
    """Check all states, and then write the answers about one window after the other."""
    from chunkattn.calls.decide import decide_call

    def of(group: Sequence[StateLine]) -> dict[str, Any]:
        """Return the options of the call of lines with equal documents."""
        return {**options, "documents": [*options["documents"], *group[0].documents]}

    for window in lines.windows():
        for group in _by_documents(window):
            with _named(questions, lines.name, group):
                decide_call(llm.frontend, [line.state for line in group], asked, **of(group))
    with _opened(output) as file, Steps("states", lines.count) as steps:
        if is_csv:
            _write(file, [csv_line(["line", "id", *table_header(asked)])])
        for window in lines.windows():
            decisions = dict[int, DecisionOutput]()
            for group in _by_documents(window):
                with _named(questions, lines.name, group):
                    outputs = llm.decide([line.state for line in group], asked, use_tqdm=False, **of(group))
                decisions |= zip((line.line for line in group), outputs, strict=True)
            _write(file, [_line(line, decisions[line.line], is_csv=is_csv) for line in window])
            steps.advance(len(window))


def _by_documents(window: Sequence[StateLine]) -> list[list[StateLine]]:
    """Return the lines in groups of equal documents, in the order of their first lines."""
    groups = dict[str, list[StateLine]]()
    for line in window:
        groups.setdefault(json.dumps(line.documents), []).append(line)
    return list(groups.values())


def _line(line: StateLine, output: DecisionOutput, *, is_csv: bool) -> bytes:
    """Return the line of a state's answers."""
    if is_csv:
        return csv_line([str(line.line), "" if line.id is None else str(line.id), *table_row(output)])
    head = {"line": line.line} if line.id is None else {"line": line.line, "id": line.id}
    return _json_line(head | as_json(output))


@contextmanager
def _named(questions: Path, source: str = "", window: Sequence[StateLine] = ()) -> Iterator[None]:
    """Name file and line in the errors of a call.

    Args:
        questions: file of the questions.
        source: name of the file of the states.
        window: states of the call.
    """
    try:
        yield
    except RequestError as error:
        kind, _, number = (error.part or "").partition(" ")
        if window and kind == "state":
            raise type(error)(f"{source} line {window[int(number)].line}{error.message}", param=error.param) from None
        if kind == "question":
            raise type(error)(f"{questions}: {error}", param=error.param) from None
        if window and window[0].documents and error.param == "documents":
            raise type(error)(f"{source} line {window[0].line}: {error}", param=error.param) from None
        raise


def _one_state(text: str | None, file: Path | None) -> OneState:
    """Return one state, from the command line, standard input or a file."""
    if file is None:
        return OneState(sys.stdin.read().removesuffix("\n") if text == "-" else text or "")
    try:
        content = file.read_text(encoding="utf-8")
        if file.suffix != ".json":
            return OneState(content)
        state = OneState(json.loads(content))
        read_state(state, str(file))
        return state
    except RecursionError:
        raise RequestError(f"{file} cannot be read: it nests too deep") from None
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{file} cannot be read: {error}") from None


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[bytes]]:
    """Open the file of the answers; None and '-' are standard output."""
    if output is None or str(output) == "-":
        yield sys.stdout.buffer
    else:
        with output.open("wb") as file:
            yield file


def _json_line(value: dict[str, Any]) -> bytes:
    # JSON escapes a lone surrogate as Python's handler of errors does.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _write(file: IO[bytes], lines: Sequence[bytes]) -> None:
    file.write(b"".join(lines))
    file.flush()


def _show(asked: Sequence[Question], output: DecisionOutput) -> None:
    table = figures("question", "answer", "probability", "confidence", "label mass", texts=("question", "answer"))
    for question, answer in zip(asked, output.answers, strict=True):
        name = escape(answer.name or question.text)
        row: tuple[str, float | None, float | None]
        if isinstance(answer, PredicateAnswer):
            row = ("yes" if answer.probability >= 0.5 else "no"), max(answer.probability, 1 - answer.probability), None
        elif isinstance(answer, ChoiceAnswer):
            row = str(answer.choice), answer.probabilities[answer.choice], answer.confidence
        else:
            row = f"{answer.score:.2f}", None, answer.confidence
        shown = ("" if value is None else f"{value:.3f}" for value in row[1:])
        table.add_row(name, escape(row[0]), *shown, f"{answer.label_mass:.3f}")
    console.print(table)
    usage = output.usage
    console.print(f"{output.method}: {usage.prompt_tokens} tokens, {usage.computed_tokens} computed")
