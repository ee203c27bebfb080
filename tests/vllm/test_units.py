"""Parts of the connector without an engine."""

import dataclasses
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers import rotary_embedding

from chunkattn.integrations.vllm.block_layout import BlockLayout
from chunkattn.integrations.vllm.chunk_options import ChunkOptions
from chunkattn.integrations.vllm.options import CLIENT_OPTIONS, ConnectorOptions
from chunkattn.integrations.vllm.requests import PARAMS_KEY, EngineRequest, adapter_key, plan_prompt, segment_keys
from chunkattn.integrations.vllm.rotation import KeyRotation
from chunkattn.integrations.vllm.scheduler_side import SchedulerSide
from chunkattn.integrations.vllm.step import Save, StepWork
from chunkattn.integrations.vllm.store_index import StoreIndex
from chunkattn.integrations.vllm.support import UnsupportedError, check_engine, check_layers, model_rotation
from chunkattn.integrations.vllm.transfers import RequestRefused, StoredSegment, Transfer, parse_transfer
from chunkattn.integrations.vllm.worker_side import WorkerSide


def parse(request, gap=0, adapter=None) -> Transfer:
    fields = request.kv_transfer_params[PARAMS_KEY]
    return parse_transfer(fields, request.token_ids, gap=gap, cache_salt=request.cache_salt, adapter=adapter)


@pytest.mark.parametrize("positions", ["shared", "reordered"])
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("prefix", [[], [1, 2, 3]])
def test_client_and_server_agree_on_keys(positions, gap, prefix):
    plan = plan_prompt(prefix, [[4, 5], [], [6], [4, 5]], [7], positions=positions, gap=gap, cache_salt="a", adapter="b")
    saved = set()
    for request in (r for stage in plan.missing(()) for r in stage):
        transfer = parse(request, gap, "b")
        assert {segment.key for segment in transfer.loads} <= saved, "a save request needs what an earlier stage saves"
        assert {segment.key for segment in transfer.saves} == set(request.keys)
        saved |= set(request.keys)
    composed = parse(plan.composed, gap, "b")
    assert {segment.key for segment in composed.loads} == set(plan.composed.keys) == saved
    assert composed.load_end == len(plan.composed.token_ids) - 1
    assert [s.end for s in composed.loads[:-1]] == [s.start for s in composed.loads[1:]]


def test_positions_of_a_composed_prompt():
    plan = plan_prompt([1, 2, 3], [[4, 5], [6, 7, 8, 9]], [10], gap=100)
    loads = parse(plan.composed, 100).loads
    # Shared positions: prefix 0-2, chunks from 103, question at 107. The question's index is 9, so all keys move by -98.
    assert [segment.origin + segment.shift for segment in loads] == [-98, 5, 5]
    reordered = plan_prompt([1, 2, 3], [[4, 5], [6, 7, 8, 9]], [10], positions="reordered", gap=100)
    assert [segment.origin + segment.shift for segment in parse(reordered.composed, 100).loads] == [0, 3, 5]


def test_keys_depend_on_prefix_chunk_gap_salt_and_adapter():
    variants = [
        segment_keys(prefix, [chunk], gap=gap, cache_salt=salt, adapter=adapter)[1][0]
        for prefix, chunk in [([1], [2, 3]), ([1, 2], [3]), ([], [1, 2, 3]), ([3], [2, 1])]
        for gap in (0, 1)
        for salt in (None, "", "a", "ab")
        for adapter in (None, "b", "ab")
    ]
    assert len(set(variants)) == len(variants) - 12, "only the gap behind an empty prefix has no effect"


def test_plain_prompts_need_no_job():
    assert plan_prompt([1, 2], [], [3], gap=4).composed.kv_transfer_params is None
    assert plan_prompt([1, 2], [[], []], [3]).composed.kv_transfer_params is None
    side = scheduler(100)
    for params in (None, {}, {"other": 3}, [], "text", 7):
        request = new_request("a", EngineRequest([1, 2], None, params))
        side.add(request)
        assert side.match(request, 0) == (0, False)


@pytest.mark.parametrize("wrong", [{"question": []}, {"positions": "offset"}, {"gap": -1}])
def test_plan_errors(wrong):
    with pytest.raises(ValueError, match=r"empty|positions|gap"):
        plan_prompt(**{"prefix": [1], "chunks": [[2]], "question": [3], **wrong})


