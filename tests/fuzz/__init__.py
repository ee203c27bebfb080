"""A differential fuzzer of the cache: random operations on one engine, every answer compared with an independent one."""
