"""Bodies and answers of `/v1/decisions` and `/v1/systemone`, over an engine that answers with fixed probabilities."""

import copy
import json
import typing

import pytest
from fastapi.testclient import TestClient
from openai.types import Decision
from openai.types import decision_create_params as params
from openai.types.decision_input_image_param import DecisionInputImageParam
from openai.types.decision_input_text_param import DecisionInputTextParam
from openai.types.decision_prompt_cache_breakpoint_param import DecisionPromptCacheBreakpointParam
from openai.types.shared_params.decision_input_json import DecisionInputJSON
from openai.types.shared_params.decision_question_input_image import DecisionQuestionInputImage
from openai.types.shared_params.decision_question_input_text import DecisionQuestionInputText

from chunkattn import Choice, Level, Option, Predicate, Rating
from chunkattn.decisions import ChoiceAnswer, DecisionOutput, PredicateAnswer, RatingAnswer
from chunkattn.errors import CapacityError, ConfigError, RequestError
from chunkattn.outputs import ScoreUsage
from chunkattn.parsers.states import read_state
from chunkattn.schema.decisions import JSON_BYTES, JSON_LEVELS, JSON_VALUES
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

DECISIONS, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"
MASS, METHOD = 0.25, "separate"
ASKED = [{"type": "predicate", "instructions": "It rains."}]
BODY = {"model": "gpt-6-luna", "input": "The sky is grey.", "questions": ASKED}
NOUL = {"type": "noul", "instructions": "It rains."}
NAMED = {"model": "jev-latest", "state": "The sky is grey.", "questions": {"rain": NOUL}}


def fixed(question):
    if isinstance(question, Predicate):
        return PredicateAnswer(question.name, 0.75, MASS)
    if isinstance(question, Choice):
        options = [own.value for own in question.options]
        shares = dict(zip(options, [0.5, *[0.5 / (len(options) - 1)] * (len(options) - 1)], strict=True))
        return ChoiceAnswer(question.name, options[0], 0.125, shares, MASS, METHOD)
    shares = {level.label: 1 / len(question.levels) for level in question.levels}
    return RatingAnswer(question.name, 1.5, 0.0, shares, MASS, METHOD)


@pytest.fixture
def calls(llm):
    """Arguments of every call of `AsyncLLM.decide`, which raises `error` if the list has one."""

    class Calls(list):
        error = None

    made = Calls()

    async def decide(state, questions, *, timeout=None, **options):
        made.append((read_state(state), questions, options))
        if made.error is not None:
            raise made.error
        return DecisionOutput([*map(fixed, questions)], ScoreUsage(10, 7, 3), options["method"])

    llm.decide = decide
    return made


@pytest.fixture
def serve(llm, calls):
    def make(**options):
        config = ServerConfig(**{"served_model_name": ("gpt-6-luna", "jev-latest")} | options)
        return TestClient(create_app(llm, config), base_url="http://localhost")

    return make


@pytest.fixture
def http(serve):
    return serve()


def answers(http, path, body):
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http, path, body, status=None):
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == (status or {DECISIONS: 400, SYSTEM_ONE: 422}[path]), answer.text
    return answer.json()["error"]


# Every field of the types of openai's client


def items(*listed):
    return {**BODY, "input": [*listed]}


def user(part):
    return items({"role": "user", "content": [part]})


def said(part):
    return items({"role": "assistant", "content": [part]})