@pytest.mark.parametrize("value", [None, True, -1, 1.0, "1", [], {}, 2**63, float("nan")])
@pytest.mark.parametrize("place", ["save", "bounds", "inside bounds", "positions", "whole"])
def test_parse_refuses_every_wrong_type(value, place):
    fields = {
        "save": {"save": value, "positions": "shared"},
        "bounds": {"bounds": value, "positions": "shared"},
        "inside bounds": {"bounds": [0, value], "positions": "shared"},
        "positions": {"bounds": [0, 1], "positions": value},
        "whole": value,
    }[place]
    with pytest.raises(RequestRefused):
        parse_transfer(fields, [1, 2, 3], gap=0, cache_salt=None, adapter=None)


@pytest.mark.parametrize("value", [None, True, "a", {}, [1], [None], ["a"] * 3])
def test_parse_refuses_wrong_computed_keys(value):
    with pytest.raises(RequestRefused, match="computed"):
        parse_transfer(
            {"bounds": [1, 2], "positions": "shared", "computed": value}, [1, 2, 3], gap=0, cache_salt=None, adapter=None
        )


def test_questions_that_are_read_share_no_blocks():
    """Neither with each other nor with answers, whose log-probabilities the cache does not hold."""
    params = {"bounds": [1, 2], "positions": "shared"}
    for value in (None, 1, "true", []):
        with pytest.raises(RequestRefused, match="read"):
            parse_transfer({**params, "read": value}, [1, 2, 3], gap=0, cache_salt=None, adapter=None)
    with pytest.raises(RequestRefused):
        parse_transfer({"save": 1, "positions": "shared", "read": True}, [1, 2, 3], gap=0, cache_salt=None, adapter=None)
    side, salts = scheduler(100), []
    composed = plan_prompt([1, 2], [[3, 4, 5]], [9, 8]).composed
    for name, request in (("a", composed), ("b", composed), ("c", composed.read()), ("d", composed.read())):
        made = new_request(name, request)
        side.add(made)
        salts.append(made.cache_salt)
    assert salts[0] == salts[1]
    assert len({*salts}) == 3


def test_what_was_computed_for_the_prompt_is_no_hit():
    side = scheduler(100)
    plan = plan_prompt([1, 2], [[3, 4], [5, 6]], [7])
    for key in plan.composed.keys:
        side.index.add(key, 1)
    hits = []
    for name, computed in (("a", plan.composed.keys), ("b", plan.composed.keys[:1]), ("c", ())):
        request = new_request(name, plan.composed.after(computed))
        side.add(request)
        loaded, _ = side.match(request, 0)
        before = side.stats.data.get("hit_segments", 0)
        side.allocated(request, [0], loaded)
        hits.append(side.stats.data.get("hit_segments", 0) - before)
    assert hits == [0, 2, 3]
    assert side.stats.data["loaded_segments"] == 9


def test_index_is_bounded_and_least_recently_used():
    index = StoreIndex(10)
    assert index.add("a", 4)
    assert index.add("b", 4)
    assert not index.add("a", 4)
    assert not index.add("large", 11)
    index.touch("a")
    assert index.add("c", 4)
    assert index.evict() == [("b", 4)]
    assert (index.keys(), index.num_bytes) == ({"a", "c"}, 8)
    assert sorted(index.clear()) == ["a", "c"]
    assert (len(index), index.num_bytes, index.evict()) == (0, 0, [])


def scheduler(max_store_bytes):
    return SchedulerSide(ConnectorOptions(max_store_bytes=max_store_bytes), 4, 1, lambda request_id: list(range(9)))


def new_request(name, request, lora=None):
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=request.kv_transfer_params,
        prompt_token_ids=request.token_ids,
        all_token_ids=request.token_ids,
        num_tokens=len(request.token_ids),
        prompt_embeds=None,
        mm_features=[],
        sampling_params=SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=None),
        resumable=False,
        lora_request=lora,
        cache_salt=request.cache_salt,
        skip_reading_prefix_cache=False,
        block_hashes=[],
        update_block_hashes=lambda: None,
    )


def run_step(side, **scheduled):
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in scheduled]
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return side.build_step(
        SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    )


def test_saves_of_one_step_may_exceed_the_store():
    side = scheduler(6)
    saves = plan_prompt([1, 2], [[3, 4, 5], [6, 7, 8]], [9]).saves
    for name, request in zip("ab", saves):
        side.add(new_request(name, request))
    work = run_step(side, a=5, b=5)
    kept = {segment.key for save in work.saves for segment in save.segments}
    assert kept == side.index.keys()
    assert side.index.num_bytes <= 6


