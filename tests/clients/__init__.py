"""Clients that others wrote, in an environment of their own, against a server of the main environment."""
