"""Write the tables of measurements into README.md and docs/research: python docs/make_tables.py

A page has `<!-- table NAME [SELECTION] -->` and `<!-- end of table -->`; what is between them is
replaced by the table of that name, made from docs/research/data. So each figure has one source: a
file that a benchmark wrote, with its machine, date and commit. `--check` writes nothing and exits
with 1 if a page is not up to date.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
DATA = DOCS / "research" / "data"
PAGES = [DOCS.parent / "README.md", *sorted((DOCS / "research").glob("*.md"))]
MARKED = re.compile(r"(<!-- table (\S+)(?: (\S+))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    outdated = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        made = MARKED.sub(lambda m: f"{m[1]}{make_table(m[2], m[3] or '')}\n{m[4]}", text)
        if made != text:
            outdated.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(made, encoding="utf-8")
    for name in outdated:
        print(f"{name}: {'not up to date' if '--check' in sys.argv else 'written'}")
    return 1 if outdated and "--check" in sys.argv else 0


def make_table(name: str, selection: str = "") -> str:
    """Make the table of a file in docs/research/data; its prefix says which benchmark wrote it."""
    results = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return TABLES[name.split("-")[0]](results, selection)


def cpu_table(results: dict[str, Any], _: str) -> str:
    """Ours against llama.cpp's, for each type of file (bench/cpu.py --only llama_cpp)."""
    files = [results, *results["types"]]
    works = {"decode": "decode", "prompt": "prompt of 512", "batch": "16 at once"}
    works |= {w: w.replace("-", " after ") for w in ("decode-4000", "decode-16000")}
    works |= {w: w.replace("-", " of ") for w in ("prompt-4000", "prompt-8000")}
    works = {work: title for work, title in works.items() if work in files[0]["engines"]["us"]}
    others = {"memory_mb": "memory, MB", "cold": "cold start, s", "quality": "KL, nats per token"}
    others = {key: title for key, title in others.items() if key in files[0]["engines"]["us"]}
    rows = []
    for file in files:
        ours, theirs = file["engines"]["us"], file["engines"]["llama_cpp"]
        kind = file["model"].removesuffix(".gguf").rsplit(".", 1)[-1].rsplit("-", 1)[-1]
        cells = [kind if kind.startswith("Q") else ours["weights"]]
        for work in works:
            ratio = statistics.median(a / b for a, b in zip(ours[work], theirs[work], strict=True))
            speeds = [f"{statistics.median(entry[work]):,.0f}" for entry in (ours, theirs)]
            cells.append(f"{' / '.join(speeds)} (**{ratio:.2f}x**)")
        for key in others:
            form = {"cold": ".2f", "quality": ".4f"}.get(key, ",.0f")
            values = []
            for value in (ours[key], theirs[key]):
                if isinstance(value, dict):
                    value = value["kl"]
                values.append(statistics.median(value) if isinstance(value, list) else value)
            cells.append(" / ".join(f"{value:{form}}" for value in values))
        rows.append(cells)
    header = ["file", *works.values(), *others.values()]
    machine, number = results["machine"], results["rounds"]
    rounds = "one round" if number == 1 else f"medians of {number} rounds"
    unit, turns = ("Tokens/s, ", f", {rounds}, engines in turns") if works else ("", "")
    note = (
        f"{unit}Unspool / llama.cpp. {results['threads']} threads on {machine['cores']} cores of "
        f"{machine['processor']} ({machine['architecture']}), {results['date']}, commit "
        f"{results['commit']}{turns}: `{results['command']}`."
    )
    return table(header, rows) + f"\n\n{note}"


def gpu_table(results: dict[str, Any], selection: str) -> str:
    """A run of bench/gpu.py: the parts of `GPU_SHORT`, those with drafts, those of an MTP layer, or
    all others."""
    sys.path.insert(0, str(DOCS.parent / "bench"))
    import gpu

    parts = [part for part in gpu.PARTS.values() if part.key in results["parts"]]
    if selection == "mtp":
        return mtp_table(results["parts"], [part for part in parts if part.work == "mtp"])
    if selection == "drafts":
        text = drafts_table(results["parts"], [part for part in parts if part.work == "drafts"])
    else:
        parts = [part for part in parts if part.work not in ("drafts", "mtp")]
        if selection == "short":
            parts = [part for part in parts if part.key in GPU_SHORT]
        text = gpu_parts_table(results, parts)
    device = gpu.describe("limits", results["limits"], None)
    note = ""
    if results.get("note") and selection != "drafts":
        note = f" Other commit: {results['note']}."
    return (
        f"{text}\n\n{device} ({results['versions']}). Random weights in published shapes, "
        f"{results['date']}, commit {results['commit']}: `{results['command']}`.{note}"
    )


GPU_SHORT = ("8b", "8b-exact", "8b-64", "8b-q4", "0.6b", "gpt-oss-20b", "gpt-oss-20b-64", "gemma4")


def gpu_parts_table(results: dict[str, Any], parts: list[Any]) -> str:
    """Speed, fraction of what the device can do, and texts that are the same when alone."""
    import gpu

    rows = []
    for part in parts:
        entry, title = results["parts"][part.key], part.title
        if title.startswith("the same"):
            title = title.replace("the same", rows[-1][0])
        share = gpu.fraction(entry, entry.get("limits", results["limits"]))
        is_load = part.work == "load"
        speed = f"{entry['bytes_s'] / 1e9:.2f} GB/s" if is_load else f"{entry['tokens_s']:,.0f}"
        reached = "–" if share is None else f"{share:.0%}"
        first = f"{entry['first_s'] * 1e3:,.0f}"
        rows.append([title, speed, reached, first, entry.get("same_alone", "–")])
    header = ["work", "tokens/s", "of the limit", "first token, ms", "same text alone"]
    return table(header, rows)


