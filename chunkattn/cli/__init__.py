"""Commands: `serve | route | generate | score | decide | inspect | demo | cache | eval | calibrate | bench | plan | ...`.

`--help` lists the commands in the order of these imports.
"""

# isort: off
from chunkattn.tools.bench import command as bench, gen_command, score_command
from chunkattn.tools.load import command as load
from chunkattn.cli import cache, check, decide, environment
from chunkattn.tools.eval import command as evaluate, calibrate_command
from chunkattn.tools.flips import command as flips
from chunkattn.cli import plan, prompts, route, serve
from chunkattn.terminal.commands import app

__all__ = [
    "app", "bench", "cache", "calibrate_command", "check", "decide", "environment", "evaluate", "flips", "gen_command", "load",
    "plan", "prompts", "route", "score_command", "serve",
]  # fmt: skip
