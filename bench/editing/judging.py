"""What a judge that had no part in an edit says of it: bits per byte before and after.

Bytes, not tokens, since the judge's vocabulary is another one than the editor's, and a change may
make a text longer or shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from editing.errors import Case, outcome
from unspool.decoding.edit.edit import document_score

Rows = np.ndarray[Any, np.dtype[np.float64]]
_ROUNDS = 4_000  # of the bootstrap
_DAMAGE = 0.01  # bits per byte: where errors cost the judge less, no share of them means anything


@dataclass(slots=True)
class Judge:
    """A causal model that reads texts; each is read once."""

    lm: Any
    known: dict[str, float] = field(default_factory=dict)

    def bits_per_byte(self, text: str) -> float:
        if text not in self.known:
            bits = -document_score(self.lm, text).total / math.log(2)
            self.known[text] = bits / len(text.encode())
        return self.known[text]


def record(judge: Judge, case: Case, revised: str) -> dict[str, Any]:
    """One text under one setting."""
    texts = {"original": case.original, "before": case.damaged, "after": revised}
    bits = {name: judge.bits_per_byte(text) for name, text in texts.items()}
    return {"kind": case.kind, **bits, **asdict(outcome(case, revised)), "text": revised}


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The texts of one kind under one setting, with 95 % intervals over texts."""
    names = ("original", "before", "after")
    bits = np.array([[one[name] for name in names] for one in records])
    gains = bits[:, 1] - bits[:, 2]
    is_damaged = (bits[:, 1] - bits[:, 0]).mean() > _DAMAGE
    touched = np.array([one["changed"] > 0 for one in records])
    counts = {
        name: sum(one[name] for one in records)
        for name in ("errors", "changed", "touched", "restored", "false")
    }
    return {
        "texts": len(records),
        "changed_texts": int(touched.sum()),
        "preferred": int((touched & (gains > 0)).sum()),
        "not_preferred": int((touched & (gains < 0)).sum()),
        "before": float(bits[:, 1].mean()),
        "change": float(-gains.mean()),
        "change_95": interval(bits, lambda rows: float((rows[:, 2] - rows[:, 1]).mean())),
        "damage": float((bits[:, 1] - bits[:, 0]).mean()),
        "repaired": repaired(bits),
        "repaired_95": interval(bits, repaired) if is_damaged else None,
        **counts,
    }


def repaired(bits: Rows) -> float:
    """How much of the bits that the errors have cost is saved; NaN where they cost none."""
    damage = (bits[:, 1] - bits[:, 0]).sum()
    return float((bits[:, 1] - bits[:, 2]).sum() / damage) if damage > 0 else math.nan


def interval(rows: Rows, statistic: Callable[[Rows], float]) -> tuple[float, float]:
    """By the bootstrap: the same figure over texts drawn anew from these."""
    rng = np.random.default_rng(0)
    drawn = (rows[rng.integers(0, len(rows), len(rows))] for _ in range(_ROUNDS))
    low, high = np.nanpercentile([statistic(one) for one in drawn], [2.5, 97.5])
    return float(low), float(high)


HEAD = (
    "| errors | setting | texts changed | revised preferred | as it was | bits per byte before |"
    " change (95 %) | damage repaired (95 %) | words changed | errors | changed back | right words"
    " changed |\n" + "|---" * 12 + "|"
)


def line(kind: str, setting: str, told: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = told["change_95"]
    share = "–"
    if told["repaired_95"]:
        least, most = told["repaired_95"]
        share = f"{told['repaired']:.0%} ({least:.0%} to {most:.0%})"
    return (
        f"| {kind} | {setting} | {told['changed_texts']} of {told['texts']} | {told['preferred']} |"
        f" {told['not_preferred']} | {told['before']:.3f} |"
        f" {told['change']:+.4f} ({low:+.4f} to {high:+.4f}) | {share} | {told['changed']} |"
        f" {told['errors']} | {told['restored']} | {told['false']} |"
    )
