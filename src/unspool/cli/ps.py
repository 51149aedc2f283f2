"""`unspool ps`: which models a running server has in memory."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any

import typer

from unspool.cli.table import print_json, print_table
from unspool.errors import UnspoolError

_TIMEOUT = 10.0  # seconds


def ps(
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """The models that a running server has loaded.

    A server that wants a key gets the one in UNSPOOL_API_KEY.

    [b]Examples[/b]

      unspool ps
      unspool ps --url http://127.0.0.1:9000
    """
    from unspool.model.hub.memory import format_bytes

    loaded = _loaded(url if "://" in url else f"http://{url}")
    if as_json:
        print_json(loaded)
    elif not loaded:
        print("no model is loaded")
    else:
        rows = [
            [str(each.get("name", "?")), format_bytes(int(each.get("size") or 0)), _until(each)]
            for each in loaded
        ]
        print_table("name size until", rows)


def _loaded(url: str) -> list[dict[str, Any]]:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url.rstrip('/')}/api/ps")
    if key := os.environ.get("UNSPOOL_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            read = json.loads(answer.read())
        return [dict(each) for each in read["models"]]
    except urllib.error.HTTPError as error:
        hint = "set UNSPOOL_API_KEY to its key" if error.code == 401 else "is it unspool serve?"
        raise UnspoolError(f"the server at {url} answers {error.code}: {hint}") from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnspoolError(
            f"no server answers at {url} ({reason}): start one with unspool serve, or give its"
            " address with --url"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise UnspoolError(f"what answers at {url} is no server of models") from None


def _until(model: dict[str, Any]) -> str:
    """When it goes if nobody uses it; a time far away means never."""
    when = str(model.get("expires_at") or "")
    if when[:4].isdigit() and int(when[:4]) > time.localtime().tm_year + 50:
        return "forever"
    return when.partition(".")[0].replace("T", " ")
