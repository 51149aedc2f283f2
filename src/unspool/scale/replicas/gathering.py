"""Answers of several replicas made into one: counters, and lists of branches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.*)$")


def joined_metrics(texts: Mapping[str, bytes]) -> bytes:
    """The counters of all, each labelled with its replica; `texts` are what Prometheus reads.

    A family's lines have to stand together, so they are gathered by family.
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
                if not any(known.split(b" ", 3)[1] == kind for known in head):
                    head.append(line)
            elif found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                every = b",".join(part for part in (label, labels) if part)
                samples.setdefault(family, []).append(b"%b{%b} %b" % (name, every, value))
    blocks = [[*lines, *samples.get(family, [])] for family, lines in heads.items()]
    return b"".join(line + b"\n" for block in blocks for line in block)


def joined_branches(lists: list[bytes]) -> dict[str, Any]:
    """The branches of all replicas, the newest first."""
    found = [branch for text in lists for branch in json.loads(text)["data"]]
    found.sort(key=lambda branch: branch["created"], reverse=True)
    return {"object": "list", "data": found}
