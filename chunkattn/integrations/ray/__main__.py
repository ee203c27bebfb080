"""Print the environment variables of a cluster as shell commands: `eval "$(python -m chunkattn.integrations.ray)"`."""

from __future__ import annotations

import argparse

from chunkattn.integrations.ray.options import environment
from chunkattn.web.options import ServerConfig


def main() -> None:
    """Print one `export` per variable."""
    parser = argparse.ArgumentParser(prog="python -m chunkattn.integrations.ray", description=main.__doc__)
    parser.add_argument("--max-body-bytes", type=int, default=ServerConfig.max_body_bytes, help="the server's option")
    parser.add_argument("--request-timeout-s", type=float, default=ServerConfig.request_timeout_s, help="the server's option")
    parser.add_argument("--run-folder", help="folder of HAProxy's files")
    parser.add_argument("--first-port", type=int, default=8400, help="first of the 64 ports used on a node")
    for name, value in environment(**vars(parser.parse_args())).items():
        print(f"export {name}={value}")


if __name__ == "__main__":
    main()
