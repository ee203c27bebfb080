"""The places of K/V: slots within a sequence, pages within the pool, and entries on disk."""
