"""What clients saw, as figures; figures as tables that read well in a README."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from peers.measure import middle, paired

FASTER, BARE = 1.5, 0.95  # the goals: times llama.cpp's throughput, share of the bare engine's
AT = 16  # clients, where the goals are
QUIET = 0.05  # of the cores, what others may take before it is told
LATENCIES = {
    "first_s": "to the first token",
    "gap_s": "between tokens",
    "request_s": "of a whole request",
}
Figures = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The least value that so many percent do not exceed: one that was measured."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share / 100 * len(values)) - 1)]


def figures(found: dict[str, Any]) -> Figures:
    """One point of one server in one round, from what the load generator saw.

    What failed is counted, and its time too; its tokens are not.
    """
    rows = found["rows"]
    good = [row for row in rows if not row["failure"]]
    seconds = max((row["ended"] for row in rows), default=0.0)
    tokens = sum(row["tokens"] for row in good)
    seen = {
        "first_s": [row["times"][0] - row["sent"] for row in good],
        "gap_s": [b - a for row in good for a, b in pairwise(row["times"])],
        "request_s": [row["ended"] - row["sent"] for row in good],
    }
    return {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "failures": dict(Counter(row["failure"] for row in rows if row["failure"])),
        "not_begun": found["not_begun"],
        "tokens": tokens,
        "lengths": sorted({row["tokens"] for row in good}),
        "counted": sorted({row["counted"] for row in good}),
        "seconds": seconds,
        "tokens_s": tokens / seconds if seconds and tokens else None,
        **{f"{kind}_p50": percentile(times, 50) for kind, times in seen.items()},
        **{f"{kind}_p99": percentile(times, 99) for kind, times in seen.items()},
        "load_cpu": found["cpu_s"] / seconds if seconds else 0.0,
    }


def series(results: dict[str, Any], key: str, clients: int, name: str) -> list[float | None]:
    """A figure of a server at a number of clients, round by round; None where it has none."""
    rounds = results["points"].get(key, {}).get(str(clients), [])
    return [found.get(name) if found else None for found in rounds]


def markdown(results: dict[str, Any]) -> str:
    machine = results["machine"]
    parts = [
        f"{machine['processor']} ({machine['architecture']}), {results['threads']} threads on "
        f"{machine['cores']} cores, that the clients share; {results['model']}; medians of "
        f"{results['rounds']} rounds, the servers taking turns. Each client sends prompts of about "
        f"{results['prompt']} tokens, no two alike, one after the other, and has "
        f"{results['tokens']} tokens streamed greedily; all begin at once. llama-cpp-python's "
        "server takes requests one after the other: its clients wait for their turn, and then "
        "have the machine to themselves."
    ]
    keys = [key for key in results["servers"] if results["points"].get(key)]
    if keys:
        parts.append(_figures(results, keys))
    if {"us", "llama_cpp"} <= set(keys):
        parts += [
            "Us beside it, median of the ratios within a round (least to largest); above 1 we are "
            "ahead: tokens/s ours by theirs, times theirs by ours.",
            _ratios(results),
        ]
    parts += [line for line in (_bare(results), goals(results), _notes(results)) if line]
    return "\n\n".join(parts) + "\n"


def goals(results: dict[str, Any]) -> str:
    """What was aimed at, beside what came out."""
    lines = []

    def line(goal: str, said: str, met: bool) -> None:
        lines.append(f"- {goal}: {said}: {'met' if met else 'NOT met'}")

    speed = _paired(results, AT, "tokens_s")
    if speed:
        goal = f"at {AT} clients at least {FASTER:g} times llama.cpp's tokens/s"
        line(goal, ratio(speed), speed["median"] >= FASTER)
        for kind, title in LATENCIES.items():
            name = f"{kind}_p99"
            mine, its = (middle(series(results, key, AT, name)) for key in ("us", "llama_cpp"))
            if mine is not None and its is not None:
                said = f"{_time(mine, kind)} against {_time(its, kind)}"
                line(f"at {AT} clients a lower p99 {title}", said, mine < its)
    share = paired(results["bare"].get("server", []), results["bare"].get("engine", []))
    if share:
        line(f"at least {BARE:.0%} of the bare engine's tokens/s", ratio(share),
             share["median"] >= BARE)  # fmt: skip
    return "\n".join(["Goals:", "", *lines]) if lines else ""


def ratio(found: dict[str, float] | None) -> str:
    if not found:
        return "—"
    return f"{found['median']:.2f}x ({found['low']:.2f} to {found['high']:.2f})"


def _figures(results: dict[str, Any], keys: list[str]) -> str:
    titles = [f"{title}, p50 / p99, {_unit(kind)}" for kind, title in LATENCIES.items()]
    head = ["clients", "server", "tokens/s", *titles, "requests", "failed"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for clients in results["clients"]:
        for key in keys:
            found = [point for point in results["points"][key].get(str(clients), []) if point]
            if not found:
                continue
            speed = middle([point["tokens_s"] for point in found])
            cells = [str(clients), results["servers"][key]["title"]]
            cells.append("—" if speed is None else f"{speed:,.0f}")
            for kind in LATENCIES:
                both = [middle([point[f"{kind}_{p}"] for point in found]) for p in ("p50", "p99")]
                cells.append(" / ".join(_time(value, kind, False) for value in both))
            for name in ("requests", "failed"):
                cells.append(f"{sum(point[name] for point in found):,}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratios(results: dict[str, Any]) -> str:
    names = [f"{kind}_{p}" for kind in LATENCIES for p in ("p50", "p99")]
    titles = [f"{title}, {p}" for title in LATENCIES.values() for p in ("p50", "p99")]
    lines = [
        "| clients | tokens/s | " + " | ".join(titles) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for clients in results["clients"]:
        cells = [ratio(_paired(results, clients, name)) for name in ("tokens_s", *names)]
        lines.append(f"| {clients} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _paired(results: dict[str, Any], clients: int, name: str) -> dict[str, float] | None:
    """Above 1 where we are ahead."""
    mine = series(results, "us", clients, name)
    its = series(results, "llama_cpp", clients, name)
    return paired(mine, its) if name == "tokens_s" else paired(its, mine)


def _bare(results: dict[str, Any]) -> str:
    found = results["bare"]
    server, engine = (middle(found.get(key, [])) for key in ("server", "engine"))
    if server is None or engine is None:
        return ""
    said = (
        f"The same {AT} prompts at once: {server:,.0f} tokens/s through our server, {engine:,.0f} "
        f"written in process without it: {ratio(paired(found['server'], found['engine']))}."
    )
    batched = middle(found.get("llama_cpp", []))
    if batched is not None:
        said += (
            f" llama.cpp itself, in process and all of them in one batch, writes {batched:,.0f}, "
            "about the most that a server could reach with it by batching: ours has "
            f"{ratio(paired(found['server'], found['llama_cpp']))} of that."
        )
    return said


def _notes(results: dict[str, Any]) -> str:
    """What a reader should know before believing the above."""
    lines = []
    for key, entry in results["servers"].items():
        title = entry["title"].strip("*")
        lines += [f"- {title}: {what}" for what in entry["failed"]]
        check = entry.get("check")
        if check and check["streamed"] != check["whole"]:
            lines.append(
                f"- {title}: counted {check['streamed']} tokens in a stream of which the whole "
                f"answer says {check['whole']}: its tokens/s are not to be trusted"
            )
        for clients, rounds in results["points"].get(key, {}).items():
            for point in filter(None, rounds):
                where = f"- {title}, {clients} clients"
                lines += [f"{where}: {n} failed: {why}" for why, n in point["failures"].items()]
                if point["not_begun"]:
                    bound = f"within {results['seconds']:g} s"
                    lines.append(f"{where}: {point['not_begun']} requests not begun {bound}")
                if point["lengths"] not in ([], [results["tokens"]]):
                    lines.append(f"{where}: texts of {point['lengths']} tokens")
                if point["others"] > QUIET:
                    lines.append(
                        f"{where}: other processes took {point['others']:.0%} of the cores"
                    )
    return "\n".join(["Notes:", "", *dict.fromkeys(lines)]) if lines else ""


def _unit(kind: str) -> str:
    return "ms" if kind == "gap_s" else "s"


def _time(seconds: float | None, kind: str, unit: bool = True) -> str:
    if seconds is None:
        return "—"
    said = f"{seconds * 1000:.1f}" if kind == "gap_s" else f"{seconds:.2f}"
    return f"{said} {_unit(kind)}" if unit else said