def test_segment_saved_right_after_a_reset_is_kept():
    """Workers drop what the reset dropped before they save it anew."""
    side = scheduler(100)
    (save,) = plan_prompt([1, 2], [[3, 4, 5]], [9]).saves
    side.add(new_request("a", save))
    run_step(side, a=5)
    side.reset()
    side.add(new_request("b", save))
    work = run_step(side, b=5)
    assert set(work.evicted) == side.index.keys() == {segment.key for segment in work.saves[0].segments}


def test_adapters_of_one_name_and_two_paths_share_nothing():
    side = scheduler(100)
    one, other = (SimpleNamespace(lora_name="adapter", lora_path=path) for path in ("/one", "/other"))
    plan = plan_prompt([1, 2], [[3, 4, 5]], [9], adapter=adapter_key(one))
    side.add(new_request("save", plan.saves[0], one))
    run_step(side, save=5)
    assert side.index.keys() == set(plan.composed.keys)
    for name, lora in (("same", one), ("other", other), ("none", None)):
        request = new_request(name, plan.composed, lora)
        side.add(request)
        side.match(request, 0)
    assert side._refused == {"other", "none"}


def test_reset_sets_the_gauges_to_zero():
    side = scheduler(100)
    side.add(new_request("a", plan_prompt([1, 2], [[3, 4, 5]], [9]).saves[0]))
    run_step(side, a=5)
    assert side.take_stats().data["stored_bytes"] == 5
    side.reset()
    assert side.take_stats().data == {"stored_segments": 0, "stored_bytes": 0}


@pytest.mark.parametrize("refused", ["prompt_embeds", "mm_features", "resumable", "cache_salt", "prompt_token_ids"])
def test_unsupported_requests_are_refused(refused):
    side = scheduler(100)
    (save,) = plan_prompt([1, 2], [[3, 4, 5]], [9]).saves
    request = new_request("a", save)
    setattr(request, refused, {"prompt_token_ids": None, "mm_features": [1], "cache_salt": 3}.get(refused, True))
    side.add(request)
    assert side.match(request, 0) == (4, True)
    side.allocated(request, [7], 4)
    work = run_step(side)
    assert (work.failed_loads, work.loads, work.saves) == (["a"], [], [])
    assert not run_step(side).failed_loads
    side.finish("a")


def test_refused_request_of_one_token_keeps_its_prompt():
    side = scheduler(100)
    request = new_request("a", plan_prompt([], [[3]], [9]).saves[0])
    request.prompt_embeds, request.skip_reading_prefix_cache = True, True
    side.add(request)
    assert side.match(request, 0) == (1, True)
    assert (request.prompt_token_ids, request.num_tokens, request.skip_reading_prefix_cache) == ([3], 1, False)


def test_options():
    assert {field.name for field in dataclasses.fields(ChunkOptions)} == CLIENT_OPTIONS | {"chunk_position_gap"}
    assert ConnectorOptions.parse({"enable_chunk_aware": True}) == ConnectorOptions()
    assert ConnectorOptions.parse({"max_store_bytes": 3, "chunk_position_gap": 4}) == ConnectorOptions(3, 4)
    for wrong in ({"max_store_byte": 3}, {"max_store_bytes": True}, {"chunk_position_gap": -1}, {"chunk_position_gap": 1.5}):
        with pytest.raises(ValueError, match=r"unknown|integer"):
            ConnectorOptions.parse(wrong)


