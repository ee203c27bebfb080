"""`OutputBuilder`: turns engine outputs into text, log-probabilities by token and finish reasons."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.engine.messages import GenerateRequest, PromptLogprobsOutput, TokenLogprobs, TokenOutput
from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_decoder(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str | None]:
    """Return a cached function from a token id to its text."""

    @lru_cache(maxsize=65536)
    def decode(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id])

    return decode


class OutputBuilder:
    """Builder of one request's `RequestOutput` from the engine's outputs."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
        decode: Callable[[int], str | None],
    ) -> None:
        layout, params = request.layout, request.sampling
        self._ids, self._decode, self._params = layout.token_ids.tolist(), decode, params
        question = self._ids[layout.question_start :]
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=self._ids,
            outputs=[CompletionOutput(i) for i in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(layout),
            chunk_lens=layout.chunk_lens,
            prefix_len=layout.prefix_len if layout.chunk_lens else 0,
        )
        self._text = [
            None
            if tokenizer is None
            else Detokenizer(
                tokenizer,
                question,
                stop=tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
            for _ in range(params.n)
        ]
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0

    @property
    def finished(self) -> bool:
        """Return whether every sample has ended."""
        return all(o.finish_reason for o in self.output.outputs)

    def add_tokens(self, event: TokenOutput) -> bool:
        """Add tokens. Return True if a stop string ended their sample, which the engine then must end, too.

        Args:
            event: new tokens of a sample; one at a time if there are stop strings.
        """
        completion, detokenizer = self.output.outputs[event.sample], self._text[event.sample]
        completion.token_ids += event.token_ids
        if event.cached is not None:
            self.output.num_cached_tokens = event.cached.total
            self.output.num_cached_chunk_tokens = event.cached.chunks
        if event.logprobs is not None and completion.logprobs is not None:
            for row, token in enumerate(event.token_ids):
                completion.logprobs.append(self._entry(event.logprobs, row, token))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + float(event.logprobs.target[row])
        completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_reason
        if detokenizer is None:
            return False
        if event.finish_reason == "stop":  # the text excludes the token that ends it
            stopped = detokenizer.add(event.token_ids[:-1]) or detokenizer.flush()
        else:
            stopped = detokenizer.add(event.token_ids, last=event.finish_reason is not None)
        if stopped:
            completion.finish_reason, completion.stop_reason = "stop", detokenizer.stopped_by
        if completion.finish_reason:  # a reader of the growing output may read the text now
            completion.text = detokenizer.text
        return stopped and event.finish_reason is None

    def read(self) -> RequestOutput:
        """Return `output` with the texts so far."""
        for completion, detokenizer in zip(self.output.outputs, self._text, strict=True):
            if detokenizer is not None:
                completion.text = detokenizer.text
        return self.output

    def add_prompt_logprobs(self, event: PromptLogprobsOutput) -> None:
        """Add the prompt's log-probabilities."""
        self.output.prompt_logprobs = [
            self._entry(event.logprobs, i, token) if known else None
            for i, (token, known) in enumerate(zip(self._ids, event.known.tolist(), strict=True))
        ]

    def _entry(self, values: TokenLogprobs, row: int, token_id: int) -> dict[int, Logprob]:
        entry = {token_id: Logprob(float(values.target[row]), int(values.rank[row]), self._decode(token_id))}
        for rank, (top_id, logprob) in enumerate(zip(values.top_ids[row].tolist(), values.top[row].tolist(), strict=True), 1):
            entry.setdefault(top_id, Logprob(logprob, rank, self._decode(top_id)))
        return entry
