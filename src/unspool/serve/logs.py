"""One line of JSON for every request, on stderr: what was asked, what came of it, how long it took.

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


def set_up(level: str) -> None:
    """Send the server's log, and uvicorn's warnings, to stderr as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name in ("unspool.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    log.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def tell(event: str, level: int = logging.INFO, exc_info: Any = None, **fields: Any) -> None:
    """Log an event with its fields."""
    log.log(level, event, extra={"fields": fields}, exc_info=exc_info)
