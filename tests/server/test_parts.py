"""Parts of raw bodies: those of the validated ones, on every route and in every form of its fields."""

import pytest

from chunkattn.schema.anthropic import CountBody, MessagesBody
from chunkattn.schema.decisions import DecisionsBody
from chunkattn.schema.documents import CacheBody, ForgetBody
from chunkattn.schema.generation import ChatBody, CompletionBody
from chunkattn.schema.parts import ROUTES, Prompt, documents_of, parts
from chunkattn.schema.responses import ResponsesBody
from chunkattn.schema.scoring import GenerativeScoringBody, RerankBody, ScoreBody
from chunkattn.schema.systemone import SystemOneBody
from chunkattn.schema.tokens import InspectBody, TokenizeBody
from chunkattn.web.paths import RERANK_PATHS
from tests.posted_parts import difference, validated

MODELS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/cache/documents": CacheBody,
    "/v1/cache/forget": ForgetBody,
    "/v1/score": ScoreBody,
    "/score": ScoreBody,
    "/generative_scoring": GenerativeScoringBody,
    **dict.fromkeys(RERANK_PATHS, RerankBody),
    "/v1/decisions": DecisionsBody,
    "/v1/systemone": SystemOneBody,
    "/inspect": InspectBody,
    "/tokenize": TokenizeBody,
}
LISTED = ["Figs.", [7, 8], {"text": "Plums.", "title": "Fruit", "id": None}, {"id": "stored"}, {"text": "", "id": "a"}]
TEXTS = ["Figs.", {"text": "Plums.", "title": "Fruit"}, {"id": "stored"}, {"id": "stored", "title": None}]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {}}]
CALL = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL, {"function": {"name": "g"}}], "reasoning": "Well."}
DIALOG = [
    {"role": "developer", "content": PARTS[:1], "name": "ann", "refusal": None},
    USER,
    CALLING,
    {"role": "tool", "content": PARTS, "tool_call_id": "c"},
    {"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "Hm.", "reasoning": "Well."},
    USER,
]
ASKED = {"questions": [{"type": "predicate", "instructions": "Is it late?"}]}
NOUL = {"questions": {"late": {"type": "noul", "instructions": "It is late."}}}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": ""}]},
    {"type": "message", "role": "system", "content": [{"type": "input_text", "text": t} for t in "ab"]},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {"b": [1, None]}}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "commentary"},
    {
        "type": "function_call",
        "call_id": "1",
        "id": "i",
        "name": "f",
        "arguments": "{}",
        "namespace": "n",
        "status": "completed",
    },
    {"type": "function_call_output", "call_id": "1", "output": "done"},
    {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "raw"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "out"}]},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": None, "strict": True}}
