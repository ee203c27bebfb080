"""Command `chunkattn serve`: all options of engine and server, from the command line, the environment or a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError
from chunkattn.options import options_of
from chunkattn.terminal.commands import app, command
from chunkattn.terminal.flags import check_keys, with_options
from chunkattn.web.options import ServerConfig

_PANELS = {
    "Model": "tokenizer revision skip_tokenizer_init generation_config dtype attention_backend seed max_logprobs",
    "Devices": "tensor_parallel_size num_hosts host_index coordinator group_secret_file",
    "Prompts and scoring": (
        "enable_chunk_aware chunk_separator document_template chat_template rerank_template special_tokens_in_documents "
        "special_tokens_in_prompts "
        "position_strategy chunk_position_gap chunk_temperature chunk_scale chunk_calibration multi_item_scoring_delimiter "
        "score_algorithm max_model_len max_chunk_len max_chunks_per_prompt max_items_per_request max_tokens_per_call"
    ),
    "Steps and warm-up": (
        "max_num_seqs max_num_batched_tokens long_prefill_token_threshold max_decode_gap_s max_queued_requests "
        "engine_hang_timeout_s warmup warmup_tokens batch_invariant"
    ),
    "KV cache": (
        "block_size kv_cache_dtype kv_cache_memory_bytes gpu_memory_utilization enable_prefix_caching kv_store "
        "kv_store_max_bytes"
    ),
}
_NAMED = {"model", *" ".join(_PANELS.values()).split()}


def _read_config(ctx: typer.Context, file: Path | None) -> Path | None:
    """Set the defaults of the other options from a YAML file of `option: value`."""
    if file is None:
        return None
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise typer.BadParameter("must hold a mapping of options")
    named = {str(name).replace("-", "_"): value for name, value in given.items()}
    options: list[Any] = [p for p in ctx.command.params if p.name not in ("config", "help")]
    known = {p.name for p in options}
    if unknown := sorted(set(named) - known):
        raise typer.BadParameter(f"unknown option {unknown[0]!r} in {file}")
    for name, value in named.items():
        option = next(p for p in options if p.name == name)
        if option.multiple and value is not None:
            named[name] = value if isinstance(value, list) else [value]
        elif isinstance(value, (list, dict)) or (
            value is not None and isinstance(value, bool) != getattr(option, "is_flag", False)
        ):
            raise typer.BadParameter(f"{name} in {file} cannot be {value!r}")
    ctx.default_map = {**(ctx.default_map or {}), **named}
    return file


@command(app)
@with_options(
    (ServerConfig, "Server"),
    *((EngineConfig, panel, names) for panel, names in _PANELS.items()),
    (EngineConfig, None, " ".join(name for name in options_of(EngineConfig) if name not in _NAMED)),
    from_environment=True,
)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Local folder, GGUF file or hub id; the bundled demo model when left out.", envvar="CHUNKATTN_MODEL"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of options.", callback=_read_config, is_eager=True, envvar="CHUNKATTN_CONFIG")
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of engines behind one address, which share the work by the documents they hold. More than 1 needs "
            "Ray: pip install 'chunkattn[ray]'.",
            envvar="CHUNKATTN_REPLICAS",
            show_envvar=False,
        ),
    ] = 1,
    **options: Any,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients.

    Every option can also be set by an environment variable, CHUNKATTN_ and its name in capitals, or in the YAML file of
    --config. The command line overrides the environment, and the environment overrides the file.
    """
    check_keys(options, "api_key", "api_key_file", "metrics_key", "group_secret_file")
    server = {name: options.pop(name) for name in options_of(ServerConfig)}
    if options["num_hosts"] > 1 and replicas > 1:
        raise ConfigError(f"--replicas {replicas} needs --num-hosts 1: a replica runs on one machine")
    if options["host_index"]:
        from chunkattn.remote.follow import follow
        from chunkattn.web.listening import set_up_logs

        set_up_logs(server["log_format"])
        follow({"model": model, **options})
    elif replicas > 1:
        from chunkattn.integrations.ray.local import serve_replicas

        serve_replicas({"model": model, **options}, ServerConfig(**server), replicas)
    else:
        from chunkattn.server.run import serve as run

        run({"model": model, **options}, ServerConfig(**server))
