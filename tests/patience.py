"""The longest wait for what is sure to come."""

PATIENCE_S = 300.0
"""Seconds after which a test calls a wait a hang. It is long, for the machine may do much else; only a failing test waits so long."""