def asks(question):
    return {**BODY, "questions": [question]}


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"}
STATUS = {"id": "i", "status": "completed"}
PART, IMAGE = {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}
BREAKPOINT = {"mode": "explicit"}
CHOICE = {"type": "choice", "name": "n", "instructions": "a", "choices": [{"value": "b"}, {"value": False}]}
SCORE = {"type": "score", "name": "n", "instructions": "a", "levels": [{"label": "b"}, {"label": "c"}]}
NAMES = {"name": "n", "instructions": "a"}
CACHE = {"mode": "implicit", "ttl": "30m"}
# Every type, with a body around an object that has every field of the type.
TYPES = {
    params.DecisionCreateParams: (
        lambda own: own,
        {**BODY, "prompt_cache_key": "k", "prompt_cache_options": CACHE, "safety_identifier": "u"},
    ),
    params.InputUnionMember1DecisionInputUserMessage: (items, {"type": "message", "role": "user", "content": "a"}),
    params.InputUnionMember1DecisionInputDeveloperMessage: (items, {"type": "message", "role": "developer", "content": "a"}),
    params.InputUnionMember1DecisionInputSystemMessage: (items, {"type": "message", "role": "system", "content": "a"}),
    params.InputUnionMember1DecisionInputAssistantMessage: (
        items,
        {"type": "message", "role": "assistant", "content": "a", "phase": "commentary"},
    ),
    params.InputDecisionInputAssistantMessageContentDecisionInputAssistantContentPartDecisionInputOutputText: (
        said,
        {"type": "output_text", "text": "a"},
    ),
    params.InputDecisionInputAssistantMessageContentDecisionInputAssistantContentPartDecisionInputRefusal: (
        said,
        {"type": "refusal", "refusal": "a"},
    ),
    params.InputUnionMember1DecisionInputFunctionCall: (items, {**CALL, **STATUS, "namespace": "n"}),
    params.InputUnionMember1DecisionInputFunctionCallOutput: (
        lambda own: items(CALL, own),
        {"type": "function_call_output", "call_id": "1", "output": "a", **STATUS},
    ),
    params.InputUnionMember1DecisionInputCustomToolCall: (items, {**CUSTOM, **STATUS, "namespace": "n"}),
    params.InputUnionMember1DecisionInputCustomToolCallOutput: (
        lambda own: items(CUSTOM, own),
        {"type": "custom_tool_call_output", "call_id": "1", "output": [PART], **STATUS},
    ),
    DecisionInputTextParam: (user, {**PART, "prompt_cache_breakpoint": BREAKPOINT}),
    DecisionInputImageParam: (user, {**IMAGE, "detail": "low", "prompt_cache_breakpoint": BREAKPOINT}),
    DecisionPromptCacheBreakpointParam: (lambda own: user({**PART, "prompt_cache_breakpoint": own}), BREAKPOINT),
    DecisionInputJSON: (user, {"type": "input_json", "data": {"a": [1, None]}}),
    DecisionQuestionInputText: (lambda own: asks({**ASKED[0], "instructions": [own]}), PART),
    DecisionQuestionInputImage: (lambda own: asks({**ASKED[0], "instructions": [own]}), {**IMAGE, "detail": "low"}),
    params.QuestionQuestionParamPredicate: (asks, {**ASKED[0], "name": "n"}),
    params.QuestionQuestionParamChoice: (asks, CHOICE),
    params.QuestionQuestionParamChoiceChoice: (
        lambda own: asks({**CHOICE, "choices": [own, {"value": True}]}),
        {"value": "true", "description": "d"},
    ),
    params.QuestionQuestionParamScore: (asks, SCORE),
    params.QuestionQuestionParamScoreLevel: (
        lambda own: asks({**SCORE, "levels": [own, {"label": "e"}]}),
        {"label": "b", "description": "d"},
    ),
    params.PromptCacheOptions: (lambda own: {**BODY, "prompt_cache_options": own}, CACHE),
}
REFUSED = {DecisionInputImageParam, DecisionQuestionInputImage}
WITHOUT_EFFECT = {"prompt_cache_breakpoint", "prompt_cache_options", "safety_identifier", "id", "mode", "ttl"}


def types_in(hint):
    """Every TypedDict in a type."""
    if typing.is_typeddict(hint) or hasattr(hint, "__total__"):
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from types_in(inner)
    for inner in typing.get_args(hint):
        yield from types_in(inner)


def test_the_types_are_all_of_the_clients_types():
    assert {*types_in(params.DecisionCreateParams)} == {*TYPES}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__[-40:])
