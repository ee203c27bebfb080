"""The commands: `chunkattn generate | score | inspect | demo | cache | bench`."""

from chunkattn.cli import bench, cache, prompts
from chunkattn.cli.common import app

__all__ = ["app", "bench", "cache", "prompts"]
