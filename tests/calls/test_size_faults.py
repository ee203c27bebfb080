"""Sizes that no engine can serve: one fault has one code on every call and route, and the error names the caller's argument."""

import asyncio
import inspect
import re
import sys
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from chunkattn import LLM, ChunkedPrompt, DocumentPrompt, SamplingParams, make_layout
from chunkattn.async_llm import AsyncLLM
from chunkattn.calls import precompute
from chunkattn.cli import cache, prompts
from chunkattn.documents.records import DocumentRecord, Prefix, Scope
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest
from chunkattn.engine.request import Request
from chunkattn.errors import ChunkAttnError, RequestError
from chunkattn.parsers import PromptParser, part_parser
from chunkattn.parsers.arguments import check_ids
from chunkattn.server.app import create_app
from chunkattn.server.state import ServerState
from chunkattn.terminal.commands import app
from chunkattn.web.errors import api_error
from chunkattn.web.options import ServerConfig

LENGTH, CHUNK, CHUNKS, ITEMS, CALL = 256, 100, 6, 8, 900
TOO_LONG, INVALID = "context_length_exceeded", "invalid_value"
USER, ANSWER = {"role": "user", "content": "q"}, SamplingParams(max_tokens=2)
FAULTS = {
    "text": {"far too long": ("Ana lives in Oslo. " * 9000, TOO_LONG), "too long": ("Ana in Oslo. " * 45, TOO_LONG)},
    "ids": {
        "too long": ([5] * (LENGTH + 1), TOO_LONG),
        "outside": ([5, 10**6], INVALID),
        "negative": ([5, -1], INVALID),
        "far outside": ([5, 2**31], INVALID),
    },
}
"""Values of a part by its kind, each with the code of its fault."""


def system(text):
    return [{"role": "system", "content": text}]


def parts(kind):
    """Every part of the calls of `LLM` and `AsyncLLM`: its argument, its name in errors, and the call with a value there."""
    a, q = ("a", "q") if kind == "text" else ([5], [6])
    labels = {"label_token_ids": [5, 6]}
    yield "prompt", "", lambda llm, v: llm.generate({"prompt" if kind == "text" else "prompt_token_ids": v}, ANSWER)
    yield "prompt", "prefix", lambda llm, v: llm.generate(ChunkedPrompt(v, [a], q), ANSWER)
    yield "prompt", "chunk 1", lambda llm, v: llm.generate(ChunkedPrompt(a, [a, v], q), ANSWER)
    yield "prompt", "question", lambda llm, v: llm.generate(ChunkedPrompt(a, [a], v), ANSWER)
    yield "prefix", "prefix", lambda llm, v: llm.generate(DocumentPrompt(v, [a], q), ANSWER)
    yield "documents", "document 1", lambda llm, v: llm.generate(DocumentPrompt(a, [a, v], q), ANSWER)
    yield "question", "question", lambda llm, v: llm.generate(DocumentPrompt(a, [a], v), ANSWER)
    yield "documents", "document 1", lambda llm, v: llm.chat([USER], ANSWER, documents=["a", v])
    yield "query", "query", lambda llm, v: llm.score(v, [a], **labels)
    yield "items", r"items?.1", lambda llm, v: llm.score(a, [a, v], **labels)
    yield "items", r"query 1: items?.1", lambda llm, v: llm.score([a, a], [[a], [a, v]], **labels)
    yield "items", r"items?.1", lambda llm, v: llm.score(a, [a, v], item_first=True, **labels)
    yield "documents", "document 1", lambda llm, v: llm.rerank("q", [a, v])
    for name in ("precompute", "lookup", "forget"):
        yield "prefix", "prefix", lambda llm, v, name=name: getattr(llm, name)(v, [a])
        yield "documents", "document 1", lambda llm, v, name=name: getattr(llm, name)(a, [a, v])
    if kind == "ids":
        return
    yield "prompt", "chunk 1", lambda llm, v: llm.generate(f"a # # b # # {v} # # q", ANSWER)
    yield "messages", "", lambda llm, v: llm.chat([{**USER, "content": v}], ANSWER)
    yield "messages", "", lambda llm, v: llm.chat([*system(v), USER], ANSWER, documents=["a"])
    yield "query", "query", lambda llm, v: llm.rerank(v, ["a"])
    yield "prefix", "", lambda llm, v: llm.precompute(system(v), ["a"])


