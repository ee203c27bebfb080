"""Addresses and names of machines: which only the machine itself can reach, Host headers, and origins of pages."""

from __future__ import annotations

import ipaddress
import re

from chunkattn.errors import ConfigError

_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%]+\]|[\w.~!$&'()*+,;=%-]*)(?::\d*)?", re.ASCII)
_ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]*,]+)(?::(\d{1,5}))?/?")
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address or name.

    Args:
        host: `localhost`, or an address, IPv6 without brackets. One dot may end a name or an IPv4 address.
    """
    name = host if ":" in host else host.removesuffix(".")
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_host(value: str) -> bool:
    """Return whether a Host header has the form of one: a name or an address, and perhaps a port."""
    return _HOST.fullmatch(value) is not None


def names_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine. A DNS-rebinding page sends its own name."""
    name = host.rpartition(":")[0] if re.fullmatch(r"\d*", host.rpartition(":")[2], re.ASCII) and ":" in host else host
    return is_loopback(name[1:-1] if name.startswith("[") and name.endswith("]") else name)


def origin(text: str) -> str:
    """Return an origin as browsers send it: in lower case, without a slash at its end or the scheme's own port.

    Args:
        text: origin, or `*` for all.

    Raises:
        ConfigError: it is no origin.
    """
    if text in ("*", "null"):  # pages without an origin of their own, such as files
        return text
    match = _ORIGIN.fullmatch(text.strip())
    if match is None:
        text = f"allowed_origins {text!r} is no origin; give a scheme, a host and perhaps a port, such as https://app.example"
        raise ConfigError(f"{text}, without a path or wildcards, or * for every page")
    scheme, host, port = match[1].lower(), match[2].lower(), match[3]
    try:
        if host.startswith("["):
            host = f"[{ipaddress.IPv6Address(host[1:-1]).compressed}]"
        elif not host.isascii():
            host = host.encode("idna").decode("ascii")
    except ValueError as error:
        raise ConfigError(f"allowed_origins {text!r} has no valid host: {error}") from None
    if port is None or int(port) == _PORTS.get(scheme):
        return f"{scheme}://{host}"
    if not 0 < int(port) < 65536:
        raise ConfigError(f"allowed_origins {text!r} has no valid port; ports are 1 to 65535")
    return f"{scheme}://{host}:{int(port)}"
