"""Engines that run on several hosts."""
