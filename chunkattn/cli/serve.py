"""Command `chunkattn serve`: all options of engine and server, from the command line, the environment or a YAML file."""

from __future__ import annotations

from collections.abc import Iterator
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
    "tokenizer": "Model",
    "tensor_parallel_size": "Devices",
    "enable_chunk_aware": "Prompts and scoring",
    "max_num_seqs": "Steps and warm-up",
    "kv_cache_dtype": "KV cache",
}
"""Titles of the help panels of `EngineConfig`, by the first option of each."""


def _engine_options() -> Iterator[tuple[type, str, str]]:
    """Yield the options of the engine for `with_options`, each with its panel."""
    title = ""
    for name in options_of(EngineConfig):
        title = _PANELS.get(name, title)
        if title:
            yield EngineConfig, title, name


def _read_config(ctx: typer.Context, file: Path | None) -> Path | None:
    """Set the defaults of the other options from a YAML file of `option: value`."""
    if file is None:
        return None
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise typer.BadParameter("must hold a mapping of options")
    named = {str(name).replace("-", "_"): value for name, value in content.items()}
    options: dict[str | None, Any] = {p.name: p for p in ctx.command.params if p.name not in ("config", "help")}
    if unknown := sorted(named.keys() - options.keys()):
        raise typer.BadParameter(f"unknown option {unknown[0]!r} in {file}")
    for name, value in named.items():
        option = options[name]
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
    *_engine_options(),
    from_environment=True,
)
def serve(
    model: Annotated[str | None, typer.Argument(envvar="CHUNKATTN_MODEL")] = None,
    config: Annotated[Path | None, typer.Option(callback=_read_config, is_eager=True, envvar="CHUNKATTN_CONFIG")] = None,
    replicas: Annotated[int, typer.Option(min=1, envvar="CHUNKATTN_REPLICAS", show_envvar=False)] = 1,
    **options: Any,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients.

    Every option can also be set by an environment variable, CHUNKATTN_ and its name in capitals, or in the YAML file of
    --config. The command line overrides the environment, and the environment overrides the file.

    Args:
        model: local folder, GGUF file or hub id; the bundled demo model when left out.
        config: YAML file of options.
        replicas: number of engines behind one address, which share the work by the documents they hold. More than 1 needs Ray:
            pip install 'chunkattn[ray]'.
        **options: other fields of `EngineConfig` and `ServerConfig`.
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
