"""Bodies of requests, as clients send them."""
