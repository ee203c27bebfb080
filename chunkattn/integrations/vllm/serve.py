"""`python -m chunkattn.integrations.vllm.serve MODEL`: `vllm serve`, with chunk-aware prompts.

Every option of `vllm serve` is taken. Fields of `ChunkOptions` and `ConnectorOptions` are options, too, such as
`--chunk-position-gap 8` and `--max-store-bytes 8589934592`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from chunkattn.errors import ConfigError
from chunkattn.integrations.vllm.chunk_options import ChunkOptions, take_options
from chunkattn.integrations.vllm.options import ConnectorOptions
from chunkattn.options import options_of

_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
_OPT_IN = ("lora_hf_hub_resolver",)
"""Plugins that act only if `VLLM_PLUGINS` names them. This one downloads what a request names."""
_OWN = "kv-transfer-config"


def chunk_arguments() -> argparse.ArgumentParser:
    """Return the parser of the options that vLLM does not have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("chunks")
    for option in (options_of(ConnectorOptions) | options_of(ChunkOptions)).values():
        how: Any = {"action": argparse.BooleanOptionalAction} if option.kind is bool else {"type": option.kind}
        group.add_argument(option.flag, default=option.default, help=option.help, **how)
    return parser


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `vllm serve`.

    Args:
        arguments: command line after the program's name: the model first, then options of either kind.

    Raises:
        ConfigError: an option is invalid, or is set by this program.
    """
    chunk, rest = chunk_arguments().parse_known_args(list(arguments))
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--config", "--model", "--revision"):
        names.add_argument(option)
    named = names.parse_known_args(rest)[0]
    config = _read_config(named.config)
    if any(word.lstrip("-").split("=")[0].replace("_", "-") == _OWN for word in [*rest, *config]):
        raise ConfigError(f"--{_OWN} is set by this program; give --max-store-bytes and --chunk-position-gap instead")
    first = rest[0] if rest and not rest[0].startswith("-") else None
    if (model := first or named.model or config.get("model")) is None:
        raise ConfigError("no model is given: name it first, or in the file of --config")
    _, transfer, _ = take_options(model, {**vars(chunk), "revision": named.revision or config.get("revision")})
    return [*rest, f"--{_OWN}", json.dumps(transfer)]


def _read_config(path: str | None) -> dict[str, Any]:
    """Return the options in a file of `--config`.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold options and their values")
    return {str(name): value for name, value in values.items()}


def plugins(current: str | None) -> str:
    """Return the value of `VLLM_PLUGINS` that adds the plugin chunkattn to those that vLLM would load.

    Args:
        current: value of the variable, None if it is not set.
    """
    if current is not None:
        loaded = current.split(",")
    else:
        loaded = [e.name for group in _GROUPS for e in entry_points(group=group) if e.name not in _OPT_IN]
    return ",".join(dict.fromkeys([*filter(None, loaded), "chunkattn"]))


def run_serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve`. The command `vllm` itself fails under the CPU build, whose distribution has another name.

    Args:
        arguments: arguments of `vllm serve`.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    configure_logging_from_args(parsed)
    command.validate(parsed)
    command.cmd(parsed)


def main() -> None:
    """Start the server."""
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(__doc__)
        chunk_arguments().print_help()
        return
    try:
        arguments = server_arguments(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    os.environ["VLLM_PLUGINS"] = plugins(os.environ.get("VLLM_PLUGINS"))
    run_serve(arguments)


if __name__ == "__main__":
    main()
