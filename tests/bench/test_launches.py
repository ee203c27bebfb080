"""Counts of launches, and no program copies a weight: read from optimised HLO of CPUs, and from lines of GPUs and TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.launches import Module, by_layer, count, describe_layers, size_of
from chunkattn import LLM
from tests.parallel.programs import compiled_readouts, compiled_step

WEIGHTS = [jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)]
GPU = """HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias) }

%wrapped (param_0: bf16[64,32], param_1: bf16[64,32]) -> bf16[128,32] {
  %param_0 = bf16[64,32]{1,0} parameter(0)
  %param_1 = bf16[64,32]{1,0} parameter(1)
  ROOT %concatenate.1 = bf16[128,32]{1,0} concatenate(%param_0, %param_1), dimensions={0}
}

ENTRY %main.1 (params_0_.1: bf16[64,32], params_1_.1: bf16[64,32], caches_0_.1: bf16[9,8]) -> (f32[8,128], bf16[9,8]) {
  %params_0_.1 = bf16[64,32]{1,0} parameter(0)
  %params_1_.1 = bf16[64,32]{1,0} parameter(1)
  %caches_0_.1 = bf16[9,8]{1,0} parameter(2)
  %x = bf16[8,32]{1,0} parameter(3)
  %bitcast.1 = bf16[64,32]{1,0} bitcast(%params_0_.1)
  %wrapped_concatenate = bf16[128,32]{1,0} fusion(%bitcast.1, %params_1_.1), kind=kLoop, calls=%wrapped
  %dot = (f32[8,128]{1,0}, s8[4096]{0}) custom-call(%x, %wrapped_concatenate), custom_call_target="__cublas$lt$matmul"
  %get-tuple-element = f32[8,128]{1,0} get-tuple-element(%dot), index=0
  ROOT %tuple = (f32[8,128]{1,0}, bf16[9,8]{1,0}) tuple(%get-tuple-element, %caches_0_.1)
}
"""
TPU = """HloModule jit_step, is_scheduled=true

ENTRY %main.1 (params_0_.1: bf16[64,32], params_1_.1: bf16[64,32]) -> bf16[64,32] {
  %params_0_.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %params_1_.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start = (bf16[64,32]{1,0:T(8,128)S(1)}, bf16[64,32]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%params_0_.1)
  %copy-done = bf16[64,32]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %slice-start = ((bf16[64,32]{1,0}), bf16[16,32]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%params_1_.1), slice={[0:16], [0:32]}
  %slice-done = bf16[16,32]{1,0:S(1)} slice-done(%slice-start)
  ROOT %copy.1 = bf16[64,32]{0,1:T(8,128)(2,1)} copy(%params_1_.1)
}
"""


def test_a_gpu_program_is_counted():
    found = count(GPU)
    assert found["by_kind"] == {"fusion kLoop": 1, "custom-call __cublas$lt$matmul": 1}
    assert (found["launches"], found["transfers"]) == (2, 0)
    merged = 128 * 32 * 2
    assert found["bytes"] == 2 * merged + merged + 8 * 32 * 2 + 8 * 128 * 4
    assert [line.split(":")[0] for line in Module.of(GPU).copied_weights(WEIGHTS)] == ["params_0_.1"]


def test_transfers_into_a_tpus_own_memory_are_no_copies():
    found, weight = count(TPU), 64 * 32 * 2
    assert (found["launches"], found["transfers"]) == (1, 2)
    assert found["bytes"] == weight + weight // 4 + 2 * weight
    assert [line.split(": ")[1].split()[0] for line in Module.of(TPU).copied_weights(WEIGHTS)] == ["copy"]


def test_large_arrays_are_not_read_whole():
    assert size_of("(bf16[2,3]{1,0}, pred[7], f32[], u4[8]{0})") == 12 + 7 + 4 + 8
    assert size_of("bf16[1000000,1000]{1,0}") == 0
    assert size_of("f32[4,4]{1,0:T(8,128)S(1)}") == 0


def test_a_layer_is_a_difference():
    same = {"kind": "launches", "compiled": True, "chip": "h100", "program": "decodes", "rows": 8}
    two = same | {"layers": 2, "launches": 36, "bytes": 2 << 20, "largest_mib": {"dot": 1.5}}
    four = same | {"layers": 4, "launches": 66, "bytes": 4 << 20, "largest_mib": {"dot": 2.5}}
    (layer,) = by_layer([four, two, two | {"rows": 64}])
    assert (layer.launches, layer.rest, layer.mib, layer.largest_mib) == (15, 6, 1, {"dot": 0.5})
    assert describe_layers([two, four]) == [
        "h100 decodes of 8 rows: a layer has 15 launches and moves 1.0 MiB (most: dot 0.5); 6 launches beside the layers"
    ]


# CPUs


@pytest.mark.parametrize("change", [lambda w: jnp.concatenate(w).T, lambda w: jnp.concatenate([w[0] * 2, w[1]]).T])
def test_a_copy_on_a_cpu_is_found(change):
    """A product with weights that are joined, or doubled, at every call."""
    params = [np.ones((64, 32), np.float32)] * 2
    program = jax.jit(lambda params, x: (x @ change(params), x @ params[1].T)).lower(params, np.ones((40, 32), np.float32))
    module = Module.of(program.compile().as_text())
    assert module.weights(params).keys() == {"params_0_.1", "params_1_.1"}
    assert module.copied_weights(params)


@pytest.mark.parametrize(("name", "dtype", "backend"), [("qwen3", "bfloat16", "cpu"), ("llama-bias", "float32", "xla")])
@pytest.mark.parametrize("way", ["parts", "joined"])
def test_no_program_of_a_cpu_copies_a_weight(name, dtype, backend, way, checkpoint, monkeypatch):
    """Nor does one with joined weights, of which accelerators hold some."""
    if way == "joined":
        monkeypatch.setattr("chunkattn.models.weights.joins", lambda platform: True)
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 64}
    llm = LLM(str(checkpoint(name)), dtype=dtype, attention_backend=backend, **options)
    programs = {f"step of {rows}": compiled_step(llm, rows) for rows in (8, 64)} | compiled_readouts(llm, 8)
    matrices = dict(zip(llm.core.runner._names, llm.core.runner._params, strict=True))
    matrices = {name: x for name, x in matrices.items() if x.ndim > 1}
    steps = matrices.keys() - {"lm_head.weight"}
    for told, program in programs.items():
        module = Module.of(program.as_text())
        assert len(module.weights(matrices.values())) == (len(steps) if "step" in told else 1), told
        assert not module.copied_weights(matrices.values()), told
    assert any("qkv_proj" in name for name in matrices) == (way == "joined")


@pytest.mark.parametrize("copies", [False, True])
def test_a_copy_in_a_loop_is_found(copies):
    """Weights come into a loop in a tuple, beside a larger array that the loop does copy."""

    def loop(params, x):
        def body(_, carry):
            y, large = carry
            weight = jnp.flip(params[0], 0) if copies else params[0]
            return jnp.tanh(y @ weight.T), large.T + y.sum()

        return jax.lax.fori_loop(0, x.shape[0] // 9, body, (x, jnp.ones((99, 99))))

    params = [np.ones((64, 64), np.float32)]
    text = jax.jit(loop).lower(params, np.ones((40, 64), np.float32)).compile().as_text()
    assert "while(" in text
    assert bool(Module.of(text).copied_weights(params)) == copies
