"""Comparison of a server's answers with its first answers, for `chunkattn flips`."""
