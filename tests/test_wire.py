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
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn import EngineConfig, SamplingParams, make_layout
from chunkattn.engine import messages
from chunkattn.engine.build import open_files
from chunkattn.engine.messages import GenerateRequest, RequestFailed, TokenOutput
from chunkattn.remote import control_messages
from chunkattn.remote.coalesce import MOST_HELD, FinalOnly
from chunkattn.remote.process import WorkerProcess
from chunkattn.remote.watchdog import StepClock
from chunkattn.remote.wire import decode, encode
from chunkattn.remote.worker import Worker


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
    limits = messages.EngineLimits(1, 16, 2**40, 512, 20, 704, maybe(64), rates, 2**20, maybe(3))
    config = EngineConfig(model=maybe(text()), kv_cache_memory_bytes=maybe(2**40), engine_hang_timeout_s=1 + rng.random())
    checkpoint = control_messages.Checkpoint.of(open_files(EngineConfig(skip_tokenizer_init=True)))
    n = int(rng.integers(1, 6))
    return [
        messages.GenerateRequest(text(), layout, sampling, tuple(ids(2)), maybe(text()), -3),
        messages.ScoreRequest(text(), layout, np.arange(n), tuple(ids(2)), True, "serial", maybe("salt"), 1),
        messages.PrecomputeRequest(text(), layout, maybe(text()), True),
        messages.TokenOutput(text(), 1, tuple(ids(n)), maybe(logprobs(n)), maybe("stop"), maybe(7), maybe(cached)),
        messages.PromptLogprobsOutput(text(), logprobs(n), rng.random(n) < 0.5),
        messages.ScoreResult(text(), rng.normal(size=(n, 2)).astype(np.float32), rates),
        messages.PrecomputeResult(text(), cached),
        messages.RequestFailed(text(), text(), maybe("prompt")),
        control_messages.Start(config, checkpoint, 30, 0.5),
        control_messages.Abort(text()),
        control_messages.Stop(text(), 3),
        control_messages.Unpin(("a", text())),
        control_messages.ResetCache(3),
        control_messages.MetricsQuery(4),
        control_messages.Shutdown(),
        control_messages.Heartbeat(rng.random(), maybe("compiling")),
        control_messages.WarmupProgress(1, 2),
        control_messages.Ready(limits),
        control_messages.Failed("ValueError", text()),
        control_messages.ResetReply(3, True),
        control_messages.MetricsReply(4, text() * 1000),
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
        encode([messages.ScoreResult("a", np.array([object()]), messages.StepRates(0, 0, 0))])


def test_the_clock_tells_compiling_from_running():
    """Seen from another thread: while a function is traced, and after it."""
    clock, seen = StepClock(), []

    @jax.jit
    def traced(x):
        asking = threading.Thread(target=lambda: seen.append(clock.read()))
        asking.start()
        asking.join()
        return x + 1

    assert clock.read() == control_messages.Heartbeat(0.0, None)
    clock.begin()
    time.sleep(0.1)
    assert clock.read().step_running_s >= 0.1
    traced(jnp.ones(3)).block_until_ready()
    assert [b.busy for b in seen] == ["compiling"]
    assert clock.read().busy is None
    assert clock.read().step_running_s < 0.1, "the end of a compilation starts the clock anew"
    clock.idle()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_final_only_holds_tokens_until_the_last_sample_has_ended(data):
    """And sends those of a sample as one."""
    final, requests, left, rng = FinalOnly(), {}, [], np.random.default_rng(5)
    for number in range(data.draw(st.integers(1, 4))):
        n, wanted, read = data.draw(st.integers(1, 3)), data.draw(st.booleans()), data.draw(st.sampled_from([None, 2]))
        params = SamplingParams(n=n, logprobs=read)
        request = GenerateRequest(f"r{number}", make_layout([1], [], [2]), params, final_only=wanted)
        final.expect(request)
        requests[request.request_id] = request
        left += [(request.request_id, s) for s in range(n) for _ in range(data.draw(st.integers(1, 3)))]
    left = data.draw(st.permutations(left))
    made, told = {name: [] for name in requests}, {name: [] for name in requests}
    ended = set()
    for place, (name, sample) in enumerate(left):
        if name in ended:
            continue
        if data.draw(st.sampled_from(["token"] * 9 + ["failed"])) == "failed":
            output = RequestFailed(name, "a fault")
            made[name] = [*told[name], output]  # what was held back is of no use to anybody
            ended.add(name)
        else:
            last = (name, sample) not in left[place + 1 :]
            cached = None if (name, sample) in left[:place] else messages.CachedTokens(place, (), 0)
            read = random_logprobs(rng, 1, 2) if requests[name].sampling.logprobs else None
            output = TokenOutput(name, sample, (place,), read, "length" if last else None, place if last else None, cached)
            made[name].append(output)
        for sent in final.passed([output]):
            told[sent.request_id].append(sent)
        whole = name in ended or all(other != name for other, _ in left[place + 1 :])
        if whole and requests[name].final_only and name not in ended:
            by_sample = {s: [o for o in made[name] if o.sample == s] for s in range(requests[name].sampling.n)}
            assert sorted(o.sample for o in told[name]) == list(by_sample)
            for output in told[name]:
                parts = by_sample[output.sample]
                assert output.token_ids == tuple(o.token_ids[0] for o in parts)
                assert (output.finish_reason, output.stop_reason) == ("length", parts[-1].stop_reason)
                assert output.cached is parts[0].cached
                for field in ("target", "rank", "top_ids", "top") if requests[name].sampling.logprobs else ():
                    rows = [getattr(o.logprobs, field)[0].tolist() for o in parts]
                    assert getattr(output.logprobs, field).tolist() == rows
        else:
            assert told[name] == (made[name] if whole or not requests[name].final_only else [])
    assert len(final) == 0


def test_final_only_sends_what_is_too_much_to_be_read_at_once():
    final, told = FinalOnly(), []
    final.expect(GenerateRequest("r", make_layout([1], [], [2]), SamplingParams(n=2), final_only=True))
    end, cached = 2 * MOST_HELD, messages.CachedTokens(1, (), 0)
    for place in range(end):
        finish_reason = "length" if place >= end - 2 else None
        made = TokenOutput("r", place % 2, (place,), None, finish_reason, None, cached if place < 2 else None)
        if sent := final.passed([made]):
            told.append((place, sent))
    assert told == [
        (MOST_HELD - 1, [TokenOutput("r", s, tuple(range(s, MOST_HELD, 2)), cached=cached) for s in range(2)]),
        (end - 1, [TokenOutput("r", s, tuple(range(MOST_HELD + s, end, 2)), finish_reason="length") for s in range(2)]),
    ]
    assert len(final) == 0


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


def test_a_worker_holds_back_what_is_final_only_until_it_is_aborted():
    class Core:
        has_work, disk = True, None

        def __init__(self):
            self.added, self.outputs = [], []

        def add(self, request):
            self.added.append(request.request_id)

        def abort(self, request_id):
            self.added.remove(request_id)

        def close_disk(self):
            pass

        def step(self):
            worker._closing = not self.outputs
            return self.outputs.pop(0) if self.outputs else []

    with zmq.Context() as context, context.socket(zmq.PAIR) as inside, context.socket(zmq.PAIR) as outside:
        inside.bind("inproc://worker")
        outside.connect("inproc://worker")
        worker = Worker(inside, inside, StepClock())
        worker.core = core = Core()
        layout = make_layout([1], [], [2])
        wanted = {name: GenerateRequest(name, layout, SamplingParams(), final_only=name != "b") for name in "abc"}
        ends = {"b": "length", "c": "length"}
        first = [TokenOutput(name, 0, (1,)) for name in "abc"]
        second = [TokenOutput(name, 0, (2,), finish_reason=ends[name]) for name in "bc"]
        core.outputs = [first]
        outside.send(encode(list(wanted.values())))
        worker.serve()
        assert core.added == ["a", "b", "c"]
        assert [plain(m) for m in decode(outside.recv())] == [plain(first[1])]
        outside.send(encode([control_messages.Abort("a")]))
        core.outputs, worker._closing = [second], False
        worker.serve()
        assert core.added == ["b", "c"]
        assert decode(outside.recv()) == [second[0], TokenOutput("c", 0, (1, 2), finish_reason="length")]
        assert len(worker._final) == 0