def table(positions, rotated, factor=1.0, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    return (torch.cat([angles.cos(), angles.sin()], -1) * factor).to(dtype)


def reference(key, position, rotated, is_neox, factor=1.0):
    """Key `[T, H, D]` at positions `[T]`, by complex numbers in float64."""
    angles = position[:, None].double() * 10000.0 ** (-torch.arange(0, rotated, 2).double() / rotated)
    z = torch.polar(torch.full_like(angles, factor), angles)[:, None]
    x = key[..., :rotated].double()
    pairs = torch.complex(*x.chunk(2, -1)) if is_neox else torch.complex(x[..., ::2], x[..., 1::2])
    moved = pairs * z
    both = torch.cat([moved.real, moved.imag], -1) if is_neox else torch.stack([moved.real, moved.imag], -1).flatten(-2)
    return torch.cat([both, key[..., rotated:].double()], -1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_rotation_equals_the_key_at_the_target(is_neox, rotated, factor):
    """Also below position 0, with an attention factor, with channels that are not rotated, and in both pairings."""
    torch.manual_seed(0)
    bare = torch.randn(40, 3, 16)
    source, target = torch.arange(40), torch.arange(40) * 7 - 60
    key = reference(bare, source, rotated, is_neox, factor).float()
    rotation = KeyRotation(table(300, rotated, factor), is_neox)
    out = torch.empty_like(key)
    rotation.apply(key, rotation.turn(source, target), out, torch.empty(2, 40, 3, rotated // 2))
    assert (out - reference(bare, target, rotated, is_neox, factor)).abs().max() < 2e-5


def test_rotation_undoes_the_rounding_of_the_table():
    rounded = table(300, 16, dtype=torch.bfloat16)
    rotation = KeyRotation(rounded, True)
    key = torch.randn(40, 1, 16)
    source, target = torch.arange(40), torch.arange(40) + 200

    def apply(at):
        cos, sin = rounded[at].float().chunk(2, -1)
        x, y = key.chunk(2, -1)
        return torch.cat([x * cos[:, None] - y * sin[:, None], y * cos[:, None] + x * sin[:, None]], -1)

    out = torch.empty_like(key)
    rotation.apply(apply(source), rotation.turn(source, target), out, torch.empty(2, 40, 1, 8))
    assert (out - apply(target)).abs().max() < 1e-5


class Writer:
    """Attention backend that lays a head's elements out in a given order.

    Like vLLM's Triton kernel, it reads its source by the stride of a token, and takes the heads to lie side by side.
    """

    def __init__(self, order=None):
        self.order = order

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        tokens = cache.shape[2]
        both = torch.cat([x.as_strided(x.shape, (x.stride(0), x.shape[2], 1)) for x in (key, value)], -1)
        if self.order is None:
            cache[slots // tokens, :, slots % tokens] = both
            return
        heads, width = both.shape[1:]
        inverse = self.order.argsort().view(tokens, width)
        for row, slot in zip(both, slots.tolist()):
            for head in range(heads):
                cache[slot // tokens, head].view(-1)[inverse[slot % tokens]] = row[head]


GPU_LAYOUTS = {
    "heads before tokens": lambda dtype: torch.zeros(12, 4, 32, 64, dtype=dtype),
    "tokens before heads": lambda dtype: torch.zeros(12, 32, 4, 64, dtype=dtype).transpose(1, 2),
    "layers inside blocks": lambda dtype: torch.zeros(12, 3, 4, 32, 64, dtype=dtype)[:, 1],
    "layers inside blocks, tokens before heads": lambda dtype: torch.zeros(12, 3, 32, 4, 64, dtype=dtype)[:, 1].transpose(1, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", GPU_LAYOUTS)
def test_block_layouts_of_gpu_backends(name, dtype):
    check_layout(Writer(), GPU_LAYOUTS[name](dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_layout_of_a_permuting_backend(dtype):
    torch.manual_seed(0)
    check_layout(Writer(torch.randperm(32 * 64)), torch.zeros(12, 2, 32, 64, dtype=dtype))


def check_layout(writer, cache):
    layout, layer = BlockLayout(32), SimpleNamespace(impl=writer)
    x = torch.randn(75, cache.shape[1], 64).to(cache.dtype)
    key, value = (part.contiguous() for part in x.chunk(2, -1))
    layout.write(layer, cache, key, value, layout.slots([5, 2, 9], 0, 75))
    assert torch.equal(layout.read(layer, cache, [5, 2, 9])[:75], x)
    assert not cache[[0, 1, 3]].any()


def test_block_layout_refuses_a_backend_that_scales():
    writer = SimpleNamespace(
        do_kv_cache_update=lambda layer, key, value, cache, slots: cache.copy_((torch.zeros_like(cache) + 7).to(cache.dtype))
    )
    with pytest.raises(NotImplementedError, match="permutation"):
        BlockLayout(32).read(SimpleNamespace(impl=writer), torch.zeros(3, 2, 32, 64), [1])


def test_save_holds_the_tokens_of_few_layers_at_a_time(monkeypatch):
    torch.manual_seed(0)
    layers = [(SimpleNamespace(impl=Writer()), torch.randn(5, 2, 32, 64)) for _ in range(6)]
    side = WorkerSide(32)
    side.register(layers, None)
    alive, most, read = weakref.WeakSet(), [], BlockLayout.read

    def watch(*args):
        tokens = read(*args)
        alive.add(tokens)
        most.append(len(alive))
        return tokens

    monkeypatch.setattr(BlockLayout, "read", watch)
    segments = (StoredSegment("prefix", 0, 40, 0), StoredSegment("chunk", 40, 70, 40))
    side.run_evictions_and_saves(StepWork(saves=[Save([3, 1, 4], segments)]))
    for segment in segments:
        expected = [read(side._layout, *layer, [3, 1, 4])[segment.start : segment.end] for layer in layers]
        assert torch.equal(side.store[segment.key], torch.stack(expected))
        assert side.store[segment.key].is_contiguous()
    assert max(most) <= 2


def engine_config(**changes):
    """vLLM's configuration of a supported engine, as far as `check_engine` reads it, with some fields changed."""
    spec = type("FullAttentionSpec", (), {"sliding_window": None, "attention_chunk_size": None})()
    fields = {
        "kv_transfer_config": {"kv_load_failure_policy": "fail", "kv_role": "kv_both"},
        "model_config": {
            "architecture": "LlamaForCausalLM",
            "is_multimodal_model": False,
            "is_hybrid": False,
            "use_mla": False,
            "get_sliding_window": lambda: None,
        },
        "hf_text_config": {"rope_parameters": {"rope_type": "default"}},
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "kv_cache_config": {"kv_cache_groups": [SimpleNamespace(kv_cache_spec=spec)]},
        "engine": {"speculative_config": None},
    }
    for name, value in changes.items():
        place, field = name.split("__")
        assert place in fields
        fields[place][field] = value
    parts = {name: SimpleNamespace(**values) for name, values in fields.items()}
    parts["model_config"].hf_text_config = parts["hf_text_config"]
    return SimpleNamespace(**parts, **fields["engine"]), parts["kv_cache_config"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "recompute"}, "kv_load_failure_policy"),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, "kv_role"),
        ({"model_config__architecture": "Gemma3ForCausalLM"}, "architecture Gemma3ForCausalLM"),
        ({"hf_text_config__layer_types": ["linear_attention", "full_attention"]}, r"recurrent layers.* use chunkattn\.LLM"),
        ({"model_config__is_multimodal_model": True}, "multimodal models"),
        ({"model_config__is_hybrid": True}, "hybrid models"),
        ({"kv_cache_config__kv_cache_groups": [SimpleNamespace(kv_cache_spec=None)] * 2}, "hybrid models"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__get_sliding_window": lambda: 64}, "sliding window"),
        ({"hf_text_config__layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"kv_cache_config__kv_cache_groups": [SimpleNamespace(kv_cache_spec=None)]}, "sliding window"),
        ({"hf_text_config__rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"hf_text_config__rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "multimodal rotary"),
        ({"hf_text_config__dual_chunk_attention_config": {}}, "dual chunk"),
        ({"hf_text_config__llama_4_scaling": {}}, "scaled by position"),
        ({"cache_config__cache_dtype": "fp8"}, "KV cache of type fp8"),
        ({"engine__speculative_config": object()}, "speculative decoding"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_engines_that_are_refused(changes, message):
    check_engine(*engine_config())
    with pytest.raises(UnsupportedError, match=message):
        check_engine(*engine_config(**changes))


def test_layers_that_are_refused():
    layer, window = SimpleNamespace(layer_name="first"), SimpleNamespace(layer_name="second", sliding_window=64)
    cache = torch.zeros(3, 2, 32, 64)
    check_layers([(layer, cache), (layer, cache)], 2, 32)
    for layers, message in [
        ([(layer, cache)], "2 layers have 1 KV caches"),
        ([(layer, cache), (window, cache)], "second has a sliding window"),
        ([(layer, cache), (layer, cache[0])], "first has a KV cache of shape"),
        ([(layer, cache), (layer, cache[:, :, :16])], "first has a KV cache of shape"),
        ([(layer, cache), (layer, cache[:, :1])], "several shapes"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            check_layers(layers, 2, 32)


def test_rotary_embeddings_that_are_refused(monkeypatch):
    class Embedding(torch.nn.Module):
        is_neox_style = True

    one, other, bare = Embedding(), Embedding(), Embedding()
    one.cos_sin_cache = other.cos_sin_cache = table(300, 16)
    for embeddings, gap, message in [
        ([], 0, "0 rotary embeddings"),
        ([one, other], 0, "2 rotary embeddings"),
        ([bare], 0, "no table"),
        ([one], 300, "300 positions"),
    ]:
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", dict(enumerate(embeddings)))
        with pytest.raises(UnsupportedError, match=message):
            model_rotation(gap)
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {0: one, 1: one})
    model_rotation(299)


def test_the_connector_loads_neither_jax_nor_the_engine():
    code = (
        "import sys, chunkattn.integrations.vllm.connector\n"
        "heavy = {'jax', 'chunkattn.engine', 'chunkattn.models', 'chunkattn.llm', 'chunkattn.parsers'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
