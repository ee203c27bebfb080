"""Random checkpoint folders and GGUF files: transformers' logits or one clear error. `tests.soak.fuzz_files` makes more."""

import pytest

from tests.fuzz import gguf_draws, quantised_draws
from tests.fuzz.draws import Draw
from tests.fuzz.folders import FAMILIES, judge, judge_tokenizer
from tests.quantised_folders import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_folders(family, tmp_path):
    found = []
    for seed in range(40):
        drawn = Draw(tmp_path / str(seed), family, seed)
        found.append(judge(drawn.folder, drawn.make_stale))
        judge_tokenizer(drawn.folder, drawn.encode)
    assert found.count("equal") >= 15


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_quantised_folders(kind, tmp_path):
    found = [quantised_draws.judge(quantised_draws.Draw(tmp_path / f"{seed}", kind, seed)) for seed in range(40)]
    assert 15 < found.count("equal") < 40


@pytest.mark.slow
def test_random_gguf_files(tmp_path):
    found = [gguf_draws.judge(tmp_path / f"{seed}.gguf", seed) for seed in range(30)]
    assert found.count("equal") > 15
