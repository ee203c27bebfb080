"""Log lines of both processes: their format and clock, and the line of transformers that is not shown."""

from __future__ import annotations

import json
import logging
import os
import time

_BEGAN = time.perf_counter()
VARIABLE = "CHUNKATTN_LOG_FORMAT"
"""Environment variable with the log format, `json` or `text`. The engine's process inherits it."""


class JsonFormatter(logging.Formatter):
    """Formatter that writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line break."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **({"request": record.__dict__["request"]} if "request" in record.__dict__ else {}),
            **({"exception": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return json.dumps(fields, ensure_ascii=False)


def since_start() -> float:
    """Return the seconds since this process began to import the package, whose first module this is."""
    return time.perf_counter() - _BEGAN


def hide_pytorch_advice() -> None:
    """Hide the advice of transformers to install PyTorch, which this package does not need. Its other lines stay."""
    logging.getLogger("transformers").addFilter(_needs_no_pytorch)


def _needs_no_pytorch(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("PyTorch was not found")


def make_handler() -> logging.Handler:
    """Return a handler that writes to stderr in the format of the environment variable."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if os.environ.get(VARIABLE) == "json" else text)
    return handler
