"""What one step of a replica takes, as tables that were measured.

A step gives each text that is being written its next token, and reads chunks of prompts beside
them. Its seconds are a sum of four terms, each of which stands for work that grows in its own way:

    decode(rows)         the texts that get a token, so many at once
    + prefill(tokens)    the tokens of prompts, if there are any
    + context_s x ...    attention of these texts: how many tokens they look back at, all together
    + pair_s x ...       attention within prompts: pairs of a token and one that it looks at

A table is straight between the numbers at which it was measured. `request_s` passes beside the
steps between a client and the engine, once for each request.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "costs"


class CostsError(Exception):
    """A table is not there, or is not one."""


@dataclass(frozen=True)
class Shape:
    """What a replica is, beside its speed: `StepLimits` of its backend, its memory, its server."""

    page_size: int = 16
    page_count: int = 20_000
    max_rows: int = 256
    prefill_tokens: int = 256
    prefill_beside_decode: int = 64
    overlaps: bool = False  # whether a step is launched before the one before it was read
    max_running: int = 64  # texts that the server has the engine write at once
    max_queued: int = 256  # requests that wait for that; more are refused
    start_s: float = 5.0  # from nothing to the first request


@dataclass(frozen=True)
class Table:
    """Seconds by a number."""

    at: tuple[int, ...]  # rising
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.at))
        if not (self.at and len(self.at) == len(self.seconds) and rising):
            raise CostsError("a table needs rising numbers, and as many seconds")
        if min(self.seconds) < 0:
            raise CostsError("no step takes less than no time")

    def __call__(self, number: int) -> float:
        """On the line between the neighbours; beyond the last one, on the last line."""
        known, seconds = self.at, self.seconds
        if number <= known[0] or len(known) == 1:
            return seconds[0]
        right = min(bisect_right(known, number), len(known) - 1)
        share = (number - known[right - 1]) / (known[right] - known[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step, and the replica they were measured on."""

    name: str
    source: str  # who measured it, where and how
    decode: Table  # by texts that get a token
    prefill: Table  # by tokens of prompts
    context_s: float = 0.0  # for each token that a text looks back at
    pair_s: float = 0.0  # the same for each token of a prompt
    request_s: float = 0.0
    shape: Shape = field(default_factory=Shape)

    def step(self, rows: int, context: int, prefill: int, pairs: int) -> float:
        """Seconds of a step that gives so many texts a token and reads so much of prompts."""
        seconds = context * self.context_s + pairs * self.pair_s
        if rows:
            seconds += self.decode(rows)
        if prefill:
            seconds += self.prefill(prefill)
        return seconds

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load(name: str) -> StepCosts:
    """A table by its file, or by its name if it came with the repository."""
    file = Path(name) if name.endswith(".json") else HERE / f"{name}.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        shape = Shape(**found.pop("shape", {}))
        decode, prefill = (_table(found.pop(name)) for name in ("decode", "prefill"))
        return StepCosts(decode=decode, prefill=prefill, shape=shape, **found)
    except FileNotFoundError:
        known = ", ".join(sorted(one.stem for one in HERE.glob("*.json")))
        raise CostsError(
            f"there is no table of step costs at {file}; known ones: {known}; "
            "`python bench/fleet.py calibrate` measures this machine"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise CostsError(f"{file} is not a table of step costs: {error}") from None


def _table(found: dict[str, Any]) -> Table:
    return Table(tuple(found["at"]), tuple(found["seconds"]))
