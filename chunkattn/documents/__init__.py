"""Documents stored by id: their records, registry and routes. No engine, no network."""
