"""Count what a call crosses: the package's files whose functions run, and its types that are made.

    python -m benchmarks.trace_calls [--json FILE|-] [--names]

A file counts when a function of it is called, in any thread that starts within. A type counts when its `__init__` or the
constructor of a `NamedTuple` runs. Every call runs three times, with the prefix cache emptied between. The last one counts, for
the second may still compile. The server's engine is another process and does not count. `lines` counts the package's lines of
code, without blanks, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import os
import sys
import threading
import tokenize
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx

import chunkattn
from chunkattn import LLM, AsyncLLM, Choice, DocumentPrompt, Predicate, SamplingParams
from chunkattn.gateway.app import Gateway
from chunkattn.gateway.options import GatewayOptions
from chunkattn.gateway.replicas import Outgoing, Report
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.web.options import ServerConfig

ROOT = Path(chunkattn.__file__).parent
_IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTS = ["The sky above the harbour is blue.", "Grass is green in spring.", "Coal is black."]


class Trace:
    """Files and types of the package that the code within crosses."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.types: set[str] = set()

    def forget(self) -> None:
        """Forget what was crossed so far."""
        self.files, self.types = set(), set()

    def copy(self) -> Trace:
        """Return a trace that no code adds to."""
        copy = Trace()
        copy.files, copy.types = self.files.copy(), self.types.copy()
        return copy

    def __enter__(self) -> Trace:
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _call(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(f"{ROOT}{os.sep}"):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))
        made = None
        if code.co_name == "__init__":
            made = type(frame.f_locals.get("self"))
        elif code.co_name in ("__new__", "<lambda>"):
            made = frame.f_locals.get("_cls")
        if isinstance(made, type) and made.__module__.startswith("chunkattn"):
            self.types.add(f"{made.__module__}.{made.__qualname__}")


def traced(call: Callable[[], Any], reset: Callable[[], Any]) -> Trace:
    """Return the trace of the third of three calls."""
    for _ in range(2):
        call()
        reset()
    with Trace() as trace:
        call()
    return trace


def code_lines(folder: Path) -> int:
    """Return the lines of code of a folder's Python files, without blanks, comments and docstrings."""
    total = 0
    for path in folder.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        doc: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                doc.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in _IGNORED:
                lines.update(range(token.start[0], token.end[0] + 1))
        total += len(lines - doc)
    return total


CHUNKS = {"prefix": "Answer the question.", "documents": DOCUMENTS, "question": "What colour is the sky?"}
QUESTIONS = [Predicate("The sky is blue."), Choice("What colour is the sky?", ["blue", "green"])]
ASKED = [{"type": "predicate", "name": "blue", "instructions": "The sky is blue."}]
BODIES = {
    "/v1/completions": {"chunks": CHUNKS, "max_tokens": 4, "temperature": 0},
    "/v1/rerank": {"query": "colour of the sky", "documents": DOCUMENTS},
    "/v1/decisions": {"input": "The sky above the harbour is blue.", "questions": ASKED},
    "/v1/cache/documents": {"prefix": "Answer the question.", "documents": DOCUMENTS},
}


async def _served() -> dict[str, Trace]:
    """Return the traces of calls over HTTP, the last one through a gateway in front of the server."""
    from chunkattn.server.app import create_app

    traces = {}
    with Trace() as trace:  # before the server's threads start
        async with AsyncLLM(str(DEMO_FOLDER), warmup=False) as llm:
            app = create_app(llm)

            async def post(client: Any, path: str) -> Trace:
                for _ in range(2):
                    (await client.post(path, json=BODIES[path])).raise_for_status()
                    assert await llm.reset_prefix_cache()
                trace.forget()
                (await client.post(path, json=BODIES[path])).raise_for_status()
                return trace.copy()

            async with _client(app) as client:
                for path in BODIES:
                    traces[f"POST {path}"] = await post(client, path)
            gateway = Gateway(_Replica(), GatewayOptions(), ServerConfig())
            await gateway.open()
            async with _client(gateway.app) as client:
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
                traces["relay /v1/completions"] = await post(client, "/v1/completions")
            await gateway.close()
    return traces


def _client(app: Any) -> Any:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=300)


class _Replica:
    """`Replicas` of one server, which answers every request alike."""

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def names(self) -> list[str]:
        return ["one"]

    def drop(self, name: str) -> None:
        pass

    async def send(self, name: str, request: Outgoing) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        yield {"type": "http.response.body", "body": b"{}", "more_body": False}

    async def report(self, name: str) -> Report:
        return Report("1", ready=True)

    async def metrics(self, name: str) -> str:
        return ""


def measure() -> dict[str, Trace]:
    """Return the traces by call."""
    llm, params = LLM(str(DEMO_FOLDER)), SamplingParams(max_tokens=4, temperature=0)
    prompt, query = DocumentPrompt("Answer the question.\n", DOCUMENTS, "\nWhat colour is the sky?"), "colour of the sky"
    labels = ["yes", "no"]
    calls: dict[str, Callable[[], Any]] = {
        "LLM.generate": lambda: llm.generate([prompt], params, use_tqdm=False),
        "LLM.generate, focus": lambda: llm.generate([prompt], params, focus=2, use_tqdm=False),
        "LLM.score": lambda: llm.score("The sky is", DOCUMENTS, labels=labels, use_tqdm=False),
        "LLM.rerank": lambda: llm.rerank(query, DOCUMENTS, use_tqdm=False),
        "LLM.rerank, document_first": lambda: llm.rerank(query, DOCUMENTS, order="document_first", use_tqdm=False),
        "LLM.decide": lambda: llm.decide(DOCUMENTS[0], QUESTIONS, use_tqdm=False),
    }
    traces = {name: traced(call, llm.reset_prefix_cache) for name, call in calls.items()}
    return traces | asyncio.run(_served())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    parser.add_argument("--names", action="store_true", help="name the files and types")
    args = parser.parse_args()
    traces, lines = measure(), code_lines(ROOT)
    rows = [{"call": call, "files": sorted(t.files), "types": sorted(t.types)} for call, t in traces.items()]
    text = json.dumps({"lines": lines, "calls": rows}, indent=2)
    if args.json == "-":
        print(text)
        return
    print(f"{'call':30} files  types")
    for row in rows:
        print(f"{row['call']:30} {len(row['files']):5}  {len(row['types']):5}")
        if args.names:
            print("  " + " ".join(row["files"]) + "\n  " + " ".join(row["types"]))
    print(f"lines of code: {lines:,}")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
