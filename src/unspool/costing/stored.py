"""Reports that were kept: one JSON file each, as `unspool costs` writes it, in one folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.model.packaged import cache_folder

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def folder() -> Path:
    """Where they lie."""
    return cache_folder() / "reports"


def keep(report: Mapping[str, Any]) -> str:
    """Keep a report's JSON; gives its name."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", str(report["model"])).strip("-.") or "model"
    stem = f"{model[:60]}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder().mkdir(parents=True, exist_ok=True)
    number, name = 1, stem
    while _file(name).exists():  # two in one second
        number += 1
        name = f"{stem}-{number}"
    # Whole or not at all: whoever lists the folder meanwhile reads no half of it.
    begun = folder() / f".{name}.part"
    begun.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    begun.replace(_file(name))
    return name


def known() -> list[dict[str, Any]]:
    """What there is, the newest first: names, and what each report measured."""
    found = []
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a file of somebody else's
            report = json.loads(path.read_text(encoding="utf-8"))
            about = {name: report[name] for name in ("model", "quick", "seed", "seconds")}
            parts = [part["name"] for part in report["parts"]]
            found.append({"name": path.stem, **about, "parts": parts, "made": path.stat().st_mtime})
    return sorted(found, key=lambda one: (-one["made"], one["name"]))


def read(name: str) -> dict[str, Any]:
    """The report of this name."""
    try:
        found: dict[str, Any] = json.loads(_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnspoolError(f"there is no report {name[:100]!r} in {folder()}") from error
    return found


def forget(name: str) -> None:
    """Delete it."""
    try:
        _file(name).unlink()
    except OSError as error:
        raise UnspoolError(f"there is no report {name[:100]!r} in {folder()}") from error


def _file(name: str) -> Path:
    """No path is ever put together from more than one plain name."""
    if not _PLAIN.fullmatch(name):
        raise UnspoolError(f"there is no report {name[:100]!r} in {folder()}")
    return folder() / f"{name}.json"
