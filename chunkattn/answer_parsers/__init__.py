"""Parsers of generated text: calls of tools and reasoning, whole and in streams, and the grammars that enforce calls."""
