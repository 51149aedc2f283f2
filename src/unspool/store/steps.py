"""Steps as compact bytes, for the database.

Numbers are exact: a step that is read again equals the one that was written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from unspool.engine.results import Candidate, Step
from unspool.sampling.chain import Draw, StageReport

_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
# Field values at the end of a row that equal these are not written.
_DEFAULTS: list[Any] = [None, None, None, None, [], [], None, 0, False, False, None, ""]
_NUM_PLAIN = 7  # fields before them, which every row has


def encode_steps(steps: Sequence[Step]) -> bytes:
    """Return steps as bytes; `decode_steps` reads them."""
    return zlib.compress(_encode([_row(step) for step in steps]).encode(), 1)


def decode_steps(data: bytes) -> list[Step]:
    """Return the steps of `encode_steps`."""
    return [_step(row) for row in json.loads(zlib.decompress(data))]


def _row(step: Step) -> list[Any]:
    draw = step.draw
    row: list[Any] = [
        step.token,
        step.bytes.decode("latin-1"),
        step.text,
        step.logprob,
        step.position,
        step.seconds,
        step.finish_reason,
        step.rank,
        step.entropy,
        step.probability,
        None if draw is None else (draw.u, draw.low, draw.high),
        [(c.token, c.text, c.logprob, c.probability) for c in step.candidates],
        [(s.name, s.kept, s.removed, s.kept_mass, s.changed, s.top) for s in step.stages],
        step.draft,
        step.retracts,
        step.chosen,
        step.thought,
        step.canvas_pass,
        step.partial_utf8.decode("latin-1"),
    ]
    while len(row) > _NUM_PLAIN and row[-1] == _DEFAULTS[len(row) - 1 - _NUM_PLAIN]:
        row.pop()
    return row


def _step(row: list[Any]) -> Step:
    row += _DEFAULTS[len(row) - _NUM_PLAIN :]
    (
        token, data, text, logprob, position, seconds, finish_reason, rank, entropy, probability,
        draw, candidates, stages, draft, retracts, chosen, thought, canvas_pass, partial,
    ) = row  # fmt: skip
    return Step(
        token,
        data.encode("latin-1"),
        text,
        logprob,
        position,
        seconds,
        finish_reason,
        rank,
        entropy,
        probability,
        None if draw is None else Draw(*draw),
        tuple([Candidate(*candidate) for candidate in candidates]),
        tuple([_stage(*stage) for stage in stages]),
        draft,
        retracts,
        chosen,
        thought,
        canvas_pass,
        partial.encode("latin-1"),
    )


def _stage(
    name: str, kept: int, removed: int, kept_mass: float, changed: int, top: list[list[Any]]
) -> StageReport:
    pairs = tuple([(token, chance) for token, chance in top])
    return StageReport(name, kept, removed, kept_mass, changed, pairs)
