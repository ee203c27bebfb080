"""Benchmarks that give the figures of the documentation. Each prints a table, and JSON with `--json`."""
