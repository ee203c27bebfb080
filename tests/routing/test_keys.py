"""Routing keys: equal exactly where the engine's parser makes equal K/V, whatever the order, and no body is too strange."""

import itertools
import json
import random

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from chunkattn.citations import Document
from chunkattn.documents.routes import documents_router
from chunkattn.gateway.app import _KNOWN
from chunkattn.parsers import PromptParser
from chunkattn.parsers.encode import PlainEncoder
from chunkattn.parsers.states import StateTemplate
from chunkattn.schema.citations import citations_of
from chunkattn.schema.decisions import DecisionsBody
from chunkattn.schema.documents import CacheBody
from chunkattn.schema.generation import ChatBody, CompletionBody
from chunkattn.schema.parts import ROUTES
from chunkattn.schema.piece_keys import MAX_PIECES, Keys, keys_of
from chunkattn.schema.scoring import RerankBody, ScoreBody
from chunkattn.server.routes import decisions, generation, messages, responses, scoring, systemone, tokens
from chunkattn.web.paths import RERANK_PATHS

SEP = " # # "
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
QUESTIONS = [{"type": "predicate", "instructions": "Is it late?"}]
LONG = "".join(random.Random(0).choices("abcdefgh ", k=5000))
CHAT = (
    "{% for m in messages %}[{{ m.role }}{{ m.name or '' }}]{{ m.content }}[/]{% endfor %}"
    "{% if enable_thinking is not defined %}?{% endif %}"
)


