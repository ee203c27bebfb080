"""The K/V store, which keeps K/V of prompt parts on disk."""
