"""Commands of the command line: `chunkattn serve | generate | score | inspect | demo | cache | eval | calibrate | bench`."""

from chunkattn.cli import bench, bench_score, cache, evaluate, prompts, serve
from chunkattn.cli.common import app

__all__ = ["app", "bench", "bench_score", "cache", "evaluate", "prompts", "serve"]
