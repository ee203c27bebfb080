"""The K/V store: K/V of prompt parts on disk."""
