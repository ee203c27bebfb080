"""Paths of routes that have more than one name."""

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
"""Paths of the route that ranks documents. A path that ends like another one comes before it."""
