"""`GET /`: the page, and its files under `/page/`.

Only what lies in the page's folder can be asked for, by the names found there: no path is ever put
together from a request. A file that changes is read again, so that a reload shows an edit.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

router = APIRouter()
FOLDER = Path(__file__).parent
PREFIX = "/page/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only the page's own files run and style it, and it speaks to nobody but its own server.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for each time, and answered with 304 if it is the same
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One file as it is sent."""

    stamp: tuple[int, int]
    body: bytes
    packed: bytes
    tag: str


_paths: dict[str, Path] = {}  # what may be asked for: name in the address, and file
_read: dict[str, _File] = {}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    if request.headers.get("user-agent", "").startswith("ollama"):
        return Response("Ollama is running", media_type="text/plain")  # they ask before all else
    return _sent("index.html", request)


@router.get("/favicon.ico", include_in_schema=False)
async def icon(request: Request) -> Response:
    """Browsers ask for it wherever a page names none, as when JSON is opened."""
    return _sent("icon.svg", request)


@router.get(PREFIX + "{name:path}", include_in_schema=False)
async def page_file(name: str, request: Request) -> Response:
    return _sent(name, request)


def _sent(name: str, request: Request) -> Response:
    if name not in _paths:
        _paths.update(_found())
    path = _paths.get(name)
    if path is None or not path.is_file():
        raise HTTPException(404, "the page has no such file")
    stat = path.stat()
    stamp = (stat.st_mtime_ns, stat.st_size)
    found = _read.get(name)
    if found is None or found.stamp != stamp:
        body = path.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        found = _read[name] = _File(stamp, body, gzip.compress(body, 9), tag)
    headers = {**_HEADERS, "etag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    body = found.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = found.packed, "gzip"
    return Response(body, headers=headers, media_type=TYPES[path.suffix])


def _found() -> dict[str, Path]:
    found = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path for path in found}
