"""Results as a table that reads well in a README."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers.measure import bytes_a_token, middle, paired

SPEEDS = {
    "decode": "decode, tokens/s",
    "prompt": "prompt of 512, tokens/s",
    "batch": "16 at once, tokens/s",
}


def markdown(results: dict[str, Any]) -> str:
    """Everything that was measured, and by name what could not be."""
    engines: dict[str, Any] = results["engines"]
    shown = {key: entry for key, entry in engines.items() if key != "reference"}
    machine = results["machine"]
    parts = [
        f"{machine['processor']} ({machine['architecture']}), {results['threads']} of "
        f"{machine['cores']} cores; {results['model']}; medians of {results['rounds']} rounds, the "
        "engines taking turns. In brackets: our speed divided by theirs within a round, median "
        "(least to largest)."
    ]
    columns = _columns(results, shown)
    if columns:
        parts.append(_table(shown, columns))
    if "KL to fp32" in columns:
        parts.append(
            "KL divergence in nats a token, to the file's numbers unpacked into 32 bits. Engines "
            "that cannot read the file's blocks pack those numbers once more, and lose by it."
        )
    if any(results["bandwidth"].values()):
        sizes = {size: middle(seen) for size, seen in results["bandwidth"].items()}
        said = ", ".join(f"{(speed or 0) / 1e9:.1f} GB/s from {size} MB"
                         for size, speed in sizes.items())  # fmt: skip
        parts.append(f"Reading memory, {results['threads']} threads: {said}.")
    parts += _growth(results["growth"])
    parts += _failures(shown)
    return "\n\n".join(parts) + "\n"


Cell = Callable[[str, dict[str, Any]], str]


def _columns(results: dict[str, Any], shown: dict[str, Any]) -> dict[str, Cell]:
    """The columns that have something to say."""
    ours = shown.get("us", {})

    def speed(work: str) -> Cell:
        def cell(key: str, entry: dict[str, Any]) -> str:
            middling = middle(entry.get(work, []))
            if middling is None:
                return "—"
            ratio = None if key == "us" else paired(ours.get(work, []), entry[work])
            return f"{middling:,.0f}" + (f" ({_ratio(ratio)})" if ratio else "")

        return cell

    def share(key: str, entry: dict[str, Any]) -> str:
        decode, most = middle(entry.get("decode", [])), middle(results["bandwidth"]["80"])
        if decode is None or not most:
            return "—"
        return f"{decode * bytes_a_token(entry['weight_bytes']) / most:.0%}"

    def memory(key: str, entry: dict[str, Any]) -> str:
        one, many = entry.get("memory_mb"), entry.get("memory_batch_mb")
        return f"{one:,.0f} / {many:,.0f}" if one and many else f"{one:,.0f}" if one else "—"

    def cold(key: str, entry: dict[str, Any]) -> str:
        taken = middle(entry.get("cold", []))
        return "—" if taken is None else f"{taken:.2f}"

    def kl(key: str, entry: dict[str, Any]) -> str:
        found = entry.get("quality", {})
        return f"{found['kl']:.4f}" if "kl" in found else "—"

    columns: dict[str, Cell] = {"weights": lambda key, entry: str(entry["weights"])}
    for work, title in SPEEDS.items():
        if any(entry.get(work) for entry in shown.values()):
            columns[title] = speed(work)
    if "decode, tokens/s" in columns:
        columns["of the memory's speed"] = share
    for field, title, cell in (
        ("memory_mb", "memory, MB (1 / 16)", memory),
        ("cold", "cold start, s", cold),
        ("quality", "KL to fp32", kl),
    ):
        if any(field in entry for entry in shown.values()):
            columns[title] = cell
    return columns if len(columns) > 1 else {}


def _table(shown: dict[str, Any], columns: dict[str, Cell]) -> str:
    lines = ["| engine | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for key, entry in shown.items():
        if "all" in entry["failed"]:
            cells = [entry["weights"], "not measured, see below", *["—"] * (len(columns) - 2)]
        else:
            cells = [cell(key, entry) for cell in columns.values()]
        lines.append(f"| {entry['title']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _growth(growth: dict[str, Any]) -> list[str]:
    tables = []
    for kind, title in (
        ("context", "tokens/s of one text against its length"),
        ("batch", "tokens/s of all texts against their number"),
        ("threads", "tokens/s of one text against threads"),
    ):
        points = [point for found in growth.values() for point in found.get(kind, {})]
        if not points:
            continue
        order = sorted(set(points), key=int)
        lines = [
            f"| {title} | " + " | ".join(map(str, order)) + " |",
            "|---" * (len(order) + 1) + "|",
        ]
        for key, found in growth.items():
            cells = [middle(found.get(kind, {}).get(point, [])) for point in order]
            said = ["—" if cell is None else f"{cell:,.0f}" for cell in cells]
            lines.append(f"| {key} | " + " | ".join(said) + " |")
        tables.append("\n".join(lines))
    return tables


def _failures(shown: dict[str, Any]) -> list[str]:
    lines = []
    for entry in shown.values():
        for work, reason in entry["failed"].items():
            what = "could not be measured" if work == "all" else f"{work} could not be measured"
            lines.append(f"- {entry['title']}: {what}: {reason}")
        missing = entry.get("quality", {}).get("error")
        if missing:
            lines.append(f"- {entry['title']}: quality could not be measured: {missing}")
    return ["\n".join(lines)] if lines else []


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f}x, {ratio['low']:.2f} to {ratio['high']:.2f}"
