"""Calls: arguments to jobs, engine outputs to results."""
