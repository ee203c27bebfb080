"""Commands: `serve | route | generate | score | decide | inspect | demo | cache | eval | calibrate | bench | plan | ...`."""

from chunkattn.cli import (
    bench,
    bench_gen,
    bench_score,
    bench_serve,
    cache,
    check,
    decide,
    environment,
    evaluate,
    flips,
    plan,
    prompts,
    route,
    serve,
)
from chunkattn.cli.common import app

__all__ = [
    "app", "bench", "bench_gen", "bench_score", "bench_serve", "cache", "check", "decide", "environment", "evaluate", "flips",
    "plan", "prompts", "route", "serve",
]  # fmt: skip
