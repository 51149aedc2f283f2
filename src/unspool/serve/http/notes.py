"""What a client is told beside its answer, in headers: what was ignored, and what to know of it.

    x-unspool-ignored: store, verbosity
    x-unspool-note: the JSON schema's 'not' cannot be kept to: check the answer for it

The same stands in the request's line in the log.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

_LONGEST = 1000  # characters of a header


def ignore(request: Request, *names: str) -> None:
    """Say that these parameters mean nothing here."""
    _add(request.state.log, "ignored", names)


def note(request: Request, *notes: str) -> None:
    """Say something about how the request was understood."""
    _add(request.state.log, "notes", notes)


def _add(log: dict[str, Any], name: str, words: tuple[str, ...]) -> None:
    known = log.setdefault(name, []) if words else []
    known += [word for word in words if word not in known]


def note_headers(log: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer whose request has this log."""
    found = [
        (b"x-unspool-ignored", ", ".join(log.get("ignored", ()))),
        (b"x-unspool-note", "; ".join(log.get("notes", ()))),
    ]
    return [
        (name, text.encode("ascii", "backslashreplace")[:_LONGEST]) for name, text in found if text
    ]
