"""Commands `chunkattn cache build | ls | gc`: the K/V of documents on disk."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from chunkattn.cache.disk.store import KVStore
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, RequestError
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.terminal.commands import Model, Verbose, command, command_group, console, log_to_stderr, make_llm
from chunkattn.terminal.files import read_document
from chunkattn.terminal.flags import with_options
from chunkattn.terminal.progress import Steps

group = command_group("cache", "Compute the K/V of documents ahead of use and keep it on disk.")

BATCH = 16
"""Documents per call: the progress bar moves after each call, and at most one call's documents wait for the disk."""


_ENGINE = (
    "tokenizer document_template chat_template position_strategy chunk_position_gap chunk_calibration dtype weights "
    "activations quantization adapter kv_cache_dtype attention_backend tensor_parallel_size"
)


@command(group)
@with_options((EngineConfig, None, _ENGINE))
def build(
    folder: Path,
    kv_store: Annotated[Path, typer.Option()],
    prefix: str | None = None,
    prefix_file: Path | None = None,
    system: str | None = None,
    pattern: str = "**/*.txt",
    cache_salt: str | None = None,
    keep_states: bool = False,
    api_key_file: Annotated[str | None, typer.Option(envvar="CHUNKATTN_API_KEY_FILE")] = None,
    api_key_name: str | None = None,
    max_bytes: int = 16 << 30,
    model: Model = None,
    verbose: Verbose = False,
    **engine: Any,
) -> None:
    """Compute the K/V of a prefix and documents. A document ends before the last line break of its file.

    Args:
        folder: folder of the documents; every matching file is one document.
        kv_store: folder that keeps the K/V.
        prefix: prefix of the prompts that will use the documents.
        prefix_file: file that holds the prefix.
        system: system message of the chats that will use the documents.
        pattern: glob pattern of the files, relative to the folder.
        cache_salt: salt of the requests that may use the K/V.
        keep_states: keep the state at the end of every document, too, in a model with recurrent layers.
        api_key_file: key file of the server that will use the K/V.
        api_key_name: name in the key file; its requests without a cache_salt may use the K/V.
        max_bytes: size limit of the K/V folder in bytes.
        model: see `Model`.
        verbose: see `Verbose`.
        **engine: other fields of `EngineConfig`.
    """
    from chunkattn.calls.precompute import precompute_job

    log_to_stderr(verbose)
    starts = [v for v in (prefix, prefix_file, system) if v is not None]
    if len(starts) > 1:
        raise RequestError("give one of --prefix, --prefix-file and --system")
    if prefix_file is not None:
        prefix = read_document(prefix_file)
    start = prefix or "" if system is None else [{"role": "system", "content": system}]
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder")
    if Path(pattern).is_absolute():
        raise RequestError(f"--pattern is relative to the folder, got {pattern!r}")
    files = sorted(f for f in folder.glob(pattern) if f.is_file())
    if not files:
        raise RequestError(f"no file of {folder} matches {pattern!r}")
    documents = [read_document(f) for f in files]
    if api_key_name is not None:
        cache_salt = _salt_of(api_key_name, api_key_file, cache_salt)
    llm = make_llm(model, kv_store=kv_store, kv_store_max_bytes=max_bytes, **engine)
    began, tokens, size, start_text = time.time(), 0, 0, str(start)
    parts: set[tuple[str, str | None]] = set()
    try:
        with Steps("documents", len(files)) as steps:
            for first in range(0, len(files), BATCH):
                batch = documents[first : first + BATCH]
                names = DOCUMENT_NAMES._replace(listed=[str(file) for file in files[first : first + BATCH]])
                options: dict[str, Any] = {"cache_salt": cache_salt, "keep_states": keep_states, "names": names}
                job = precompute_job(llm.frontend, start, batch, **options)
                report = llm.run(job, use_tqdm=False)
                parts |= {(start_text, document) for document, d in zip(batch, report.documents, strict=True) if d.tokens}
                tokens += sum(d.tokens for d in report.documents)
                size += sum(d.num_bytes for d in report.documents)
                steps.advance(len(batch))
        disk = llm.core.disk
        assert disk is not None
        parts |= {(start_text, None)} if report.prefix_tokens else set()
        disk.writer.flush(timeout=600)
        kept = sum(entry.last_used >= began - 1 and entry.kind != "state" for entry in disk.store.entries())
    finally:
        llm.close()
    counts = disk.counts
    console.print(
        f"{len(files)} documents, {tokens} tokens, {_bytes(size)}; parts written {counts['written']}, there already "
        f"{counts['hit']}, damaged and computed again {counts['damaged']}"
    )

    if kept < len(parts):
        raise ConfigError(
            f"{len(parts) - kept} of {len(parts)} parts are not kept: the store of {_bytes(max_bytes)} is too small for them, "
            "raise --max-bytes"
        )


