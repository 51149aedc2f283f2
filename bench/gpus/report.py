"""The table: what was measured, beside what the device allows, what must be, and transformers."""

from __future__ import annotations

from typing import Any

from gpus.limits import Limits, floor
from gpus.parts import PARTS, Part

_NONE = "–"


def line(name: str, result: dict[str, Any], limits: Limits | None) -> str:
    """One part in a line, as soon as it is there."""
    if name == "limits":
        return (
            f"{result['device']}: reads {result['bandwidth'] / 1e12:.2f} TB/s, "
            f"multiplies bf16 at {result['flops'] / 1e12:.0f} TFLOP/s"
        )
    if "bytes_s" in result:
        return (
            f"{name}: {result['bytes'] / 1e9:.1f} GB in {result['seconds']:.1f} s "
            f"({result['bytes_s'] / 1e9:.2f} GB/s; cached {result['cached_s']:.1f} s, plain "
            f"reading {result['disk_s']:.1f} s, first token after {result['first_s']:.1f} s)"
        )
    share = fraction(result, limits)
    said = [f"{name}: {result['tokens_s']:,.1f} tokens/s"]
    if share is not None:
        said.append(f"{share:.1%} of the limit")
    if "first_s" in result:
        said.append(f"first token {result['first_s'] * 1e3:,.1f} ms")
    if "same_alone" in result:
        said.append(f"same alone {result['same_alone']}")
    said += [f"{key} {result[key]:.1f} s" for key in ("load_s", "warm_s") if key in result]
    if "memory_bytes" in result:
        said.append(f"memory {result['memory_bytes'] / 1e9:.1f} GB")
    return ", ".join(said)


def fraction(result: dict[str, Any], limits: Limits | None) -> float | None:
    if limits is None or not result.get("floor"):
        return None
    return floor(result["floor"], limits) / float(result["seconds"])


def markdown(results: dict[str, Any]) -> str:
    """Every part that was measured, and by name what could not be."""
    found, limits = results["parts"], results["limits"]
    lines = []
    if limits:
        lines += [f"{line('limits', limits, None)}; {results['versions']}.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += [_row(part, found, limits) for part in PARTS.values() if part.key in found]
    failed = [f"- {name} could not be measured: {why}" for name, why in results["failed"].items()]
    return "\n".join([*lines, "", *failed]).rstrip() + "\n"


COLUMNS = (
    "work", "tokens/s", "limit", "of the limit", "must", "aim", "first token, ms", "same alone",
    "transformers", "ours to theirs",
)  # fmt: skip


def _row(part: Part, found: dict[str, Any], limits: Limits | None) -> str:
    entry = found[part.key]
    share, speed = fraction(entry, limits), entry.get("tokens_s")
    if part.work == "load":
        reached = f"{entry['disk_s'] / entry['seconds']:.0%} of plain reading"
        measured = [f"{entry['bytes_s'] / 1e9:.2f} GB/s", _NONE, reached]
    else:
        limit = speed / share if share else None
        measured = [_number(speed), _number(limit), _NONE if share is None else f"{share:.0%}"]
    theirs = [found[name]["tokens_s"] for name in found if name.startswith(f"{part.key}@")]
    best = max(theirs, default=None)
    cells = [
        part.title,
        *measured,
        _wanted(part, share, speed),
        _number(part.aim),
        _number(entry["first_s"] * 1e3),
        entry.get("same_alone", _NONE),
        _number(best),
        f"{speed / best:.1f}x" if best and speed else _NONE,
    ]
    return "| " + " | ".join(cells) + " |"


def _wanted(part: Part, share: float | None, speed: float | None) -> str:
    """What the part must reach, and whether it did."""
    if part.must is None:
        return _NONE
    reached = share if part.work == "first" else speed
    said = f"{part.must:.0%}" if part.work == "first" else _number(part.must)
    return f"{said} {'✓' if reached is not None and reached >= part.must else '✗'}"


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}".removesuffix(".0")