def bodies(kind):
    """Every part of a request body, as `parts`."""
    a, q = ("a", "q") if kind == "text" else ([5], [6])
    labels, most = {"label_token_ids": [5, 6]}, {"max_tokens": 2}
    yield "prompt", "", "/v1/completions", lambda v: {"prompt": v, **most}
    yield "prompt", "prompt 1", "/v1/completions", lambda v: {"prompt": [a, v], **most}
    yield "query", "query", "/v1/score", lambda v: {"query": v, "items": [a], **labels}
    yield "items", r"items?.1", "/v1/score", lambda v: {"query": a, "items": [a, v], **labels}
    yield "items", r"query 1: items?.1", "/score", lambda v: {"query": [a, a], "items": [[a], [a, v]], **labels}
    yield "query", "query", "/generative_scoring", lambda v: {"query": v, "items": [a], **labels}
    yield "items", r"items?.1", "/generative_scoring", lambda v: {"query": a, "items": [a, v], **labels}
    yield "prefix", "prefix", "/v1/cache/documents", lambda v: {"prefix": v, "documents": [a]}
    yield "documents", "document 1", "/v1/cache/documents", lambda v: {"prefix": a, "documents": [a, v]}
    if kind == "ids":
        return
    yield "prefix", "prefix", "/v1/completions", lambda v: {"chunks": {"prefix": v, "documents": ["a"], "question": q}}
    yield "documents", "document 1", "/v1/completions", lambda v: {"chunks": {"documents": ["a", v], "question": q}}
    yield "question", "question", "/v1/completions", lambda v: {"chunks": {"documents": ["a"], "question": v}}
    yield "messages", "", "/v1/chat/completions", lambda v: {"messages": [{**USER, "content": v}], **most}
    yield "documents", "document 1", "/v1/chat/completions", lambda v: {"messages": [USER], "documents": ["a", v], **most}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        yield "query", "query", path, lambda v: {"query": v, "documents": ["a"]}
        yield "documents", "document 1", path, lambda v: {"query": "q", "documents": ["a", v]}
    yield "texts", "document 1", "/rerank", lambda v: {"query": "q", "texts": ["a", v]}
    yield "text_2", "document 1", "/v1/score", lambda v: {"text_1": "q", "text_2": ["a", v]}
    yield "text_1", "query 1", "/v1/score", lambda v: {"text_1": ["q", v], "text_2": ["a", "b"]}
    yield "messages", "", "/v1/cache/documents", lambda v: {"messages": system(v), "documents": ["a"]}


