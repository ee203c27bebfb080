"""Engines under test, and checks of their answers."""

import gc
from contextlib import contextmanager

import numpy as np
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import rotary_embedding

from chunkattn.integrations.vllm.requests import plan_prompt
from chunkattn.integrations.vllm.step import StepWork

COUNT = 6
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, logprobs=20, detokenize=False, ignore_eos=True)
SAVE = SamplingParams(max_tokens=1, temperature=0, detokenize=False)


class Engine:
    """vLLM in this process, with the connector.

    Args:
        folder: checkpoint.
        connector: options of the connector.
        options: options of vLLM.
    """

    def __init__(self, folder, connector=None, **options):
        rotary_embedding._ROPE_DICT.clear()  # of an engine before this one
        transfer = {
            "kv_connector": "ChunkConnector",
            "kv_connector_module_path": "chunkattn.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector or {},
            **options.pop("transfer", {}),
        }
        defaults = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": 32,
            "max_num_batched_tokens": 2048,
            "disable_log_stats": False,
        }
        self.llm = LLM(model=str(folder), kv_transfer_config=transfer, **{**defaults, **options})
        self.gap = (connector or {}).get("chunk_position_gap", 0)

    @property
    def core(self):
        """vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        """Return the scheduler's side of the connector."""
        return self.core.scheduler.connector.scheduler_side

    @property
    def worker(self):
        """Return the worker's side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    def plan(self, prefix, chunks, question, positions="shared", **options):
        """Return the requests of a prompt."""
        return plan_prompt(prefix, chunks, question, positions=positions, gap=self.gap, **options)

    def send(self, *requests, params=SAVE):
        """Run requests together and return their outputs."""
        return self.run([(request, params) for request in requests])

    def run(self, pairs):
        """Run requests with sampling parameters together and return their outputs."""
        return self.llm.generate(*self._inputs(pairs), use_tqdm=False)

    @staticmethod
    def _inputs(pairs):
        prompts, params = [], []
        for request, own in pairs:
            salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
            prompts.append({"prompt_token_ids": request.token_ids, **salt})
            params.append(own.clone())
            if request.kv_transfer_params is not None:
                params[-1].extra_args = {"kv_transfer_params": request.kv_transfer_params}
        return prompts, params

    def save(self, plan):
        """Send what a plan needs, and return the outputs."""
        return [output for stage in plan.missing(()) for output in self.send(*stage)]

    def answer(self, plan, params=GREEDY):
        """Save all documents of a plan, and answer it."""
        assert all(finish(output) == "length" for output in self.save(plan))
        return self.send(plan.composed, params=params)[0]

    def add(self, name, request, params):
        """Queue a request without running a step."""
        (prompt,), (params,) = self._inputs([(request, params)])
        self.llm.llm_engine.add_request(name, prompt, params)

    def drain(self, limit):
        """Run steps until all requests have ended, and return the outputs by name."""
        outputs = {}
        for _ in range(limit):
            if not self.llm.llm_engine.has_unfinished_requests():
                return outputs
            outputs |= {output.request_id: output for output in self.llm.llm_engine.step() if output.finished}
        raise AssertionError("requests hang")

    def spy(self, monkeypatch, look):
        """Call `look` with every new request, after the connector has read it."""
        add = self.scheduler.add
        monkeypatch.setattr(self.scheduler, "add", lambda request: (add(request), look(request)))

    def check_idle(self):
        """Require that no request is left, and that scheduler and worker hold the same segments."""
        self.plain([1, 2, 3])  # a step that carries evictions out
        side = self.scheduler
        assert not any(map(len, (side._transfers, side._refused, side._unsaved, +side._producers)))
        assert side._next == StepWork()
        assert not self.core.scheduler.requests
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a request that ended holds blocks"  # one is never used
        assert side.index.keys() == self.worker.store.keys()
        assert side.index.num_bytes == sum(kv.numel() * kv.element_size() for kv in self.worker.store.values())
        assert side.index.num_bytes <= side.index.max_bytes

    def plain(self, ids, params=GREEDY, salt=None):
        """Answer an ordinary prompt."""
        prompt = {"prompt_token_ids": list(ids), **({"cache_salt": salt} if salt else {})}
        return self.llm.generate([prompt], [params], use_tqdm=False)[0]

    def reset(self):
        """Empty vLLM's prefix cache and the store."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def metric(self, name):
        """Return the value of one of the connector's metrics."""
        names = (f"vllm:chunkattn_{name}", f"vllm:chunkattn_{name}_total")
        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return sum(sample.value for sample in samples if sample.name in names)


@contextmanager
def engine(folder, connector=None, **options):
    """Start an engine, and free it with all that vLLM keeps per process."""
    made = Engine(folder, connector, **options)
    try:
        yield made
    finally:
        made.llm.llm_engine.engine_core.shutdown()
        del made.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def finish(output):
    """Return why a request ended."""
    return output.outputs[0].finish_reason


def check(output, expected, allowed=1e-4):
    """Require an output to agree with the witness: log-probabilities within `allowed`, and equal greedy tokens.

    From a step on at which vLLM itself finds the two tokens within 1e-4 of each other, the tokens are not compared.

    Returns:
        The largest error of the first token's log-probabilities.
    """
    tokens, logprobs = expected
    (completion,) = output.outputs
    assert completion.finish_reason == "length"
    error = max(abs(found.logprob - logprobs[token]) for token, found in completion.logprobs[0].items())
    assert error <= allowed, f"a log-probability differs by {error:.1e}, allowed {allowed:.1e}"
    found = list(completion.token_ids)
    if found != tokens:
        step = next(step for step, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b)
        ranked = completion.logprobs[step]
        assert tokens[step] in ranked
        assert ranked[found[step]].logprob - ranked[tokens[step]].logprob < 1e-4, f"token {step} of {len(tokens)} differs"
    return error


def ids(rng, count):
    """Return random token ids."""
    return rng.integers(0, 256, count).tolist()


def flat(*parts):
    """Return all parts as one list."""
    return [token for part in parts for token in part]


def differs(a, b):
    """Return whether two answers of the witness differ visibly."""
    return np.abs(a[1] - b[1]).max() > 1e-2
