"""transformers in float32 as the witness: greedy tokens and log-probabilities of chunked prompts."""

from itertools import accumulate

import numpy as np
import torch
from transformers import DynamicCache

from tests.checkpoints import Oracle


class Witness:
    """One model, answering by definition: nothing here is shared with the connector.

    Args:
        folder: checkpoint.
    """

    def __init__(self, folder):
        self.oracle = Oracle(folder)
        self.model = self.oracle.model

    def plain(self, ids, count):
        """Answer an ordinary prompt: `(count tokens, float32 [vocab] log-probabilities of the first)`."""
        return self.shared([], [], ids, count)

    def answer(self, prefix, chunks, question, count, positions="shared", gap=0):
        """Answer a chunked prompt."""
        if positions == "shared":
            return self.shared(prefix, chunks, question, count, gap)
        return self.reordered(prefix, chunks, question, count)

    @torch.no_grad()
    def shared(self, prefix, chunks, question, count, gap=0):
        """Answer under `shared` positions: one forward pass of the prompt under a dense mask, then token by token."""
        first = len(prefix) + (gap if chunks else 0)
        after = first + max(map(len, chunks), default=0)
        token_ids = [*prefix, *(t for c in chunks for t in c), *question]
        part = np.repeat([-1, *range(len(chunks)), -2], [len(prefix), *map(len, chunks), len(question)])
        position = np.concatenate(
            [np.arange(len(prefix)), *(first + np.arange(len(c)) for c in chunks), after + np.arange(len(question))]
        )
        seen, sees = part[None], part[:, None]
        visible = np.tril(np.ones((len(part), len(part)), bool)) & ((seen == -1) | (seen == sees) | (sees == -2))
        mask = torch.where(torch.as_tensor(visible), 0.0, torch.finfo(torch.float32).min)[None, None]
        past = DynamicCache()
        out = self.model(
            torch.tensor([token_ids]),
            attention_mask=mask,
            position_ids=torch.as_tensor(position.astype(int))[None],
            past_key_values=past,
        )
        return self._continue(out.logits[0, -1], past, after + len(question), count)

    @torch.no_grad()
    def reordered(self, prefix, chunks, question, count):
        """Answer at consecutive positions: every chunk is computed behind the prefix, then its keys are moved."""
        keys, values, spans = [], [], list(zip(accumulate(map(len, chunks), initial=len(prefix)), chunks))
        for shift, ids, start in [(0, prefix, 0), *((at - len(prefix), [*prefix, *c], len(prefix)) for at, c in spans)]:
            if len(ids) == start:
                continue
            cache = DynamicCache()
            self.model(torch.tensor([ids]), past_key_values=cache)
            source = torch.arange(start, len(ids))
            keys.append([self._move(layer.keys[:, :, start:], source, source + shift) for layer in cache.layers])
            values.append([layer.values[:, :, start:] for layer in cache.layers])
        past = DynamicCache()
        for layer in range(len(keys[0])):
            past.update(torch.cat([k[layer] for k in keys], 2), torch.cat([v[layer] for v in values], 2), layer)
        position = past.get_seq_length()
        places = position + torch.arange(len(question))
        out = self.model(torch.tensor([question]), past_key_values=past, position_ids=places[None])
        return self._continue(out.logits[0, -1], past, position + len(question), count)

    def _continue(self, logits, past, position, count):
        """Pick the best token `count` times. Generated tokens see the whole cache."""
        logprobs, tokens = logits.log_softmax(-1).numpy(), [int(logits.argmax())]
        while len(tokens) < count:
            out = self.model(torch.tensor([tokens[-1:]]), past_key_values=past, position_ids=torch.tensor([[position]]))
            position, tokens = position + 1, [*tokens, int(out.logits[0, -1].argmax())]
        return tokens, logprobs

    def _move(self, keys, source, target):
        """Undo the rotation at `source`, apply the one at `target`: `[1, H, T, D]`, in float64."""
        like = torch.zeros(1, 1, 1, dtype=torch.float64)
        (a, b), (c, d) = (self.model.model.rotary_emb(like, places[None]) for places in (source, target))
        keys = keys.double()
        bare = (keys * a - self._half(keys) * b) / (a * a + b * b)
        return (bare * c + self._half(bare) * d).float()

    @staticmethod
    def _half(x):
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
