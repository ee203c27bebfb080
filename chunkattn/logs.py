"""Format of log lines, in the server's process and the engine's."""

from __future__ import annotations

import json
import logging
import os

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


def make_handler() -> logging.Handler:
    """Return a handler that writes to stderr in the format of the environment variable."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if os.environ.get(VARIABLE) == "json" else text)
    return handler
