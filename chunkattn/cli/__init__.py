"""Commands: `chunkattn serve | generate | score | inspect | demo | cache | eval | calibrate | bench | check | env`."""

from chunkattn.cli import bench, bench_gen, bench_score, bench_serve, cache, check, environment, evaluate, prompts, serve
from chunkattn.cli.common import app

__all__ = [
    "app", "bench", "bench_gen", "bench_score", "bench_serve", "cache", "check", "environment", "evaluate", "prompts", "serve",
]  # fmt: skip