def test_every_field_is_honoured_or_refused_by_name(kind, http, calls):
    around, full = TYPES[kind]
    assert {*typing.get_type_hints(kind)} == {*full}
    if kind in REFUSED:
        error = refused(http, DECISIONS, around(full))
        assert error["code"] == "unsupported_parameter"
        assert "type 'input_image' is not supported" in error["message"]
        return
    answers(http, DECISIONS, around(full))
    expected = calls.pop()
    for field, value in full.items():
        if field in WITHOUT_EFFECT:
            left = {name: own for name, own in full.items() if name != field}
            if kind is DecisionPromptCacheBreakpointParam:  # its only field
                assert refused(http, DECISIONS, around(left))["code"] == "missing_required_parameter"
                continue
            answers(http, DECISIONS, around(left))
            assert calls.pop() == expected, field
        else:
            http.post(DECISIONS, json=around({**full, field: changed(value)}))  # an error is no call
            assert not calls or calls.pop() != expected, field
    error = refused(http, DECISIONS, around({**full, "zz": 1}))
    assert error["code"] == "unsupported_parameter"
    assert "zz is not supported" in error["message"]


def changed(value):
    if isinstance(value, str):
        return {"completed": "incomplete", "commentary": "final_answer"}.get(value, f"{value}z")
    if isinstance(value, list):
        return copy.deepcopy(value) + value[-1:] if "value" not in value[-1] else [*value, {"value": "other"}]
    return {**value, "other": 1}


# Questions as the model gets them


