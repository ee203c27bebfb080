"""Messages on their way to the engine's process and back, and its sign of life."""

import asyncio
import threading
import time
from dataclasses import fields, is_dataclass

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import zmq

from chunkattn import EngineConfig, SamplingParams, make_layout
from chunkattn.engine import messages
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.models.loader import open_files
from chunkattn.remote import messages as remote
from chunkattn.remote.messages import decode, encode
from chunkattn.remote.process import WorkerProcess
from chunkattn.remote.watchdog import StepClock


def plain(value):
    """Any message as values that compare: arrays as dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value).__name__, [(f.name, plain(getattr(value, f.name))) for f in fields(value)]
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else (type(value), value)


def random_logprobs(rng, n, k):
    values = rng.normal(size=(n, k)).astype(np.float32) - np.float32(np.inf if rng.random() < 0.2 else 0)
    ranks, ids = rng.integers(0, 2**31, n).astype(np.int32), rng.integers(0, 99, (n, k)).astype(np.int32)
    return messages.TokenLogprobs(rng.normal(size=n).astype(np.float32), ranks, ids, values)


def random_messages(rng):
    def ids(n, high=2**31):
        return [int(i) for i in rng.integers(0, high, n)]

    def text():
        return "".join(map(chr, rng.choice([65, 228, 8364, 128512, 0], 4)))

    def maybe(value):
        return value if rng.random() < 0.7 else None

    def logprobs(n):
        return random_logprobs(rng, n, int(rng.integers(0, 5)))

    chunks = [ids(rng.integers(0, 9)) for _ in range(rng.integers(0, 4))]
    layout = make_layout(ids(rng.integers(0, 9)), chunks, ids(rng.integers(0, 9)))
    _ = layout.segments, layout.chunk_ids  # remembered values stay here
    sampling = SamplingParams(
        n=int(rng.integers(1, 5)),
        temperature=rng.random(),
        top_p=1 - rng.random(),
        seed=maybe(int(rng.integers(2**63 - 1))),
        logit_bias={i: rng.normal() for i in ids(3)},
        stop=[text() for _ in range(rng.integers(3))],
        stop_token_ids=ids(2),
        max_tokens=maybe(7),
        logprobs=maybe(3),
        ignore_eos=bool(rng.random() < 0.5),
    )
    cached = messages.CachedTokens(3, tuple(ids(4)), 5)
    rates = messages.StepRates(*rng.random(3).tolist())
    sizes = StepSizes((1, *ids(3)), int(rng.integers(256)))
    limits = EngineLimits(1, 16, 2**40, 512, 20, 704, rates, sizes, 2**20, maybe(3), {text(): (maybe(text()), 8192)})
    config = EngineConfig(model=maybe(text()), kv_cache_memory_bytes=maybe(2**40), engine_hang_timeout_s=1 + rng.random())
    checkpoint = remote.Checkpoint.of(open_files(EngineConfig(skip_tokenizer_init=True)))
    n, lists = int(rng.integers(1, 6)), (tuple(ids(2)), tuple(ids(3)))
    return [
        messages.GenerateRequest(text(), layout, sampling, tuple(ids(2)), maybe(text()), -3, maybe((0.5, 2.0)), maybe(3)),
        messages.ScoreRequest(
            text(), layout, np.arange(n), lists, maybe(np.arange(n) % 2), True, n, "serial", maybe("salt"), 1, maybe("x")
        ),
        messages.PrecomputeRequest(text(), layout, maybe(text()), True),
        messages.TokenOutput(text(), 1, tuple(ids(n - 1)), maybe(logprobs(n - 1)), maybe("stop"), maybe(7), maybe(cached)),
        messages.PromptLogprobsOutput(text(), logprobs(n), rng.random(n) < 0.5),
        messages.ScoreResult(text(), rng.normal(size=(n, 2)).astype(np.float32), rates, n),
        messages.PrecomputeResult(text(), cached),
        messages.RequestFailed(text(), text(), maybe("prompt"), finite=bool(n % 2)),
        remote.Start(config, checkpoint, 30, 0.5),
        remote.Abort(text()),
        remote.Stop(text(), 3),
        remote.Unpin(("a", text())),
        remote.ResetCache(3),
        remote.MetricsQuery(4),
        remote.Shutdown(),
        remote.Heartbeat(rng.random(), maybe("compiling")),
        remote.WarmupProgress(1, 2),
        remote.Ready(limits, 1.5),
        remote.Failed("ValueError", text()),
        remote.Ended(text()),
        remote.Reply(3, bool(n % 2)),
        remote.Reply(4, (cached,) * n),
        remote.Reply(5, text() * 1000),
    ]


def test_messages_survive_the_wire():
    rng = np.random.default_rng(3)
    for _ in range(50):
        sent = random_messages(rng)
        received = decode(encode(sent))
        assert plain(received) == plain(sent)
        assert received[0].layout.chunk_lens == sent[0].layout.chunk_lens  # a tuple still


def test_what_is_no_message_is_refused():
    for frame in (b"", b"\x91\x92\xa5Abort\x80", encode([]) + b"x", msgspec.msgpack.encode([("Runner", {})])):
        with pytest.raises(msgspec.DecodeError):
            decode(frame)
    with pytest.raises(TypeError, match="wire form"):
        encode([messages.ScoreResult("a", np.array([object()]), messages.StepRates(0, 0, 0), 0)])


def test_the_clock_tells_compiling_from_running():
    """Seen from another thread: while a function is traced, and after it."""
    clock, seen = StepClock(), []

    @jax.jit
    def traced(x):
        asking = threading.Thread(target=lambda: seen.append(clock.read()))
        asking.start()
        asking.join()
        return x + 1

    assert clock.read() == remote.Heartbeat(0.0, None)
    clock.begin()
    time.sleep(0.1)
    assert clock.read().step_running_s >= 0.1
    traced(jnp.ones(3)).block_until_ready()
    assert [b.busy for b in seen] == ["compiling"]
    assert clock.read().busy is None
    assert clock.read().step_running_s < 0.1, "the end of a compilation starts the clock anew"
    clock.idle()


def test_frames_are_heard_in_order_to_the_last_of_a_burst():
    async def listen(context):
        worker, heard = WorkerProcess.__new__(WorkerProcess), []
        worker._loop, worker._outputs = asyncio.get_running_loop(), context.socket(zmq.PULL)
        sender = context.socket(zmq.PUSH)
        sender.bind("inproc://outputs")
        worker._outputs.connect("inproc://outputs")
        sent = [b"%d" % n for n in range(100)]
        for frame in sent[:50]:  # before anybody listens
            sender.send(frame)
        worker.listen(heard.append)
        assert len(heard) < 50, "others have their turn"
        async with asyncio.timeout(60):
            while heard != sent[:50]:
                await asyncio.sleep(0)
        for frame in sent[50:]:
            sender.send(frame)
        async with asyncio.timeout(60):
            while heard != sent:
                await asyncio.sleep(0.01)
        worker._loop.remove_reader(worker._outputs.fileno())

    context = zmq.Context()
    try:
        asyncio.run(listen(context))
    finally:
        context.destroy(linger=0)
