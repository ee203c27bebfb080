"""Hosts of one model find each other, or are told what keeps them apart."""

import asyncio
import shutil
import socket
import threading
import time
from contextlib import suppress

import pytest
import zmq
from safetensors.numpy import load_file, save_file

from chunkattn import LLM, AsyncLLM, EngineConfig
from chunkattn.errors import ConfigError
from chunkattn.models.loader import open_files, resolve_path
from chunkattn.remote import supervisor
from chunkattn.remote.client import EngineClient
from chunkattn.remote.hosts import first_host, group
from chunkattn.remote.hosts.first_host import FirstHost
from chunkattn.remote.hosts.group_messages import End
from chunkattn.remote.hosts.group_secret import VARIABLE
from chunkattn.remote.hosts.other_host import OtherHost
from chunkattn.remote.messages import Checkpoint, Ended, Failed, encode
from tests.patience import PATIENCE_S

HOSTS = {"num_hosts": 2, "tensor_parallel_size": 2}


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def started(monkeypatch):
    """Addresses with which JAX would have been started."""
    found = []
    monkeypatch.setattr(group, "initialize", lambda config, address, bind=None: found.append((config.host_index, address)))
    return found


def of(index, port, **changes):
    config = EngineConfig(
        **HOSTS | {"host_index": index, "coordinator": f"127.0.0.1:{port}", "skip_tokenizer_init": True} | changes
    )
    return config, Checkpoint.of(open_files(config))


def in_thread(work):
    def run():
        with suppress(zmq.ZMQError):  # the test has closed the sockets
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hosts": 2}, "needs coordinator"),
        ({"num_hosts": 2, "coordinator": "a:1", "tensor_parallel_size": 3}, "no multiple of num_hosts=2"),
        ({"num_hosts": 2, "coordinator": "a:1"}, "no multiple of num_hosts=2"),
        (HOSTS | {"coordinator": "a:1", "kv_store": "/tmp/x"}, "kv_store is not supported with num_hosts=2"),
        (HOSTS | {"coordinator": "a:1", "host_index": 2}, "host_index must be below num_hosts 2"),
        ({"host_index": 1}, "host_index must be below num_hosts 1"),
        ({"coordinator": "a:1"}, "coordinator needs num_hosts"),
        *((HOSTS | {"coordinator": text}, "HOST:PORT") for text in ("a", "a:", ":1", "a:0", "a:65536", "a:b", "::1:5", "")),
        ({"num_hosts": 0}, "num_hosts must be at least 1"),
        ({"host_index": -1}, "host_index must be at least 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_ipv6_addresses_stand_in_brackets():
    assert EngineConfig(**HOSTS, coordinator="[::1]:8476").coordinator == "[::1]:8476"


def test_who_takes_requests():
    with pytest.raises(ConfigError, match="AsyncLLM"):
        LLM(**HOSTS, coordinator="127.0.0.1:1")
    with pytest.raises(ConfigError, match="takes no requests"):
        AsyncLLM(**HOSTS, coordinator="127.0.0.1:1", host_index=1)


def test_hosts_join_in_any_order_and_notice_an_end(context, started, port, monkeypatch):
    other = OtherHost(context, *of(1, port))
    joining = in_thread(other.join)
    time.sleep(0.3)
    first = FirstHost(context, *of(0, port))
    first.gather()
    joining.join(PATIENCE_S)
    assert sorted(started) == [(0, started[0][1]), (1, started[0][1])]
    assert first.lost() is None
    assert other.lost() is None
    monkeypatch.setattr(first_host, "_LEAVE_S", PATIENCE_S)
    ending = in_thread(first.end)  # waits for the other
    until, told = time.monotonic() + PATIENCE_S, []
    while not told and time.monotonic() < until:
        told = other.receive()
    assert told == [End()]
    assert not other.has_ended
    while not other.has_ended and time.monotonic() < until:  # the end comes over either connection first
        other.hear(busy=False)
    assert other.has_ended
    other.end()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()


def test_an_end_of_the_first_host_is_no_error(monkeypatch, caplog):
    """The engine starts again as often as needed, and waits."""

    class Ending:
        """A process that ends because host 0 has, four times, and then fails."""

        number = 0

        def __init__(self, context):
            self.exited, self.pid = asyncio.get_running_loop().create_future(), 1
            Ending.number += 1

        def listen(self, take):
            take(encode([Ended("host 0 has ended") if self.number < 5 else Failed("ConfigError", "enough")]))
            self.exited.set_result(int(self.number == 5))

        dispose = send = lambda self, *_: None

    async def start():
        await EngineClient(EngineConfig(), lambda _: None).start(None)

    monkeypatch.setattr(supervisor, "WorkerProcess", Ending)
    with caplog.at_level("INFO", "chunkattn"), pytest.raises(ConfigError, match="enough"):
        asyncio.run(start())
    assert caplog.text.count("host 0 has ended; the engine starts again and waits") == 4
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("dies", ["first", "other"])
def test_a_closed_connection_shows(context, started, port, dies):
    contexts = {"first": context, "other": zmq.Context()}
    first, other = FirstHost(contexts["first"], *of(0, port)), OtherHost(contexts["other"], *of(1, port))
    joining = in_thread(other.join)
    first.gather()
    joining.join(PATIENCE_S)
    left = other if dies == "first" else first
    contexts[dies].destroy(linger=0)
    until = time.monotonic() + 5
    while not (reason := left.lost()) and time.monotonic() < until:
        time.sleep(0.05)
    assert reason == ("host 0 is gone" if dies == "first" else "host 1 of 2 is gone")
    left.end()
    contexts["other"].destroy(linger=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 32}, "max_num_seqs differs: 32 there, 64 on host 0"),
        ({"dtype": "bfloat16"}, "dtype differs: 'bfloat16' there"),
        ({"weights": "dequantized"}, "weights differs: 'dequantized' there, 'auto' on host 0"),
        ({"attention_backend": "xla"}, "attention_backend differs"),
    ],
)
def test_hosts_of_other_options_are_refused(context, started, port, changes, message):
    first, other = FirstHost(context, *of(0, port)), OtherHost(context, *of(1, port, **changes))
    in_thread(first.gather)
    with pytest.raises(ConfigError, match=message):
        other.join()
    assert not started
    other.end()


def test_another_checkpoint_is_refused(context, started, port, tmp_path):
    """Equal shapes do not make equal weights."""
    other_path = shutil.copytree(resolve_path(None, None), tmp_path / "other")
    (file,) = other_path.glob("*.safetensors")
    save_file({name: -weight for name, weight in load_file(file).items()}, file)
    first = FirstHost(context, *of(0, port))
    in_thread(first.gather)
    other = OtherHost(context, *of(1, port, model=str(other_path)))
    with pytest.raises(ConfigError, match="weights of the model differs"):
        other.join()
    other.end()


def test_an_address_of_another_machine_is_refused(context, port, monkeypatch):
    monkeypatch.setenv(VARIABLE, "a secret of the tests")
    with pytest.raises(ConfigError, match=r"coordinator '192\.0\.2\.1"):
        FirstHost(context, *of(0, port, coordinator="192.0.2.1:8476"))
    with pytest.raises(ConfigError, match="name an address of host 0"):
        FirstHost(context, *of(0, port, coordinator="no-such-host.invalid:8476"))