MANY = ["a"] * 9
CHUNKS_OF_IDS = [[n, *[5] * (CHUNK - 1)] for n in range(CHUNKS)]
WHOLE = [
    (INVALID, "prompt", lambda llm: llm.generate(ChunkedPrompt("a", MANY, "q"), ANSWER)),
    (INVALID, "prompt", lambda llm: llm.generate(" # # ".join(MANY), ANSWER, chunk_aware=True)),
    (INVALID, "documents", lambda llm: llm.generate(DocumentPrompt("a", MANY, "q"), ANSWER)),
    (INVALID, "documents", lambda llm: llm.chat([USER], ANSWER, documents=MANY)),
    (INVALID, "items", lambda llm: llm.score("q", MANY, labels=["a"])),
    (INVALID, "items", lambda llm: llm.score(["q"] * 3, MANY[:3], labels=["a"])),
    (INVALID, "documents", lambda llm: llm.rerank("q", MANY)),
    (INVALID, "documents", lambda llm: llm.precompute("a", MANY)),
    (INVALID, "prompt", lambda llm: llm.generate("", ANSWER)),
    (INVALID, "prompt", lambda llm: llm.generate({"prompt_token_ids": []}, ANSWER)),
    (INVALID, "prompt", lambda llm: llm.generate(ChunkedPrompt("a", ["b"], ""), ANSWER)),
    (INVALID, "question", lambda llm: llm.generate(DocumentPrompt("a", ["b"], ""), ANSWER)),
    (INVALID, "question", lambda llm: llm.generate(DocumentPrompt([5], [[5]], []), ANSWER)),
    (INVALID, "query", lambda llm: llm.score("", ["a"], labels=["a"])),
    (INVALID, "query", lambda llm: llm.rerank("", ["a"])),
    (INVALID, "documents", lambda llm: llm.precompute([], [])),
    (INVALID, "packed_ids", lambda llm: llm.score(packed_ids=[5, 368, *[6, 368] * 9], label_token_ids=[5])),
    (INVALID, "packed_ids", lambda llm: llm.score(packed_ids=[5, 368, 10**6, 368], label_token_ids=[5])),
    (TOO_LONG, "packed_ids", lambda llm: llm.score(packed_ids=[5, 368, *[6] * LENGTH, 368], label_token_ids=[5])),
    (TOO_LONG, "packed_ids", lambda llm: llm.score(packed_ids=[*[5] * (LENGTH + 1), 368, 6, 368], label_token_ids=[5])),
    (INVALID, "label_token_ids", lambda llm: llm.score([5], [[5]], label_token_ids=[])),
    (INVALID, "label_token_ids", lambda llm: llm.score([5], [[5]], label_token_ids=[10**6])),
    (INVALID, "label_token_ids", lambda llm: llm.score([5], [[5], [6]], label_token_ids=[[5], []])),
    (INVALID, "label_token_ids", lambda llm: llm.score([5], [[5], [6]], label_token_ids=[[5], [10**6]])),
    (INVALID, "labels", lambda llm: llm.score("q", ["a", "b"], labels=[["a"]])),
    (INVALID, "stop_token_ids", lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[10**6]))),
    (INVALID, "logprobs", lambda llm: llm.generate("a", SamplingParams(logprobs=10**6))),
    (INVALID, "min_tokens", lambda llm: llm.generate("a " * 100, SamplingParams(max_tokens=None, min_tokens=LENGTH))),
    (TOO_LONG, "n", lambda llm: llm.generate("a", SamplingParams(n=17, max_tokens=1))),
    (TOO_LONG, "max_tokens", lambda llm: llm.generate("a", SamplingParams(max_tokens=LENGTH))),
    (TOO_LONG, "max_tokens", lambda llm: llm.generate("a", SamplingParams(n=3, max_tokens=150))),
    (TOO_LONG, "prompt", lambda llm: llm.generate({"prompt_token_ids": [5] * LENGTH}, ANSWER)),
    (TOO_LONG, "prompt", lambda llm: llm.generate(ChunkedPrompt([5], CHUNKS_OF_IDS, [6]), ANSWER)),
    (TOO_LONG, "documents", lambda llm: llm.generate(DocumentPrompt([5], CHUNKS_OF_IDS, [6]), ANSWER)),
    (TOO_LONG, "items", lambda llm: llm.score([5] * 150, [[n] for n in range(8)], label_token_ids=[5], algorithm="serial")),
    (TOO_LONG, "documents", lambda llm: llm.precompute([5] * 200, [[n, *[5] * 99] for n in range(8)])),
    (TOO_LONG, "documents", lambda llm: llm.precompute([5], CHUNKS_OF_IDS, pin=True)),
]
"""Calls that are too many, too much or empty, each with the code of the fault and the argument."""
WHOLE_BODIES = [
    ("/v1/completions", {"prompt": ""}, INVALID, "prompt"),
    ("/v1/completions", {"prompt": [[5] * 200] * 5}, TOO_LONG, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": LENGTH}, TOO_LONG, "max_tokens"),
    ("/v1/completions", {"chunks": {"documents": MANY, "question": "q"}}, INVALID, "documents"),
    ("/v1/completions", {"chunks": {"documents": ["a"], "question": ""}}, INVALID, "question"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**6]}, INVALID, "stop_token_ids"),
    ("/v1/chat/completions", {"messages": [USER], "documents": MANY}, INVALID, "documents"),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": LENGTH}, TOO_LONG, "max_tokens"),
    ("/v1/score", {"query": "q", "items": MANY, "labels": ["a"]}, INVALID, "items"),
    ("/v1/score", {"query": "", "items": ["a"], "labels": ["a"]}, INVALID, "query"),
    ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [10**6]}, INVALID, "label_token_ids"),
    ("/v1/score", {"query": "q", "items": ["a", "b"], "label_token_ids": [[5], [10**6]]}, INVALID, "label_token_ids"),
    ("/v1/score", {"query": "q", "items": ["a", "b"], "labels": [["a"], []]}, INVALID, "labels"),
    ("/v1/score", {"query": "q", "items": ["a", "b"], "labels": [["a"], "b"]}, INVALID, "labels"),
    ("/v1/score", {"query": "q", "items": ["a", "b"], "label_token_ids": [[5], [True]]}, INVALID, "label_token_ids"),
    ("/v1/score", {"text_1": "q", "text_2": MANY}, INVALID, "text_2"),
    ("/v1/score", {"text_1": "", "text_2": ["a"]}, INVALID, "text_1"),
    ("/generative_scoring", {"query": "q", "items": MANY, "label_token_ids": [5]}, INVALID, "items"),
    ("/v1/rerank", {"query": "q", "documents": MANY}, INVALID, "documents"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, INVALID, "query"),
    ("/rerank", {"query": "q", "texts": MANY}, INVALID, "texts"),
    ("/v1/cache/documents", {"documents": MANY}, INVALID, "documents"),
    ("/v1/cache/documents", {"documents": []}, INVALID, "documents"),
]


