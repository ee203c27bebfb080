"""Addresses and names that only this machine can reach."""

import pytest

from chunkattn.addresses import is_loopback


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.8.9.1", "127.255.255.255", "127.0.0.1.", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"),
        *("::ffff:7f00:1", "localhost", "LocalHost", "LOCALHOST", "localhost."),
    ],
)
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", ".", "0.0.0.0", "10.0.0.1", "192.168.1.1", "128.0.0.1", "::", "::2", "fd00::1", "fe80::1", "::ffff:10.0.0.1"),
        *(
            "::ffff:0.0.0.0",
            "[::1]",
            "::1.",
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
            "127.0.0.1:80",
            "localhost..",
            "localhost:80",
        ),
        *("localhost:80", "localhost.localdomain", "localhost.example", "127.0.0.1.example", "llm-0.llm", "\uff4cocalhost"),
    ],
)
def test_reached_by_others(host):
    assert not is_loopback(host)
