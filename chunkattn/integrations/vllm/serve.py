"""`python -m chunkattn.integrations.vllm.serve MODEL`: vLLM's OpenAI-compatible server, with chunk-aware prompts.

Every option of `vllm serve` is taken. Fields of `ChunkOptions` and `ConnectorOptions` are options, too, such as
`--chunk-position-gap 8` and `--max-store-bytes 8589934592`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import entry_points

from chunkattn.errors import ConfigError
from chunkattn.integrations.vllm.chunk_options import ChunkOptions, take_options
from chunkattn.integrations.vllm.options import ConnectorOptions

_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")


def chunk_arguments() -> argparse.ArgumentParser:
    """Return the parser of the options that vLLM does not have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("chunks")
    for option in {f.name: f for kind in (ConnectorOptions, ChunkOptions) for f in fields(kind)}.values():
        flag = f"--{option.name.replace('_', '-')}"
        if option.type == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default)
        else:
            group.add_argument(flag, type=int if "int" in str(option.type) else str, default=option.default)
    return parser


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line of vLLM's server.

    Args:
        arguments: command line after the program's name: the model first, then options of either kind.

    Raises:
        ConfigError: an option is invalid, or is set by this program.
    """
    given, rest = chunk_arguments().parse_known_args(list(arguments))
    if any(word.split("=")[0] in ("--kv-transfer-config", "--kv_transfer_config") for word in rest):
        raise ConfigError(
            "--kv-transfer-config is set by this program; give --max-store-bytes and --chunk-position-gap instead"
        )
    if rest and not rest[0].startswith("-"):
        rest = ["--model", *rest]
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--model")
    _, config, _ = take_options(named.parse_known_args(rest)[0].model, vars(given))
    return [*rest, "--kv-transfer-config", json.dumps(config)]


def plugins(current: str | None) -> str:
    """Return the value of `VLLM_PLUGINS` that adds the plugin chunkattn to those that vLLM would load.

    Args:
        current: value of the variable, None if it is not set.
    """
    loaded = [e.name for group in _GROUPS for e in entry_points(group=group)] if current is None else current.split(",")
    return ",".join(dict.fromkeys([*filter(None, loaded), "chunkattn"]))


def main() -> None:
    """Start the server."""
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(__doc__)
        chunk_arguments().print_help()
        return
    try:
        sys.argv[1:] = server_arguments(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    os.environ["VLLM_PLUGINS"] = plugins(os.environ.get("VLLM_PLUGINS"))
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
