"""`chunkattn flips`: what differs and what flips, counted by hand and on servers with planted faults."""

import hashlib
import json
import math
import os
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.errors import EngineError
from chunkattn.tools.flips.replies import Tally, Tokens, read_scores, read_tokens, verdict
from tests.server_helpers import SMALL as SERVER
from tests.server_helpers import ServerProcess

ROOT = Path(__file__).parents[2]

# Counting


def counted(*pairs, is_labelled=False):
    tally = Tally("scores", "again")
    for first, now in pairs:
        tally.add_scores([(p,) for p in first], [(p,) for p in now], is_labelled=is_labelled)
    return tally.answers, tally.differ, tally.flips, pytest.approx(tally.drift)


def test_a_score_flips_by_its_place():
    assert counted(([0.1, 0.9, 0.4], [0.1, 0.9, 0.4])) == (3, 0, 0, 0.0)
    assert counted(([0.1, 0.9, 0.4], [0.2, 0.8, 0.3])) == (3, 3, 0, 0.1)
    assert counted(([0.1, 0.9, 0.4], [0.1, 0.9, 0.05])) == (3, 1, 2, 0.35)  # the last two change places
    assert counted(([0.1, 0.9, 0.4], [0.95, 0.9, 0.4])) == (3, 1, 3, 0.85)
    assert counted(([0.6], [0.4])) == (1, 1, 0, 0.2)  # one relevance has one place
    assert counted(([0.9, 0.1], [0.9, 0.1]), ([0.9, 0.1], [0.1, 0.9])) == (4, 2, 2, 0.8)
    assert counted(([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])) == (3, 0, 0, 0.0)
    assert counted(([0.5, 0.4], [0.4, 0.4])) == (2, 1, 0, 0.1)  # equal scores keep the order of the items
    assert counted(([0.4, 0.5], [0.4, 0.4])) == (2, 1, 2, 0.1)


def test_a_label_flips_at_one_half():
    assert counted(([0.6, 0.1], [0.4, 0.1]), is_labelled=True) == (2, 1, 1, 0.2)
    assert counted(([0.5], [math.nextafter(0.5, 0)]), is_labelled=True) == (1, 1, 1, 0.0)
    assert counted(([0.6, 0.1], [0.1, 0.6]), is_labelled=True) == (2, 2, 2, 0.5)
    tally = Tally("scores", "again")
    tally.add_scores([(0.75, 0.25)], [(0.75, 0.125)], is_labelled=True)  # another label's value
    assert (tally.differ, tally.flips, tally.drift) == (1, 0, 0.125)
    with pytest.raises(EngineError, match="2 values first and 1 values later"):
        tally.add_scores([(0.75, 0.25)], [(0.75,)], is_labelled=True)


def tokens(*steps):
    return Tokens(tuple(name for name, _ in steps), tuple({n: math.log(p) for n, p in table.items()} for _, table in steps))


def test_a_text_flips_by_its_tokens():
    first = tokens(("a", {"a": 0.5, "b": 0.25}), ("c", {"c": 0.5, "d": 0.25}), ("e", {"e": 0.5}))

    def found(*steps):
        tally = Tally("texts", "again")
        tally.add_tokens(first, tokens(*steps))
        return tally.differ, tally.flips, pytest.approx(tally.drift)

    a, c, e = (("a", {"a": 0.5, "b": 0.25}), ("c", {"c": 0.5, "d": 0.25}), ("e", {"e": 0.5}))
    assert found(a, c, e) == (0, 0, 0.0)
    assert found(a, c, ("e", {"e": 0.375})) == (1, 0, 0.125)
    assert found(("a", {"a": 0.5, "x": 0.25}), c, e) == (0, 0, 0.0)  # only tokens that both list count
    assert found(a, ("d", {"c": 0.25, "d": 0.5}), ("e", {"e": 0.1})) == (1, 1, 0.25)  # after a flip the text is another
    assert found(a, c) == (1, 1, 0.0)


ODD = "A first answer that is the odd one counts in every condition."


