"""Limits bound the work of a call before the work begins; what a call needs is made stage by stage."""

import asyncio
import inspect
import tracemalloc
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from chunkattn import ChunkedPrompt, SamplingParams
from chunkattn.calls import algorithms, score_inputs
from chunkattn.calls.algorithms import AUTO
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import generate_job
from chunkattn.calls.precompute import precompute_job
from chunkattn.calls.rerank import rerank_call
from chunkattn.calls.rerank_template import PLAIN
from chunkattn.calls.score_inputs import score_call
from chunkattn.config import EngineConfig
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import StepRates
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.errors import CapacityError, ConfigError, RequestError
from chunkattn.models.loader import open_files
from chunkattn.parsers import arguments
from chunkattn.parsers.encode import PartEncoder
from chunkattn.schema.documents import CacheBody
from chunkattn.schema.generation import ChatBody, CompletionBody
from chunkattn.schema.scoring import GenerativeScoringBody, RerankBody, ScoreBody
from chunkattn.server.answers import Completion
from chunkattn.server.routes import generation, scoring
from chunkattn.server.state import ServerState
from chunkattn.web.errors import ApiError
from chunkattn.web.options import ServerConfig
from tests.flows import stages_of


@pytest.fixture(scope="module")
def files():
    return open_files(EngineConfig())


@pytest.fixture
def frontend(files):
    """A front end without an engine."""

    def make(**options):
        config = EngineConfig(enable_chunk_aware=True, **options)
        made = Frontend(config, files)
        vocab = files.spec.vocab_size
        rates, sizes, dense = StepRates(1e-3, 1e-5, 1e-9), StepSizes((2048,), 256), {"packed_dense": (None, 8192)}
        made.connect(EngineLimits(4096, 16, 1, 16384, 20, vocab, rates, sizes, backends=dense, config=config))
        return made

    return make


def refuse(*_, **__):
    raise AssertionError("work has begun")


