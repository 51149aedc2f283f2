"""Measures parts in a process of its own and tells what came of each, a line at a time.

A line is a JSON object: {"part": ..., "begin": true}, then {"part": ..., "result": ...} or
{"part": ..., "error": ...}. What libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpus import limits
from gpus.ours import Ours, Place, empty, load_from_disk, served
from gpus.parts import PARTS, Part
from gpus.theirs import Theirs

OWN = {"load": load_from_disk, "server": served}  # works that load a model themselves


def work(names: list[str], place: Place) -> None:
    """Names are parts ("8b"), parts as transformers does them ("8b@static"), or "limits"."""
    told = os.dup(1)
    os.dup2(2, 1)
    context = max((PARTS[name].context for name in names if name in PARTS), default=0)
    kept: dict[Any, Any] = {}  # at most one model, which the next part may need too

    def model(key: Any, make: Callable[[], Any]) -> Any:
        if key not in kept:
            for old in kept.values():
                with suppress(AttributeError):  # transformers' model is only let go of
                    old.close()
            kept.clear()
            empty()
            kept[key] = make()
        return kept[key]

    def measure(name: str) -> dict[str, Any]:
        if name == "limits":
            return dict(limits.measured(place.device, place.small))
        key, _, way = name.partition("@")
        part: Part = PARTS[key]
        if way:
            return dict(
                model(("theirs", part.shape), lambda: Theirs(part, place)).measure(part, way)
            )
        if part.work in OWN:
            model(None, lambda: None)
            return OWN[part.work](part, place)
        mine: Ours = model(part.model, lambda: Ours(part, place, context))
        return mine.measure(part)

    def tell(**line: Any) -> None:
        os.write(told, (json.dumps(line) + "\n").encode())

    for name in names:
        tell(part=name, begin=True)
        try:
            tell(part=name, result=measure(name))
        except Exception as error:
            traceback.print_exc()
            tell(part=name, error=f"{type(error).__name__}: {error}"[:500])
            if "CUDA error" in str(error):  # nothing runs in this process any more
                os._exit(3)
    sys.stderr.flush()
    os._exit(0)  # graphs and pools need no tidying up


def main(given: argparse.Namespace) -> None:
    place = Place(given.device, given.backend, given.rounds, given.tiny, given.scratch)
    work(given.parts, place)
