"""vLLM's own server with chunk-aware prompts, started by the documented command, over HTTP with the openai client."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import requests
from transformers import AutoTokenizer

from chunkattn.integrations.vllm.chunk_options import ChunkOptions
from chunkattn.parsers import ChunkedPrompt
from tests.vllm.witness import Witness

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "chunkattn" / "models" / "demo"
TOKEN_BYTES = 5 * 2 * 2 * 32 * 4
STORE_TOKENS = 330
DOCUMENTS = [
    "Zenuso works as a baker. Zenuso lives in Kirora.",
    "Lezudo has a house in Pegelu. Lezudo likes honey.",
    "Nila lives in Tunise.",
]
PREFIX, QUESTION = "Read the documents and answer the question.", "Where does Lezudo live?"
MESSAGES = [{"role": "user", "content": QUESTION}]
IDS = {"return_token_ids": True, "ignore_eos": True}
# Samples that equal the greedy answer: vLLM refuses temperature 0 with several.
SAMPLES = {"temperature": 1, "extra_body": {"top_k": 1}}


class Server:
    """The server in a process of its own."""

    def __init__(self, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "chunkattn.integrations.vllm.serve", str(DEMO)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "demo"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32"]
        command += ["--enable-chunk-aware", "--max-store-bytes", str(STORE_TOKENS * TOKEN_BYTES)]
        command += ["--enable-prompt-tokens-details", "--max-num-seqs", "16"]
        self.process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def wait(self):
        for _ in range(240):
            assert self.process.poll() is None, "the server ended"
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            except requests.ConnectionError:
                time.sleep(0.5)
        raise AssertionError("the server did not start")

    def metric(self, name):
        text = requests.get(f"{self.url}/metrics", timeout=10).text
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:_total)?{{.*?}} (\S+)$", text, flags=re.MULTILINE))

    def is_idle(self, seconds=20):
        deadline = time.time() + seconds
        while time.time() < deadline:
            if self.metric("vllm:num_requests_running") == self.metric("vllm:num_requests_waiting") == 0:
                return True
            time.sleep(0.1)
        return False

    def chat(self, documents=DOCUMENTS, messages=MESSAGES, **options):
        extra = {"documents": documents, **IDS, **options.pop("extra_body", {})}
        options = {"max_tokens": 6, "temperature": 0, **options}
        return self.client.chat.completions.create(model="demo", messages=messages, extra_body=extra, **options)

    def complete(self, prompt="", **options):
        extra = {**IDS, **options.pop("extra_body", {})}
        options = {"max_tokens": 6, "temperature": 0, **options}
        return self.client.completions.create(model="demo", prompt=prompt, extra_body=extra, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "log"
    with path.open("w") as log:
        made = Server(log)
        try:
            made.wait()
            yield made
        except AssertionError:
            print(path.read_text()[-8000:])
            raise
        finally:
            made.process.terminate()
            made.process.wait(60)
    text = path.read_text()
    assert not re.search(r"EngineCore.*Traceback|Task exception", text), text[-8000:]


@pytest.fixture(scope="module")
def parser():
    return ChunkOptions(enable_chunk_aware=True).parser(AutoTokenizer.from_pretrained(DEMO))


@pytest.fixture(scope="module")
def model():
    return Witness(DEMO)


def parts(parsed):
    first, *chunks, last = (parsed.layout.part(segment).tolist() for segment in parsed.layout.segments)
    return first, chunks, last


def expected(model, parsed, count=6):
    return model.answer(*parts(parsed), count)


def code_of(error):
    return error.value.status_code, error.value.body["message"]


def test_chat_with_documents(server, parser, model):
    parsed = parser.parse_chat(MESSAGES, DOCUMENTS)
    answer = server.chat(logprobs=True, top_logprobs=3)
    tokens, logprobs = expected(model, parsed)
    assert answer.choices[0].token_ids == tokens
    assert answer.prompt_token_ids == parsed.layout.token_ids.tolist()
    first = answer.choices[0].logprobs.content[0].logprob
    assert abs(first - logprobs[tokens[0]]) <= 1e-4
    assert server.chat(extra_body={"ignore_eos": False}).choices[0].message.content.strip() == "Pegelu"


def test_documents_may_be_objects_and_token_ids(server, parser):
    ids = parts(parser.parse_chat(MESSAGES, DOCUMENTS))[1]
    answers = [server.chat(documents) for documents in (DOCUMENTS, [{"text": text} for text in DOCUMENTS], ids)]
    assert len({tuple(answer.choices[0].token_ids) for answer in answers}) == 1
    titled = server.chat([{"title": "Houses", "text": DOCUMENTS[1]}])
    assert titled.choices[0].token_ids == server.chat([f"Houses\n{DOCUMENTS[1]}"]).choices[0].token_ids


def test_later_turns_and_a_system_message(server, parser, model):
    messages = [
        {"role": "system", "content": PREFIX},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "Pegelu"},
        {"role": "user", "content": "What does Lezudo like?"},
    ]
    plain = [{**m, "content": QUESTION} if isinstance(m["content"], list) else m for m in messages]
    tokens, _ = expected(model, parser.parse_chat(plain, DOCUMENTS))
    assert server.chat(messages=messages).choices[0].token_ids == tokens


def test_completions_with_separators_chunks_and_ids(server, parser, model):
    text = " # # ".join([PREFIX, *DOCUMENTS, f"{QUESTION} Answer:"])
    parsed = parser.parse(text)
    tokens, _ = expected(model, parsed)
    chunks = {"prefix": PREFIX, "documents": DOCUMENTS, "question": f"{QUESTION} Answer:"}
    first, documents, last = parts(parsed)
    answers = [
        server.complete(text),
        server.complete(extra_body={"chunks": chunks}),
        server.complete(extra_body={"chunks": {"prefix": first, "documents": documents, "question": last}}),
    ]
    assert [a.choices[0].token_ids for a in answers] == [tokens] * 3
    echoed = server.complete(text, echo=True, extra_body={"return_token_ids": False})
    assert echoed.choices[0].text == parsed.text + answers[0].choices[0].text
    both = server.complete([text, "Nila lives in"])
    assert [c.token_ids for c in both.choices] == [tokens, server.complete("Nila lives in").choices[0].token_ids]


def test_chunks_without_documents_are_a_prefix_and_a_question(server, parser, model):
    for prefix in ("", PREFIX):
        answer = server.complete(extra_body={"chunks": {"prefix": prefix, "documents": [], "question": QUESTION}})
        tokens = parser.parse(ChunkedPrompt(prefix, [], QUESTION)).layout.token_ids.tolist()
        assert answer.choices[0].token_ids == model.plain(tokens, 6)[0]
        assert answer.usage.prompt_tokens == len(tokens)


def test_chunk_aware_false_leaves_separators_alone(server, parser, model):
    text = " # # ".join([PREFIX, *DOCUMENTS, QUESTION])
    answer = server.complete(text, extra_body={"chunk_aware": False})
    assert answer.choices[0].token_ids == model.plain(parser.parse(text, False).layout.token_ids.tolist(), 6)[0]


def test_a_warm_request_computes_its_question_alone(server, parser):
    documents = ["Rumi has no house.", "Rumi has two houses.", "Rumi is old."]
    cold = server.chat(documents).usage
    computed = []
    for order in ((2, 0, 1), (1, 2), (0, 1, 2)):
        before = server.metric("vllm:prompt_tokens"), server.metric("vllm:prompt_tokens_cached")
        usage = server.chat([documents[i] for i in order]).usage
        computed.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
        after = server.metric("vllm:prompt_tokens"), server.metric("vllm:prompt_tokens_cached")
        assert (after[0] - before[0]) - (after[1] - before[1]) == computed[-1], "vLLM's own counters"
    question = len(parts(parser.parse_chat(MESSAGES, documents))[2])
    # The first order is the composed request's own prompt in canonical order, which vLLM's prefix cache holds too.
    assert all(0 < n <= question for n in computed)
    assert computed[1] == question
    prefix = len(parts(parser.parse_chat(MESSAGES, []))[0])
    assert (cold.prompt_tokens_details.cached_tokens if cold.prompt_tokens_details else 0) <= prefix


def test_hits_are_loads_of_what_was_stored_before(server):
    def counts():
        return [server.metric(f"vllm:chunkattn_{name}_segments") for name in ("loaded", "hit")]

    documents = ["Lelo bakes.", "Lelo has a mill.", "Lelo sings."]
    grown, before = [], counts()
    for asked in (documents, documents[1:], documents[:1]):
        server.chat(asked)
        after = counts()
        grown.append([b - a for a, b in zip(before, after)])
        before = after
    (loads, hits), *later = grown
    assert loads - hits in (3, 4)  # an earlier test may have stored the prefix
    assert all(loads == hits > 0 for loads, hits in later)


def test_order_does_not_matter(server):
    answers = [server.chat(docs, logprobs=True) for docs in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:] + DOCUMENTS[:1])]
    assert len({str(a.choices[0].logprobs) for a in answers}) == 1


def test_streams_equal_whole_answers(server):
    whole = server.chat().choices[0]
    deltas = list(server.chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(d.choices[0].delta.content or "" for d in deltas if d.choices) == whole.message.content
    assert deltas[-1].usage.prompt_tokens_details.cached_tokens > 0
    text = " # # ".join([PREFIX, *DOCUMENTS, QUESTION])
    streamed = "".join(d.choices[0].text for d in server.complete(text, stream=True))
    assert streamed == server.complete(text).choices[0].text


def test_a_closed_stream_ends_its_request(server):
    stream = server.chat(stream=True, max_tokens=400)
    next(iter(stream))
    stream.close()
    assert server.is_idle()
    assert server.chat().choices[0].finish_reason == "length"


def test_a_client_that_leaves_while_documents_are_computed(server):
    def waits(count, seconds=10):
        deadline = time.time() + seconds
        while server.metric("vllm:num_requests_waiting") != count:
            if time.time() > deadline:
                return False
        return True

    def leave():
        documents = [[20 + n] * 50 for n in range(3)]
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=1).chat.completions.create(
                model="demo", messages=MESSAGES, extra_body={"documents": documents}
            )

    stream = server.complete("x", stream=True, max_tokens=500, n=16, **SAMPLES)  # as many as run at once
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(leave)
        assert waits(3), "one save for each document"
        left.result()
    assert waits(0)
    assert server.metric("vllm:num_requests_running") == 16, "the saves ended before any could run"
    stream.close()
    assert server.is_idle()
    assert server.chat().choices[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_evicted_documents_are_computed_again(server, parser, model, n):
    first = server.chat().choices[0].token_ids
    for number in range(6):
        server.chat([f"Somebody number {number} lives in a town of {n} houses, and likes honey. " * 2 for n in range(2)])
    misses = server.metric("vllm:chunkattn_refused_requests")
    again = server.chat(n=n, **SAMPLES).choices
    assert [choice.index for choice in again] == list(range(n))
    assert all(choice.token_ids == first for choice in again)
    assert first == expected(model, parser.parse_chat(MESSAGES, DOCUMENTS))[0]
    assert server.metric("vllm:chunkattn_refused_requests") > misses


def test_every_sample_of_a_prompt_is_answered(server):
    first = server.chat().choices[0]
    whole = server.chat(n=3, **SAMPLES).choices
    assert [(choice.index, choice.token_ids) for choice in whole] == [(n, first.token_ids) for n in range(3)]
    texts = {}
    for delta in server.chat(n=3, stream=True, **SAMPLES):
        for choice in delta.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == dict.fromkeys(range(3), first.message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_documents_larger_than_the_store(server, stream):
    documents = [[10 + n] * 60 for n in range(7)]
    with pytest.raises(openai.APIError, match="raise the bytes of the chunk store") as error:
        list(server.chat(documents, stream=stream, max_tokens=2))
    assert "7 documents, 420 tokens" in str(error.value)
    if not stream:
        assert error.value.status_code == 503


def test_many_clients_at_once(server, parser, model):
    rng = np.random.default_rng(3)
    asked = [[DOCUMENTS[i] for i in rng.permutation(3)[: rng.integers(1, 4)]] for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.chat, asked))
    for documents, answer in zip(asked, answers):
        assert answer.choices[0].token_ids == expected(model, parser.parse_chat(MESSAGES, documents))[0]


def test_many_clients_in_a_store_for_one(server, parser, model):
    rng = np.random.default_rng(4)
    asked = [[rng.integers(10, 700, 100).tolist() for _ in range(2)] for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.chat, asked))
    for documents, answer in zip(asked, answers):
        assert answer.choices[0].token_ids == expected(model, parser.parse_chat(MESSAGES, documents))[0]


def test_salts_share_nothing(server):
    def cached(salt):
        details = server.chat(["A tenant's secret."], extra_body={"cache_salt": salt}).usage.prompt_tokens_details
        return details.cached_tokens if details else 0

    assert [cached(salt) > 0 for salt in ("a", "a", "b", "b")] == [False, True, False, True]


def test_plain_requests_are_vllms(server, parser, model):
    ids = parser.parse_chat(MESSAGES, DOCUMENTS).layout.token_ids.tolist()
    server.chat()
    assert server.complete(ids, extra_body={"chunk_aware": False}).choices[0].token_ids == model.plain(ids, 6)[0]
    plain = server.client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=6, extra_body=IDS)
    assert plain.choices[0].token_ids == model.plain(parser.parse_chat(MESSAGES).layout.token_ids.tolist(), 6)[0]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"documents": "text"}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": [{"id": "x"}]}, "documents"),
        ({"documents": [[-1]]}, "documents"),
        ({"documents": [[10] * 600]}, "maximum context length"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"truncate_prompt_tokens": 5}}, "truncate_prompt_tokens"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
        ({"extra_body": {"add_special_tokens": True}}, "add_special_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"documents": []}}}, "chat_template_kwargs"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"documents": None, "extra_body": {"kv_transfer_params": {"chunkattn": {"save": 1}}}}, "kv_transfer_params"),
        ({"extra_body": {"kv_transfer_params": {"chunkattn": {"bounds": [0, 9]}}}}, "kv_transfer_params"),
    ],
)
def test_chat_errors_name_the_field(server, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        server.chat(**options)
    status, message = code_of(error)
    assert status == 400
    assert param in (error.value.body.get("param") or message)
    assert server.chat().choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": "a # # b # # "}, "prompt"),
        ({"extra_body": {"chunks": {"documents": ["x"]}}}, "chunks"),
        ({"extra_body": {"chunks": {"documents": ["x"], "question": "y", "more": 1}}}, "chunks"),
        ({"prompt": "x", "extra_body": {"chunks": {"documents": ["x"], "question": "y"}}}, "chunks"),
        ({"prompt": "x", "extra_body": {"chunk_aware": "yes"}}, "chunk_aware"),
        ({"prompt": "a # # b # # c", "suffix": "d"}, "suffix"),
        ({"prompt": "a # # b # # c", "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a # # b # # c", "extra_body": {"kv_transfer_params": {"chunkattn": {"save": 1}}}}, "kv_transfer_params"),
    ],
)
def test_completion_errors_name_the_field(server, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        server.complete(**options)
    status, message = code_of(error)
    assert status == 400
    assert param in (error.value.body.get("param") or message)


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("written", [{"bounds": [0, 9]}, None])
def test_no_route_takes_the_connectors_parameters_from_a_client(server, route, written):
    body = {"model": "demo", "max_tokens": 2, "kv_transfer_params": {"chunkattn": written}}
    body |= {"prompt": "x"} if route == "/v1/completions" else {"messages": MESSAGES}
    answer = requests.post(f"{server.url}{route}", json=body, timeout=30)
    assert answer.status_code == 400
    assert "is set by the server" in answer.text


@pytest.mark.parametrize("written", ["text", ["chunkattn"], 3])
def test_transfer_parameters_are_an_object(server, written):
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params must be an object"):
        server.complete("x", extra_body={"vllm_xargs": {"kv_transfer_params": written}})
