"""The format of log lines, in this process and the engine's."""

from __future__ import annotations

import json
import logging
import os

VARIABLE = "CHUNKATTN_LOG_FORMAT"
"""`json` or `text`; the engine's process inherits it."""


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
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
    """Writes to stderr, in the format the environment asks for."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if os.environ.get(VARIABLE) == "json" else text)
    return handler
