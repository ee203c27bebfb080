"""The secret that the hosts of a group share, and the key of ZeroMQ's CURVE that follows from it."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from zmq.utils import z85

from chunkattn.addresses import is_loopback
from chunkattn.config import EngineConfig, split_address
from chunkattn.errors import ConfigError
from chunkattn.user_cache import user_cache

VARIABLE = "CHUNKATTN_GROUP_SECRET"
"""Environment variable that holds the secret."""
_LEAST_BYTES, _MOST_BYTES = 16, 4096
_OTHERS = stat.S_IWGRP | stat.S_IRWXO
"""Permissions of a secret's file that are refused. Its group may read it, as the group of a Kubernetes volume must."""
_MAKE_ONE = "openssl rand -hex 32 makes one"


def curve_key(config: EngineConfig) -> bytes:
    """Return the secret key of the port of host 0, which every host of the group can compute.

    The public key of a CURVE server does not cross the network, so only a host with the secret passes the handshake.

    Args:
        config: options of the engine.

    Raises:
        ConfigError: see `read_secret`.
    """
    secret = read_secret(config)
    return z85.encode(hashlib.scrypt(secret, salt=b"chunkattn group of hosts", n=1 << 14, r=8, p=1, dklen=32))


def read_secret(config: EngineConfig) -> bytes:
    """Return the secret of a group: of `group_secret_file`, of the environment, or on loopback this user's own.

    Args:
        config: options of the engine.

    Raises:
        ConfigError: a group that other machines can reach has no secret, or the secret cannot be read or is too short.
    """
    file, text = config.group_secret_file, os.environ.get(VARIABLE)
    if file is not None and text is not None:
        raise ConfigError(f"group_secret_file and {VARIABLE} are both set; set one of them")
    if file is not None:
        return _checked(_read(Path(file).expanduser(), f"group_secret_file {file}"), f"group_secret_file {file}")
    if text is not None:
        return _checked(os.fsencode(text), VARIABLE)
    if not is_loopback(split_address(config.coordinator or "")[0]):
        raise ConfigError(
            f"other machines can reach the coordinator {config.coordinator}, and the group has no secret; set "
            f"group_secret_file or {VARIABLE} to the same secret on every host ({_MAKE_ONE})"
        )
    return _own_secret()


def _own_secret() -> bytes:
    """Return the secret of this user's groups on loopback, made at the first use.

    Raises:
        ConfigError: the file cannot be made or read.
    """
    path = user_cache() / "group_secret"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                with suppress(FileExistsError):  # another host was faster
                    os.link(made, path)
            finally:
                made.unlink()
    except OSError as error:
        raise ConfigError(f"no secret can be kept in {path}: {error}; set group_secret_file or {VARIABLE}") from None
    return _checked(_read(path, f"the group's secret {path}"), f"the group's secret {path}")


def _read(path: Path, shown: str) -> bytes:
    """Return the content of a secret's file.

    Raises:
        ConfigError: the file cannot be read, is no regular file, is open to others, or is too long.
    """
    try:
        # Without O_NONBLOCK, a FIFO would block until it has a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{shown} is no regular file; give the path of a file that holds the secret")
            if mode & _OTHERS:
                raise ConfigError(
                    f"{shown} has mode {stat.S_IMODE(mode):04o}, so that other users can read or change it; make a new secret "
                    "and chmod 600 the file (defaultMode: 0440 for a Kubernetes secret)"
                )
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown} cannot be read: {error}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{shown} holds more than {_MOST_BYTES} bytes; give a file that holds the secret alone")
    return content


def _checked(secret: bytes, shown: str) -> bytes:
    """Return a secret without the white space around it.

    Raises:
        ConfigError: the secret is empty or short.
    """
    secret = secret.strip()
    if not secret:
        raise ConfigError(f"{shown} is empty; give a secret of at least {_LEAST_BYTES} characters ({_MAKE_ONE})")
    if len(secret) < _LEAST_BYTES:
        raise ConfigError(f"{shown} has {len(secret)} characters, and at least {_LEAST_BYTES} are needed ({_MAKE_ONE})")
    return secret
