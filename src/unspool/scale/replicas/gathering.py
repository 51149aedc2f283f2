"""Merge responses of several replicas: metrics and branch lists."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.*)$")


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Merge Prometheus texts by replica, with a label for the replica.

    The lines of a metric family must be consecutive, so they are grouped by family.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for replica, text in texts.items():
        label = b'replica="%b"' % replica.encode()
        family = b""
        for line in text.splitlines():
            if line.startswith(b"#"):
                kind, name = line.split(b" ", 3)[1:3]
                family = name
                head = heads.setdefault(family, [])
                if not any(previous.split(b" ", 3)[1] == kind for previous in head):
                    head.append(line)
            elif sample := _SAMPLE.match(line):
                name, labels, value = sample.groups()
                all_labels = b",".join(part for part in (label, labels) if part)
                samples.setdefault(family, []).append(b"%b{%b} %b" % (name, all_labels, value))
    blocks = [[*lines, *samples.get(family, [])] for family, lines in heads.items()]
    return b"".join(line + b"\n" for block in blocks for line in block)


def merge_branches(lists: list[bytes]) -> dict[str, Any]:
    """Merge the branch lists of all replicas, the newest first."""
    branches = [branch for text in lists for branch in json.loads(text)["data"]]
    branches.sort(key=lambda branch: branch["created"], reverse=True)
    return {"object": "list", "data": branches}
