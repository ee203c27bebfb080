"""Benchmarks that `chunkattn bench` runs."""
