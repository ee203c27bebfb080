"""From a request to its tokens: scheduling, batching, the jitted step, sampling."""
