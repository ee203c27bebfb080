"""Parsers from text, chat messages or token ids to a `ChunkLayout`."""

from chunkattn.parsers.parser import PromptParser
from chunkattn.parsers.prompt import ChunkedPrompt, DocumentPrompt, ParsedPrompt

__all__ = ["ChunkedPrompt", "DocumentPrompt", "ParsedPrompt", "PromptParser"]
