"""Quantised folders with random codes and scales, and the values of their matrices by each format's published formula."""

from dataclasses import dataclass

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Neighbours by their place in a word, as AutoAWQ packs them."""


@dataclass
class Quantised:
    """One matrix: its tensors by the last part of their names, and its values in float32 `[out, in]`."""

    tensors: dict
    values: np.ndarray


@dataclass
class Kind:
    """A format: its configuration, and `make(rng, out, in)`."""

    config: dict
    make: object


def pack(codes, bits, axis):
    """Codes below 2**bits, packed in int32 along an axis, the first in the lowest bits; the last word is filled with 0."""
    count, codes = 32 // bits, np.moveaxis(codes.astype(np.int64), axis, 0)
    words = np.zeros((-(-len(codes) // count), *codes.shape[1:]), np.int64)
    for place, code in enumerate(codes):
        words[place // count] |= code << bits * (place % count)
    return torch.from_numpy(np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32).copy())


def spread(blocks, out, inputs, rows, columns):
    """One number for every element, from one for each block of `rows` outputs and `columns` inputs."""
    return blocks[np.arange(out) // rows][:, np.arange(inputs) // columns]


def scales(rng, shape, dtype=torch.float32, size=0.02):
    """Random scales in a type, and their values."""
    made = torch.from_numpy(rng.uniform(0.2, 1, shape) * size).to(dtype)
    return made, made.float().numpy()


def fp8(rng, out, inputs, block=(None, None), name="weight_scale", dtype=torch.float32, shape=None):
    codes = torch.from_numpy(rng.normal(0, 40, (out, inputs))).to(torch.float8_e4m3fn)
    rows, columns = block[0] or out, block[1] or inputs
    grid = -(-out // rows), -(-inputs // columns)
    stored, numbers = scales(rng, grid, dtype, 0.004)
    values = codes.float().numpy() * spread(numbers, out, inputs, rows, columns)
    return Quantised({"weight": codes, name: stored if shape is None else stored.reshape(shape)}, values)


def int8(rng, out, inputs, group=None, asymmetric=False, dtype=torch.float32):
    columns = group or inputs
    codes = rng.integers(-128, 128, (out, inputs)).astype(np.int8)
    stored, numbers = scales(rng, (out, inputs // columns), dtype, 0.004)
    zeros = rng.integers(-20, 20, numbers.shape).astype(np.int8) * asymmetric
    difference = codes.astype(np.float32) - spread(zeros, out, inputs, 1, columns)
    tensors = {"weight": torch.from_numpy(codes), "weight_scale": stored}
    if asymmetric:
        tensors["weight_zero_point"] = torch.from_numpy(zeros)
    return Quantised(tensors, difference * spread(numbers, out, inputs, 1, columns))


def packed(rng, out, inputs, bits=4, group=None, asymmetric=False, ordered=False, dtype=torch.bfloat16):
    columns, half = group or inputs, 1 << (bits - 1)
    codes = rng.integers(-half, half, (out, inputs))
    stored, numbers = scales(rng, (out, inputs // columns), dtype, 0.3 / half)
    zeros = rng.integers(-half, half, numbers.shape) * asymmetric
    groups = np.arange(inputs) // columns
    tensors = {
        "weight_packed": pack(codes + half, bits, 1),
        "weight_scale": stored,
        "weight_shape": torch.tensor([out, inputs]),
    }
    if ordered:
        groups = rng.permutation(groups)
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    if asymmetric:
        tensors["weight_zero_point"] = pack(zeros + half, bits, 0)
    return Quantised(tensors, (codes - zeros[:, groups]).astype(np.float32) * numbers[:, groups])


def fp4(rng, out, inputs):
    """Random codes of E2M1, packed two in a byte, and their values."""
    codes = rng.integers(0, 16, (out, inputs))
    bytes_ = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(bytes_), np.where(codes & 8, -1, 1).astype(np.float32) * E2M1[codes & 7]


def nvfp4(rng, out, inputs):
    stored, values = fp4(rng, out, inputs)
    blocks = torch.from_numpy(rng.uniform(20, 400, (out, inputs // 16))).to(torch.float8_e4m3fn)
    divisor = torch.tensor([3000 + 1000 * rng.random()], dtype=torch.float32)
    numbers = blocks.float().numpy() / divisor.numpy()
    tensors = {"weight_packed": stored, "weight_scale": blocks, "weight_global_scale": divisor}
    return Quantised(tensors, values * spread(numbers, out, inputs, 1, 16))


def modelopt(rng, out, inputs):
    stored, values = fp4(rng, out, inputs)
    blocks = torch.from_numpy(rng.uniform(20, 400, (out, inputs // 16))).to(torch.float8_e4m3fn)
    factor = torch.tensor(2e-4 + 2e-4 * rng.random(), dtype=torch.float32)
    numbers = blocks.float().numpy() * factor.numpy()
    tensors = {"weight": stored, "weight_scale": blocks, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
    return Quantised(tensors, values * spread(numbers, out, inputs, 1, 16))


def mxfp4(rng, out, inputs):
    stored, values = fp4(rng, out, inputs)
    exponents = rng.integers(118, 123, (out, inputs // 32)).astype(np.uint8)
    numbers = np.float32(2) ** (exponents.astype(np.float32) - 127)
    tensors = {"weight_packed": stored, "weight_scale": torch.from_numpy(exponents)}
    return Quantised(tensors, values * spread(numbers, out, inputs, 1, 32))


def awq(rng, out, inputs, group=16):
    columns = group or inputs
    codes, zeros = rng.integers(0, 16, (inputs, out)), rng.integers(0, 16, (inputs // columns, out))
    stored, numbers = scales(rng, zeros.shape, torch.float16, 0.04)
    groups = np.arange(inputs) // columns

    def reorder(rows):
        return pack(rows.reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(len(rows), -1), 4, 1)

    tensors = {"qweight": reorder(codes), "qzeros": reorder(zeros), "scales": stored}
    return Quantised(tensors, ((codes - zeros[groups]).astype(np.float32) * numbers[groups]).T)


def gptq(rng, out, inputs, bits=4, group=16, ordered=False, version=1, symmetric=False):
    columns, top = group or inputs, 1 << bits
    codes, grid = rng.integers(0, top, (inputs, out)), (-(-inputs // columns), out)
    zeros = rng.integers(1, top, grid) if not symmetric else np.full(grid, top // 2)
    stored, numbers = scales(rng, zeros.shape, torch.float16, 0.6 / top)
    groups = np.arange(inputs) // columns
    groups = rng.permutation(groups) if ordered else groups
    tensors = {
        "qweight": pack(codes, bits, 0),
        "qzeros": pack(zeros - (version == 1), bits, 1),
        "scales": stored,
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Quantised(tensors, ((codes - zeros[groups]).astype(np.float32) * numbers[groups]).T)


def compressed(form, ignore=("lm_head",), targets=("Linear",), **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": [*targets], "weights": {"symmetric": True, **weights}}},
        "ignore": [*ignore],
    }


def _fp8(**changes):
    base = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    return base | changes


def _gptq(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False} | changes


def _with(make, **options):
    return lambda rng, out, inputs: make(rng, out, inputs, **options)


_INT4 = {"num_bits": 4, "type": "int"}
_INT8 = {"num_bits": 8, "type": "int"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_BLOCKS = {"name": "weight_scale_inv", "dtype": torch.bfloat16}
KINDS = {
    "fp8": Kind(_fp8(weight_block_size=[128, 128]), _with(fp8, block=(128, 128), **_BLOCKS)),
    "fp8-edges": Kind(_fp8(weight_block_size=[20, 12]), _with(fp8, block=(20, 12), **_BLOCKS)),
    "fp8-tensor": Kind(_fp8(activation_scheme="static"), _with(fp8, name="weight_scale_inv", dtype=torch.bfloat16, shape=())),
    "ct-fp8-tensor": Kind(compressed("float-quantized", **_FLOAT8, strategy="tensor"), _with(fp8, shape=(1,))),
    "ct-fp8-channel": Kind(
        compressed("float-quantized", **_FLOAT8, strategy="channel"), _with(fp8, block=(1, None), dtype=torch.bfloat16)
    ),
    "ct-fp8-block": Kind(
        compressed("float-quantized", **_FLOAT8, strategy="block", block_structure=[20, 12]), _with(fp8, block=(20, 12))
    ),
    "ct-int8": Kind(compressed("int-quantized", **_INT8, strategy="channel"), _with(int8, dtype=torch.bfloat16)),
    "ct-int8-asymmetric": Kind(
        compressed("int-quantized", **_INT8, strategy="group", group_size=16, symmetric=False),
        _with(int8, group=16, asymmetric=True),
    ),
    "ct-int4": Kind(compressed("pack-quantized", **_INT4, strategy="channel"), _with(packed)),
    "ct-int4-group": Kind(compressed("pack-quantized", **_INT4, strategy="group", group_size=16), _with(packed, group=16)),
    "ct-int4-asymmetric": Kind(
        compressed("pack-quantized", **_INT4, strategy="group", group_size=16, symmetric=False),
        _with(packed, group=16, asymmetric=True),
    ),
    "ct-int4-ordered": Kind(
        compressed("pack-quantized", **_INT4, strategy="group", group_size=16, actorder="group"),
        _with(packed, group=16, ordered=True),
    ),
    "ct-int4-group-32": Kind(compressed("pack-quantized", **_INT4, strategy="group", group_size=32), _with(packed, group=32)),
    "ct-int8-packed": Kind(
        compressed("pack-quantized", **_INT8, strategy="group", group_size=16), _with(packed, bits=8, group=16)
    ),
    "ct-nvfp4": Kind(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16), nvfp4
    ),
    "ct-mxfp4": Kind(compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4),
    "modelopt": Kind({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]}, modelopt),
    "modelopt-fp8": Kind({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, _with(fp8, shape=())),
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq),
    "awq-columns": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "GEMM"}, _with(awq, group=None)
    ),
    "gptq": Kind(_gptq(), gptq),
    "gptq-symmetric": Kind(_gptq(sym=True), _with(gptq, symmetric=True)),
    "gptq-8-symmetric-32": Kind(_gptq(bits=8, sym=True, group_size=32), _with(gptq, bits=8, group=32, symmetric=True)),
    "gptq-columns": Kind(_gptq(group_size=-1), _with(gptq, group=None)),
    "gptq-edges": Kind(_gptq(group_size=20), _with(gptq, group=20)),
    "gptq-symmetric-edges": Kind(_gptq(sym=True, group_size=64), _with(gptq, group=64, symmetric=True)),
    "gptq-ordered": Kind(_gptq(desc_act=True), _with(gptq, ordered=True)),
    "gptq-v2": Kind(_gptq(checkpoint_format="gptq_v2"), _with(gptq, version=2)),
    "gptq-8": Kind(_gptq(bits=8), _with(gptq, bits=8)),
    "gptq-8-ordered-v2": Kind(
        _gptq(bits=8, desc_act=True, checkpoint_format="gptq_v2"), _with(gptq, bits=8, ordered=True, version=2)
    ),
}
"""Formats by the name of a test."""
PACKED = {
    "ct-int8": "Q8_0",
    "ct-int4": "Q4_0",
    "ct-int4-group-32": "Q4_0",
    "gptq-8-symmetric-32": "Q8_0",
    "gptq-columns": "Q5_0",
    "gptq-symmetric-edges": "Q4_0",
    "awq-columns": "Q5_0",
}
"""Packed formats of those whose values a packed format has, too."""


def is_linear(name, value):
    """Return whether formats quantise a parameter: a projection of attention, a recurrent layer, an MLP or an expert."""
    return value.ndim == 2 and name.endswith(("proj.weight", "in_proj_qkv.weight", "in_proj_qkvz.weight", "in_proj_z.weight"))


def quantise(kind, tensors, rng, chosen=is_linear):
    """Tensors with random quantised matrices in place of the chosen ones, and the same with their values in float32.

    Matrices whose inputs the format does not divide stay as they are.
    """
    made, plain = {}, {}
    for name, value in tensors.items():
        plain[name] = made[name] = value
        if not chosen(name, value) or value.shape[1] % (32 if kind.endswith(("32", "mxfp4")) else 16):
            continue
        matrix = KINDS[kind].make(rng, *value.shape)
        del made[name]
        made |= {name.removesuffix("weight") + leaf: tensor for leaf, tensor in matrix.tensors.items()}
        plain[name] = torch.from_numpy(np.ascontiguousarray(matrix.values, np.float32))
    return made, plain