def distinct(count, size):
    """Items that differ in their first two tokens."""
    return [[n % 100, n // 100, *[8] * (size - 2)] for n in range(count)]


def score(made, query, items, algorithm=None, **options):
    return score_call(made, query, items, label_token_ids=[5, 6], algorithm=algorithm, **options)


# Chunks


@pytest.mark.parametrize(
    "prompt",
    [
        ChunkedPrompt("", [""] * 9, "q"),
        ChunkedPrompt([], [[]] * 9, [1]),
        " # # " * 10 + "q",
        {"prompt": " # # " * 10 + "q"},
    ],
    ids=["texts", "ids", "separators", "dict"],
)
def test_chunks_are_counted_before_they_are_tokenized(frontend, prompt, monkeypatch):
    made = frontend(max_chunks_per_prompt=8)
    monkeypatch.setattr(PartEncoder, "__call__", refuse)
    with pytest.raises(RequestError, match="9 chunks, max_chunks_per_prompt is 8"):
        made.parse(prompt, True)


def test_separator_ids_and_documents_are_counted(frontend, monkeypatch):
    made = frontend(max_chunks_per_prompt=8)
    ids = made.parser.encode(" # # ") * 10 + [5]
    with pytest.raises(RequestError, match="9 chunks, max_chunks_per_prompt is 8"):
        made.parse({"prompt_token_ids": ids}, True)
    monkeypatch.setattr(PartEncoder, "__call__", refuse)
    with pytest.raises(RequestError, match="9 chunks, max_chunks_per_prompt is 8") as caught:
        made.parse_chat([{"role": "user", "content": "q"}], [""] * 9, None)
    assert caught.value.param == "documents"


def test_as_many_chunks_as_allowed_are_parsed(frontend):
    (parsed,) = frontend(max_chunks_per_prompt=8).parse("a # # " + "b # # " * 8 + "q", True)
    assert parsed.layout.num_chunks == 8


def test_documents_to_precompute_are_counted(frontend, monkeypatch):
    made = frontend(max_items_per_request=8, max_chunks_per_prompt=2)
    precompute_job(made, "a", ["b"] * 8)  # chunks of a prompt are another limit
    monkeypatch.setattr(PartEncoder, "__call__", refuse)
    with pytest.raises(RequestError, match="9 documents exceed max_items_per_request 8"):
        precompute_job(made, "a", ["b"] * 9)


# Lists of a request


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": ["a"] * 65}, "stop has 65 entries, at most 64"),
        ({"stop": "a" * 1025}, "stop string 0 has 1025 characters, at most 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 entries, at most 1024"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries, at most 1024"),
    ],
)
def test_lists_of_sampling_params_are_bounded(options, text):
    with pytest.raises(RequestError, match=text) as caught:
        SamplingParams(**options)
    assert caught.value.param == next(iter(options))


@pytest.mark.parametrize(
    "field",
    [
        {"stop": ["a"] * 65},
        {"stop": "a" * 1025},
        {"stop_token_ids": [1] * 1025},
        {"logit_bias": {str(n): 1.0 for n in range(1025)}},
        {"cache_salt": "a" * 257},
    ],
    ids=lambda field: next(iter(field)),
)
def test_bodies_are_bounded(field):
    with pytest.raises(ValidationError, match="at most"):
        CompletionBody.model_validate({"prompt": "x", **field})


def test_labels_are_bounded(frontend):
    for given in ({"labels": ["a"] * 1025}, {"label_token_ids": [1] * 1025}):
        with pytest.raises(ValidationError, match="at most 1024"):
            ScoreBody.model_validate({"query": "q", "items": ["a"], **given})
        with pytest.raises(RequestError, match="at most 1024"):
            score_call(frontend(), "q", ["a"], **given)


# Salts


def test_a_salt_is_bounded_and_reaches_the_engine_as_a_digest(frontend):
    made, params = frontend(), SamplingParams(max_tokens=1)
    with pytest.raises(RequestError, match="257 characters, at most 256") as caught:
        generate_job(made, made.parse("x", None), params, cache_salt="s" * 257)
    assert caught.value.param == "cache_salt"
    with pytest.raises(RequestError, match="no valid Unicode"):
        generate_job(made, made.parse("x", None), params, cache_salt="\ud800")

    def salts(salt):
        ((generate,),) = stages_of(generate_job(made, made.parse("x", None), params, cache_salt=salt))
        cached = [*chain.from_iterable(precompute_job(made, "a", ["b"], cache_salt=salt).stages())]
        scored = [*chain.from_iterable(stages_of(score(made, "a", ["b"], cache_salt=salt)))]
        return {request.salt_key for request in (generate, *cached, *scored)}

    (one,), (other,) = salts("s" * 256), salts("t")
    assert len(one) == len(other) == 32
    assert one != other
    assert salts(None) == {None}


# Costs


def test_costs_are_those_of_what_is_laid_out(frontend):
    made = frontend(max_num_batched_tokens=128)
    query, items = [7] * 100, [[8] * (n % 40) for n in range(300)]
    items += items[50:]  # repeated items cost nothing
    told = score(made, query, items)._calls[0].tokens()
    for name, cost in told.items():
        requests = [*chain.from_iterable(stages_of(score(made, query, items, name)))]
        rows = sum(len(r.layout) - (r.layout.prefix_len if getattr(r, "share_prefix", False) else 0) for r in requests)
        assert rows == cost, name


def test_the_documented_contract_is_admitted():
    limit = EngineConfig().max_tokens_per_call
    costs = algorithms.ScoreInputs([7] * 2000, distinct(10_000, 20)).tokens()
    assert max(costs["packed_segment"], costs["prefill_extend"], costs["serial"]) <= limit
    assert costs["serial"] == 10_000 * 2020


def test_a_call_that_costs_too_much_is_refused_before_it_is_laid_out(frontend, monkeypatch):
    made = frontend(max_tokens_per_call=10_000)
    monkeypatch.setattr(algorithms, "make_layout", refuse)
    with pytest.raises(CapacityError, match=r"'serial' .* 11000 tokens .*max_tokens_per_call is 10000") as caught:
        score(made, [7] * 100, distinct(100, 10), "serial")
    assert caught.value.param == "items"
    with pytest.raises(CapacityError, match="11000 tokens"):
        score(made, [7] * 100, distinct(100, 10), item_first=True)
    with pytest.raises(CapacityError, match="12000 tokens"):
        score(made, [[7] * 100] * 6, [[8] * 1900], item_first=True)
    assert score(made, [7] * 100, distinct(100, 10))  # auto leaves out what costs too much
    with pytest.raises(CapacityError, match="max_tokens_per_call"):
        score(made, [7] * 100, distinct(100, 110))


def test_prompts_samples_and_documents_count(frontend):
    made = frontend(max_tokens_per_call=100)
    prompts = made.parse([{"prompt_token_ids": [5] * 10}] * 2, False)
    assert generate_job(made, prompts, SamplingParams(n=4, max_tokens=10)).total == 2
    with pytest.raises(CapacityError, match="are 108 tokens, max_tokens_per_call is 100"):
        generate_job(made, prompts, SamplingParams(n=4, max_tokens=11))
    with pytest.raises(CapacityError, match="are 101 tokens, max_tokens_per_call is 100"):
        precompute_job(made, [5] * 41, [[6] * 30] * 2)


def test_prompts_of_one_http_request_count_together(frontend):
    body = CompletionBody(prompt=[[5] * 40] * 2, max_tokens=20)
    answer = Completion(
        body, state(frontend(max_tokens_per_call=100)), SimpleNamespace(salt=lambda salt: salt, document_owner="", adapter=None)
    )
    with pytest.raises(CapacityError, match="are 120 tokens, max_tokens_per_call is 100"):
        answer._jobs(answer.prompts)


def test_queries_times_items_are_bounded_before_they_are_tokenized(frontend, monkeypatch):
    made = frontend(max_items_per_request=100)
    monkeypatch.setattr(PartEncoder, "__call__", refuse)
    with pytest.raises(RequestError, match="110 items of all queries exceed max_items_per_request 100"):
        score(made, ["q"] * 11, ["a"] * 10)
    with pytest.raises(RequestError, match="101 items of all queries exceed"):
        score(made, ["q"] * 101, [])


def test_items_that_all_queries_share_are_tokenized_once(frontend, monkeypatch):
    made, seen, encode = frontend(), [], PartEncoder.__call__

    def count(self, text, *names):
        seen.append(text)
        return encode(self, text, *names)

    monkeypatch.setattr(PartEncoder, "__call__", count)
    score(made, ["one", "two", "three"], ["a", "b"])
    assert seen == ["one", "a", "b", "two", "three"]


def test_ids_of_the_tokenizer_are_not_checked_one_by_one(frontend, monkeypatch):
    made = frontend()
    for module in (arguments, score_inputs):
        monkeypatch.setattr(module, "check_ids", refuse)
    assert rerank_call(made, "q", ["a", "b"], template=PLAIN).total == 2
    assert score_call(made, "q", ["a", "b"], labels=["yes"]).total == 2
    with pytest.raises(AssertionError, match="work has begun"):
        rerank_call(made, "q", [[5]], template=PLAIN)


# Stages


@pytest.mark.parametrize("algorithm", ["serial", "packed_segment", "prefill_extend", "packed_dense"])
def test_only_one_stage_of_a_scoring_call_is_in_memory(frontend, algorithm):
    made = frontend(max_num_batched_tokens=128)
    job = score(made, [7] * 1000, distinct(2000, 10), algorithm)
    tracemalloc.start()
    largest = max(sum(len(r.layout) for r in stage) for stage in stages_of(job))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= 16384
    assert peak < 4 << 20  # all of `serial` are 16 MB


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_batches_of_a_stage_share_steps_where_company_changes_no_bits(frontend, batch_invariant):
    """Ten batches of 120 tokens in steps of 128: behind the query come four steps' worth, else as one series."""
    made = frontend(max_num_batched_tokens=128)
    made.connect(replace(made.limits, batch_invariant=batch_invariant))
    query, *stages = stages_of(score(made, [7] * 100, distinct(120, 10), "prefill_extend"))
    assert len(query) == 1
    assert [len(stage) for stage in stages] == [4, 4, 2]
    series = {request.series for stage in stages for request in stage}
    assert len(series) == 1
    assert (series == {None}) == batch_invariant


def test_a_stage_is_made_when_it_is_asked_for(frontend, monkeypatch):
    made, laid_out, build = frontend(max_num_batched_tokens=128), [], algorithms.make_layout

    def count(*parts):
        laid_out.append(parts)
        return build(*parts)

    monkeypatch.setattr(algorithms, "make_layout", count)
    for query in ([7] * 100, [[7] * 100, [9] * 100]):
        laid_out.clear()
        stages = stages_of(score(made, query, distinct(100, 10), "serial"))
        assert laid_out == []
        assert len(next(stages)) < len(laid_out) + 1 < 12
    laid_out.clear()
    stages = precompute_job(made, [7] * 10, [[8] * 300] * 10).stages()
    assert [len(stage) for stage in stages] == [1] * 10


def test_whole_calls_are_checked_when_they_are_planned(frontend):
    made = frontend()
    for items in ([[5], [10**6]], [[5], [5] * 9000]):
        with pytest.raises(RequestError) as caught:
            score(made, [7], items)
        assert caught.value.part == "item 1"


# Errors name parts


def test_errors_name_parts_as_the_caller_knows_them(frontend):
    made = frontend(max_chunk_len=4)
    with pytest.raises(RequestError, match="chunk 1 has 5 tokens, max_chunk_len is 4") as caught:
        generate_job(made, made.parse(ChunkedPrompt([1], [[2], [3] * 5], [4]), None), None)
    assert caught.value.part == "chunk 1"
    for strategy in ("shared", "offset"):
        made = frontend(max_chunk_len=4, position_strategy=strategy)
        with pytest.raises(RequestError) as caught:
            precompute_job(made, [1], [[2], [3] * 5])
        assert str(caught.value) == "document 1 has 5 tokens, max_chunk_len is 4"
        assert (caught.value.part, caught.value.param) == ("document 1", "documents")
    with pytest.raises(RequestError, match=r"document 1\[0\] is not a token id") as caught:
        precompute_job(made, [1], [[2], ["x"]])
    assert caught.value.part == "document 1"


def test_the_prefix_is_named(frontend):
    made = frontend()
    with pytest.raises(CapacityError) as caught:
        precompute_job(made, [1] * 20_000, [[2]])
    assert caught.value.part == "prefix"


# Priorities


def test_priorities_fit_64_bits(frontend):
    made = frontend()
    prompts = made.parse("x", None)
    assert generate_job(made, prompts, None, -(2**63))
    for priority in (2**63, -(2**63) - 1):
        with pytest.raises(RequestError, match="64 bits"):
            generate_job(made, prompts, None, priority)
        with pytest.raises(RequestError, match="64 bits"):
            score(made, "a", ["b"], priority=priority)
        with pytest.raises(RequestError, match="64 bits"):
            precompute_job(made, "a", ["b"], priority=priority)


def state(made=None, **options):
    config = EngineConfig()
    limits = SimpleNamespace(vocab_size=500, max_model_len=100)
    llm = SimpleNamespace(state="ready", config=config, frontend=made, limits=limits, threads=None)
    return ServerState(llm, ServerConfig(**options))


async def add_documents(body, state):
    state.check_stored(body)


ROUTES = [
    (generation.completions, CompletionBody, {"prompt": "x"}),
    (generation.chat_completions, ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
    (scoring.score, ScoreBody, {"query": "x", "items": ["y"], "labels": ["a"]}),
    (scoring.generative_scoring, GenerativeScoringBody, {"query": "x", "items": ["y"], "label_token_ids": [1]}),
    (scoring.rerank, RerankBody, {"query": "x", "documents": ["y"]}),
    (add_documents, CacheBody, {"documents": ["y"]}),
]


@pytest.mark.parametrize(("route", "body", "fields"), ROUTES, ids=lambda value: getattr(value, "__name__", None))
def test_clients_set_no_priority_unless_the_operator_lets_them(route, body, fields):
    arguments = {"request": SimpleNamespace(state=SimpleNamespace(caller=None)), "caller": None}
    wanted = {name: arguments[name] for name in inspect.signature(route).parameters if name in arguments}
    for priority, most in ((-1, 0), (2**70, 0), (6, 5), (-6, 5)):
        given = body.model_validate({**fields, "priority": priority})
        with pytest.raises(ApiError, match="priority") as caught:
            asyncio.run(route(given, state=state(priority_range=most), **wanted))
        assert (caught.value.status, caught.value.param) == (400, "priority")


def test_priorities_in_range_are_taken():
    for priority in (-5, 0, 5):
        state(priority_range=5).check(CompletionBody(prompt="x", priority=priority))
    state().check(CompletionBody(prompt="x"))
    state().check(CacheBody(documents=["y"]))  # its default is 1
    with pytest.raises(ConfigError, match="priority_range must be at least 0"):
        ServerConfig(priority_range=-1)


def test_the_server_runs_no_baseline():
    body = ScoreBody(query="x", items=["y"], labels=["a"], algorithm="packed_dense")
    with pytest.raises(ApiError, match="packed_dense") as caught:
        asyncio.run(scoring.score(body, None, state(), None))
    assert (caught.value.status, caught.value.param) == (400, "algorithm")
    for name in AUTO:
        scoring._check(state(), body.model_copy(update={"algorithm": name}), SimpleNamespace())


# Texts of tokens
