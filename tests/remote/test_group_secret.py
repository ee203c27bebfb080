"""The secret of a group of hosts: where it comes from, and what is refused."""

import os
import stat
import threading

import pytest

from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError
from chunkattn.remote.client import EngineClient
from chunkattn.remote.follow import follow
from chunkattn.remote.hosts.group_secret import VARIABLE, curve_key, read_secret

LONG = "0123456789abcdef"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)


def config(host="10.0.0.1", **changes):
    return EngineConfig(num_hosts=2, tensor_parallel_size=2, coordinator=f"{host}:8476", **changes)


def written(tmp_path, content, mode=0o600):
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"", 0o600, "is empty"),
        (b" \r\n\t", 0o600, "is empty"),
        (b"short\n", 0o600, "has 5 characters, and at least 16"),
        (LONG[1:].encode() + b" " * 20, 0o600, "has 15 characters"),
        (LONG.encode(), 0o604, "mode 0604"),
        (LONG.encode(), 0o602, "mode 0602"),
        (LONG.encode(), 0o601, "mode 0601"),
        (LONG.encode(), 0o620, "mode 0620"),
        (LONG.encode(), 0o644, "chmod 600"),
        (LONG.encode() * 300, 0o600, "more than 4096 bytes"),
    ],
)
def test_files_that_are_refused(tmp_path, content, mode, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read_secret(config(group_secret_file=written(tmp_path, content, mode)))
    assert LONG not in str(raised.value)


def test_no_file_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name, message in (
        ("absent", "cannot be read"),
        (".", "cannot be read|regular"),
        ("fifo", "no regular file"),
        ("a\0", "null"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_secret(config(group_secret_file=f"{tmp_path}/{name}"))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_white_space_around_a_secret_does_not_count(tmp_path, monkeypatch, mode):
    monkeypatch.setenv(VARIABLE, LONG)
    expected = curve_key(config())
    monkeypatch.delenv(VARIABLE)
    for content in (LONG, f"{LONG}\n", f" {LONG}\r\n"):
        (tmp_path / "secret").unlink(missing_ok=True)
        assert curve_key(config(group_secret_file=written(tmp_path, content.encode(), mode))) == expected
    assert curve_key(config(group_secret_file=written(tmp_path, b"another secret of it", 0o600))) != expected


def test_two_secrets_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, LONG)
    with pytest.raises(ConfigError, match="both set"):
        read_secret(config(group_secret_file=written(tmp_path, LONG.encode())))
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ConfigError, match=f"{VARIABLE} is empty"):
        read_secret(config())


LOOPBACK = ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "[::1]"]


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "192.168.1.1", "llm-0.llm", "[fd00::1]", "127.0.0.1.nip.io", "localhost.localdomain"]
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_group_that_others_reach_needs_a_secret(host, index):
    """The client of an engine says so, before it starts a process."""
    with pytest.raises(ConfigError, match=f"group_secret_file or {VARIABLE}"):
        EngineClient(config(host, host_index=index), lambda _: None)


def test_the_command_of_a_follower_says_so():
    with pytest.raises(ConfigError, match="has no secret"):
        follow({"num_hosts": 2, "tensor_parallel_size": 2, "host_index": 1, "coordinator": "10.0.0.1:8476"})


@pytest.mark.parametrize("host", LOOPBACK)
def test_hosts_on_loopback_share_a_secret_of_their_user(tmp_path, host):
    found = []
    threads = [threading.Thread(target=lambda: found.append(read_secret(config(host)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) >= 32
    (file,) = (tmp_path / "cache" / "chunkattn").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        read_secret(config(host))


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"set group_secret_file or {VARIABLE}"):
        read_secret(config("127.0.0.1"))


def test_options_of_one_host_need_no_secret(tmp_path):
    with pytest.raises(ConfigError, match="group_secret_file needs num_hosts"):
        EngineConfig(group_secret_file=written(tmp_path, LONG.encode()))
    assert config(group_secret_file=tmp_path).group_secret_file == str(tmp_path)
