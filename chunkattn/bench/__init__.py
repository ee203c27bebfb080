"""Benchmarks behind `chunkattn bench`."""
