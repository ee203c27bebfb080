"""Entry point of `python -m chunkattn`."""

from chunkattn.cli import app

app()
