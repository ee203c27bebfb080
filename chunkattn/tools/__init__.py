"""Commands that measure: benchmarks, load, flips and evaluation."""