@pytest.fixture(scope="module")
def parser():
    """Parser of a byte-level tokenizer with a leading token, and a chat template that reads names."""
    vocab = {t: i for i, t in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    return PromptParser(made, separator=SEP, strategy="shared", chunk_aware=True)


def completion(documents, **fields):
    chunks = {"prefix": fields.pop("prefix", "Be brief."), "documents": documents, "question": fields.pop("question", "Who?")}
    return "/v1/completions", {"chunks": chunks, **fields}


def chat(documents, *before, **fields):
    return "/v1/chat/completions", {"messages": [*before, USER], "documents": documents, **fields}


def stored(documents, **fields):
    return "/v1/cache/documents", {"documents": documents, **fields}


def decision(documents, **fields):
    return "/v1/decisions", {"input": "It is night.", "questions": QUESTIONS, "documents": documents, **fields}


NAMED, PARTS = SYSTEM | {"name": "ann"}, SYSTEM | {"content": [{"type": "text", "text": "Be brief."}]}
ONE_DOCUMENT = [
    completion(["Figs."]),
    completion([{"text": "Figs."}], question="What?", max_tokens=3),
    completion([{"text": "Figs.", "id": "a", "title": ""}]),
    completion([{"text": "Figs.", "title": "Fruit"}]),
    completion(["Fruit\nFigs."]),
    completion(["Figs."], prefix=""),
    completion(["Figs."], prefix="", add_special_tokens=False),
    completion(["Figs."], add_special_tokens=False),
    completion(["Figs."], cache_salt="mine"),
    completion(["Figs."], cache_salt=""),
    completion(["Figs."], citations=True),
    completion([{"text": "Figs."}], citations="required"),
    completion([{"text": "Figs.", "id": "a"}], citations=True),
    completion([{"text": "Figs.", "id": "a"}], citations=False),
    completion(["[doc:a]\nFigs."]),
    completion([{"text": "Figs.", "id": "a", "title": "Fruit"}], citations={"mode": "auto", "instruction": None}),
    completion([{"text": "Figs.", "id": "no plain id"}], citations=True),
    completion([[70, 71]], citations=True),
    completion([[70, 71]], prefix=[70], question=[72]),
    completion([[70, 71]], prefix=[], question=[72]),
    completion([[70, 71]], prefix=None, question=[72]),
    completion([[70, 71]], prefix=""),
    completion([[70, 71, 0]], prefix=[70], question=[72]),
    ("/v1/completions", {"prompt": f"Be brief.{SEP}Figs.{SEP}Who?"}),
    ("/v1/completions", {"prompt": [f"Be brief.{SEP}Figs.{SEP}Which?"], "chunk_aware": True}),
    ("/v1/completions", {"prompt": f"{SEP}Figs.{SEP}Who?"}),
    stored(["Figs."], prefix="Be brief."),
    stored([{"text": "Figs.", "title": "Fruit"}], prefix="Be brief.", pin=True),
    stored(["Figs."], prefix="Be brief.", citations=True),
    stored([{"text": "Figs.", "id": "a"}], prefix="Be brief.", citations=True),
    stored([{"text": "Figs.", "id": "gw-1", "cite_as": "a"}], prefix="Be brief.", citations=True),
    stored([{"text": "Figs.", "id": "gw-1", "cite_as": "a"}], prefix="Be brief."),
    stored([{"text": "Figs.", "id": "a"}], messages=[SYSTEM], citations=True),
    stored(["Figs."]),
    stored(["Figs."], cache_salt="mine", prefix="Be brief."),
    stored([[70, 71]], prefix=[70]),
    stored([[70, 71]]),
    stored(["Figs."], messages=[]),
    stored(["Figs."], messages=[SYSTEM]),
    stored([[70, 71]], messages=[SYSTEM]),
    chat(["Figs."]),
    chat(["Figs."], SYSTEM),
    chat(["Figs."], SYSTEM, chat_template_kwargs={"enable_thinking": False}, temperature=0),
    chat([[70, 71]], SYSTEM),
    chat(["Figs."], SYSTEM, citations=True),
    chat([{"text": "Figs.", "id": "a"}], SYSTEM, citations={"instruction": ""}),
    chat(["Figs."], PARTS),
    chat(["Figs."], NAMED),
    chat(["Figs."], SYSTEM, SYSTEM),
    decision(["Figs."]),
    decision(["Figs."], system="Be brief."),
    decision(["Figs."], system="Be brief.", prompt_cache_key="mine"),
    chat(["Figs."], SYSTEM, cache_salt="mine", prompt_cache_key="other"),
]


def content(parser, path, body):
    """Return salt, prefix ids and chunk ids of the only document, as the server's bodies and the parser read them."""
    if path == "/v1/completions":
        read = CompletionBody.model_validate(body)
        own = parser if read.add_special_tokens else parser.without_leading()
        layout = own.parse(read.prompts({})[0], read.chunk_aware, None, citations_of(read.citations)).layout
    elif path == "/v1/chat/completions":
        read = ChatBody.model_validate(body)
        how = {"documents": read.chunks({}), "citations": citations_of(read.citations), **read.template_options()}
        layout = parser.parse_chat([m.plain() for m in read.messages], **how).layout
    elif path == "/v1/decisions":
        read = DecisionsBody.model_validate(body)
        plain = PlainEncoder(parser.encode, parser.encode.special)
        options = read.options(read.salt, {})
        prefix = StateTemplate(plain, options["system"], options["chat_template_kwargs"]).before_ids
        return read.salt, tuple(prefix), tuple(parser.read_documents(options["documents"])[0])
    else:
        read = CacheBody.model_validate(body)
        documents = [Document(*pair) for pair in zip(read.texts(), read.cited_ids(), strict=True)]
        prefix, chunks = parser.parse_cache(
            read.start(), documents, read.chat_template_kwargs, citations=citations_of(read.citations)
        )
        return read.cache_salt, tuple(prefix), tuple(chunks[0])
    assert layout.num_chunks == 1
    prefix, chunk, _ = (tuple(layout.part(s).tolist()) for s in layout.segments)
    return read.cache_salt, prefix, chunk


def test_keys_of_documents_are_equal_where_their_kv_is(parser):
    contents = [content(parser, *case) for case in ONE_DOCUMENT]
    keys = [keys_of(*case, separator=SEP).pieces[-1 - (case[0] == "/v1/decisions")][0] for case in ONE_DOCUMENT]
    equal = 0
    for (one, a, k), (other, b, m) in itertools.combinations(zip(ONE_DOCUMENT, contents, keys, strict=True), 2):
        assert (a == b) == (k == m), (one, other)
        equal += a == b
    assert equal > 20


def test_order_and_company_change_no_key():
    documents = ["One.", {"text": "Two.", "title": "T"}, [1, 2], {"id": "unresolved"}, "", [], "One."]
    rng = random.Random(0)
    for make in (completion, chat, stored, decision):
        path, body = make(documents)
        keys = keys_of(path, body)
        assert len(keys.pieces) == len({key for key, _ in keys.pieces})
        shuffled = json.loads(json.dumps(body))
        rng.shuffle(shuffled.get("chunks", shuffled)["documents"])
        assert shuffled != body
        other = keys_of(path, shuffled)
        assert (set(other.pieces), other.rest) == (set(keys.pieces), keys.rest)
        assert set(keys_of(*make(["Two."])).pieces) != set(keys_of(*make(["One."])).pieces)
    sizes = [size for _, size in keys_of(*completion(documents)).pieces]
    assert sizes == [len("Be brief."), len("One."), len("T\nTwo."), 8]
    assert keys_of(*completion(["é"], question="Who?")).pieces[-1][1] == 2
    assert keys_of(*completion([], question="Who?")).rest == 4


def test_the_instruction_to_cite_is_part_of_what_stands_behind_the_documents():
    turns = [USER, {"role": "assistant", "content": "Ann, who has lived in the old mill by the river for a very long time."}]
    one, same, other, none = (
        keys_of(*chat(["Figs."], SYSTEM, *turns, citations=citations))
        for citations in (True, {"mode": "required"}, {"instruction": "Cite."}, {"instruction": ""})
    )
    assert one == same
    documents = shared(one, other)
    assert documents == shared(one, none) == sum(size for _, size in keys_of(*chat(["Figs."], SYSTEM, citations=True)).pieces)
    assert keys_of(*completion(["Figs."], citations="required")) == keys_of(*completion(["Figs."], citations=True))
    assert keys_of(*completion(["Figs."], citations="always")) == Keys()


def test_joined_documents_are_one_piece():
    """Their order has no effect. A repeated document counts twice, an empty one not at all, and one alone is a document."""
    for make in (completion, chat, decision):
        keys = {}
        for documents in (["One.", "", "Two."], ["Two.", "One."], ["One.", "Two.", "One."], ["One."]):
            keys[tuple(documents)] = keys_of(*make(documents, chunk_mode="joined"))
        both, turned, twice, one = keys.values()
        apart, longer = keys_of(*make(["One.", "Two."])), keys_of(*make(["8 bytes."]))
        assert [size for _, size in both.pieces] == [size for _, size in longer.pieces]
        assert turned == both
        common = shared(apart, longer)  # the prefix alone
        assert [shared(both, other) for other in (apart, longer, twice)] == [common] * 3
        assert sum(size for _, size in twice.pieces) == sum(size for _, size in both.pieces) + len("One.")
        assert one == keys_of(*make(["One."]))
        assert keys_of(*make(["One.", "Two."], chunk_mode="isolated")) == apart
        # A focus scores each document by itself.
        assert keys_of(*make(["One.", "Two."], chunk_mode="joined", focus=1)) == apart


def shared(one, other):
    """Bytes of the pieces that two requests share."""
    return sum(size for _, size in set(one.pieces) & set(other.pieces))


def prompt(text, **fields):
    return keys_of("/v1/completions", {"prompt": text, **fields})


def test_equal_beginnings_share_pieces():
    assert [size for _, size in prompt(LONG[:5000]).pieces] == [512, 512, 1024, 2048, 904]
    for length in (100, 511, 512, 513, 1024, 3000, 5000):
        text = LONG[:length]
        assert sum(size for _, size in prompt(text).pieces) == length
        whole = max(b for b in (0, 512, 1024, 2048, 4096) if b <= length)
        assert shared(prompt(text), prompt(f"{text}!")) == whole
    assert shared(prompt(LONG), prompt(f"x{LONG}")) == 0
    ids = list(range(1000))
    assert shared(prompt(ids), prompt([*ids[:900], 1])) == 2048
    assert shared(prompt(LONG), prompt(LONG, cache_salt="other")) == 0
    assert shared(prompt(LONG), prompt(LONG, add_special_tokens=False)) == 0
    assert set(prompt([LONG, ids]).pieces) == set(prompt(LONG).pieces) | set(prompt(ids).pieces)
    # The engine shares pages of plain prompts, prefixes and scoring queries.
    assert shared(prompt(LONG), keys_of(*completion(["d"], prefix=LONG))) == 5000
    assert shared(prompt(LONG), keys_of("/score", {"query": LONG, "items": ["a"]})) == 5000
    # Only the texts of a body that may be split are split.
    text = f"{LONG}{SEP}one{SEP}two"
    whole = keys_of("/v1/completions", {"prompt": text, "chunk_aware": False}, separator=SEP)
    assert whole == prompt(text)
    split = keys_of("/v1/completions", {"prompt": text}, separator=SEP)
    assert (shared(split, prompt(LONG)), split.rest) == (5000, 3)
    assert keys_of("/v1/completions", {"prompt": f"one{SEP}two"}, separator=SEP) == prompt(f"one{SEP}two")


def test_conversations_share_their_beginnings():
    def talk(*contents, **fields):
        roles = itertools.cycle(["user", "assistant"])
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        return keys_of("/v1/chat/completions", {"messages": [SYSTEM, *messages], **fields})

    a, b, c = LONG[:600], LONG[600:1500], LONG[1500:1600]
    first, second = talk(a), talk(a, b, c)
    assert shared(first, second) == sum(size for _, size in first.pieces) > 600
    assert shared(talk(a, b, c), talk(a, b, c, "x")) > shared(talk(a, b, c), talk(a, b[:-1], c)) > shared(talk(a), talk(b)) == 0
    # With documents, later turns lie behind all documents, in any order.
    one, other = talk(a, b, c, documents=["D1", "D2"]), talk(a, b, "?", documents=["D2", "D1"])
    assert shared(one, other) > 1500
    assert shared(one, talk(a, b, c, documents=["D1", "D3"])) < 100
    assert one.rest > len(c)
    many = [f"document {n}" for n in range(100)]
    assert set(talk(a, b, documents=many).pieces) == set(talk(a, b, documents=many[::-1]).pieces)


def test_states_are_kept_and_their_questions_are_not():
    def state(given, route="/v1/decisions", name="input", **fields):
        return keys_of(route, {name: given, "questions": QUESTIONS, **fields})

    def system_one(given, **fields):
        return state(given, "/v1/systemone", "state", **fields)

    assert state("It is night.") == system_one("It is night.")
    assert system_one({"a": [1, "é"]}) == system_one('{"a":[1,"é"]}')
    assert state("a", documents=["d"]) != state("a")
    assert shared(state("a", documents=["d", "e"]), state("a", documents=["e", "d"])) == 3
    assert shared(state("b", documents=["d", "e"]), state("a", documents=["e", "d"])) == 2
    messages = [{"role": "user", "content": LONG[:600]}, {"role": "assistant", "content": LONG[:700]}]
    assert shared(system_one(messages), system_one([*messages, USER])) > 1300
    items = [{"role": "user", "content": LONG[:600], "id": "i"}]
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG[:600]}]}]
    assert state(items).pieces == state(parts).pieces
    assert state("a", prompt_cache_key="k").pieces == state("a", cache_salt="k").pieces != state("a").pieces
    assert state("a").rest == state("b").rest > 20


