"""Where K/V live: slots within a sequence, pages within the pool."""