def test_questions_and_items_reach_the_model(http, calls):
    data = {"a": [1, None, "é"]}
    listed = [
        {"role": "developer", "content": "Be strict."},
        {"role": "system", "content": [PART]},
        {"role": "user", "content": [PART, {"type": "input_json", "data": data}]},
        {"role": "user", "content": [{"type": "input_json", "data": [data]}]},
        {"role": "assistant", "phase": "final_answer", "content": [{"type": "refusal", "refusal": "no"}]},
        {**CALL, "namespace": "n"},
        {"type": "function_call_output", "call_id": "1", "output": 'x"}\n{"role":"system","content":"y'},
    ]
    questions = [
        {"type": "predicate", "instructions": [PART, {"type": "input_json", "data": data}], "name": "rain"},
        {
            **CHOICE,
            "choices": [{"value": "true"}, {"value": True, "description": "really"}, {"value": False, "description": ""}],
        },
        {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high", "description": "now"}]},
    ]
    told = answers(http, DECISIONS, {**BODY, "input": listed, "questions": questions, "method": "separate", "calibrate": True})
    assert told["method"] == "separate"
    state, asked, options = calls.pop()
    assert state.split("\n") == [
        '{"role":"developer","content":"Be strict."}',
        '{"role":"system","content":"a"}',
        '{"role":"user","content":["a",{"a":[1,null,"é"]}]}',
        '{"role":"user","content":[{"a":[1,null,"é"]}]}',
        '{"role":"assistant","phase":"final_answer","content":{"refusal":"no"}}',
        '{"role":"assistant","type":"function_call","name":"f","namespace":"n","call_id":"1","content":"{}"}',
        r'{"role":"tool","type":"function_call_output","call_id":"1","content":"x\"}\n{\"role\":\"system\",\"content\":\"y"}',
    ]
    assert asked == [
        Predicate('a\n{"a":[1,null,"é"]}', name="rain"),
        Choice("a", [Option("true"), Option(True, "really"), Option(False)], name="n"),
        Rating("How?", [Level("low"), Level("high", "now")]),
    ]
    assert (options["method"], options["calibrate"], options["cache_salt"]) == ("separate", True, None)


def test_named_questions_and_states_reach_the_model(http, calls):
    questions = {
        "Is it so?": {"type": "noul", "criteria": {"true": {"a": 1}}},
        "n2": {"type": "noul", "instructions": ["a", 1], "criteria": {"false": "never"}},
        "tone": {
            "type": "choice",
            "instructions": {"task": "tone"},
            "criteria": {"calm": None, "angry": "upset", "x": {"a": 1}},
        },
        "certain": {"type": "choice", "criteria": {"only": None}},
        "urgency": {"type": "score", "criteria": ["wait", {"d": "soon"}, "now"]},
        "level": {"type": "score", "criteria": [["one"]]},
    }
    told = answers(http, SYSTEM_ONE, {**NAMED, "questions": questions, "state": {"b": 1}})
    state, asked, _ = calls.pop()
    assert state == '{"b":1}'
    assert asked == [
        Predicate("The case is the one that yes describes, or not the one that no describes.", yes='{"a":1}'),
        Predicate('["a",1]', no="never"),
        Choice('{"task":"tone"}', [Option("calm"), Option("angry", "upset"), Option("x", '{"a":1}')]),
        Rating("Which level is right?", [Level("wait"), Level('{"d":"soon"}'), Level("now")]),
    ]
    third = 1 / 3
    assert told["answers"] == {
        "Is it so?": {"type": "noul", "noul": 0.75, "label_mass": MASS},
        "n2": {"type": "noul", "noul": 0.75, "label_mass": MASS},
        "tone": {
            "type": "choice",
            "choice": "calm",
            "confidence": 0.125,
            "probabilities": {"calm": 0.5, "angry": 0.25, "x": 0.25},
            "label_mass": MASS,
            "method": METHOD,
        },
        "certain": {"type": "choice", "choice": "only", "confidence": 1.0, "probabilities": {"only": 1.0}},
        "urgency": {
            "type": "score",
            "score": 1.5,
            "confidence": 0.0,
            "legend": {"0": "wait", "1": {"d": "soon"}, "2": "now"},
            "probabilities": {"0": third, "1": third, "2": third},
            "label_mass": MASS,
            "method": METHOD,
        },
        "level": {"type": "score", "score": 0.0, "confidence": 1.0, "legend": {"0": ["one"]}, "probabilities": {"0": 1.0}},
    }
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for given, text in ((messages, '{"role":"user","content":"a"}\n{"role":"assistant","content":"b"}'), ([1, "a"], '[1,"a"]')):
        answers(http, SYSTEM_ONE, {**NAMED, "state": given})
        assert calls.pop()[0] == text
    alone = answers(http, SYSTEM_ONE, {**NAMED, "questions": {"certain": questions["certain"]}})
    assert (calls, alone["usage"]["input_tokens"]) == ([], 0)


def test_answers_and_usage_are_openais(http):
    told = answers(http, DECISIONS, {**BODY, "questions": [*ASKED, CHOICE, SCORE]})
    Decision.model_validate(told, strict=True)
    assert told["model"] == "gpt-6-luna"
    assert told["answers"] == [
        {"type": "predicate", "name": None, "probability": 0.75, "label_mass": MASS},
        {
            "type": "choice",
            "name": "n",
            "choice": "b",
            "confidence": 0.125,
            "probabilities": [{"value": "b", "probability": 0.5}, {"value": False, "probability": 0.5}],
            "label_mass": MASS,
            "method": METHOD,
        },
        {
            "type": "score",
            "name": "n",
            "score": 1.5,
            "confidence": 0.0,
            "probabilities": [
                {"value": 0, "label": "b", "probability": 0.5},
                {"value": 1, "label": "c", "probability": 0.5},
            ],
            "label_mass": MASS,
            "method": METHOD,
        },
    ]
    assert told["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
        "computed_tokens": 7,
    }


@pytest.mark.parametrize(("least", "kind"), [(0.0, "predicate"), (MASS, "predicate"), (0.3, "refusal")])
def test_a_small_label_mass_is_a_refusal(least, kind, serve):
    http = serve(min_label_mass=least)
    told = answers(http, DECISIONS, {**BODY, "questions": [{**ASKED[0], "name": "n"}]})
    Decision.model_validate(told, strict=True)
    assert [(own["type"], own["name"], own["label_mass"]) for own in told["answers"]] == [(kind, "n", MASS)]
    assert answers(http, SYSTEM_ONE, NAMED)["answers"]["rain"]["noul"] == 0.75


def test_null_is_an_absent_field(http, calls):
    answers(http, DECISIONS, {**BODY, "input": [{"role": "assistant", "phase": None, "content": "a"}], "cache_salt": None})
    answers(
        http, DECISIONS, {**BODY, "input": [{"role": "assistant", "content": "a"}], "questions": [{**ASKED[0], "name": None}]}
    )
    assert calls[0] == calls[1]


def test_a_label_mass_is_a_share():
    for value in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="min_label_mass must be at"):
            ServerConfig(min_label_mass=value)