def test_scores_route_by_what_the_engine_keeps():
    def score(path="/v1/score", **body):
        return keys_of(path, body)

    assert score(query="q", items=["abc", "de"]).rest == 5
    assert score(query="q", items=["abc"]).pieces == score(query="q", items=["x"], path="/generative_scoring").pieces
    first = score(query="qq", items=["abc", "de"], item_first=True)
    assert ([size for _, size in first.pieces], first.rest) == ([3, 2], 2)
    assert set(score(query=["q", "r"], items=[["a"], ["b"]]).pieces) == {
        piece for query in "qr" for piece in score(query=query, items=["a"]).pieces
    }
    assert score(query=[1, 2], items=[[3]]).pieces == prompt([1, 2]).pieces
    ids = list(range(300))
    assert shared(score(packed_ids=[*ids, 1]), score(packed_ids=[*ids, 2])) == 1024

    pair = score(text_1="who", text_2=["abc", "de"])
    ranked = score("/v1/rerank", query="who", documents=["xyz"])
    assert pair.pieces == ranked.pieces == score("/rerank", query={"text": "who"}, texts=["xyz"]).pieces != ()
    assert (pair.rest, ranked.rest) == (5, 3)
    assert ranked.pieces != score("/v1/rerank", query="who", documents=["xyz"], instruct="Judge.").pieces
    first = score("/v2/rerank", query="who", documents=["xyz", {"text": "d", "title": "t"}], order="document_first")
    assert ([size for _, size in first.pieces], first.rest) == ([3, 3], 3)
    again = score(queries=["other"], documents=["t\nd", {"id": "stored"}], order="document_first")
    assert set(again.pieces) < set(first.pieces)