def mtp_table(entries: dict[str, Any], parts: list[Any]) -> str:
    """Drafts of an MTP layer by their length and the probability that a token is right."""
    rows = [
        [str(part.drafted), f"{part.acceptance:.0%}", f"{entries[part.key]['tokens_s']:,.0f}",
         f"{entries[part.key]['speedup']:.2f}x"]
        for part in parts
    ]  # fmt: skip
    return table(["drafted tokens", "right", "tokens/s", "times the speed without"], rows)


def drafts_table(entries: dict[str, Any], parts: list[Any]) -> str:
    """Speculative decoding by the number of texts and the probability that a draft is right."""
    rates = sorted({part.acceptance for part in parts})
    rows = []
    for num_texts in sorted({part.rows for part in parts}):
        cells = [str(num_texts)]
        for part in sorted(parts, key=lambda part: float(part.acceptance)):
            if part.rows == num_texts:
                entry = entries[part.key]
                cells.append(f"{entry['tokens_s']:,.0f} ({entry['speedup']:.1f}x)")
        rows.append(cells)
    return table(["texts at a time", *(f"right {rate:.0%}" for rate in rates)], rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def steering_table(results: dict[str, Any], selection: str) -> str:
    """Effect of one steering vector (bench/steering.py effect), or times of sweeps (patch)."""
    if selection == "patch":
        rows = [
            [
                str(row["tokens"]),
                str(row["cells"]),
                f"{row['seconds']:.2f}",
                f"{row['transformers_seconds']:.1f}",
                f"**{row['ratio']:.0f}x**",
                f"{row['largest_difference']:.2f} of {row['largest_value']:.1f}",
            ]
            for row in results["sweeps"]
        ]
        header = ["tokens", "cells", "Unspool, s", "hooks, s", "ratio", "largest difference"]
        return f"{table(header, rows)}\n\n{results['date']}: `{results['command']}`."
    head = "| strength | preference, nats a token | tokens of an answer | perplexity | answer |"
    lines = [head, "|---|---|---|---|---|"]
    for row in results["effects"]:
        if row["vector"] == selection:
            answer = " ".join(row["answer"].split())[:70].strip().replace("|", "/")
            lines.append(
                f"| {row['strength']:+g} | {row['preference']:+.2f} | {row['tokens']:.0f} | "
                f"{row['perplexity']:.1f} | {answer} |"
            )
    return "\n".join(lines)


def lenses_table(results: dict[str, Any], selection: str) -> str:
    """Lenses by layer, or attribution patching by site (bench/lenses.py compare, gradients)."""
    if selection == "gradients":
        rows = [
            [
                row["clean"],
                row["site"],
                str(row["cells"]),
                f"{row['correlation']:.2f}",
            ]
            for row in results["gradients"]
        ]
        return table(["clean text", "site", "cells", "correlation"], rows)
    names = list(results["kl"])
    last = len(results["kl"][names[0]]) - 1
    rows = []
    for layer in [*range(0, last, 3), last - 1]:
        cells = [f"{results['kl'][n][layer]:.2f}" for n in names]
        cells += [f"{results['same_top_token'][n][layer]:.0%}" for n in names]
        rows.append([str(layer), *cells])
    header = ["layer", *(f"KL, {n}" for n in names), *(f"same token, {n}" for n in names)]
    note = (
        f"{results['positions']} positions of {results['texts']} texts, {results['machine']}, "
        f"{results['date']}: `{results['command']}`. Same token: how often the most likely token "
        "is that of the last layer. Layer 0 is the embedding."
    )
    return table(header, rows) + f"\n\n{note}"


def interpretability_table(results: dict[str, Any], selection: str) -> str:
    """Induction heads of each model, and what is lost without them (bench/interpretability.py)."""
    names = {name: name.split(".gguf")[0] for name in results["models"]}
    if selection == "heads":
        lines = ["| model | heads with the highest prefix-matching scores |", "|---|---|"]
        for name, result in results["models"].items():
            best = result["induction"]["best"][:8]
            listed = ", ".join(f"{h['layer']}.{h['head']} ({h['score']:.2f})" for h in best)
            lines.append(f"| {names[name]} | {listed} |")
        return "\n".join(lines)
    lines = [
        "| model | first half | second half | heads removed | second half without the best | "
        "without random ones (mean, worst) |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results["models"].items():
        induction = result["induction"]
        start = f"| {names[name]} | {induction['loss_first']:.2f} | {induction['loss_second']:.2f} "
        for row in induction["knock_outs"]:
            lines.append(
                f"{start}| {row['heads']} | {row['loss']:.2f} | {row['loss_random']:.2f}, "
                f"{row['loss_random_max']:.2f} |"
            )
            start = "| | | "
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any], str], str]] = {
    "cpu": cpu_table,
    "gpu": gpu_table,
    "interpretability": interpretability_table,
    "lenses": lenses_table,
    "steering": steering_table,
}

if __name__ == "__main__":
    sys.exit(main())
