"""Prompts and scores that take every kind of step, and their answers, to compare engines over different numbers of devices."""

import numpy as np

from chunkattn import LLM, ChunkedPrompt, SamplingParams

OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 20,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 256,
}
ALGORITHMS = ("serial", "prefill_extend", "packed_segment", "packed_dense")
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=0)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=6, repetition_penalty=1.3, logprobs=0)


def _tokens(rng: np.random.Generator, *counts: int) -> list[list[int]]:
    return [rng.integers(2, 120, count).tolist() for count in counts]


def prompts() -> list:
    """One plain prompt, and prompts with chunks of unequal lengths."""
    rng = np.random.default_rng(0)
    prefix, one, two, three, question, plain = _tokens(rng, 20, 37, 18, 5, 9, 60)
    pieces = [ChunkedPrompt(prefix, [one, two], question), ChunkedPrompt(prefix, [three, one], question)]
    return [{"prompt_token_ids": plain}, *pieces]


class Answers:
    """Answers of an engine.

    Args:
        llm: the engine.
        algorithms: algorithms of scoring to ask for.
        sampling: parameters under which every prompt is answered.

    Attributes:
        tokens: tokens of every answer.
        logprobs: their log-probabilities and those of the prompts, by token.
        scores: log-probabilities of the labels, by algorithm.
    """

    def __init__(
        self, llm: LLM, algorithms: tuple[str, ...] = ("prefill_extend",), sampling: tuple[SamplingParams, ...] = (GREEDY,)
    ) -> None:
        outputs = [o for p in sampling for o in llm.generate(prompts(), p, use_tqdm=False)]
        samples = [output.outputs[0] for output in outputs]
        self.tokens = [sample.token_ids for sample in samples]
        self.logprobs = [[at[t].logprob for at, t in zip(s.logprobs, s.token_ids, strict=True)] for s in samples]
        self.logprobs += [[x.logprob for at in o.prompt_logprobs or () if at for x in at.values()] for o in outputs]
        query, *items = _tokens(np.random.default_rng(1), 30, 4, 9, 1, 17)
        self.scores = [
            llm.score(query, items, label_token_ids=[7, 8, 9], algorithm=name, use_tqdm=False).logprobs for name in algorithms
        ]

    def check(self, other: "Answers", tolerance: float = 1e-4) -> None:
        """Compare with the answers of another engine: equal tokens, close log-probabilities."""
        assert self.tokens == other.tokens
        for own, theirs in zip(self.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(own, theirs, atol=tolerance, rtol=0)
        np.testing.assert_allclose(self.scores, other.scores, atol=tolerance, rtol=0)
