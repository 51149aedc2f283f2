"""The server's log on stderr: one line for each request with its outcome and duration.

JSON lines for programs, or text for a terminal. Prompts and answers are logged only with
`log_prompts`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("unspool.server")


class _JsonFormatter(logging.Formatter):
    """A record and its fields as a line of JSON."""

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


class _TextFormatter(logging.Formatter):
    """A record as text for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        words = [time.strftime("%H:%M:%S", time.localtime(record.created)), record.getMessage()]
        if record.getMessage() == "request":
            words = [words[0], fields["method"], fields["path"], str(fields["status"])]
            words.append(f"{fields['seconds']:.2f} s")
            if "prompt_tokens" in fields:
                words.append(
                    f"· {fields['prompt_tokens']} prompt tokens "
                    f"({fields['cached_tokens']} cached), {fields['completion_tokens']} generated"
                )
            fields = {name: fields[name] for name in _REQUEST_FIELDS if name in fields}
        words += [f"{name}={value}" for name, value in fields.items()]
        if record.exc_info:
            words.append("\n" + self.formatException(record.exc_info))
        return " ".join(words)


_REQUEST_FIELDS = (  # shown in a text line if present
    "replica",
    "error",
    "gone",
    "ignored",
    "notes",
    "prompts",
    "texts",
)


def configure_logging(level: str, as_json: bool) -> None:
    """Log to stderr: the server's events, and uvicorn's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    for name in ("unspool.server", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    log.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def log_event(event: str, level: int = logging.INFO, exc_info: Any = None, **fields: Any) -> None:
    """Log an event with its fields."""
    log.log(level, event, extra={"fields": fields}, exc_info=exc_info)