def test_the_verdict():
    exact = [Tally("scores", "again", 32), Tally("texts", "again", 4)]
    assert verdict(exact) == "0 of 36 answers flip, 0 differ; probabilities move by 0.0"
    moved = [*exact, Tally("scores", "under load", 64, 16, 1, 0.03125)]
    assert verdict(moved) == "1 of 100 answers flip (1.0%), 16 differ (16.0%); probabilities move by up to 0.031. " + ODD


# Answers


def test_scores_of_every_form():
    assert read_scores({"results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]}, 2) == [
        (0.1,),
        (0.9,),
    ]
    assert read_scores([{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}], 2) == [(0.1,), (0.9,)]
    assert read_scores({"data": [{"score": 0.1}, {"score": 1}]}, 2) == [(0.1,), (1.0,)]
    assert read_scores({"scores": [[0.1, 0.9], [0.2, 0.8]]}, 2) == [(0.1, 0.9), (0.2, 0.8)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no scores"),
        ("text", "no scores"),
        ({"scores": [0.1]}, "1 scores for 2 items"),
        ({"scores": [0.1, math.nan]}, "nan where a finite number"),
        ({"scores": [0.1, None]}, "None where a finite number"),
        ({"scores": [0.1, True]}, "True where a finite number"),
        ({"scores": [[0.1], []]}, r"\[\] where a finite number"),
        ({"data": [{"score": 0.1}, {"value": 0.1}]}, "None where a finite number"),
        ({"data": [{"index": 0, "score": 0.1}] * 2}, "a score of item 0"),
        ({"data": [{"index": 2, "score": 0.1}] * 2}, "a score of item 2"),
        ({"data": [{"index": [], "score": 0.1}] * 2}, r"a score of item \[\]"),
    ],
)
def test_wrong_scores(answer, message):
    with pytest.raises(EngineError, match=message):
        read_scores(answer, 2)


def test_tokens_of_every_form():
    legacy = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"a": -1.0, "x": -3.0}, {"x": -1.5}]}
    expected = Tokens(("a", "b"), ({"a": -1.0, "x": -3.0}, {"x": -1.5, "b": -2.0}))
    assert read_tokens({"choices": [{"logprobs": legacy}]}) == expected
    content = [
        {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}, {"token": "x", "logprob": -3.0}]},
        {"token": "b", "logprob": -2.0, "top_logprobs": [{"token": "x", "logprob": -1.5}]},
    ]
    assert read_tokens({"choices": [{"logprobs": {"content": content}}]}) == expected
    bare = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None}
    assert read_tokens({"choices": [{"logprobs": bare}]}) == Tokens(("a",), ({"a": -1.0},))
    for wrong in ({}, {"choices": []}, {"choices": [{"logprobs": None}]}, {"choices": [{"logprobs": {"tokens": ["a"]}}]}, []):
        with pytest.raises(EngineError, match="no log-probabilities of tokens"):
            read_tokens(wrong)


# Servers with and without planted faults

QUERIES, ITEMS, PROMPTS, ROUNDS = 2, 4, 2, 2
SMALL = f"--queries {QUERIES} --items {ITEMS} --prompts {PROMPTS} --rounds {ROUNDS} --company 1,3 --load 2".split()
SCORES, TEXTS = QUERIES * ITEMS * ROUNDS, PROMPTS * ROUNDS


def chance(*texts):
    """A number in [0, 1) that depends on texts alone."""
    return int.from_bytes(hashlib.sha256("|".join(texts).encode()).digest()[:6]) / (1 << 48)


