"""The engine: scheduling, batching, the jitted step and sampling."""
