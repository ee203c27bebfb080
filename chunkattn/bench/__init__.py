"""Benchmarks that ship with the package: `chunkattn bench`."""
