"""One line for every request, on stderr: what was asked, what came of it, how long it took.

In JSON for programs that read logs, in words for a person at a terminal.

What people wrote is not in it, unless the server was told to log prompts.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("unspool.serve")


class _Lines(logging.Formatter):
    """A record as a line of JSON, with the fields that came along."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Words(logging.Formatter):
    """A record for a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        words = [time.strftime("%H:%M:%S", time.localtime(record.created)), record.getMessage()]
        if record.getMessage() == "request":
            words = [words[0], fields["method"], fields["path"], str(fields["status"])]
            words.append(f"{fields['seconds']:.2f} s")
            if "prompt_tokens" in fields:
                words.append(
                    f"· {fields['prompt_tokens']} tokens read ({fields['cached_tokens']} cached), "
                    f"{fields['completion_tokens']} written"
                )
            fields = {name: fields[name] for name in _ODD if name in fields}
        words += [f"{name}={value}" for name, value in fields.items()]
        if record.exc_info:
            words.append("\n" + self.formatException(record.exc_info))
        return " ".join(words)


_ODD = (
    "replica",
    "error",
    "gone",
    "ignored",
    "notes",
    "prompts",
    "texts",
)  # of a request: said where they are there


def set_up(level: str, as_json: bool) -> None:
    """Send the server's log, and uvicorn's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines() if as_json else _Words())
    for name in ("unspool.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    log.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def log_event(event: str, level: int = logging.INFO, exc_info: Any = None, **fields: Any) -> None:
    """Log an event with its fields."""
    log.log(level, event, extra={"fields": fields}, exc_info=exc_info)
