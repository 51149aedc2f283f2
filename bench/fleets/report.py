"""What the studies found, as tables in Markdown and as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fleets.studies import Row
from thinking.report import Panel, sheet
from unspool.costs.part import Series

Column = tuple[str, Callable[[Row], str]]


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] * 1e3:,.0f}"


def _s(name: str) -> Callable[[Row], str]:
    return lambda row: "–" if math.isinf(row[name]) else f"{row[name]:,.0f}"


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.0%}"


def _plain(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:,}" if not isinstance(row[name], str) else row[name]


_LATENCIES: tuple[Column, ...] = (
    ("first token p50, ms", _ms("first_p50")),
    ("p99", _ms("first_p99")),
    ("between tokens p50, ms", _ms("gap_p50")),
    ("p99", _ms("gap_p99")),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "size": (
        ("requests/s", lambda row: f"{row['rate']:.0f}"),
        ("routing", _plain("policy")),
        ("**replicas**", lambda row: f"**{row['replicas']}**"),
        ("texts in a step", lambda row: f"{row['rows']:.0f}"),
        ("prompts cached", _share("cached")),
        *_LATENCIES,
    ),
    "routing": (
        ("replicas", _plain("replicas")),
        ("routing", _plain("policy")),
        ("prompt tokens computed", _plain("prefill_tokens")),
        ("cached", _share("cached")),
        ("texts in a step", lambda row: f"{row['rows']:.0f}"),
        *_LATENCIES,
    ),
    "loss": (
        ("replicas", _plain("replicas")),
        ("routing", _plain("policy")),
        ("p99 before, ms", _ms("p99_before")),
        ("worst 10 s, ms", _ms("p99_worst")),
        ("s until as before", _s("seconds")),
        ("requests sent again", _plain("retried")),
        ("longest pause in a text, s", lambda row: f"{row['longest_pause']:.1f}"),
        ("lost", _plain("lost")),
    ),
    "scaling": (
        ("up delay, s", _s("up_delay_s")),
        ("start, s", _s("start_s")),
        ("first new replica after, s", _s("first_new_s")),
        ("p99 before, ms", _ms("p99_before")),
        ("worst 10 s, ms", _ms("p99_worst")),
        ("s until as before", _s("seconds")),
        ("refused", _plain("refused")),
        ("most replicas", _plain("most")),
    ),
}


def table(study: str, rows: Sequence[Row]) -> str:
    columns = COLUMNS[study]
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def pictures(found: dict[str, list[Row]]) -> str:
    """One sheet of all that was studied."""
    drawn: list[Panel] = []
    if found.get("size"):
        drawn.append(("Replicas for a p99 within the targets", _sizes(found["size"])))
    if found.get("loss"):
        drawn.append(("A machine is lost", _curves(found["loss"], _loss_name)))
    if found.get("scaling"):
        drawn.append(("The load triples", _curves(found["scaling"], _scaling_name)))
    return sheet(drawn)


def _sizes(rows: Sequence[Row]) -> list[Series]:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    return [
        Series(
            name,
            [row["rate"] for row in rows if row["policy"] == name],
            [row["replicas"] for row in rows if row["policy"] == name],
            x_label="requests a second", y_label="replicas",
        )
        for name in names
    ]  # fmt: skip


def _loss_name(row: Row) -> str:
    return f"{row['replicas']} replicas, {row['policy']}"


def _scaling_name(row: Row) -> str:
    return f"up after {row['up_delay_s']:g} s, start {row['start_s']:g} s"


def _curves(rows: Sequence[Row], name: Callable[[Row], str]) -> list[Series]:
    return [
        Series(
            name(row),
            [moment for moment, _ in row["curve"]],
            [value for _, value in row["curve"]],
            x_label="seconds", y_label="p99 to the first token, s",
        )
        for row in rows
    ]  # fmt: skip


def savings(rows: Sequence[Row]) -> list[str]:
    """What policies save against the first one on the same fleet, in words."""
    first: dict[int, Row] = {}
    told = []
    for row in rows:
        base = first.setdefault(row["replicas"], row)
        if row is not base:
            less = 1 - row["prefill_tokens"] / base["prefill_tokens"]
            quicker = 1 - row["first_p99"] / base["first_p99"]
            told.append(
                f"{row['replicas']} replicas, {row['policy']} against {base['policy']}: "
                f"prompt tokens computed {-less:+.0%}, p99 to the first token {-quicker:+.0%}"
            )
    return told
