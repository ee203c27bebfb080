"""Errors name the field that the client sent, under whichever name a body has for an argument."""

import re

import pytest

from chunkattn.errors import RequestError
from chunkattn.schema.anthropic import MessagesBody
from chunkattn.schema.base import Body
from chunkattn.schema.decisions import DecisionsBody
from chunkattn.schema.generation import ChatBody, CompletionBody
from chunkattn.schema.responses import ResponsesBody
from chunkattn.schema.responses_chat import LOGPROBS
from chunkattn.schema.scoring import RerankBody, ScoreBody
from chunkattn.schema.systemone import SystemOneBody
from chunkattn.schema.tokens import InspectBody
from chunkattn.web.errors import ApiError, renamed

pytest_plugins = ["tests.told_engine"]

LONG = "Ana lives in Oslo. " * 2000
USER = {"role": "user", "content": "Who?"}
RANK = {"query": "Who?", "documents": ["Ana", "Ben"]}
SCHEMA = {"type": "json_schema", "schema": {"type": "no such type"}}
BLOCK = {"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}
EFFORT = {"chat_template_kwargs": {"reasoning_effort": "high"}}
QUESTIONS = [{"type": "predicate", "name": "late", "instructions": "Is it late?"}]
PATHS = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions", ScoreBody: "/v1/score"}
PATHS |= {ResponsesBody: "/v1/responses", MessagesBody: "/v1/messages"}
PATHS |= {RerankBody: "/v1/rerank", DecisionsBody: "/v1/decisions", InspectBody: "/inspect"}
# For each field under which a body has an argument: a body with a fault in that field.
FAULTS = {
    (CompletionBody, "prompt", "prompt"): {"prompt": LONG},
    (InspectBody, "prompt", "prompt"): {"prompt": [5] * 70_000},
    (InspectBody, "prompt", "chunks"): {"chunks": {"documents": [[5] * 15_000] * 5, "question": [5]}},
    (ChatBody, "prompt", "messages"): {"messages": [USER | {"content": LONG}]},
    (ChatBody, "max_tokens", "max_tokens"): {"messages": [USER], "max_tokens": 0},
    (ChatBody, "max_tokens", "max_completion_tokens"): {"messages": [USER], "max_completion_tokens": 0},
    (ChatBody, "logprobs", "logprobs"): {"messages": [USER], "logprobs": "yes"},
    (ChatBody, "logprobs", "top_logprobs"): {"messages": [USER], "logprobs": True, "top_logprobs": 10**6},
    (ChatBody, "structured_outputs", "structured_outputs"): {"messages": [USER], "structured_outputs": {}},
    (ChatBody, "structured_outputs", "response_format"): {"messages": [USER], "response_format": {"type": "xml"}},
    (ChatBody, "structured_outputs", "tools"): {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f"}}] * 2,
    },
    (CompletionBody, "structured_outputs", "structured_outputs"): {"prompt": "x", "structured_outputs": {"regex": "("}},
    (CompletionBody, "structured_outputs", "response_format"): {"prompt": "x", "response_format": {"type": "xml"}},
    (ResponsesBody, "messages", "input"): {"input": LONG},
    (ResponsesBody, "max_tokens", "max_output_tokens"): {"input": "Who?", "max_output_tokens": 0},
    (ResponsesBody, "top_logprobs", "top_logprobs"): {"input": "Who?", "top_logprobs": 10**6},
    (ResponsesBody, "top_logprobs", "include"): {"input": "Who?", "include": [LOGPROBS], "max_output_tokens": 10**7},
    (ResponsesBody, "response_format", "text"): {"input": "Who?", "text": {"format": SCHEMA | {"name": "a"}}},
    (ResponsesBody, "reasoning_effort", "reasoning"): {"input": "Who?", "reasoning": {"effort": "low"}, **EFFORT},
    (MessagesBody, "stop", "stop"): {"messages": [USER], "max_tokens": 2, "stop": [""]},
    (MessagesBody, "stop", "stop_sequences"): {"messages": [USER], "max_tokens": 2, "stop_sequences": [""]},
    (MessagesBody, "documents", "documents"): {"messages": [USER], "max_tokens": 2, "documents": ["x"] * 2, "citations": True},
    (MessagesBody, "documents", "messages"): {"messages": [{"role": "user", "content": [BLOCK] * 2}, USER], "max_tokens": 2},
    (MessagesBody, "response_format", "output_config"): {
        "messages": [USER],
        "max_tokens": 2,
        "output_config": {"format": SCHEMA},
    },
    (MessagesBody, "reasoning_effort", "output_config"): {
        "messages": [USER],
        "max_tokens": 2,
        "output_config": {"effort": "low"},
        **EFFORT,
    },
    (ScoreBody, "items", "items"): {"query": "a", "items": [LONG], "labels": ["yes"]},
    (ScoreBody, "items", "packed_ids"): {"packed_ids": [1, 0, 2, 0], "label_token_ids": [1]},  # there is no delimiter
    (ScoreBody, "labels", "labels"): {"query": "a", "items": ["b"], "labels": ["more than one token"]},
    (ScoreBody, "labels", "label_token_ids"): {"query": "a", "items": ["b"], "label_token_ids": [10**6]},
    (RerankBody, "documents", "documents"): RANK | {"documents": [LONG]},
    (RerankBody, "documents", "texts"): {"query": "Who?", "texts": [LONG]},
    (RerankBody, "top_n", "top_n"): RANK | {"top_n": 0},
    (RerankBody, "top_n", "top_k"): RANK | {"top_k": 0},
    (RerankBody, "instruction", "instruction"): RANK | {"instruction": "Judge."},  # the template takes none
    (RerankBody, "instruction", "instruct"): RANK | {"instruct": "Judge."},
    (RerankBody, "max_tokens_per_doc", "max_tokens_per_doc"): RANK | {"max_tokens_per_doc": 0},
    (RerankBody, "max_tokens_per_doc", "max_doc_length"): RANK | {"max_doc_length": 0},
    (RerankBody, "truncate_prompt_tokens", "truncate_prompt_tokens"): RANK | {"truncate_prompt_tokens": -5},
    (RerankBody, "truncate_prompt_tokens", "truncation"): RANK | {"truncation": 1},
    (RerankBody, "truncate_prompt_tokens", "truncate"): RANK | {"truncate": 1},
    (DecisionsBody, "state", "input"): {"input": LONG, "questions": QUESTIONS},
}
MORE = [
    ("/v1/chat/completions", {"messages": [USER], "max_completion_tokens": 10**6}, "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": [USER], "max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [USER], "prompt_logprobs": 10**6}, "prompt_logprobs"),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "logprobs": 10**6}, "logprobs"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [USER], "chat_template": "x"}, "chat_template"),
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ("/tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template"),
]


STREAMED = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)


def test_every_other_name_is_tested():
    """A new name of an argument comes into this table."""

    def bodies(cls):
        return {cls}.union(*map(bodies, cls.__subclasses__()))

    assert {*PATHS, SystemOneBody} <= bodies(Body)
    owners = {cls for cls in bodies(Body) if "fields_of" in vars(cls)}  # others have the table of one of these
    known = {(cls, argument, name) for cls in owners for argument, names in cls.fields_of.items() for name in names}
    # An engine whose pages run out is at fault itself, and names the whole prompt.
    chunks = CompletionBody(chunks={"documents": ["a"], "question": "?"})
    assert chunks.own_error(RequestError("it cannot fit", param="prompt")).param == "chunks"
    assert known == {*FAULTS, (CompletionBody, "prompt", "chunks")}
    assert all(name in cls.model_fields for cls, _, name in known)


@pytest.mark.parametrize(("cls", "argument", "name"), FAULTS)
def test_errors_name_the_field_that_was_sent(post, cls, argument, name):
    for stream in ({}, {"stream": True}) if cls in STREAMED else ({},):
        answer = post(PATHS[cls], FAULTS[cls, argument, name] | stream)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == name, error
        if "_" in name:
            assert name in error["message"]


@pytest.mark.parametrize(("path", "body", "name"), MORE)
def test_messages_have_the_same_names(post, path, body, name):
    error = post(path, body).json()["error"]
    assert error["param"] == name, error
    words = re.findall(r"\w+", error["message"])
    assert name in words
    for argument, own in (("max_tokens", "max_completion_tokens"), ("logprobs", "top_logprobs")):
        assert argument in body or own not in body or argument not in words


def test_errors_without_a_field_stay():
    error = ApiError(503, "max_tokens", code="x", **{"Retry-After": "1"})
    own = renamed(error, {"max_tokens": "max_completion_tokens"})
    assert (own.status, own.param, own.code, own.headers) == (503, None, "x", {"Retry-After": "1"})
    assert renamed(error, {}) is error
