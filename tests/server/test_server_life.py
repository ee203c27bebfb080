"""A server's start, access, life through the death of its engine, and end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from chunkattn.async_llm import AsyncLLM
from chunkattn.cli import app as commands
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError
from chunkattn.server.app import create_app
from chunkattn.web.errors import ApiError
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import OPEN_PATHS
from chunkattn.web.time_limit import unless_gone
from tests.patience import PATIENCE_S
from tests.server_helpers import SMALL, ServerProcess, is_idle, wait_until

pytest_plugins = ["tests.async_faults"]

ASKED = {"prompt": "Where does Ana live?", "temperature": 0, "max_tokens": 8}
LONG = {"prompt": "Tell me.", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(fault_file):
    made = ServerProcess(*SMALL, "--engine-hang-timeout-s=2")
    yield made
    assert made.close() == 0


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "cleaning up"])
@pytest.mark.parametrize(
    "ends", [("gone",), ("stopped",), ("gone", "stopped"), ("stopped", "gone"), ()], ids=lambda e: "+".join(e) or "neither"
)
def test_work_ends_with_its_client(ends, late):
    """A client that leaves is told 499; whoever cancels the request itself is obeyed, whatever the client does."""

    class Request:
        left = None

        async def receive(self):
            await self.left.wait()
            return {"type": "http.disconnect"}

    async def work(state):
        try:
            state.append("began")
            await asyncio.sleep(0.02 if not ends else 9)
            return "answer"
        finally:
            state.append("cleaned up")
            if late:
                await asyncio.sleep(0.05)

    async def main():
        request, state, counts = Request(), [], []
        request.left = asyncio.Event()

        async def answer():
            try:
                return await unless_gone(request, work(state))
            finally:
                counts.append(asyncio.current_task().cancelling())

        task = asyncio.create_task(answer())
        await asyncio.sleep(0.01)
        for end in ends:
            request.left.set() if end == "gone" else task.cancel()
            await asyncio.sleep(0.01 if late else 0)
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        assert state == ["began", "cleaned up"]
        assert counts == ["stopped" in ends]
        return done

    done = asyncio.run(main())
    if "stopped" in ends:
        assert isinstance(done, asyncio.CancelledError)
    elif ends:
        assert isinstance(done, ApiError)
        assert done.status == 499
    else:
        assert done == "answer"


def test_every_route_but_probes_asks_for_the_key():
    """The engine need not run for that."""
    app = create_app(AsyncLLM(), ServerConfig(api_key="secret"))
    client = TestClient(app, base_url="http://localhost")
    routes = [(method, path) for path, methods in app.openapi()["paths"].items() for method in methods]
    assert len(routes) > 12
    routes += [("get", p) for p in ("/", "/static/app.js", "/openapi.json", "/nothing")]
    routes += [("post", p) for p in ("/score", "/rerank", "/v2/rerank")]
    for method, path in routes:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Basic !"},
            {"Authorization": b"Basic \xff"},
        ):
            answer = client.request(method, path, headers=headers, json={})
            assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path)
            if path not in OPEN_PATHS:
                assert answer.json()["error"]["code"] == "invalid_api_key"
    for headers in ({"Authorization": "Bearer secret"}, ("me", "secret")):
        options = {"headers": headers} if isinstance(headers, dict) else {"auth": headers}
        assert client.get("/v1/models", **options).status_code == 200


def test_other_names_of_this_machine_are_refused():
    """A page whose name was made to lead here could else do whatever its visitors can."""
    for config, status in ((ServerConfig(), 403), (ServerConfig(api_key="k"), 401), (ServerConfig(host="0.0.0.0"), 200)):
        client = TestClient(create_app(AsyncLLM(), config), base_url="http://evil.example:8000")
        assert client.get("/v1/models").status_code == status
    client = TestClient(create_app(AsyncLLM()), base_url="http://localhost:8000")
    assert client.get("/v1/models").status_code == 200


def test_before_the_engine_is_ready():
    client = TestClient(create_app(AsyncLLM()), base_url="http://127.0.0.1:8000")
    assert client.get("/livez").status_code == 200
    for path in ("/health", "/readyz"):
        assert (client.get(path).status_code, client.get(path).json()["status"]) == (503, "starting")
        assert client.get(path).json()["warm"] is False
    answer = client.post("/v1/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_starting")
    assert answer.headers["retry-after"]
    assert "chunkattn_http_requests" in client.get("/metrics").text


def test_a_defect_is_told_by_its_id_alone(monkeypatch):
    """Nothing of the inside gets out."""
    llm = AsyncLLM()
    monkeypatch.setattr(type(llm), "state", property(lambda _: 1 / 0))
    client = TestClient(create_app(llm), base_url="http://[::1]:1", raise_server_exceptions=False)
    answer = client.get("/health", headers={"X-Request-Id": "abc"})
    assert answer.status_code == 500
    assert "abc" in answer.json()["error"]["message"]
    assert "division" not in answer.text


def runs(http, count):
    return f'chunkattn_requests_now{{state="running"}} {count:.1f}' in http.get("/metrics").text


def ask_long(server, *, stream):
    with server.client() as own:
        return own.post("/v1/completions", json={**LONG, "stream": stream})


def test_a_failed_step_is_told_by_an_id(server, fault):
    with server.client() as http, ThreadPoolExecutor(4) as pool:
        fault.write_text("slow")
        answers = [pool.submit(ask_long, server, stream=bool(i % 2)) for i in range(4)]
        wait_until(lambda: runs(http, 4))
        fault.write_text("raise always")  # once would fail nobody: each request passes when it runs again alone
        for future in answers:
            answer = future.result(timeout=PATIENCE_S)
            assert "internal_error" in answer.text
            assert answer.headers["x-request-id"] in answer.text
            assert "injected" not in answer.text
            assert answer.status_code in (200, 500)
        fault.unlink()
        assert http.post("/v1/completions", json=ASKED).status_code == 200
        wait_until(lambda: is_idle(http))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.ci)], ids=["killed", "hung"])
def test_a_server_outlives_its_engine(server, fault, number):
    """Every client gets an answer or an explicit error; then all is well again."""
    with server.client() as http:
        expected = http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        fault.write_text("slow")
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ask_long, server, stream=bool(i % 2)) for i in range(8)]
            wait_until(lambda: runs(http, 8))
            os.kill(server.engine_pid, number)
            wait_until(lambda: http.get("/health").json()["status"] == "degraded")
            refused = http.post("/v1/completions", json=ASKED)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_degraded")
            for future in answers:
                answer = future.result(timeout=PATIENCE_S)
                assert "engine_not_ready" in answer.text
                if answer.status_code == 200:
                    assert answer.text.endswith("data: [DONE]\n\n")
                else:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
        fault.unlink()
        wait_until(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == expected


@pytest.mark.slow
def test_answers_before_it_is_warm_and_a_restart_loads_what_was_compiled(tmp_path):
    sizes = ("--max-num-seqs=8", "--max-num-batched-tokens=16", f"--kv-cache-memory-bytes={32 << 20}")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    server = ServerProcess(*sizes, **cache)
    with server.client() as http:
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["status"], ready.json()["warm"]) == (200, "ready", False)
        assert 0 < ready.json()["warmup"]["done"] < ready.json()["warmup"]["total"]
        assert "chunkattn_warm 0.0" in http.get("/metrics").text
        expected = http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        wait_until(lambda: http.get("/readyz").json()["warm"])
        assert "chunkattn_warm 1.0" in http.get("/metrics").text
        programs = {file.name for file in tmp_path.iterdir()}
        assert programs
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: http.get("/readyz").json()["engine_restarts"] == 1 and http.get("/readyz").json()["warm"])
        assert http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == expected
        assert "chunkattn_compiles_after_warmup_total 0.0" in http.get("/metrics").text
        assert {file.name for file in tmp_path.iterdir()} == programs  # every compiled program would be written
    assert server.wait_for(r"ready after \d+\.\d s; the imports took \d+\.\d s", 1)
    assert server.close() == 0


@pytest.mark.ci
def test_the_first_signal_drains(fault):
    fault.write_text("slow")
    server = ServerProcess(*SMALL)
    found = []

    def read():
        with server.client() as own, own.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            found.extend(answer.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(found) > 2)
    with server.client() as http:
        for path in ("/tokenize", "/v1/completions"):  # clients that leave, whose work goes on
            with pytest.raises(httpx.ReadTimeout):
                http.post(path, json={"prompt": "It never ends."}, timeout=0.5)
        server.signal()
        wait_until(lambda: http.get("/readyz").json()["status"] == "draining")
        answer = http.post("/v1/completions", json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_draining")
    fault.unlink()
    reader.join(PATIENCE_S)
    assert found[-2] == "data: [DONE]"
    assert '"finish_reason": "length"' in "".join(found)
    assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.ci
def test_the_second_signal_stops(fault):
    fault.write_text("slow")
    server = ServerProcess(*SMALL, "--log-format=json", CHUNKATTN_SERVED_MODEL_NAME="mine")
    with server.client() as http, ThreadPoolExecutor(1) as pool:
        assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert '"path": "/v1/models"' in server.wait_for(r"v1/models 200", 60).string
        running = pool.submit(ask_long, server, stream=False)
        wait_until(lambda: runs(http, 1))
        server.signal()
        server.wait_for("draining", 60)
        server.signal()
        assert server.process.wait(PATIENCE_S) == 0
        with pytest.raises(httpx.HTTPError):
            running.result(timeout=PATIENCE_S).raise_for_status()


def test_options_come_from_everywhere(tmp_path, monkeypatch):
    """The command line goes before the environment, that before the file."""
    seen = {}
    monkeypatch.setattr("chunkattn.server.run.serve", lambda options, config: seen.update(options=options, config=config))
    file = tmp_path / "serve.yaml"
    file.write_text("model: other\nport: 9001\nmax-num-seqs: 7\nblock_size: 32\nenable_chunk_aware: true\nhost: 0.0.0.0\n")
    environment = {"CHUNKATTN_BLOCK_SIZE": "64", "CHUNKATTN_PORT": "9002", "CHUNKATTN_API_KEY": "k"}
    result = CliRunner().invoke(commands, ["serve", "folder", "--config", str(file), "--port", "9003"], env=environment)
    assert result.exit_code == 0, result.output
    config, options = seen["config"], EngineConfig(**seen["options"])
    assert (config.port, config.host, config.api_key) == (9003, "0.0.0.0", "k")
    assert (options.model, options.max_num_seqs, options.block_size, options.enable_chunk_aware) == ("folder", 7, 64, True)
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "port must be between 0 and 65535"),
        pytest.param(["/nowhere"], "/nowhere", marks=pytest.mark.slow),
        pytest.param(["--block-size", "17"], "block_size must be a power of two", marks=pytest.mark.slow),
        pytest.param(["--request-timeout-s", "0"], "request_timeout_s must be above 0", marks=pytest.mark.slow),
        pytest.param(["--log-format", "xml"], "log_format 'xml' is unknown", marks=pytest.mark.slow),
        pytest.param(["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid", marks=pytest.mark.slow),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_server_that_cannot_start_says_why(arguments, message):
    command = [sys.executable, "-m", "chunkattn", "serve", *(["--port=0"] * ("--port" not in arguments)), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_config_file_is_checked(tmp_path):
    file = tmp_path / "serve.yaml"
    for text, message in (
        ("prot: 1", "unknown option 'prot'"),
        ("- 1", "mapping"),
        ("{", "cannot be read"),
        ("port: true", "port"),
        ("model: [a]", "model"),
    ):
        file.write_text(text)
        result = CliRunner().invoke(commands, ["serve", "--config", str(file)])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": ""},
        {"port": -1},
        {"drain_timeout_s": float("inf")},
        {"max_body_bytes": 0},
        {"request_timeout_s": 0},
        {"log_format": "xml"},
    ],
    ids=str,
)
def test_bad_server_options(options):
    with pytest.raises(ConfigError):
        ServerConfig(**options)


@pytest.mark.ci
def test_out_of_pages():
    """Requests that do not fit together take turns; one that cannot fit says so, and why; nobody else is touched."""
    server = ServerProcess(*SMALL, f"--kv-cache-memory-bytes={1 << 20}", "--max-pinned-share=1")
    questions = [f"Where does number {n} live?" for n in range(8)]

    def ask(question, stream=False, tokens=120):
        body = {"prompt": question, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        with server.client() as own:
            answer = own.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    try:
        with server.client() as http, ThreadPoolExecutor(8) as pool:
            alone = [ask(question) for question in questions]
            asked = [pool.submit(ask, question, stream=bool(n % 2)) for n, question in enumerate(questions)]
            refused = http.post("/v1/completions", json={"prompt": "word " * 480, "max_tokens": 8})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert [future.result(60) for future in asked] == alone
            assert "chunkattn_preemptions_total 0.0" not in http.get("/metrics").text  # they did not fit together

            alone = [ask(question, tokens=40) for question in questions[:2]]
            documents = [{"id": str(n), "text": f"{n} " * 30} for n in range(7)]
            pinned = http.post("/v1/cache/documents", json={"documents": documents[:4], "pin": True})
            assert pinned.status_code == 200, pinned.text
            asked = [pool.submit(ask, question, tokens=40) for question in questions[:2]]
            refused = http.post("/v1/completions", json={"prompt": "word " * 60, "max_tokens": 8})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "pinned" in refused.json()["error"]["message"]
            refused = http.post("/v1/cache/documents", json={"documents": documents, "pin": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_pins")
            assert [future.result(60) for future in asked] == alone
            for document in documents[:4]:
                assert http.delete(f"/v1/cache/documents/{document['id']}").status_code == 200
            assert http.post("/v1/completions", json={"prompt": "word " * 60, "max_tokens": 8}).status_code == 200
            wait_until(lambda: is_idle(http))
            assert 'chunkattn_pages{state="pinned"} 0.0' in http.get("/metrics").text
    finally:
        assert server.close() == 0