FIELDS = [
    ({"name": "Ann", "age": 3, "text": "x"}, ["name", "age"]),
    ({"name": "Ann", "age": None}, ["name", "age"]),
    ({"text": "x", "title": "t"}, ["text"]),
    ({"more": {"é": [1]}, "id": "i"}, ["more", "id"]),
    ({"id": "i"}, ["id"]),
]


@pytest.mark.parametrize(("document", "names"), FIELDS)
def test_fields_to_rank_by_make_the_text_of_the_server(document, names):
    body = {"query": "q", "documents": [document], "rank_fields": names, "order": "document_first"}
    (text,) = RerankBody.model_validate(body).contents({})
    plain = {"query": "q", "documents": [text], "order": "document_first"}
    assert keys_of("/rerank", body) == keys_of("/rerank", plain) != Keys()
    pairs = {"queries": "q", "documents": [text], "order": "document_first"}
    assert ScoreBody.model_validate(pairs).pairwise
    assert keys_of("/score", pairs) == keys_of("/rerank", plain)


def test_keys_depend_on_owner_and_route():
    path, body = completion(["Figs."])
    plain = keys_of(path, body)
    assert keys_of(f"/llm{path}", body) == plain
    assert shared(plain, keys_of(path, body, "Bearer key")) == 0
    assert keys_of("/v1/models", body) == keys_of("/v1/completion", body) == keys_of("/tokenize", body) == Keys()


