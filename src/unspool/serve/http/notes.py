"""Response headers that report ignored parameters and other notes on a request.

    x-unspool-ignored: store, verbosity
    x-unspool-note: the JSON schema's 'not' cannot be enforced: check the answer for it

The log line of the request has both too.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request

_MAX_HEADER = 1000  # characters


def ignore(request: Request, *names: str) -> None:
    """Report that these parameters have no effect."""
    _add(request.state.log, "ignored", names)


def note(request: Request, *notes: str) -> None:
    """Report how the request was interpreted."""
    _add(request.state.log, "notes", notes)


def _add(log: dict[str, Any], name: str, words: tuple[str, ...]) -> None:
    reported = log.setdefault(name, []) if words else []
    reported += [word for word in words if word not in reported]


def note_headers(log: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """The response headers for a request with this log."""
    headers = [
        (b"x-unspool-ignored", ", ".join(log.get("ignored", ()))),
        (b"x-unspool-note", "; ".join(log.get("notes", ()))),
    ]
    return [
        (name, text.encode("ascii", "backslashreplace")[:_MAX_HEADER])
        for name, text in headers
        if text
    ]
