"""Calls of the API: turn arguments into jobs, and engine outputs into results."""
