"""The HTTP server: OpenAI-compatible routes over `AsyncLLM`."""
