"""`GET /`: the page, and its files under `/page/`.

Only files of the page's folder are served, by a table of their names: no path is built from a
request. A file that changed on disk is read again, so a reload shows an edit.
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
    ".gz": "application/gzip",
}
# Scripts, styles and requests of this server only.
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
    "cache-control": "no-cache",  # browsers revalidate each time; unchanged files answer 304
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class _CachedFile:
    """Contents of one file, ready to send."""

    version: tuple[int, int]  # modification time in ns, and size
    body: bytes
    gzipped: bytes
    etag: str


_paths: dict[str, Path] = {}  # name in the URL -> file
_cache: dict[str, _CachedFile] = {}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    if request.headers.get("user-agent", "").startswith("ollama"):
        return Response("Ollama is running", media_type="text/plain")  # its clients check
    return _file_response("index.html", request)


@router.get("/favicon.ico", include_in_schema=False)
async def icon(request: Request) -> Response:
    """Serve the icon that browsers request for answers without one, such as JSON."""
    return _file_response("icon.svg", request)


@router.get(PREFIX + "{name:path}", include_in_schema=False)
async def page_file(name: str, request: Request) -> Response:
    return _file_response(name, request)


def _file_response(name: str, request: Request) -> Response:
    if name not in _paths:
        _paths.update(_list_files())
    path = _paths.get(name)
    if path is None or not path.is_file():
        raise HTTPException(404, "the page has no such file")
    stat = path.stat()
    version = (stat.st_mtime_ns, stat.st_size)
    file = _cache.get(name)
    if file is None or file.version != version:
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        file = _cache[name] = _CachedFile(version, body, gzip.compress(body, 9), etag)
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    body = file.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = file.gzipped, "gzip"
    return Response(body, headers=headers, media_type=TYPES[path.suffix])


def _list_files() -> dict[str, Path]:
    paths = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path for path in paths}
