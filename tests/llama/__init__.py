"""Tests whose witness is llama.cpp."""