@command(group)
def ls(kv_store: Annotated[Path, typer.Option()], as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the entries of a K/V folder, most recently used first.

    Args:
        kv_store: folder that keeps the K/V.
        as_json: print one JSON object per entry.
    """
    with _open(kv_store) as store:
        entries, used = store.entries()[::-1], store.num_bytes
    if as_json:
        for entry in entries:
            print(json.dumps(asdict(entry) | {"key": entry.key.hex()}))
        return
    table = Table("model", "kind", "tokens", "size", "last used", "key")
    for entry in entries:
        ago = max(time.time() - entry.last_used, 0)
        table.add_row(
            entry.model[:8], entry.kind, str(entry.tokens), _bytes(entry.num_bytes), _ago(ago), entry.key.hex()[16:28]
        )
    console.print(table)
    console.print(f"{len(entries)} entries, {_bytes(used)} in use")


@command(group)
def gc(
    kv_store: Annotated[Path, typer.Option()],
    max_bytes: int | None = None,
    max_age_days: float | None = None,
    model: str | None = None,
    everything: Annotated[bool, typer.Option("--all")] = False,
) -> None:
    """Remove entries from a K/V folder.

    Args:
        kv_store: folder that keeps the K/V.
        max_bytes: remove least recently used entries down to this size in bytes.
        max_age_days: remove entries not used for this number of days.
        model: remove entries of this model only: its tag, or the tag's beginning.
        everything: remove all entries.
    """
    if (max_bytes or 0) < 0 or not (max_age_days or 0.0) >= 0:
        raise RequestError("--max-bytes and --max-age-days must not be negative")
    if everything == any(v is not None for v in (max_bytes, max_age_days, model)):
        raise RequestError("say what to remove: --max-bytes, --max-age-days and --model, or --all")
    with _open(kv_store) as store:
        before = len(store.entries())
        if model is not None:
            tags = {entry.model for entry in store.entries() if entry.model.startswith(model)}
            if len(tags) != 1:
                raise RequestError(f"{len(tags)} models of {kv_store} have a tag that begins with {model!r}; one is needed")
            (model,) = tags
        if everything:
            store.clear()
        else:
            store.gc(max_bytes, None if max_age_days is None else 86400 * max_age_days, model)
        left, used = len(store.entries()), store.num_bytes
    console.print(f"{before - left} entries removed, {left} left, {_bytes(used)} in use")


def _salt_of(name: str, file: str | None, cache_salt: str | None) -> str:
    """Return the cache salt of a named API key.

    Raises:
        RequestError: there is no key file, or a salt is given too.
        ConfigError: the file cannot be read, or has no such name.
    """
    from chunkattn.web.keys import Keys

    if file is None:
        raise RequestError("--api-key-name needs --api-key-file")
    if cache_salt is not None:
        raise RequestError("give one of --cache-salt and --api-key-name")
    return Keys(os.environ.get("CHUNKATTN_API_KEY"), file).salt_of(name)


def _open(folder: Path) -> KVStore:
    """Open the K/V store of a folder.

    Raises:
        ConfigError: the folder holds no store.
    """
    if not (folder / "data.mdb").exists():
        raise ConfigError(f"{folder} holds no KV store")
    size = (folder / "data.mdb").stat().st_size
    return KVStore(folder, max_bytes=max(size, 16 << 20), create=False)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
