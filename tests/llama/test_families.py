"""Files of every family as llama.cpp reads them: its log-probabilities are those of the model that was written."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.checkpoints import force_factors
from tests.gguf_files import ALL, VOCAB, write
from tests.llama_cpp import llama_server

IDS = np.random.default_rng(7).integers(3, VOCAB, 60)
_F32 = 0


def _vocabulary(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("mistral-window", "phi3-window")])
def test_llama_cpp_computes_the_model_that_was_written(name, tmp_path):
    """llama.cpp has no windows for the architectures of the two files that are left out."""
    file = write(tmp_path / "model.gguf", name, Kind.F32, change=_vocabulary)
    oracle = file.oracle()
    if name == "phi3-longrope":  # all prompts of a context have its factors
        oracle.model = force_factors(oracle.model, "long")
    logits = oracle.logits(IDS).astype(np.float64)
    with llama_server(file.path, cache_type_k=_F32, cache_type_v=_F32, flash_attn_type=0) as post:
        for length in (5, 30, 60):
            asked = {"prompt": IDS[:length].tolist(), "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "cache_prompt": False}
            (answer,) = post("/completion", asked)["completion_probabilities"]
            found = {entry["id"]: entry["logprob"] for entry in answer["top_logprobs"]}
            row = logits[length - 1] - np.logaddexp.reduce(logits[length - 1])
            np.testing.assert_allclose([found[token] for token in range(VOCAB)], row, atol=1e-2)
