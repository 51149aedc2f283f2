"""Stored reports: one JSON file each, as `unspool costs` writes it, in one folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.model.hub.download import cache_folder

_VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def reports_folder() -> Path:
    """Return the folder of the reports."""
    return cache_folder() / "reports"


def save_report(report: Mapping[str, Any]) -> str:
    """Store a report's JSON; return its name."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", str(report["model"])).strip("-.") or "model"
    stem = f"{model[:60]}-{time.strftime('%Y%m%d-%H%M%S')}"
    reports_folder().mkdir(parents=True, exist_ok=True)
    number, name = 1, stem
    while _file(name).exists():  # two in one second
        number += 1
        name = f"{stem}-{number}"
    # Write to a temporary file and rename: readers never see half a report.
    partial = reports_folder() / f".{name}.part"
    partial.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(_file(name))
    return name


def list_reports() -> list[dict[str, Any]]:
    """Return name and summary of all reports, the newest first."""
    reports = []
    for path in reports_folder().glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # not a report
            report = json.loads(path.read_text(encoding="utf-8"))
            about = {name: report[name] for name in ("model", "quick", "seed", "seconds")}
            parts = [part["name"] for part in report["parts"]]
            reports.append(
                {"name": path.stem, **about, "parts": parts, "made": path.stat().st_mtime}
            )
    return sorted(reports, key=lambda report: (-report["made"], report["name"]))


def read_report(name: str) -> dict[str, Any]:
    """Return the report with this name."""
    try:
        report: dict[str, Any] = json.loads(_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnspoolError(f"no such report: {name[:100]!r} in {reports_folder()}") from error
    return report


def delete_report(name: str) -> None:
    """Delete the report with this name."""
    try:
        _file(name).unlink()
    except OSError as error:
        raise UnspoolError(f"no such report: {name[:100]!r} in {reports_folder()}") from error


def _file(name: str) -> Path:
    """Return the file of a report; only plain file names are valid."""
    if not _VALID_NAME.fullmatch(name):
        raise UnspoolError(f"no such report: {name[:100]!r} in {reports_folder()}")
    return reports_folder() / f"{name}.json"