SAID = [
    {"role": "developer", "content": [{"type": "input_text", "text": t} for t in "ab"]},
    {"type": "message", "role": "user", "content": "Who?", "id": None},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": t} for t in "Hm"]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask.", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
    {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "1", "output": "done"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "out"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
]
BLOCK = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
TURNS = [
    {"role": "user", "content": "Who?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "é"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [BLOCK]}, BLOCK, BLOCK]},
]
SHOWN = {"chat_template_kwargs": {"enable_thinking": False, "tone": "dry"}, "cache_salt": "mine"}
CHUNKED = [
    {"prompt": "Hello."},
    {"prompt": [1, 2], "add_special_tokens": False},
    {"prompt": "Hello.", "add_special_tokens": False, "cache_salt": ""},
    {"chunks": {"documents": LISTED, "question": "Who?"}},
    {"chunks": {"prefix": "", "documents": LISTED[1:2], "question": [3]}, "cache_salt": None},
    {"chunks": {"prefix": [1], "documents": [], "question": [3]}, "prompt": ""},
]
PAIRS = [
    {"query": "q", "documents": TEXTS},
    {"query": {"text": "q"}, "texts": ["a", "b"], "instruct": "Judge.", "template": "t"},
    {"query": "q", "documents": TEXTS, "order": "document_first", "instruction": "Judge.", "cache_salt": "mine"},
]
ANN, BEN, STORED = {"name": "Ann", "age": 3, "more": {"é": [1]}}, {"name": "Ben", "age": None}, {"id": "stored"}
for documents, names in (([ANN, BEN, STORED], ["name", "age"]), ([ANN, STORED], ["more", "id"]), ([ANN, STORED], ["age"])):
    PAIRS.append({"query": "q", "documents": documents, "rank_fields": names})
LABELS = {"label_token_ids": [1], "apply_softmax": True}
DOCUMENTS = [{"documents": [d for d in LISTED if d != {"id": "stored"}], "prefix": "Read."}, {"documents": [[7]]}]
DOCUMENTS += [{"documents": ["a"], "messages": [SYSTEM], **SHOWN}, {"documents": ["a", [1]], "messages": []}]
DOCUMENTS += [{"documents": ["a"], "messages": [SYSTEM], "tools": [TOOL], **SHOWN}]
BODIES = {
    CompletionBody: [*CHUNKED, {"prompt": ["a", "b"]}, {"prompt": [[1], [2, 3]]}],
    InspectBody: CHUNKED,
    TokenizeBody: [
        {"prompt": "Hello."},
        {"prompt": "Hello.", "add_special_tokens": False},
        {"messages": DIALOG, "tools": [TOOL]},
    ],
    ChatBody: [
        {"messages": DIALOG, **SHOWN},
        {"messages": DIALOG, "documents": LISTED, "reasoning_effort": "high"},
        {"messages": [SYSTEM | {"content": PARTS}, USER], "documents": LISTED[:2]},
        {"messages": [SYSTEM, USER], "documents": []},
        {"messages": [USER], "documents": None},
        {"messages": [USER], "documents": ["a"], "tools": [TOOL], "tool_choice": "none"},
        {"messages": [USER], "tools": []},
    ],
    ResponsesBody: [
        {"input": "Who?"},
        {"input": SAID, "instructions": "Be brief.", **SHOWN},
        {"input": SAID, "tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "auto"},
        {"input": SAID, "documents": LISTED, "reasoning": {"effort": "high"}, "instructions": None},
        {"input": [{"role": "user", "content": "Who?"}], "documents": LISTED[:2], "stream": True, "text": None},
    ],
    CountBody: [
        {"messages": TURNS, "system": "Be brief.", **SHOWN},
        {"messages": TURNS[:1], "system": [BLOCK, BLOCK], "documents": LISTED},
    ],
    MessagesBody: [
        {"messages": TURNS, "max_tokens": 4, "system": "Be brief.", **SHOWN},
        {"messages": TURNS, "max_tokens": 4, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        {"messages": TURNS[:1], "max_tokens": 4, "system": [BLOCK, BLOCK], "documents": LISTED},
        {"messages": [*TURNS, TURNS[1]], "max_tokens": 4, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
    ],
    CacheBody: [body | {"pin": True} for body in DOCUMENTS],
    ForgetBody: DOCUMENTS,
    ScoreBody: [
        {"query": "q", "items": ["a", "b"], **LABELS},
        {"query": ["q", "r"], "items": [["a"], ["b"]], "labels": ["x"]},
        {"query": [1, 2], "items": [[3], [4]], "item_first": True, **LABELS},
        {"packed_ids": [1, 2, 3], **LABELS},
        {"text_1": "q", "text_2": ["a", "b"], "cache_salt": "mine"},
        {"queries": ["q", "r"], "documents": TEXTS[:2], "instruction": "Judge."},
        {"queries": "q", "documents": TEXTS, "order": "document_first"},
        {"text_1": ["q"], "items": "a"},
        {"queries": "q", "text_2": "a"},
    ],
    GenerativeScoringBody: [{"query": "q", "items": "a", **LABELS}, {"query": [1], "items": [[2], [3]], **LABELS}],
    RerankBody: PAIRS,
    DecisionsBody: [
        {"input": "It is night.", **ASKED, "prompt_cache_key": "mine"},
        {"input": ITEMS, **ASKED, "system": "Be brief.", **SHOWN},
        {"input": "x", **ASKED, "documents": LISTED, "prompt_cache_key": "mine", "cache_salt": "mine"},
    ],
    SystemOneBody: [
        {"state": {"é": [1]}, **NOUL},
        {"state": [SYSTEM, USER], "documents": LISTED, "system": "Be brief.", **NOUL},
        {"state": [], **NOUL},
        {"state": "It is night.", "cache_salt": "mine", **NOUL},
    ],
}


def test_every_route_has_bodies():
    assert MODELS.keys() == ROUTES.keys()
    assert {*MODELS.values()} == BODIES.keys()


@pytest.mark.parametrize("path", MODELS)
def test_the_parts_of_a_raw_body_are_those_of_the_validated_one(path):
    for raw in BODIES[MODELS[path]]:
        body = MODELS[path].model_validate(raw)
        assert validated(body) is not None
        assert difference(path, raw, body) is None
        if ROUTES[path].place:
            assert [*documents_of(path, raw)] == (raw.get("chunks", raw).get("documents") or [])


def test_text_prompts_are_split_where_the_replicas_split_them():
    split = parts("/v1/completions", {"prompt": ["a # b # c", "a # b"]}, " # ")
    assert split.prompts == [Prompt("text", ["a"], ["b"], in_template=False), Prompt("text", ["a # b"])]
    assert split.question == ["c"]
    whole = {"prompt": "a # b # c", "chunk_aware": False}
    assert parts("/v1/completions", whole, " # ") == parts("/v1/completions", whole)
