"""Parsers from text, chat messages or token ids to a `ChunkLayout`."""

from chunkattn.parsers.prompt import ChunkedPrompt, DocumentPrompt, ParsedPrompt, PromptParser

__all__ = ["ChunkedPrompt", "DocumentPrompt", "ParsedPrompt", "PromptParser"]
