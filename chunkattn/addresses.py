"""Addresses and names of machines that only the machine itself can reach."""

from __future__ import annotations

import ipaddress


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
