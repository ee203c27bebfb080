"""The server and the gateway driven by clients of other languages, each as it comes: Node.js, the JDK and curl."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
NODE_FOLDER = Path(os.environ.get("CLIENTS_ENV", ".cache/clients-env")).absolute() / "node"
MODEL = "chunkattn-demo"
CITIES = ("Oslo", "Rome")
MESSAGES = [
    {"role": "system", "content": "Read the notes."},
    {"role": "user", "content": "Ana lives in Oslo. Where does Ana live?"},
]
PROMPT = "Ana lives in Oslo. Where does Ana live? Answer:"
QUERY, DOCUMENTS = "Find a person who likes honey.", ["Zenuso works as a baker.", "Lezudo likes honey.", "Nila is a poet."]
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
RERANK = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}
LONG = {"model": MODEL, "query": QUERY, "documents": [f"{text} {number}" for number in range(200) for text in DOCUMENTS]}


@pytest.fixture(params=["server", "gateway"])
def base(request):
    """Base URL of the server, and of a gateway before it."""
    return request.getfixturevalue(request.param)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranking(answer):
    return [[result["index"], pytest.approx(result["relevance_score"])] for result in answer["results"]]


def run_node(script, **asked):
    """Run a script of `node/` and return its JSON."""
    copied = NODE_FOLDER / script
    shutil.copy(HERE / "node" / script, copied)  # modules are looked for beside the script
    return json.loads(run("node", str(copied), json.dumps(asked)))


@pytest.fixture
def node(base):
    return run_node("ask.mjs", url=base, model=MODEL, messages=MESSAGES, prompt=PROMPT, query=QUERY, documents=DOCUMENTS)


def test_shapes_and_tools_of_the_ai_sdk(base):
    """Through chats, and through `/v1/responses`, the default of its provider for OpenAI."""
    for told in run_node("shapes.mjs", url=base, model=MODEL, prompt=MESSAGES[1]["content"]).values():
        assert told["object"] == told["streamed"]
        assert told["object"]["city"] in CITIES
        ((name, asked),) = told["calls"]
        assert (name, told["results"]) == ("look", [f"{asked['city']}."])
        assert asked["city"] in CITIES


def test_node(node, post):
    chat = post("/v1/chat/completions", CHAT)
    content = chat["choices"][0]["message"]["content"]
    completion = post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12})["choices"][0][
        "text"
    ]
    ranked = ranking(post("/v1/rerank", RERANK))
    assert content
    assert node["openai"].pop("models") > 0
    fault = {"status": 400, "param": "top_p", "type": "invalid_request_error"}
    assert node["openai"] == {"chat": content, "completion": completion, "fault": fault}
    assert node["aiSdk"] == {"chat": content, "streamed": content, "tokens": chat["usage"]["completion_tokens"]}
    assert node["langchain"] == {"chat": content, "streamed": content, "completion": completion}
    assert node["cohere"] == {"v1": ranked[:2], "v2": ranked, "langchain": ranked[:2]}


def scores(text):
    return [(result["index"], result["relevance_score"]) for result in json.loads(text)["results"]]


@pytest.mark.parametrize("body", [RERANK, LONG], ids=["short", "long"])
def test_jdk(base, post, tmp_path, body):
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    expected = scores(json.dumps(post("/v1/rerank", body)))
    answers = run("java", str(HERE / "java" / "Ask.java"), f"{base}/v1/rerank", str(file)).splitlines()
    assert [answer.split(" ", 2)[:2] for answer in answers] == [["HTTP_1_1", "200"]] * 3
    assert [scores(answer.split(" ", 2)[2]) for answer in answers] == [expected] * 3


@pytest.mark.parametrize("body", [RERANK, LONG], ids=["short", "long"])
@pytest.mark.parametrize("option", ["--http1.0", "--http1.1", "--http2"])
def test_curl(base, post, tmp_path, option, body):
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    expected = scores(json.dumps(post("/v1/rerank", body)))
    once = [
        "-sS",
        "--fail-with-body",
        option,
        "-H",
        "Content-Type: application/json",
        "--data-binary",
        f"@{file}",
        f"{base}/v1/rerank",
    ]
    answers = run("curl", *once, "--next", *once, "-H", "Expect: 100-continue")  # on one connection
    decoder, found = json.JSONDecoder(), []
    while answers := answers.lstrip():
        value, end = decoder.raw_decode(answers)
        found.append(scores(json.dumps(value)))
        answers = answers[end:]
    assert found == [expected] * 2