@pytest.fixture(scope="module")
def llm():
    """An engine of few pages. No call of this file reaches a step."""
    made = LLM(
        enable_chunk_aware=True,
        max_model_len=LENGTH,
        max_chunk_len=CHUNK,
        max_chunks_per_prompt=CHUNKS,
        max_items_per_request=ITEMS,
        multi_item_scoring_delimiter=368,
        max_tokens_per_call=CALL,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 20,
    )
    made.core.step = lambda: pytest.fail("a step ran")
    return made


@pytest.fixture(scope="module")
def served(llm):
    """`AsyncLLM` with the same limits, over no engine."""
    made = AsyncLLM(enable_chunk_aware=True)
    made.config, made._frontend = llm.config, llm.frontend
    made.client.limits, made.client.state = llm.limits, "ready"
    made.client._worker = SimpleNamespace(send=lambda messages: None)
    return made


@pytest.fixture(scope="module")
def post(served):
    """A request to the app over `served`, whose answer is an error."""

    def call(path, body):
        async def once():
            transport = httpx.ASGITransport(create_app(served, ServerConfig()))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, json=body)

        answer = asyncio.run(once())
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    return call


async def awaited(answer):
    if inspect.isasyncgen(answer):
        return [output async for output in answer]
    return await answer


def run(engine, call):
    answer = call(engine)
    return asyncio.run(awaited(answer)) if isinstance(engine, AsyncLLM) else answer


def error_of(engine, call):
    """The error of a call, as a server would answer it."""
    with pytest.raises(ChunkAttnError) as caught:
        run(engine, call)
    return api_error(caught.value, "").body["error"]


def check(error, code, param, name=""):
    assert (error["code"], error["param"]) == (code, param), error
    assert re.search(rf"\b{name}\b" if name else "", error["message"]), error


FAULTY = [(kind, fault) for kind, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("kind", "fault"), FAULTY)
def test_a_part_that_cannot_be_served_has_one_code_in_every_call(kind, fault, llm, served):
    value, code = FAULTS[kind][fault]
    for engine in (llm, served):
        for param, name, call in parts(kind):
            check(error_of(engine, lambda engine, call=call: call(engine, value)), code, param, name)


@pytest.mark.parametrize(("kind", "fault"), FAULTY)
def test_a_part_that_cannot_be_served_has_one_code_on_every_route(kind, fault, post):
    value, code = FAULTS[kind][fault]
    for param, name, path, body in bodies(kind):
        check(post(path, body(value)), code, param, name)


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_a_call_that_cannot_be_served_has_one_code(number, llm, served):
    code, param, call = WHOLE[number]
    for engine in (llm, served):
        check(error_of(engine, call), code, param)


@pytest.mark.parametrize(("path", "body", "code", "param"), WHOLE_BODIES)
def test_a_body_that_cannot_be_served_has_the_code_of_its_call(path, body, code, param, post):
    check(post(path, body), code, param)


