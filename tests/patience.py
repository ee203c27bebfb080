"""The longest wait for what is sure to come."""

PATIENCE_S = 300.0
"""Seconds after which a wait is a hang. It is long, for the machine may do much else; only a test that fails waits so long."""