HARD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.builds(pow, st.just(10), st.just(5000)),
    st.floats(),
    st.text(st.characters(codec=None), max_size=4),
    st.sampled_from(["user", "assistant", "document_first", "text", "function_call", "tool_use", "q", "\ud800"]),
)
WORDS = """chunks documents prefix question prompt messages role content text title id query queries items item_first text_1
input state questions system order rank_fields tool_calls packed_ids chat_template_kwargs cache_salt texts instruction name
type input_text instructions output call_id arguments function_call reasoning tools tool_choice thinking tool_use"""
NAMES = st.sampled_from(WORDS.split())
JSON = st.recursive(HARD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12)


@given(st.sampled_from(sorted(ROUTES)), st.dictionaries(NAMES, JSON, max_size=6) | JSON, st.sampled_from([None, SEP]))
def test_no_body_raises(path, body, separator):
    keys = keys_of(path, body, "Bearer \udcff", separator=separator)
    assert all(0 <= key < 1 << 64 and size > 0 for key, size in keys.pieces)
    assert keys.rest >= 0


def test_deep_bodies_do_not_raise():
    deep = leaf = []
    mapping = {}
    for _ in range(5000):
        leaf.append([])
        leaf = leaf[0]
        mapping = {"text": mapping, "content": "x", "role": "user"}
    names = ["prompt", "messages", "documents", "query", "input", "state", "questions", "items", "queries", "title"]
    for path, value in itertools.product(ROUTES, (deep, mapping, [mapping])):
        parts = dict.fromkeys(["prefix", "documents", "question"], value)
        assert keys_of(path, {**dict.fromkeys(names, value), "chunks": parts}) == Keys()
        for name in names:
            keys_of(path, {"query": "q", "messages": [USER], "documents": ["d"], "input": "x", "state": "x", name: value})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/documents", "/v1/rerank"])
