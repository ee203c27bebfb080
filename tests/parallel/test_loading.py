"""Loading a model over several devices: the bytes that are read, and the values."""

import copy
import shutil
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.gguf_tensors import GGUFTensors
from chunkattn.models.loader import open_files
from chunkattn.models.packed import Packed
from chunkattn.models.packing import Packing
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.shards import Shards
from chunkattn.models.weights import save_weights
from tests.gguf_files import CONFIGS, Written


def load(path, size, monkeypatch=None, source=SafetensorsFolder, packing=None):
    """Load a model over some devices. Return the decoder, and the bytes of every read by tensor."""
    files = open_files(EngineConfig(model=str(path), dtype="float32", skip_tokenizer_init=True))
    reads = {}
    if monkeypatch is not None:
        original = source.read

        def read(self, name, dtype, index=()):
            values = original(self, name, dtype, index)
            reads.setdefault(name, []).append(values.nbytes)
            return values

        monkeypatch.setattr(source, "read", read)
    return files.load(Shards.over(jax.devices()[:size], files.spec), packing), reads


def check_reads(decoder, reads):
    """No read is larger than the part of one device, and no part is read twice."""
    shapes, held = decoder.spec.parameters(), Counter()
    for name, weight in decoder.weights.items():
        held[name] = max(shard.data.nbytes for shard in weight.addressable_shards)
        assert max(reads[name]) <= held[name], name
        assert sum(reads[name]) == 4 * np.prod(shapes[name]), name


def check_values(decoder, whole):
    for name, weight in decoder.weights.items():
        np.testing.assert_array_equal(np.asarray(weight)[: len(whole.weights[name])], whole.weights[name], err_msg=name)


def test_slices_of_safetensors(wide, monkeypatch):
    folder = wide("llama-bias", vocab_size=131)
    whole, _ = load(folder, 1)
    with monkeypatch.context() as patch:
        decoder, reads = load(folder, 8, patch)
    check_reads(decoder, reads)
    check_values(decoder, whole)
    table = decoder.weights["model.embed_tokens.weight"]
    assert table.shape[0] == 136
    assert not np.asarray(table)[131:].any()


@pytest.mark.ci
def test_columns_of_experts(wide, tmp_path):
    """Each device holds an eighth of the columns of every expert, of numbered tensors and of a GGUF file's."""
    path = Written(tmp_path / "model.gguf", CONFIGS["qwen3moe"], Kind.Q4_1).path
    for source, size, width in ((wide("qwen3-moe"), 8, 4), (path, 4, 64)):
        (whole, _), (decoder, _) = load(source, 1), load(source, size)
        check_values(decoder, whole)
        for part, axis in (("gate", 1), ("up", 1), ("down", 2)):
            shards = decoder.weights[f"model.layers.0.mlp.experts.{part}_proj.weight"].addressable_shards
            assert {shard.data.shape[axis] for shard in shards} == {width}
    (whole, _), (decoder, _) = (load(path, size, packing=Packing()) for size in (1, 4))
    for part, axis in (("gate", 1), ("down", 2)):
        name = f"model.layers.0.mlp.experts.{part}_proj.weight"
        weight, expected = decoder.weights[name], _matrices(whole.weights[name], whole.weights[name].data)
        found = [_matrices(weight, s.data) for s in sorted(weight.data.addressable_shards, key=lambda s: s.index[0].start)]
        np.testing.assert_array_equal(np.concatenate(found, axis=axis), expected)


def _matrices(weight, data):
    """The stacked matrices of a device's part."""
    flat = replace(weight, outputs=weight.count * weight.outputs, count=None)
    return _rows(flat, data).reshape(weight.shape)


@pytest.mark.ci
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q6_K])
def test_slices_of_gguf(tmp_path, monkeypatch, kind):
    """Four devices hold 64 of 256 columns each: two blocks of Q4_1, and a quarter of one block of Q6_K."""
    path = Written(tmp_path / "model.gguf", CONFIGS["llama-bias"], kind).path
    whole, _ = load(path, 1)
    with monkeypatch.context() as patch:
        decoder, reads = load(path, 4, patch, GGUFTensors)
    check_reads(decoder, reads)
    check_values(decoder, whole)


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "dense"), [(Kind.Q4_1, ()), (Kind.Q6_K, ("o_proj", "down_proj"))])
def test_parts_of_packed_matrices(tmp_path, kind, dense):
    """Four devices hold 64 of 256 columns each, which fill no block of Q6_K, and 48 rows of a vocabulary of 131."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size = 131
    path = Written(tmp_path / "model.gguf", config, kind).path
    (whole, _), (decoder, _) = load(path, 1), load(path, 4, packing=Packing())
    for name, weight in decoder.weights.items():
        expected, module = np.asarray(whole.weights[name]), name.split(".")[-2]
        assert isinstance(weight, Packed) == (expected.ndim == 2 and module not in dense), name
        if not isinstance(weight, Packed):
            np.testing.assert_array_equal(weight, expected, err_msg=name)
            continue
        found = [_rows(weight, shard.data) for shard in sorted(weight.data.addressable_shards, key=lambda s: s.index[0].start)]
        parts = found[:: 4 // decoder.shards.division(name)[1]]  # two devices share a KV head
        joined = np.concatenate(parts, axis=decoder.shards.division(name)[0])
        np.testing.assert_array_equal(joined[: len(expected)], expected, err_msg=name)
        assert not joined[len(expected) :].any()


def _rows(weight, data):
    return np.asarray(replace(weight, data=jax.device_put(data, jax.devices()[0])).rows(jnp.arange(weight.outputs)))


def test_a_part_that_is_not_finite_is_refused(wide, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    decoder, _ = load(wide("qwen3"), 1)
    decoder.weights[name] = decoder.weights[name].at[0, -1].set(np.nan)
    save_weights(decoder, tmp_path)
    shutil.copy(wide("qwen3") / "config.json", tmp_path)
    with pytest.raises(ModelError, match=name):
        load(tmp_path, 4)
