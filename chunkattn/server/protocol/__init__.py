"""Request bodies of the HTTP API."""