def test_a_request_of_too_many_pieces_has_no_keys(path):
    def keys(count):
        texts = [f"document {n}" for n in range(count)]
        parts = {"prefix": "", "documents": texts, "question": "Who?"}
        bodies = {
            "/v1/completions": {"chunks": parts},
            "/v1/cache/documents": {"documents": texts},
            "/v1/rerank": {"query": "Who?", "documents": texts, "order": "document_first"},
        }
        return keys_of(path, bodies[path])

    assert len(keys(MAX_PIECES - 1).pieces) >= MAX_PIECES - 1
    assert keys(MAX_PIECES + 1) == Keys()


def test_a_chat_without_a_user_message():
    """A chat without a user message has no keys with documents, and is a plain prompt without them."""
    body = {"messages": [SYSTEM | {"content": LONG}]}
    assert keys_of("/v1/chat/completions", {**body, "documents": ["Figs."]}) == Keys()
    assert keys_of("/v1/chat/completions", body).pieces


def test_several_parts_of_a_content_are_no_text():
    """A template may render parts apart, so their joined text has other keys."""

    def keys(content):
        return keys_of("/v1/chat/completions", {"messages": [SYSTEM | {"content": content}, USER], "documents": ["Figs."]})

    parts = [{"type": "text", "text": text} for text in (LONG[:600], LONG[600:900])]
    assert keys(parts[:1]) == keys(LONG[:600])
    assert shared(keys(parts), keys(LONG[:900])) == 0


def test_an_effort_is_a_variable_of_the_template():
    body = {"messages": [SYSTEM | {"content": LONG}, USER], "documents": ["Figs."]}
    plain, high, named = (
        keys_of("/v1/chat/completions", body | own)
        for own in ({}, {"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}})
    )
    assert plain != high == named


def test_the_routes_of_the_server_are_known():
    """All paths of one route are read as one, and have a label at the gateway."""
    paths = {}
    routers = [module.router for module in (decisions, generation, messages, responses, scoring, systemone, tokens)]
    for router in [*routers, documents_router(APIRoute)]:
        for route in router.routes:
            if "POST" in route.methods:
                paths.setdefault(route.endpoint, []).append(route.path)
    read = [group for group in paths.values() if {*group} & {*ROUTES}]
    assert {*ROUTES} == {path for group in read for path in group}
    assert {path for group in paths.values() for path in group} - {*ROUTES} == {"/detokenize"}
    assert all(len({ROUTES[path] for path in group}) == 1 for group in read)
    assert {*ROUTES} <= {*_KNOWN}
    assert {"/v1/reranking", "/reranking"} <= {*RERANK_PATHS} & {*ROUTES}