def test_commands_name_their_arguments(llm, monkeypatch, tmp_path):
    for module in (prompts, cache):
        monkeypatch.setattr(module, "make_llm", lambda *_, **__: llm)
    monkeypatch.setattr(llm, "close", lambda: None)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text(FAULTS["text"]["too long"][0])
    value = FAULTS["text"]["too long"][0]
    for arguments, name in (
        (["generate", value], "prompt"),
        (["generate", "--prefix", value, "--document", "a", "--question", "q"], "prefix"),
        (["generate", "--prefix", "a", "--document", "a", "--document", value, "--question", "q"], "document 1"),
        (["generate", "--prefix", "a", "--document", "a", "--question", value], "question"),
        (["score", value, "a"], "query"),
        (["score", "q", "a", value], "item 1"),
        (["cache", "build", str(tmp_path), "--kv-store", str(tmp_path / "kv")], f"{tmp_path / 'b.txt'} has"),
        (["cache", "build", str(tmp_path), "--kv-store", str(tmp_path / "kv"), "--prefix", value], "prefix"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert name in " ".join(result.stderr.split()), (arguments[0], result.stderr)


def test_ids_are_checked_without_a_loop():
    """Lines of Python do not grow with the ids: a request may bring hundreds of thousands."""

    def lines(count):
        ids, seen = [*range(count)], 0

        def trace(frame, event, argument):
            nonlocal seen
            seen += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            check_ids(ids, "ids")
        finally:
            sys.settrace(before)
        return seen

    assert 0 < lines(50_000) == lines(50)


@pytest.mark.parametrize("bad", [True, -1, 2**31, 2**70, 1.0, "1", None, [1], np.bool_(True), np.float32(1)], ids=repr)
def test_what_is_no_token_id_is_named_by_its_place(bad):
    with pytest.raises(RequestError, match=r"ids\[2\] is not a token id"):
        check_ids([1, 2, bad, bad], "ids")


def test_integers_of_any_kind_are_token_ids():
    kinds = [[1, 2], (1, 2), np.asarray([1, 2]), np.asarray([1, 2], np.uint8), [np.int64(1), 2], np.asarray([1, 2], object)]
    for ids in kinds:
        found = check_ids(ids, "ids")
        assert (found, {*map(type, found)}) == ([1, 2], {int})
    assert check_ids([], "ids") == check_ids(np.zeros(0), "ids") == []
    for ids in (np.asarray([[1, 2]]), np.asarray([1.0]), np.asarray([True])):
        with pytest.raises(RequestError, match=r"ids\[0\] is not a token id"):
            check_ids(ids, "ids")


def test_documents_of_a_request_are_laid_out_once(served, monkeypatch):
    """Documents are parsed once, and only their own requests are laid out."""
    laid_out, parsed = [], []
    make, parse = precompute.make_layout, PromptParser.parse_cache
    monkeypatch.setattr(precompute, "make_layout", lambda *parts: laid_out.append(parts) or make(*parts))
    monkeypatch.setattr(PromptParser, "parse_cache", lambda self, *args: parsed.append(args) or parse(self, *args))
    monkeypatch.setattr(part_parser, "make_layout", lambda *_: pytest.fail("a prompt was laid out"))

    async def add():
        keeper = ServerState(served, ServerConfig()).keeper
        contents = await keeper._parse([DocumentRecord(Scope(), name, Prefix("Read."), name) for name in ("one", "two")])
        return [*keeper.contents.job(contents).stages()]

    stages = asyncio.run(add())
    assert (len(parsed), len(laid_out)) == (1, 2)
    assert sum(map(len, stages)) == 2


def test_a_footprint_is_computed_once_by_the_engine(llm, monkeypatch):
    seen = []
    pages = EngineLimits.pages
    monkeypatch.setattr(EngineLimits, "pages", lambda self, *args: seen.append(args) or pages(self, *args))
    message = GenerateRequest("r", make_layout([1], [[2, 3]] * 2, [4]), SamplingParams(max_tokens=5))
    request = Request(message, llm.limits, arrival=1)
    assert (request.pages_per_sample, request.total_pages, request.max_tokens) == (4, 3, 5)
    assert len(seen) == 1