class Handler(BaseHTTPRequestHandler):
    """A server whose answers depend on the request alone, except for its fault."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self):
        self.answer(200, {"data": [{"id": "m", "owned_by": self.server.owner}]})

    def do_POST(self):
        body, path = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.path
        if path == "/tokenize":
            return self.answer(*self.server.tokenize(body["prompt"]))
        query, items = body.get("query", body.get("text_1")), body.get("documents", body.get("items", body.get("text_2")))
        with self.server.lock:
            self.server.asked.append((path, body))
            if items is None:
                return self.answer(*self.completion(path, body))
            scores = [chance(query, item.strip()) for item in items]
            scores = self.server.score_fault(query, [item.strip() for item in items], scores)
        if not isinstance(scores, list):
            return self.answer(*scores)
        if path == "/v1/rerank":
            results = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
            return self.answer(200, {"results": sorted(results, key=lambda result: -result["relevance_score"])})
        if path == "/v1/score" and "text_1" not in body:
            return self.answer(200, {"scores": [[score, 1 - score] for score in scores]})
        return self.answer(200, {"data": [{"index": index, "score": score} for index, score in enumerate(scores)]})

    def completion(self, path, body):
        prompt = dict(body.get("chunks") or {"prompt": body.get("prompt") or body["messages"]})
        prompt["documents"] = sorted(prompt.get("documents", []))
        text = json.dumps(prompt)
        names = [f"t{int(1000 * chance(text, str(number)))}" for number in range(body["max_tokens"])]
        values = [math.log(chance(text, name) or 1) for name in names]
        names, values = self.server.text_fault(text, names, values)
        if names is None:
            return values
        tops = [{name: value, "other": -9.0} for name, value in zip(names, values)]
        logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        if "messages" in body:
            logprobs = {"content": [{"token": n, "logprob": v, "top_logprobs": []} for n, v in zip(names, values)]}
        return 200, {"choices": [{"logprobs": logprobs}]}

    def answer(self, status, value):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def no_fault(text, names, values):
    return names, values


@contextmanager
def fake_server(score_fault=None, text_fault=None, tokenize=None, owner="others"):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.lock, server.asked = True, threading.Lock(), []
    server.score_fault = score_fault or (lambda query, items, scores: scores)
    server.text_fault, server.owner = text_fault or no_fault, owner
    server.tokenize = tokenize or (lambda text: (200, {"tokens": [len(word) for word in text.split()]}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def flips(*options, **faults):
    """Exit code, figures by kind and condition, and the report of a run against a fake server."""
    with fake_server(**faults) as (server, url):
        result = CliRunner().invoke(app, ["flips", url, *SMALL, *options, "--json", "-"])
    assert result.exit_code in (0, 1), result.stderr
    report = json.loads(result.stdout)
    figures = {(t["kind"], t["condition"]): (t["answers"], t["differ"], t["flips"], t["drift"]) for t in report["results"]}
    return result.exit_code, figures, report, server.asked


SCORE_CONDITIONS = ("again", "1 other item", "3 other items", "other orders")


@pytest.mark.parametrize(
    ("scoring", "generation"),
    [("rerank", "chunks"), ("score", "chat"), ("pairs", "prompt"), ("generative_scoring", "none"), ("none", "chunks")],
)
def test_an_exact_server(scoring, generation):
    code, figures, report, asked = flips("--scoring", scoring, "--generation", generation)
    expected = {}
    if scoring != "none":
        expected |= {("scores", condition): (SCORES, 0, 0, 0.0) for condition in SCORE_CONDITIONS}
        expected["scores", "under load"] = (2 * SCORES, 0, 0, 0.0)
    if generation != "none":
        texts = ("again", "all at once", *(["other orders"] if generation == "chunks" else []), "under load")
        expected |= {("texts", condition): (TEXTS, 0, 0, 0.0) for condition in texts}
    assert figures == expected
    assert (code, report["notes"], report["error"]) == (0, [], None)
    answers = sum(figure[0] for figure in figures.values())
    assert report["verdict"] == f"0 of {answers} answers flip, 0 differ; probabilities move by 0.0"
    assert all(body["model"] == "m" for _, body in asked)


def test_scores_that_are_kept_are_asked_for_anew():
    """This project's server keeps scores by salt, so that an equal request would not be computed again."""
    *_, asked = flips("--generation", "none", owner="chunkattn")
    salted = [body.get("cache_salt") for path, body in asked if path == "/v1/rerank" and "flips" in str(body.get("cache_salt"))]
    assert len(salted) == len({*salted}) >= 3 * SCORES // 2
    first_and_again = [body for path, body in asked if path == "/v1/rerank"][: QUERIES * ITEMS + SCORES]
    assert not any("cache_salt" in body for body in first_and_again)
    assert not any("cache_salt" in body for _, body in flips("--generation", "none")[3])


