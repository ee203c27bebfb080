"""Compare a model's own choice between tools with decisions about them.

    python -m benchmarks.tool_choice [--model MODEL] [--limit N] [--json FILE|-]

Every message has three to eight tools, and one of them, or none, is right. The model chooses by its own answer to a chat with
the tools: freely, and under the grammar of `tool_choice: "required"`. A template without tools is replaced by one in the form
of Hermes. The decisions are a `Choice` whose options are the tools and an option for no tool, by every method; the options
are `names` with descriptions, or for `likelihood` the `descriptions` alone. The row `fitted` is the decision, and its bias
for no tool, that are right most often on the messages of half the domains, judged on the other half. The seconds are medians,
with an empty cache for each choice.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tool_choice_data import Message, draw_messages, group_of
from chunkattn import LLM, Choice, Option, SamplingParams
from chunkattn.answer_parsers.families import find_tool_parser
from chunkattn.answer_parsers.reader import AnswerReader
from chunkattn.answer_parsers.reader import Message as Answer
from chunkattn.answer_parsers.tools import Mode, Tool, Tools
from chunkattn.structured_outputs import StructuredOutputsParams
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import say, timed
from chunkattn.tools.eval.measures import Mean, mean_of

_HERMES = """{%- if tools %}<|im_start|>system
You are a helpful assistant.

# Tools

You may call one of these functions to help with the user's message; answer without a call where none of them helps.
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

