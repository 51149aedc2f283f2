"""Draws docs/images/architecture.svg: python docs/make_architecture.py

Fails if a folder of src/unspool is not in the picture, or if the picture names one that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "unspool"


@dataclass(frozen=True)
class Box:
    """A folder or module, what it does, and the parts to show inside."""

    name: str
    text: str
    parts: tuple[str, ...] = ()
    weight: float = 1.0  # share of the row's width


# From the top to the bottom: each row imports only the rows below it.
ROWS = [
    [Box("cli", "the command line")],
    [
        Box("train", "text to weights", ("data", "learning", "running", "tuning", "twins"), 2.3),
        Box("costs", "cost report", (), 0.8),
        Box("scale", "many machines, on Ray", ("replicas", "batch"), 1.1),
    ],
    [
        Box(
            "server",
            "OpenAI, Anthropic, Ollama, llama.cpp; the token tree",
            ("http", "runtime", "dialects", "tree", "app.py"),
            2.6,
        ),
        Box("page", "web UI (Preact)", (), 1.0),
    ],
    [
        Box("conversation.py", "a chat, kept as token ids"),
        Box("loading.py", "name to model"),
        Box("lm.py", "LanguageModel: the public API"),
    ],
    [
        Box(
            "decoding",
            "generation methods on append, fork, rewind",
            ("search", "speculative", "diffusion", "infill", "edit"),
            2.6,
        ),
        Box("lens", "read activations; replay", (), 1.0),
    ],
    [Box("session.py", "Session: a model with its tokenizer and its engine")],
    [
        Box(
            "engine",
            "plan, launch, settle: many texts in one batch",
            ("loop.py", "scheduler.py", "batch.py", "tree.py", "sequence.py", "canvas.py"),
        )
    ],
    [Box("backends", "StepBatch in, StepResult out", ("step.py", "cpu", "cuda", "torch"))],
    [
        Box("text", "tokenizer, chat, tools", ("tokenizer", "chat", "tools")),
        Box("model", "config and weights", ("families", "files", "hub", "layers")),
        Box("sampling", "logits to one token", ("stages.py", "chain.py", "picker.py")),
    ],
]
BASE = "errors.py, features.py, gc_pause.py, native.py, notebook.py, progress.py: for every row"

WIDTH, MARGIN, GAP, ARROW = 860, 12, 12, 20
HEIGHT, PART_HEIGHT = 46, 24


def check_names() -> None:
    """Compare the names in the picture with the folders on disk."""
    boxes = [box for row in ROWS for box in row]
    drawn = {box.name for box in boxes}
    for box in boxes:
        for name in (box.name, *(f"{box.name}/{part}" for part in box.parts)):
            if not (SOURCE / name).exists():
                raise SystemExit(f"src/unspool/{name} does not exist")
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    if missing := folders - drawn:
        raise SystemExit(f"not in the picture: {', '.join(sorted(missing))}")


def draw_box(box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    middle = x + width / 2
    offset = 0 if box.parts else (height - HEIGHT) / 2
    svg = [
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="6"/>',
        f'<text x="{middle:.0f}" y="{y + offset + 19:.0f}" class="name">{box.name}</text>',
        f'<text x="{middle:.0f}" y="{y + offset + 36:.0f}">{box.text}</text>',
    ]
    if box.parts:
        part_width = (width - 10 * (len(box.parts) + 1)) / len(box.parts)
        for index, part in enumerate(box.parts):
            left, top = x + 10 + index * (part_width + 10), y + HEIGHT
            svg.append(
                f'<rect x="{left:.0f}" y="{top}" width="{part_width:.0f}" height="{PART_HEIGHT}" '
                f'rx="4" class="part"/><text x="{left + part_width / 2:.0f}" y="{top + 16}">'
                f"{part}</text>"
            )
    return svg


def draw() -> tuple[list[str], int]:
    """Return the elements of the picture and its height."""
    svg, y = list[str](), MARGIN
    for number, row in enumerate(ROWS):
        if number:
            middle = MARGIN + WIDTH / 2
            svg.append(f'<path d="M{middle} {y + 3}V{y + ARROW - 4}m-4 -5l4 5l4 -5"/>')
            y += ARROW
        height = HEIGHT + (PART_HEIGHT + 10 if any(box.parts for box in row) else 0)
        room, x = WIDTH - GAP * (len(row) - 1), float(MARGIN)
        for box in row:
            width = room * box.weight / sum(box.weight for box in row)
            svg += draw_box(box, x, y, width, height)
            x += width + GAP
        y += height
    svg.append(f'<text x="{MARGIN + WIDTH / 2}" y="{y + 22}" class="base">{BASE}</text>')
    return svg, y + 22 + MARGIN


def main() -> None:
    check_names()
    svg, height = draw()
    width = WIDTH + 2 * MARGIN
    style = (
        "rect{fill:#f6f3ec;stroke:#8a7a55}.part{fill:#fff;stroke:#c9bd9e}"
        "text{font:12px sans-serif;text-anchor:middle;fill:#333}"
        ".name{font-weight:bold;font-size:14px}.base{fill:#666}path{fill:none;stroke:#8a7a55}"
    )
    body = "\n".join(svg)
    target = Path(__file__).parent / "images" / "architecture.svg"
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">\n'
        f"<style>{style}</style>\n"
        '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>\n'
        f"{body}\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