def test_the_first_answers_come_first_and_companies_are_as_large_as_told():
    *_, asked = flips("--seed", "7")
    first = asked[: QUERIES * ITEMS + PROMPTS]
    alone = [(body["query"], body["documents"]) for _, body in first[: QUERIES * ITEMS]]
    assert all(len(documents) == 1 for _, documents in alone)
    assert len({(query, *documents) for query, documents in alone}) == QUERIES * ITEMS
    assert all("chunks" in body for _, body in first[QUERIES * ITEMS :])
    scored = [body["documents"] for path, body in asked[len(first) :] if path == "/v1/rerank"]
    targets = {documents[0] for _, documents in alone}
    shared = [(len(documents), len(targets & {*documents})) for documents in scored]
    assert shared[:SCORES] == [(1, 1)] * SCORES
    assert shared[SCORES : 2 * SCORES] == [(2, 1)] * SCORES
    assert shared[2 * SCORES : 2 * SCORES + SCORES // 2] == [(4, 2)] * (SCORES // 2)
    assert flips("--seed", "7")[3][: len(first)] == first
    assert flips("--seed", "8")[3][: len(first)] != first


def test_company_that_moves_a_score():
    def fault(query, items, scores):
        return [score + 0.25 for score in scores] if len(items) > 1 else scores

    code, figures, report, _ = flips(score_fault=fault)
    assert code == 1
    assert figures.pop(("scores", "again")) == (SCORES, 0, 0, 0.0)
    assert figures.pop(("scores", "under load")) == (2 * SCORES, SCORES, 0, 0.25)
    for condition in ("1 other item", "3 other items", "other orders"):
        assert figures.pop(("scores", condition)) == (SCORES, SCORES, 0, 0.25)
    assert {figure[1:] for figure in figures.values()} == {(0, 0, 0.0)}
    answers, differ = 6 * SCORES + 4 * TEXTS, 4 * SCORES
    assert report["verdict"] == (
        f"0 of {answers} answers flip (0.0%), {differ} differ ({differ / answers:.1%}); probabilities move by up to 0.25. "
        + ODD
    )


def test_a_warm_answer_that_differs():
    seen = set()

    def fault(query, items, scores):
        warm = [(query, item) in seen for item in items]
        seen.update((query, item) for item in items)
        return [1 - score if is_warm else score for is_warm, score in zip(warm, scores)]

    code, figures, *_ = flips("--generation", "none", score_fault=fault)
    assert code == 1
    # Four items in reverse order have new places.
    assert figures["scores", "again"][:3] == (SCORES, SCORES, SCORES)
    assert figures["scores", "again"][3] > 0.1


def test_an_order_that_flips():
    known = []

    def fault(query, items, scores):
        known.extend(items if len(items) == 1 else ())
        order = [known.index(item) for item in items if item in known]
        return scores[::-1] if len(order) == len(items) == ITEMS and order != sorted(order) else scores

    code, figures, *_ = flips("--generation", "none", score_fault=fault)
    assert code == 1
    assert figures.pop(("scores", "other orders"))[:3] == (SCORES, SCORES, SCORES)
    assert {figure[1:] for figure in figures.values()} == {(0, 0, 0.0)}


def test_another_order_of_documents():
    first = []

    with fake_server() as (server, url):

        def fault(text, names, values):
            documents = server.asked[-1][1]["chunks"]["documents"]
            if len(first) < PROMPTS:
                first.append(documents)
            return (names, values) if documents in first else (names, [value - 0.5 for value in values])

        server.text_fault = fault
        result = CliRunner().invoke(app, ["flips", url, *SMALL, "--scoring", "none", "--json", "-"])
    tallies = {t["condition"]: t for t in json.loads(result.stdout)["results"]}
    assert result.exit_code == 1
    assert (tallies["other orders"]["flips"], tallies["again"]["differ"], tallies["under load"]["differ"]) == (0, 0, 0)
    assert tallies["other orders"]["differ"] == TEXTS
    assert tallies["other orders"]["drift"] > 0.01


def test_another_token_under_load():
    texts = []

    def fault(text, names, values):
        texts.extend([text] if text not in texts else [])
        # From the first prompt on that is not compared, the second token is another one.
        return ([names[0], "x", *names[2:]] if len(texts) > PROMPTS else names), values

    code, figures, report, _ = flips("--scoring", "none", "--generation", "prompt", text_fault=fault)
    assert code == 1
    assert figures == {
        ("texts", "again"): (TEXTS, 0, 0, 0.0),
        ("texts", "all at once"): (TEXTS, 0, 0, 0.0),
        ("texts", "under load"): (TEXTS, TEXTS, TEXTS, 0.0),
    }
    assert report["verdict"].startswith(f"{TEXTS} of {3 * TEXTS} answers flip (33.3%)")


def test_the_table_and_the_file(tmp_path):
    def fault(query, items, scores):
        return [score + 0.125 for score in scores] if len(items) == 2 else scores

    file = tmp_path / "flips.json"
    with fake_server(score_fault=fault) as (_, url):
        options = [*SMALL, "--seed", "3", "--json", str(file), "--api-key", "secret"]
        result = CliRunner().invoke(app, ["flips", f"{url}/v1/", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["1", "other", "item", "16", "16", "0", "0.12"] in rows
    assert ["scores", "again", "16", "0", "0", "0.0"] in rows
    report = json.loads(file.read_text())
    assert result.stdout.splitlines()[-1] == report["verdict"]
    assert report["plan"]["seed"] == 3
    assert "secret" not in file.read_text()
    assert "scores, 1 other item: 0 of 16 flip, 16 differ" in result.stderr


# Servers that lack something


def missing(*_):
    return 404, {"detail": "Not Found"}


def lacking(*_):
    return None, missing()


def test_a_missing_route_is_left_out():
    code, figures, report, asked = flips(score_fault=missing)
    assert code == 0
    assert {kind for kind, _ in figures} == {"texts"}
    assert report["notes"] == [
        'left out: scores, the first answers: POST /v1/rerank answered 404: {"detail": "Not Found"}; choose another --scoring'
    ]
    assert sum(path == "/v1/rerank" for path, _ in asked) == 1
    code, figures, report, _ = flips("--generation", "chat", text_fault=lacking)
    assert {kind for kind, _ in figures} == {"scores"}
    assert "POST /v1/chat/completions answered 404" in report["notes"][0]


def test_a_server_that_does_not_tokenize():
    code, _, report, asked = flips(tokenize=missing)
    assert (code, len(report["notes"])) == (0, 1)
    assert report["notes"][0].startswith("sizes count words instead of tokens: POST /tokenize answered 404")
    assert len(asked[0][1]["query"].split()) == 200


def after(count, fault):
    """A fault of the answers after `count` ones."""
    answered = []

    def late(*given):
        answered.append(given)
        return fault(*given) if len(answered) > count else given[-1]

    return late


@pytest.mark.parametrize(
    ("options", "faults", "message"),
    [
        (
            [],
            {"score_fault": missing, "text_fault": lacking},
            'Found"}; choose another --scoring | texts, the first answers: POST',
        ),
        (["--scoring", "score"], {"tokenize": missing}, "name the model's tokenizer with --tokenizer"),
        (
            [],
            {"score_fault": lambda q, i, scores: scores[1:]},
            "scores, the first answers: the answer has 0 scores for 1 items",
        ),
        ([], {"score_fault": after(20, lambda q, i, scores: [math.nan])}, "scores, again: the answer has nan where"),
        ([], {"score_fault": lambda *_: (500, {"error": "broken"})}, 'POST /v1/rerank answered 500: {"error": "broken"}'),
        ([], {"score_fault": lambda *_: (401, {"error": "wrong key"})}, "answered 401"),
        ([], {"score_fault": lambda *_: (400, {"error": "query?"})}, "; choose another --scoring, or none"),
        (
            [],
            {"score_fault": lambda q, items, scores: (413, {"error": "long"}) if len(items) > 3 else scores},
            'scores, 3 other items: POST /v1/rerank answered 413: {"error": "long"}; lower --company or --load, or',
        ),
        ([], {"score_fault": lambda *_: (200, b"<html>")}, "POST /v1/rerank gave no JSON"),
        (
            ["--scoring", "none"],
            {"text_fault": lambda *_: (None, (200, {"choices": []}))},
            "has no log-probabilities of tokens",
        ),
        (["--scoring", "none"], {"text_fault": lambda *_: (None, (422, {}))}, "; choose another --generation, or none"),
        (
            ["--timeout-s", "0.05"],
            {"score_fault": lambda *_: threading.Event().wait(0.3) or (500, {})},
            "no answer within 0.05 s",
        ),
    ],
)
def test_errors(options, faults, message):
    with fake_server(**faults) as (_, url):
        result = CliRunner().invoke(app, ["flips", url, *SMALL, *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_load_that_fails_is_a_note():
    def fault(text, names, values):
        return (None, (503, {"error": "full"})) if len(names) != 8 else (names, values)

    code, _, report, _ = flips("--scoring", "none", "--load", "3", text_fault=fault)
    assert code == 0
    assert "requests of the load failed, first: POST /v1/completions answered 503" in report["notes"][0]


def test_an_interrupt_keeps_what_was_measured():
    def interrupt(query, items, scores):
        if len(items) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return scores

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    try:
        with fake_server(score_fault=interrupt) as (_, url):
            result = CliRunner().invoke(app, ["flips", url, *SMALL, "--json", "-"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    report = json.loads(result.stdout)
    assert [tally["condition"] for tally in report["results"]] == ["again", "1 other item"]
    assert (report["error"], report["verdict"]) == ("interrupted", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["localhost:8000"], "URL must be like http://localhost:8000"),
        (["http://127.0.0.1:9"], "GET /v1/models failed"),
        (["http://127.0.0.1:9", "--model", "m"], "is the server running?"),
        (["http://localhost", "--scoring", "tei"], "choose one of rerank, score, pairs, generative_scoring, none"),
        (["http://localhost", "--generation", "text"], "choose one of chunks, prompt, chat, none"),
        (["http://localhost", "--scoring", "none", "--generation", "none"], "leave nothing to ask"),
        (["http://localhost", "--company", "1,x"], "--company must be numbers above 0"),
        (["http://localhost", "--company", "0"], "--company must be numbers above 0"),
        (["http://localhost", "--rounds", "0"], "--rounds must be at least 1"),
        (["http://localhost", "--timeout-s", "nan"], "--timeout-s must be a finite number above 0"),
        (["http://localhost", "--json", "no/such/folder.json"], "is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(options, message):
    result = CliRunner().invoke(app, ["flips", *options])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


# The real server


SIZES = ["--rounds", "1", "--company", "1,7", "--documents", "2", "--output-tokens", "4"]
STEP_SIZE = """
from jax import numpy as jnp
from chunkattn.models import linear
linear.sums = lambda x: jnp.roll(x, len(x) // 8, -1).sum(-1, keepdims=True)
"""
"""A fault: norms add up a row in an order that follows the number of rows of the step."""


MORE = ["--queries", "4", "--items", "8", "--company", "1,7,50", "--scoring", "score", "--generation", "prompt"]


@pytest.mark.parametrize(
    ("options", "answers"),
    [pytest.param([*SMALL, *SIZES], 56, marks=pytest.mark.ci), pytest.param(MORE, 472, marks=pytest.mark.slow)],
)
def test_the_demo_server(demo_server, options, answers):
    result = CliRunner().invoke(app, ["flips", demo_server.url, *options, "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verdict"] == f"0 of {answers} answers flip, 0 differ; probabilities move by 0.0"
    assert report["notes"] == []


@pytest.mark.slow
def test_a_server_with_a_planted_fault(tmp_path):
    """Python imports the fault at its start, in the server's process and in the engine's."""
    (tmp_path / "sitecustomize.py").write_text(STEP_SIZE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    server = ServerProcess(*SERVER, PYTHONPATH=path)
    try:
        result = CliRunner().invoke(app, ["flips", server.url, *SMALL, *SIZES, "--json", "-"])
    finally:
        assert server.close() == 0
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    differ = {kind: sum(t["differ"] for t in report["results"] if t["kind"] == kind) for kind in ("scores", "texts")}
    assert min(differ.values()) > 0, differ
    assert f", {sum(differ.values())} differ (" in report["verdict"]
