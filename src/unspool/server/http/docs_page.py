"""`GET /docs`: a page that lists the endpoints and lets people try them.

One self-contained file, so that it works offline and sends no request to other hosts. Its
Content-Security-Policy allows its own style and script, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from unspool.server.http.replies import new_router

router = new_router("Operation")
PAGE = Path(__file__).with_name("static") / "docs.html"


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    text, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page, and its Content-Security-Policy."""
    text = PAGE.read_text(encoding="utf-8")
    directives = {
        "default-src": "'none'",
        "style-src": _hashes("style", text),
        "script-src": _hashes("script", text),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in directives.items())


def _hashes(tag: str, text: str) -> str:
    """Hashes of the content of these elements, as a policy lists them."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (hashlib.sha256(part.encode()).digest() for part in parts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