To call a function, write its name and arguments as JSON between tags:
<tool_call>
{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TOKENS = 32
"""Tokens of an answer, enough for text and the name of a call."""
_NONE = "none"
_DECISIONS = (
    ("letters", "names", False),
    ("letters", "names", True),
    ("likelihood", "names", True),
    ("likelihood", "descriptions", True),
    ("separate", "names", True),
)
"""Method, form of the options and calibration of each decision."""
OWN, REQUIRED, FITTED = "own, auto", "own, required", "fitted"


@dataclass(frozen=True)
class Chosen:
    """Choice for one message.

    Attributes:
        name: name of the tool; None for none.
        seconds: seconds until the choice was known.
        gap: log odds of the likeliest tool against no tool; NaN for a choice without probabilities.
        tool: likeliest tool.
    """

    name: str | None
    seconds: float
    gap: float = math.nan
    tool: str | None = None


Way = Callable[[Message], Chosen]


def own_ways(llm: LLM) -> dict[str, Way]:
    """Return the model's own choices: free, and forced to call."""
    template = getattr(llm.tokenizer, "chat_template", None) or ""
    replaced = None if "tools" in template else _HERMES
    parser = find_tool_parser("auto", replaced or template)
    assert parser is not None, "the template has no known form of calls"
    special = {token.content: number for number, token in llm.tokenizer.added_tokens_decoder.items() if token.special}

    def choose(message: Message, mode: Mode) -> Chosen:
        functions = [tool["function"] for tool in message.tools]
        tools = Tools(tuple(Tool(one["name"], one["parameters"]) for one in functions), mode)
        began, form = time.perf_counter(), None
        if mode == "required":
            form = StructuredOutputsParams(grammar=parser.grammar(tools, special.get))
        sampling = SamplingParams(temperature=0, max_tokens=_TOKENS, structured_outputs=form, skip_special_tokens=False)
        asked: list[dict[str, Any]] = [{"role": "user", "content": message.text}]
        (output,) = llm.chat(asked, sampling, tools=message.tools, chat_template=replaced, use_tqdm=False)
        read = Answer()
        read.add(AnswerReader(parser, tools).feed(output.outputs[0].text, last=True))
        return Chosen(read.calls[0].name if read.calls else None, time.perf_counter() - began)

    return {OWN: lambda message: choose(message, "auto"), REQUIRED: lambda message: choose(message, "required")}


def decide_ways(llm: LLM) -> dict[str, Way]:
    """Return the decisions of `_DECISIONS`."""

    def decide(message: Message, method: str, form: str, calibrate: bool) -> Chosen:
        functions = [tool["function"] for tool in message.tools]
        began = time.perf_counter()
        names: dict[Any, str | None] = {one["name"]: one["name"] for one in functions} | {_NONE: None}
        options: list[str | bool | Option] = [Option(one["name"], one["description"]) for one in functions]
        options.append(Option(_NONE, "Answers without a tool."))
        question = "Which tool should the assistant use to answer this message?"
        if form == "descriptions":
            names = {one["description"]: one["name"] for one in functions} | {"Answers without a tool.": None}
            options, question = [*names], "What should the assistant's next step do?"
        (answer,) = llm.decide(
            message.text, [Choice(question, options)], method=method, calibrate=calibrate, use_tqdm=False
        ).answers
        seconds = time.perf_counter() - began
        logs = {names[value]: math.log(max(share, 1e-300)) for value, share in answer.probabilities.items()}
        none = logs.pop(None)
        tool = max(logs, key=logs.__getitem__)
        return Chosen(names[answer.choice], seconds, logs[tool] - none, tool)

    ways = {}
    for method, form, calibrate in _DECISIONS:
        name = f"{method}{', N/A' if calibrate else ''}, {form}"
        ways[name] = lambda message, how=(method, form, calibrate): decide(message, *how)
    return ways


@dataclass(frozen=True)
class Row:
    """Figures of one way.

    Attributes:
        name: the way.
        all: share of right choices, with its interval.
        change: paired difference of that share from the model's free choice.
        with_tool: share of right choices where a tool is right.
        without: share of right choices where none is.
        seconds: median seconds of a choice.
    """

    name: str
    all: Mean
    change: Mean
    with_tool: float
    without: float
    seconds: float


def rows_of(messages: Sequence[Message], chosen: dict[str, list[Chosen]]) -> list[Row]:
    """Return the figures of every way on messages."""
    needs = np.asarray([message.right is not None for message in messages])
    hits = {
        way: np.asarray([c.name == m.right for c, m in zip(listed, messages, strict=True)], np.float64)
        for way, listed in chosen.items()
    }
    return [
        Row(
            way,
            mean_of(right),
            mean_of(right - hits[OWN]),
            float(right[needs].mean()),
            float(right[~needs].mean()),
            float(np.median([c.seconds for c in chosen[way]])),
        )
        for way, right in hits.items()
    ]


def fitted(messages: Sequence[Message], chosen: dict[str, list[Chosen]]) -> list[Chosen]:
    """Return the choices of the decision, and of its bias for no tool, that are best on the messages of other domains.

    There are two groups of domains; each message is judged by the way and the bias of the group that its domain is not in.
    """
    groups, result = group_of(messages), {}
    for group in (0, 1):
        places = [n for n, one in enumerate(groups) if one != group]
        way, bias = _best(messages, chosen, places)
        say(f"{FITTED}, group {group}: {way}, bias {bias:.2f}")
        result |= {n: _biased(chosen[way][n], bias) for n, one in enumerate(groups) if one == group}
    return [result[n] for n in range(len(messages))]


def _best(messages: Sequence[Message], chosen: dict[str, list[Chosen]], places: Sequence[int]) -> tuple[str, float]:
    """Return the decision that is right most often with its best bias, and the bias in nats, the smallest of equal ones."""
    best = ("", 0.0, -1)
    for way, listed in chosen.items():
        if math.isnan(listed[0].gap):
            continue
        for bias in sorted({0.0, *(listed[n].gap for n in places)}, key=abs):
            right = sum(_biased(listed[n], bias).name == messages[n].right for n in places)
            best = max(best, (way, bias, right), key=lambda entry: entry[2])
    return best[:2]


def _biased(chosen: Chosen, bias: float) -> Chosen:
    return Chosen(chosen.tool if chosen.gap > bias else None, chosen.seconds)


def measure(llm: LLM, messages: Sequence[Message]) -> dict[str, list[Chosen]]:
    """Return the choices for all messages in every way, in turns."""
    ways, chosen = own_ways(llm) | decide_ways(llm), defaultdict(list)
    for number, message in enumerate(messages):
        with timed(f"message {number + 1} of {len(messages)}"):
            for name, way in ways.items():
                llm.reset_prefix_cache()
                chosen[name].append(way(message))
    return chosen


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, file or name of the model; by default the demo model")
    parser.add_argument("--limit", type=int, help="number of messages; by default all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the tools beside each message")
    parser.add_argument("--json", help="file for the figures and choices, or - for the output")
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=2048)
    messages = draw_messages(args.seed)[: args.limit]
    chosen = measure(llm, messages)
    chosen[FITTED] = fitted(messages, chosen)
    rows = rows_of(messages, chosen)
    figures = [
        {
            "way": row.name,
            "accuracy": row.all.mean,
            "interval": row.all.ends,
            "change": row.change.mean,
            "change_interval": row.change.ends,
            "with_tool": row.with_tool,
            "without": row.without,
            "seconds": row.seconds,
            "chosen": [one.name for one in chosen[row.name]],
        }
        for row in rows
    ]
    if write_json(figures, args.json):
        table = Table("choice", "right", "difference from own, auto", "a tool is right", "none is right", "seconds")
        for row in rows:
            values = (f"{row.with_tool:.2f}", f"{row.without:.2f}", f"{row.seconds:.2f}")
            table.add_row(row.name, _text(row.all, ""), _text(row.change, "+"), *values)
        Console().print(table)


def _text(mean: Mean, sign: str) -> str:
    ends = f" [{mean.low:{sign}.2f}, {mean.high:{sign}.2f}]" if mean.has_interval else ""
    return f"{mean.mean:{sign}.2f}{ends}"


if __name__ == "__main__":
    main()
