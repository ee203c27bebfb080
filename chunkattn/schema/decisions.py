"""Request body of `/v1/decisions`, in OpenAI's schema."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictStr, model_validator

from chunkattn.calls.decide_questions import MAX_OPTIONS
from chunkattn.decisions import (
    Answer,
    Choice,
    ChoiceAnswer,
    DecisionOutput,
    Level,
    Option,
    Predicate,
    PredicateAnswer,
    Question,
    Rating,
)
from chunkattn.parsers.states import OneState
from chunkattn.schema.accepted import ShortText, no_effect
from chunkattn.schema.base import CacheSalt, Entry, FastList
from chunkattn.schema.decide import DecideBody, Kinds, compact, usage_of
from chunkattn.schema.generation import MAX_MESSAGES
from chunkattn.schema.parts import state_message

MAX_QUESTIONS = 400
"""OpenAI's limit on the questions of a request."""
JSON_LEVELS, JSON_VALUES, JSON_BYTES = 32, 10_000, 256 << 10
"""OpenAI's limits on an `input_json`: levels of containers, values, and bytes of compact UTF-8."""

_CACHING = "caching is automatic"


class CacheBreakpoint(Entry):
    """Mark of the end of a reusable prefix."""

    mode: Literal["explicit"]


class CacheOptions(Entry):
    """OpenAI's options of prompt caching."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


# Input


class InputText(Entry):
    """Text in a message or in instructions."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Annotated[CacheBreakpoint | None, no_effect("OpenAI's object", _CACHING)] = None


class InputJson(Entry):
    """JSON object, or array of objects, in a message or in instructions."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]

    @model_validator(mode="after")
    def _check(self) -> InputJson:
        _check_json(self.data)
        return self


class OutputText(Entry):
    """Text of an assistant."""

    type: Literal["output_text"]
    text: str


class SaidRefusal(Entry):
    """Refusal by an assistant."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | InputJson, Kinds()]
TextPart = Annotated[InputText, Kinds()]
SaidPart = Annotated[OutputText | SaidRefusal, Kinds()]


class UserMessage(Entry):
    """Message of a user."""

    type: Literal["message"] = "message"
    role: Literal["user"]
    content: str | FastList[Part]


class InstructionMessage(Entry):
    """Message of a developer or of the system."""

    type: Literal["message"] = "message"
    role: Literal["developer", "system"]
    content: str | FastList[TextPart]


class AssistantMessage(Entry):
    """Message of an assistant."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | FastList[SaidPart]
    phase: Literal["commentary", "final_answer"] | None = None


class _Called(Entry):
    """Fields of calls and of their outputs."""

    call_id: str
    id: Annotated[ShortText, no_effect("a text of up to 1024 characters", "nothing is stored")] = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCall(_Called):
    """Call of a function."""

    type: Literal["function_call"]
    name: str
    arguments: str
    namespace: str | None = None


class CustomCall(_Called):
    """Call of a custom tool."""

    type: Literal["custom_tool_call"]
    name: str
    input: str
    namespace: str | None = None


class CallOutput(_Called):
    """Output of a function or of a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | FastList[TextPart]


Item = Annotated[
    UserMessage | InstructionMessage | AssistantMessage | FunctionCall | CustomCall | CallOutput,
    Kinds(),
]


# Questions


class _Asked(Entry):
    """Fields of every question."""

    name: str | None = None
    instructions: str | FastList[Part]

    @property
    def text(self) -> str:
        """Return the instructions as a text, a line for each part."""
        if isinstance(self.instructions, str):
            return self.instructions
        return "\n".join(part.text if isinstance(part, InputText) else compact(part.data) for part in self.instructions)


class DecisionPredicate(_Asked):
    """Statement about the input."""

    type: Literal["predicate"]
    num_values: ClassVar[int] = 1

    def question(self) -> Question:
        """Return the question of `LLM.decide`."""
        return Predicate(self.text, name=self.name)


class DecisionOption(Entry):
    """One option of a choice."""

    value: StrictStr | StrictBool
    description: str | None = None


class DecisionChoice(_Asked):
    """Choice of one option."""

    type: Literal["choice"]
    choices: Annotated[FastList[DecisionOption], Field(max_length=MAX_OPTIONS)]

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        return len(self.choices)

    def question(self) -> Question:
        """Return the question of `LLM.decide`."""
        return Choice(self.text, [Option(o.value, o.description or None) for o in self.choices], self.name)


class DecisionLevel(Entry):
    """One level of a score."""

    label: str
    description: str | None = None


