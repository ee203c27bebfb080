"""Every supported family and rotary embedding against transformers, over random layouts. Engine cores run in a process."""

import pytest

from tests.vllm.engines import COUNT, GREEDY, SAVE, check, engine, finish, flat, ids

FAMILIES = ["llama", "llama3-rope", "llama-yarn", "mistral", "qwen2", "qwen3"]


def random_prompt(rng):
    chunk_lens = rng.integers(1, 130, rng.integers(1, 17)) if rng.random() < 0.3 else rng.integers(1, 130, rng.integers(1, 5))
    chunks = [ids(rng, n) for n in chunk_lens]
    if rng.random() < 0.4:
        chunks += [chunks[int(rng.integers(len(chunks)))], []]
    return ids(rng, int(rng.choice([0, 1, 32, rng.integers(1, 100)]))), chunks, ids(rng, int(rng.choice([1, 2, 9, 40])))


def run(made, model, rng, count, gap):
    """Send random prompts of both strategies in random company, and return the largest error."""
    assert finish(made.send(made.plan(*random_prompt(rng)).composed)[0]) == "error", "nothing is stored yet"
    worst = 0.0
    for _ in range(count):
        prompts = [(*random_prompt(rng), str(rng.choice(["shared", "reordered"]))) for _ in range(3)]
        plans = [made.plan(*prompt) for prompt in prompts]
        requests = [(r, SAVE) for plan in plans for stage in plan.missing(()) for r in stage]
        composed = [(plan.composed, GREEDY) for plan in plans]
        outputs = made.run([*requests, *composed])
        assert all(finish(output) == "length" for output in outputs)
        for output, (prefix, chunks, question, positions) in zip(outputs[len(requests) :], prompts):
            # With shared positions, vLLM's question lies at higher positions than the witness's, whose angles float32 rounds.
            allowed = max(1e-4, len(output.prompt_token_ids) * 2**-22) if positions == "shared" else 1e-4
            expected = model.answer(prefix, chunks, question, COUNT, positions, gap)
            worst = max(worst, check(output, expected, allowed))
            assert output.num_cached_tokens >= len(flat(prefix, *chunks))
        prefix, chunks, question, _ = prompts[0]
        check(made.plain(flat(prefix, *chunks, question)), model.plain(flat(prefix, *chunks, question), COUNT))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0, 37, 600])
@pytest.mark.parametrize("name", FAMILIES)
def test_random_layouts(checkpoint, witness, rng, monkeypatch, capsys, name, gap):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with engine(checkpoint(name), {"chunk_position_gap": gap}) as made:
        worst = run(made, witness(name), rng, 8, gap)
        assert made.metric("loads") > 0, "statistics must cross the processes"
    with capsys.disabled():
        print(f"{name}, gap {gap}: 24 prompts, largest error of a log-probability {worst:.1e}")


@pytest.mark.slow
def test_tensor_parallel(checkpoint, witness, rng, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(checkpoint("llama"), {"chunk_position_gap": 37}, tensor_parallel_size=2) as made:
        run(made, witness("llama"), rng, 3, 37)


@pytest.mark.slow
def test_bfloat16_is_as_close_as_plain_vllm(checkpoint, witness, rng):
    """Moved keys are rounded once more. Their error stays within that of vLLM's own prompts of the same length."""
    model, composed, plain = witness("llama"), [], []

    def error(output, expected):
        return max(abs(found.logprob - expected[1][token]) for token, found in output.outputs[0].logprobs[0].items())

    with engine(checkpoint("llama"), dtype="bfloat16") as made:
        for positions in ("shared", "reordered") * 4:
            prefix, chunks, question = ids(rng, 20), [ids(rng, 60), ids(rng, 90)], ids(rng, 9)
            output = made.answer(made.plan(prefix, chunks, question, positions))
            composed.append(error(output, model.answer(prefix, chunks, question, 1, positions)))
            ordinary = flat(prefix, *chunks, question)
            plain.append(error(made.plain(ordinary), model.plain(ordinary, 1)))
    assert sum(composed) <= 1.5 * sum(plain)
