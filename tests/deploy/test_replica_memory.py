"""Memory of the replicas that one machine runs."""

import pytest

from chunkattn.errors import ConfigError
from chunkattn.integrations.ray import local

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """A machine with 32 GiB."""
    values = {"SC_PHYS_PAGES": 32 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(local.os, "sysconf", values.__getitem__)


def test_replicas_share_the_memory_of_states():
    cpu, gpu = {"num_cpus": 2}, {"num_cpus": 2, "num_gpus": 1}
    assert local._state_bytes(None, 4, cpu) is None, "an engine takes at most 2 GiB, which all have"
    assert local._state_bytes(None, 8, cpu) == GIB
    assert local._state_bytes(3 * GIB, 8, cpu) == 3 * GIB
    assert local._state_bytes(None, 8, gpu) is None
    assert local._state_bytes(50 * GIB, 8, gpu) == 50 * GIB
    with pytest.raises(ConfigError, match=f"8 replicas with state_cache_memory_bytes {5 * GIB} each need {40 * GIB} bytes"):
        local._state_bytes(5 * GIB, 8, cpu)


def test_replicas_share_the_memory_of_kv_pools():
    cpu = {"num_cpus": 2}
    assert [local._kv_bytes(None, count, cpu) for count in (4, 64)] == [GIB, GIB // 4]
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        local._kv_bytes(5 * GIB, 8, cpu)
