"""Paths of routes that more than one module names."""

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
"""Paths of the route that ranks documents. A path that ends like another one comes before it."""
OPEN_PATHS = ("/health", "/livez", "/ping", "/readyz")
"""Routes open without a key, because health probes have no key."""
RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"
"""Routes of OpenAI's Responses API and of Anthropic's Messages API."""
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
ANTHROPIC_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH)
"""Routes whose errors and headers have Anthropic's form."""