class DecisionScore(_Asked):
    """Rating on a scale of levels."""

    type: Literal["score"]
    levels: Annotated[FastList[DecisionLevel], Field(max_length=MAX_OPTIONS)]

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        return len(self.levels)

    def question(self) -> Question:
        """Return the question of `LLM.decide`."""
        return Rating(self.text, [Level(level.label, level.description or None) for level in self.levels], self.name)


AskedQuestion = Annotated[DecisionPredicate | DecisionChoice | DecisionScore, Kinds()]


class DecisionsBody(DecideBody):
    """Request body of `/v1/decisions`."""

    input: str | Annotated[FastList[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The state: a text, or messages, calls of tools and their outputs."""
    questions: Annotated[FastList[AskedQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    """Predicates, choices and scores."""
    prompt_cache_key: Annotated[CacheSalt, Field(description="Another name of `cache_salt`.")] = None
    prompt_cache_options: Annotated[CacheOptions | None, no_effect("OpenAI's `mode` and `ttl`", _CACHING)] = None
    safety_identifier: Annotated[ShortText, no_effect("a text of up to 1024 characters", "requests are counted by API key")] = (
        None
    )

    fields_of: ClassVar = {"state": ("input",)}

    @model_validator(mode="after")
    def _check(self) -> DecisionsBody:
        if None not in (self.cache_salt, self.prompt_cache_key) and self.cache_salt != self.prompt_cache_key:
            raise ValueError("prompt_cache_key and cache_salt differ; give one of them")
        items = enumerate(self.input if isinstance(self.input, list) else ())
        called = set[tuple[str, str]]()
        for number, item in items:
            if isinstance(item, (FunctionCall, CustomCall)):
                called.add((item.type, item.call_id))
            elif isinstance(item, CallOutput) and (item.type.removesuffix("_output"), item.call_id) not in called:
                call = item.type.removesuffix("_output")
                raise ValueError(f"input.{number}: no {call} before this output has the call_id {item.call_id[:80]!r}")
        return self

    @property
    def salt(self) -> str | None:
        """Return the request's cache salt."""
        return self.cache_salt if self.cache_salt is not None else self.prompt_cache_key

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        return sum(question.num_values for question in self.questions)

    def call(self) -> tuple[OneState, list[Question]]:
        """Return the state and the questions; see `DecideBody.call`."""
        state = self.input if isinstance(self.input, str) else [state_message(item.model_dump()) for item in self.input]
        return OneState(state), [question.question() for question in self.questions]

    def answer(self, output: DecisionOutput, min_mass: float) -> dict[str, Any]:
        """Return answers and usage; see `DecideBody.answer`."""
        return {"answers": [_answer(answer, min_mass) for answer in output.answers], "usage": usage_of(output.usage)}


def _answer(answer: Answer, min_mass: float) -> dict[str, Any]:
    """Return an answer in OpenAI's format."""
    result: dict[str, Any]
    name, mass = {"name": answer.name}, {"label_mass": answer.label_mass}
    if answer.label_mass < min_mass:
        return {"type": "refusal", **name, **mass}
    if isinstance(answer, PredicateAnswer):
        return {"type": "predicate", **name, "probability": answer.probability, **mass}
    shares: list[dict[str, Any]]
    if isinstance(answer, ChoiceAnswer):
        result = {"type": "choice", **name, "choice": answer.choice}
        shares = [{"value": value, "probability": p} for value, p in answer.probabilities.items()]
    else:
        result = {"type": "score", **name, "score": answer.score}
        numbered = enumerate(answer.probabilities.items())
        shares = [{"value": number, "label": label, "probability": p} for number, (label, p) in numbered]
    return {**result, "confidence": answer.confidence, "probabilities": shares, **mass, "method": answer.method}


def _check_json(data: Any) -> None:
    """Check the bounds of an `input_json`.

    Raises:
        ValueError: a bound is exceeded, or the data are no JSON.
    """
    left, count = [(data, 1)], 0
    while left:
        value, level = left.pop()
        if level > JSON_LEVELS:
            raise ValueError(f"input_json has more than {JSON_LEVELS} levels of objects and arrays")
        inner = value.values() if isinstance(value, dict) else value
        count += len(inner)
        if count > JSON_VALUES:
            raise ValueError(f"input_json has more than {JSON_VALUES} values")
        left += [(one, level + 1) for one in inner if isinstance(one, (dict, list))]
    if (size := len(compact(data).encode())) > JSON_BYTES:
        raise ValueError(f"input_json has {size} bytes as compact JSON, at most {JSON_BYTES} are read")
