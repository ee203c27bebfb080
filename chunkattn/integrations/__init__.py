"""Integrations with other inference engines."""