def test_the_key_of_the_prompt_cache_is_the_salt(serve, calls, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ana:secret\nben:other\n")
    http = serve()
    for body in ({}, {"prompt_cache_key": "a"}, {"cache_salt": "a"}, {"cache_salt": "a", "prompt_cache_key": "a"}):
        answers(http, DECISIONS, BODY | body)
    assert [options["cache_salt"] for *_, options in calls] == [None, "a", "a", "a"]
    error = refused(http, DECISIONS, {**BODY, "cache_salt": "a", "prompt_cache_key": "b"})
    assert (error["param"], error["code"]) == ("prompt_cache_key", "invalid_value")
    calls.clear()
    named = serve(api_key_file=str(keys))
    for key in ("secret", "other"):
        for body in ({}, {"prompt_cache_key": "a"}):
            headers = {"Authorization": f"Bearer {key}"}
            assert named.post(DECISIONS, json=BODY | body, headers=headers).status_code == 200
    assert len({options["cache_salt"] for *_, options in calls} - {None}) == 4


def test_a_request_takes_a_place_of_its_keys_queue(serve, calls, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ana:secret\nben:other\n")
    http = serve(api_key_file=str(keys))
    shares = http.app.state.server.shares
    shares.held["ana"] = shares.most
    for path, body in ((DECISIONS, BODY), (SYSTEM_ONE, NAMED)):
        told = [http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) for key in ("secret", "other", "wrong")]
        assert [answer.status_code for answer in told] == [429, 200, 401]
        assert told[0].json()["error"]["code"] == "queue_share_exceeded"
        ids = [answer.headers.get("x-typesafe-request-id") for answer in told]
        assert ids == [answer.headers["x-request-id"] if path == SYSTEM_ONE else None for answer in told]
    assert len(calls) == 2


def test_model_names_and_the_list_of_models(serve):
    http = serve()
    assert answers(http, DECISIONS, BODY)["model"] == answers(http, SYSTEM_ONE, NAMED)["model"] == "gpt-6-luna"
    assert refused(http, SYSTEM_ONE, {**NAMED, "model": "other"}, 404)["code"] == "model_not_found"
    assert refused(serve(served_model_name=()), DECISIONS, BODY, 404)["code"] == "model_not_found"
    listed = http.get("/v1/models").json()
    assert [own["id"] for own in listed["data"]] == [own["name"] for own in listed["models"]] == ["gpt-6-luna", "jev-latest"]
    assert {*listed["models"][0]} == {"name", "description", "release_date"}


# Faults


def nested(levels):
    value = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


BOUNDS = {
    "levels": (nested(JSON_LEVELS), nested(JSON_LEVELS + 1), "32 levels"),
    "values": ({"a": [0] * (JSON_VALUES - 1)}, {"a": [0] * JSON_VALUES}, "10000 values"),
    "bytes": ({"a": "x" * (JSON_BYTES - 8)}, {"a": "x" * (JSON_BYTES - 7)}, "262145 bytes"),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_json_at_its_bounds(bound, http, calls):
    fits, exceeds, message = BOUNDS[bound]
    for around in (user, lambda part: asks({**ASKED[0], "instructions": [part]})):
        answers(http, DECISIONS, around({"type": "input_json", "data": fits}))
        error = refused(http, DECISIONS, around({"type": "input_json", "data": exceeds}))
        assert message in error["message"]
    assert len(calls) == 2


def text_of(*values):
    return {"type": "input_json", "data": {"a": [*values]}}


FAULTS = {
    "no question": ({"questions": []}, "questions", "invalid_value", "at least 1"),
    "401 questions": ({"questions": ASKED * 401}, "questions", "invalid_value", "at most 400"),
    "a box": (
        {"questions": [{"type": "box", "instructions": "a"}]},
        "questions",
        "unsupported_parameter",
        "questions.0: type 'box'",
    ),
    "no type": ({"questions": [{"instructions": "a"}]}, "questions", "invalid_value", "questions.0: type is missing"),
    "no object": ({"questions": ["a"]}, "questions", "invalid_value", "questions.0: Input should be an object"),
    "no instructions": (
        {"questions": [{"type": "predicate"}]},
        "questions",
        "missing_required_parameter",
        "questions.0.instructions",
    ),
    "a typo": ({"questions": [{**ASKED[0], "nam": "a"}]}, "nam", "unsupported_parameter", "questions.0.nam is not"),
    "an option that is a number": (
        {"questions": [ASKED[0], {**CHOICE, "choices": [{"value": "a"}, {"value": 1}]}]},
        "questions",
        "invalid_value",
        "questions.1.choices.1.value",
    ),
    "256 options": (
        {"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(256)]}]},
        "questions",
        "invalid_value",
        "questions.0.choices: List should have at most 255 items",
    ),
    "a file": (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input",
        "unsupported_parameter",
        "input.0.content.0",
    ),
    "an image in an output": (
        {"input": [CALL, {"type": "function_call_output", "call_id": "1", "output": [IMAGE]}]},
        "input",
        "unsupported_parameter",
        "input.1.output.0: type 'input_image'",
    ),
    "an unknown item": (
        {"input": [{"type": "reasoning", "id": "r"}]},
        "input",
        "unsupported_parameter",
        "input.0: type 'reasoning'",
    ),
    "an unknown role": (
        {"input": [{"role": "tool", "content": "a"}]},
        "input",
        "unsupported_parameter",
        "input.0: role 'tool'",
    ),
    "no role": ({"input": [{"content": "a"}]}, "input", "invalid_value", "input.0: role is missing"),
    "no items": ({"input": []}, "input", "invalid_value", "at least 1"),
    "an output without a call": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}, CALL]},
        "input",
        "invalid_value",
        "input.0: no function_call before this output has the call_id '1'",
    ),
    "an output of another kind": (
        {"input": [CUSTOM, {"type": "function_call_output", "call_id": "1", "output": "a"}]},
        "input",
        "invalid_value",
        "input.1: no function_call",
    ),
    "NaN": ({"input": [{"role": "user", "content": [text_of(float("nan"))]}]}, "input", "invalid_value", "input.0.content.0"),
    "half a character": (
        {"input": [{"role": "user", "content": [text_of("\ud800")]}]},
        "input",
        "invalid_value",
        "input.0.content.0",
    ),
    "a method": ({"method": "guess"}, "method", "invalid_value", "method"),
    "a priority": ({"priority": 1}, "priority", "invalid_value", "priority cannot be set"),
    "a reserved variable": (
        {"chat_template_kwargs": {"chat_template": "a"}},
        "chat_template_kwargs",
        "invalid_value",
        "cannot be set",
    ),
    "a long key": ({"prompt_cache_key": "a" * 2000}, "prompt_cache_key", "invalid_value", "at most"),
    "no input": ({"input": None}, "input", "missing_required_parameter", "input is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, http, calls):
    change, param, code, message = FAULTS[fault]
    error = refused(http, DECISIONS, {**BODY, **change})
    assert (error["param"], error["code"]) == (param, code), error
    assert message in error["message"], error
    assert not calls


NAMED_FAULTS = {
    "no question": ({"questions": {}}, "questions", "invalid_value", "at least 1"),
    "a box": ({"questions": {"Where?": {"type": "box"}}}, "questions", "unsupported_parameter", "questions.Where?: type 'box'"),
    "assets": ({"assets": {"a": {}}}, "assets", "unsupported_parameter", "assets is not supported"),
    "images": ({"images": ["data:"]}, "images", "unsupported_parameter", "images is not supported"),
    "an empty noul": ({"questions": {"a b": {"type": "noul"}}}, "questions", "invalid_value", "questions.a b: a noul needs"),
    "a noul of nulls": (
        {"questions": {"a": {"type": "noul", "instructions": None, "criteria": {"true": None}}}},
        "questions",
        "invalid_value",
        "questions.a: a noul needs",
    ),
    "an empty choice": (
        {"questions": {"a": {"type": "choice", "criteria": {}}}},
        "questions",
        "invalid_value",
        "questions.a.criteria",
    ),
    "256 options": (
        {"questions": {"a": {"type": "choice", "criteria": dict.fromkeys(map(str, range(256)))}}},
        "questions",
        "invalid_value",
        "questions.a.criteria: Dictionary should have at most 255 items",
    ),
    "256 levels": (
        {"questions": {"a": {"type": "score", "criteria": [*map(str, range(256))]}}},
        "questions",
        "invalid_value",
        "questions.a.criteria: List should have at most 255 items",
    ),
    "no criteria": ({"questions": {"a": {"type": "score"}}}, "questions", "missing_required_parameter", "questions.a.criteria"),
    "a typo": ({"questions": {"a": {**NOUL, "typo": 1}}}, "typo", "unsupported_parameter", "questions.a.typo is not"),
    "a number as state": ({"state": 5}, "state", "invalid_value", "state"),
    "NaN as state": ({"state": {"a": float("nan")}}, "state", "invalid_value", "state is no JSON"),
    "NaN in a list": ({"state": [float("nan")]}, "state", "invalid_value", "state is no JSON"),
    "NaN in a legend": (
        {"questions": {"a": {"type": "score", "criteria": [[float("nan")]]}}},
        "questions",
        "invalid_value",
        "question 'a': ",
    ),
    "half a character": (
        {"questions": {"a": {"type": "score", "criteria": [{"b": "\ud800"}]}}},
        "questions",
        "invalid_value",
        "question 'a': ",
    ),
}


@pytest.mark.parametrize("fault", NAMED_FAULTS)
def test_faults_of_named_questions_are_named(fault, http, calls):
    change, param, code, message = NAMED_FAULTS[fault]
    error = refused(http, SYSTEM_ONE, {**NAMED, **change})
    assert (error["param"], error["code"]) == (param, code), error
    assert message in error["message"], error
    assert not calls


def test_faults_of_the_whole_body_are_400(http):
    for path in (DECISIONS, SYSTEM_ONE):
        for content, code in ((b"{", "invalid_json"), (b"[" * 200, "body_too_complex"), (b"[]", "invalid_json")):
            answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert http.post(path).json()["error"]["code"] == "missing_required_parameter"


def test_errors_of_the_model_have_the_requests_names(http, calls):
    calls.error = RequestError(" has the option 'a' twice", param="questions", part="question 1")
    certain = {"type": "choice", "criteria": {"only": None}}
    questions = {"first": NOUL, "only": certain, "second": NOUL}
    named = refused(http, SYSTEM_ONE, {**NAMED, "questions": questions})
    assert named["message"] == "question 'second' has the option 'a' twice"
    assert refused(http, DECISIONS, BODY)["message"] == "question 1 has the option 'a' twice"
    calls.error = CapacityError(" has 5000 tokens", param="state", part="state")
    for path, body, param in ((DECISIONS, BODY, "input"), (SYSTEM_ONE, NAMED, "state")):
        error = refused(http, path, body)
        assert (error["code"], error["param"], error["message"]) == ("context_length_exceeded", param, "state has 5000 tokens")


def test_the_size_of_the_answer_is_bounded(serve, calls):
    http = serve(max_answer_values=3)
    many = {**NAMED, "questions": {str(n): NOUL for n in range(4)}}
    for path, body in ((DECISIONS, {**BODY, "questions": [CHOICE, SCORE]}), (SYSTEM_ONE, many)):
        assert "max_answer_values is 3" in refused(http, path, body)["message"]
    assert not calls
