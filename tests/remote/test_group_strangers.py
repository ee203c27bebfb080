"""A stranger at a port of a group of hosts changes nothing and keeps no host away."""

import logging
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import zmq

from chunkattn import EngineConfig
from chunkattn.engine.host_calls import CopyPages, Forward, ReadTokens, ResetPool
from chunkattn.models.loader import open_files
from chunkattn.remote.hosts import first_host, gate, group, other_host
from chunkattn.remote.hosts.first_host import FirstHost
from chunkattn.remote.hosts.group_messages import TO_FIRST, Busy, Hello
from chunkattn.remote.hosts.group_secret import VARIABLE, curve_key
from chunkattn.remote.hosts.other_host import OtherHost
from chunkattn.remote.messages import Checkpoint
from tests.patience import PATIENCE_S
from tests.remote.strangers import CALLS, FRAMES, attack, knock, send_as

CALL = Forward((np.arange(300_000, dtype=np.int64), np.zeros((3, 5), np.int32)), None)
"""A call of more than one part."""


class Members:
    """Two hosts that have joined, with the loops of their engines."""

    def __init__(self, config, checkpoint):
        self.contexts = zmq.Context(), zmq.Context()
        self.first = FirstHost(self.contexts[0], config(0), checkpoint)
        self.other = OtherHost(self.contexts[1], config(1), checkpoint)
        joining = threading.Thread(target=self.other.join, daemon=True)
        joining.start()
        self.first.gather()
        joining.join(PATIENCE_S)
        self.config = config(0)
        self.calls, self.lost, self.stopping = [], [], threading.Event()
        self.start()

    def start(self):
        self.stopping.clear()
        self.threads = [threading.Thread(target=work) for work in (self.listen, self.follow, self.lead)]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    @property
    def ports(self):
        return {"coordinator": int(self.config.coordinator.rpartition(":")[2]), "calls": self.other._port}

    def listen(self):
        while not self.stopping.is_set():
            if self.other.calls.poll(50):
                self.calls += self.other.receive()

    def follow(self):
        while not self.stopping.wait(0.02):
            self.other.hear(busy=False)
            self.lost += filter(None, [self.other.lost()])

    def lead(self):
        while not self.stopping.wait(0.02):
            self.first.hear(busy=False)
            self.lost += filter(None, [self.first.lost()])

    def check(self, count=20):
        """Check that the calls of the first host arrive, and no others, and that no loop has ended."""
        told = [CALL, ResetPool(), CopyPages(((1, 2),)), ReadTokens((0,), (1,))] * (count // 4)
        self.calls.clear()
        for call in told:
            self.first.tell(call)
        until = time.monotonic() + PATIENCE_S
        while len(self.calls) < len(told) and time.monotonic() < until:
            time.sleep(0.02)
        assert [CALLS.encode([call]) for call in self.calls] == [CALLS.encode([call]) for call in told]
        assert not self.lost
        assert all(thread.is_alive() for thread in self.threads)

    def close(self):
        self.stop()
        for host, context in zip((self.first, self.other), self.contexts, strict=True):
            host.end()
            context.destroy(linger=0)


@pytest.fixture(scope="module")
def made_config():
    def config(index, port, **changes):
        options = {"num_hosts": 2, "tensor_parallel_size": 2, "host_index": index, "coordinator": f"127.0.0.1:{port}"}
        return EngineConfig(**options | {"skip_tokenizer_init": True, "max_num_seqs": 32} | changes)

    return config


@pytest.fixture(scope="module")
def members(made_config):
    patch = pytest.MonkeyPatch()
    patch.setattr(group, "initialize", lambda *_, **__: None)
    patch.setattr(first_host, "_LEAVE_S", 0.1)
    patch.setenv(VARIABLE, "a secret of the tests")
    port = free_port()
    checkpoint = Checkpoint.of(open_files(made_config(0, port)))
    made = Members(lambda index: made_config(index, port), checkpoint)
    yield made
    made.close()
    patch.undo()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("port", ["coordinator", "calls"])
@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_frames_of_strangers_change_nothing(members, port, count):
    attacking = threading.Thread(target=attack, args=(members.ports[port],), kwargs={"count": count, "seed": 65})
    attacking.start()
    members.check()
    attacking.join()
    members.check()


def test_a_second_peer_with_the_secret_changes_nothing(members, caplog):
    """The port for calls knows the first host alone, and the first host hears no calls and no messages that it cannot read."""
    key = zmq.curve_public(curve_key(members.config))
    send_as(members.ports["calls"], FRAMES, key)
    with caplog.at_level(logging.WARNING, "chunkattn"):
        for frame in FRAMES:
            send_as(members.ports["coordinator"], [frame], key, kinds=(zmq.DEALER,), wait_s=0.05)
        send_as(members.ports["coordinator"], [b"x" * (2 << 20)], key, kinds=(zmq.DEALER,))
    members.check()
    assert "sent a message that cannot be understood; its connection is closed" in caplog.text
    assert "another process says that it is host 1" in caplog.text


def test_both_listen_where_they_reach_each_other(members):
    for listening in (members.first._hellos, members.other.calls):
        assert b"127.0.0.1" in listening.last_endpoint


def test_idle_connections_are_bounded(members):
    """The oldest strangers make room, and all of them leave after the time of a handshake. Members stay."""
    for port, places in ((members.ports["coordinator"], first_host._LATE_PLACES), (members.ports["calls"], 0)):
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        until = time.monotonic() + 10
        while (still := sum(map(is_open, idle))) > places and time.monotonic() < until:
            time.sleep(0.05)
        assert still <= places
        members.check(4)
        for connection in idle:
            connection.close()


def is_open(connection):
    connection.setblocking(False)
    try:
        while connection.recv(1024):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def test_hosts_join_beside_strangers(made_config, monkeypatch):
    """Strangers that come first, and more of them than there are places, keep no host away. Silent ones leave in time."""
    monkeypatch.setattr(group, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(first_host, "_LEAVE_S", 0.1)
    monkeypatch.setattr(gate, "PLACES", 8)
    monkeypatch.setattr(gate, "HANDSHAKE_MS", 300)
    monkeypatch.delenv(VARIABLE, raising=False)
    port, context, ended = free_port(), zmq.Context(), threading.Event()
    config = made_config(0, port)
    checkpoint = Checkpoint.of(open_files(config))
    first = FirstHost(context, config, checkpoint)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]

    def disturb():
        while not ended.wait(0.01):
            knock(port, FRAMES[0])
            send_as(port, FRAMES[6:8], wait_s=0.02)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        other = OtherHost(context, made_config(1, port), checkpoint)
        joining = threading.Thread(target=other.join)
        joining.start()
        first.gather()
        joining.join(PATIENCE_S)
        assert not joining.is_alive()
        assert first.lost() is None
        assert other.lost() is None
        time.sleep(0.5)
        assert not any(map(is_open, idle))
    finally:
        ended.set()
        disturbing.join()
        first.end()
        other.end()
        context.destroy(linger=0)
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("secret", ["another secret of the tests", None])
def test_another_secret_keeps_a_host_out(made_config, monkeypatch, caplog, secret):
    """Both hosts say so."""
    monkeypatch.setattr(other_host, "REPORT_S", 1.5)
    context, port = zmq.Context(), free_port()
    monkeypatch.setenv(VARIABLE, "a secret of the tests")
    checkpoint = Checkpoint.of(open_files(made_config(0, port)))
    first = FirstHost(context, made_config(0, port), checkpoint)
    monkeypatch.delenv(VARIABLE) if secret is None else monkeypatch.setenv(VARIABLE, secret)
    other = OtherHost(context, made_config(1, port), checkpoint)

    def join():
        with suppress(zmq.ZMQError):  # the test has closed the sockets
            other.join()

    threading.Thread(target=join, daemon=True).start()
    text = "host 1 fails the handshake"
    until = time.monotonic() + PATIENCE_S
    while text not in caplog.text and time.monotonic() < until:
        first._hellos.poll(50)
    assert text in caplog.text
    assert "connections refused without the group's secret: 1" in caplog.text
    assert not list(first._received(0))
    context.destroy(linger=0)


def test_members_messages_are_read(members):
    """The attacks above would pass if the port heard nobody at all."""
    key = zmq.curve_public(curve_key(members.config))
    members.stop()
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.curve_serverkey = key
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    made.connect(f"tcp://127.0.0.1:{members.ports['coordinator']}")
    made.send(TO_FIRST.encode([Hello(1, 9, b"k" * 40, {}), Busy()]))
    assert [type(message) for _, message in members.first._received(5000)] == [Hello, Busy]
    context.destroy(linger=0)
    members.start()
