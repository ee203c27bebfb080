"""Engines that must not start."""

import pytest

from tests.vllm.engines import engine


@pytest.mark.parametrize(
    ("name", "connector", "options", "match"),
    [
        ("mistral-window", {}, {}, "sliding window"),
        ("qwen2-window", {}, {}, "sliding window"),
        ("llama-dynamic", {}, {}, "'dynamic'"),
        ("llama", {}, {"kv_cache_dtype": "fp8"}, "KV cache of type fp8"),
        ("llama", {}, {"transfer": {"kv_load_failure_policy": "recompute"}}, "kv_load_failure_policy"),
        ("llama", {}, {"transfer": {"kv_role": "kv_consumer"}}, "kv_role"),
        ("llama", {"max_store_byte": 3}, {}, "unknown"),
        ("llama", {"max_store_bytes": -1}, {}, "at least 0"),
        ("llama", {"chunk_position_gap": "3"}, {}, "integer"),
        ("llama", {"chunk_position_gap": 5000}, {}, "4096 positions"),
    ],
)
def test_refusal_names_the_reason(checkpoint, name, connector, options, match):
    with pytest.raises(Exception, match=match), engine(checkpoint(name), connector, **options):
        pass
