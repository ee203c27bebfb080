"""Rotary embedding and the strategies that assign position ids."""
