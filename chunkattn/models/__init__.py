"""The decoder, its families, its weights and the bundled demo model."""
