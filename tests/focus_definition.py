"""The definition of `focus` in docs/concepts/semantics.md, written out over transformers: scores, choice, composed prompt."""

import hashlib
from types import SimpleNamespace

import numpy as np
import torch

from chunkattn import SamplingParams
from tests.engine.test_calibration import gapped_positions, weighed_logits
from tests.engine.test_parity import check_greedy

MODES = ("reread", "only")
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)


def digest(document):
    """Hash that orders documents: of the token ids as int32."""
    return hashlib.blake2b(np.asarray(document, "<i4").tobytes(), digest_size=16).digest()


def laid_out(prefix, chunks, question, gap=0):
    """A prompt under shared positions, as `Oracle.chunked` reads it."""
    ids = [*prefix, *(token for chunk in chunks for token in chunk), *question]
    positions = np.array(gapped_positions((prefix, chunks, question), gap))
    lens = [len(chunk) for chunk in chunks]
    parts = [-1] * len(prefix) + [n for n, size in enumerate(lens) for _ in range(size)] + [-2] * len(question)
    return SimpleNamespace(
        token_ids=np.array(ids),
        positions=positions,
        prefix_len=len(prefix),
        chunk_lens=lens,
        question_len=len(question),
        next_position=int(positions[-1]) + 1,
        chunk_ids=np.array(parts),
    )


class Definition:
    """Prompts of one model under one gap, chunk temperature and chunk scale.

    Args:
        oracle: transformers on the model.
        gap: positions between prefix and chunks.
        weighing: chunk temperature and scale.
    """

    def __init__(self, oracle, gap=0, weighing=(1.0, 1.0)):
        self.oracle, self.gap, self.weighing = oracle, gap, weighing

    def logprobs(self, layout, generated=()):
        """Log-probabilities `[T, vocab]` at every token."""
        found = weighed_logits(self.oracle, layout, generated, *self.weighing)
        return torch.log_softmax(torch.as_tensor(found), -1).numpy()

    def likelihoods(self, prefix, documents, question, history=1):
        """Mean log-probability of the question's tokens behind each document alone; None for an empty document.

        The first `history` tokens of the question do not count.
        """
        found = []
        for document in documents:
            rows = self.logprobs(laid_out(prefix, [document], question, self.gap))[history - len(question) - 1 : -1]
            found.append(float(rows[range(len(rows)), question[history:]].astype(np.float64).mean()) if document else None)
        return found

    def check(self, output, prefix, documents, question, top_n, mode, scores=None):
        """Compare scores, choice, composed prompt, greedy tokens and their log-probabilities.

        Args:
            output: output of the engine.
            prefix: token ids.
            documents: token ids of each document, in the caller's order.
            question: token ids.
            top_n: number of documents to choose.
            mode: one of `MODES`.
            scores: right scores of the documents; None for their likelihoods.
        """
        expected = self.likelihoods(prefix, documents, question) if scores is None else scores
        found = output.focus.scores
        assert [score is None for score in found] == [score is None for score in expected]
        kept = [score for score in expected if score is not None]
        np.testing.assert_allclose([score for score in found if score is not None], kept, atol=1e-4)
        # Rounding decides between scores this close, so the choice follows from the engine's own scores.
        first = {tuple(document): number for number, document in reversed([*enumerate(documents)]) if document}
        best = sorted(first.values(), key=lambda number: (-found[number], digest(documents[number])))[:top_n]
        assert output.focus.documents == best
        assert output.focus.mode == mode
        chosen = [documents[number] for number in sorted(best, key=lambda number: digest(documents[number]))]
        if mode == "reread" or not chosen:
            chunks, last = documents, [*(token for document in chosen for token in document), *question]
        else:
            chunks, last = [documents[number] for number in sorted(best)], question
        layout = laid_out(prefix, chunks, last, self.gap)
        assert output.prompt_token_ids == layout.token_ids.tolist()
        assert list(output.chunk_lens) == layout.chunk_lens
        (sample,) = output.outputs
        rows = self.logprobs(layout, sample.token_ids)
        check_greedy(rows, len(layout.token_ids), sample.token_ids)
        wanted = rows[len(layout.token_ids) - 1 : -1][range(len(sample.token_ids)), sample.token_ids]
        own = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        np.testing.assert_allclose(own, wanted, atol=1e-4)
