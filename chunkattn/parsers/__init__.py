"""Text or token ids to `ChunkLayout`."""

from chunkattn.parsers.prompt import ChunkedPrompt, ParsedPrompt, PromptParser

__all__ = ["ChunkedPrompt", "ParsedPrompt", "PromptParser"]
