"""Benchmarks whose figures the documentation quotes. Each prints a table, and JSON with `--json`."""
