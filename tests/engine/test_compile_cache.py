"""Every host of a group keeps its compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache, compiler, distributed

from chunkattn.engine import build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty compilation cache."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(compiler, "distributed", distributed)
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("kept", [True, False])
def test_a_follower_writes_programs_only_with_our_help(cache, monkeypatch, kept):
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    if kept:
        build._write_compile_cache_here()
    jax.jit(lambda x: jnp.sin(x) * 65)(jnp.arange(7.0)).block_until_ready()
    assert any(cache.glob("jit__lambda*")) == kept
    assert distributed.global_state.process_id == 1


def test_a_jax_of_another_build_is_a_warning(cache, monkeypatch, caplog):
    monkeypatch.delattr(compiler, "distributed")
    build._write_compile_cache_here()
    assert "keeps no compiled programs" in caplog.text
