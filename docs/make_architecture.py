"""Draws docs/images/architecture.svg: python docs/make_architecture.py"""

from __future__ import annotations

from pathlib import Path

ROWS = [
    [("cli", "every command")],
    [("scale", "many machines: Ray, torchrun")],
    [("serve", "HTTP: OpenAI, Anthropic, tree"), ("page", "the browser")],
    [("costing", "what writing token by token costs, as a report")],
    [("train", "from text to weights: data, objectives, loop, runs")],
    [("loading", "a model from a name"), ("conversation", "a chat that stays ids")],
    [("language_model", "the face: every question to a model is a method")],
    [("decoding", "strategies on the verbs"), ("lens", "looking inside")],
    [("session", "a model with its engine"), ("request_options", "checked at the door")],
    [("engine", "tree, scheduler, loop: plan, launch, settle")],
    [("backends", "a StepBatch in, a handle out: cpu, torch")],
    [
        ("text", "ids, bytes, text"),
        ("model", "config, weights"),
        ("sampling", "logits to one token"),
    ],
]
WIDTH, ROW, GAP, HEIGHT = 760, 66, 14, 48


def boxes() -> list[str]:
    found = []
    for number, row in enumerate(ROWS):
        width = (WIDTH - GAP * (len(row) - 1)) / len(row)
        y = 10 + number * ROW
        for place, (name, words) in enumerate(row):
            x = 10 + place * (width + GAP)
            found.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="6"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 20}" class="name">{name}</text>'
                f'<text x="{x + width / 2:.0f}" y="{y + 37}">{words}</text>'
            )
        if number:
            middle = 10 + WIDTH / 2
            found.append(f'<path d="M{middle} {y - ROW + HEIGHT + 2}V{y - 4}m-4 -6l4 6l4 -6"/>')
    return found


def main() -> None:
    height = 20 + len(ROWS) * ROW
    style = (
        "rect{fill:#f6f3ec;stroke:#8a7a55}text{font:12px sans-serif;text-anchor:middle;fill:#333}"
        ".name{font-weight:bold;font-size:14px}path{fill:none;stroke:#8a7a55}"
    )
    body = "\n".join(boxes())
    target = Path(__file__).parent / "images" / "architecture.svg"
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} {height}" '
        f'width="{WIDTH + 20}" height="{height}">\n'
        f"<style>{style}</style>\n"
        '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>\n'
        f"{body}\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
