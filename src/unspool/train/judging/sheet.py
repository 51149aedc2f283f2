"""A sheet of samples: the same prompts and seeds, written by several models side by side.

sheet = write_sheet({"start": "runs/a/checkpoints/000000", "end": "runs/a"}, ["The people"])
print(sheet.as_text())
Path("sheet.html").write_text(sheet.as_html())
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from unspool.decoding.progress import progress_bar
from unspool.errors import SettingsError
from unspool.loading import load
from unspool.train.running.runs import Run

DEFAULT_PROMPTS = ("Once upon a time", "The people of", "It is not")


@dataclass(frozen=True, slots=True)
class Sheet:
    """Texts by (prompt, seed) and model."""

    models: tuple[str, ...]
    rows: tuple[tuple[str, int], ...]
    texts: Mapping[tuple[str, str, int], str]  # (model, prompt, seed)

    def as_text(self, width: int = 100) -> str:
        """For a terminal: below each prompt what every model wrote."""
        room = max(len(name) for name in self.models) + 2
        lines: list[str] = []
        for prompt, seed in self.rows:
            lines.append(f"\n{prompt!r}, seed {seed}")
            for model in self.models:
                text = " ".join(self.texts[model, prompt, seed].split())
                first, rest = f"  {model:<{room}}", " " * (room + 2)
                whole = f"{first}{text}"
                lines.append(textwrap.fill(whole, max(width, 60), subsequent_indent=rest))
        return "\n".join(lines).strip()

    def as_html(self, title: str = "Samples") -> str:
        """A page of its own, readable in light and dark."""
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in self.models)
        rows = "".join(self._html_row(prompt, seed) for prompt, seed in self.rows)
        return _PAGE.format(title=html.escape(title), heads=heads, rows=rows)

    def _html_row(self, prompt: str, seed: int) -> str:
        begun = html.escape(prompt)
        cells = (html.escape(self.texts[name, prompt, seed]) for name in self.models)
        written = "".join(f"<td><b>{begun}</b>{cell}</td>" for cell in cells)
        return f"<tr><th>{begun}<small>seed {seed}</small></th>{written}</tr>\n"

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {"model": model, "prompt": prompt, "seed": seed, "text": text}
            for (model, prompt, seed), text in self.texts.items()
        ]


def write_sheet(
    models: Mapping[str, str | Path],
    prompts: Sequence[str] = DEFAULT_PROMPTS,
    *,
    seeds: Sequence[int] = (0,),
    max_tokens: int = 80,
    temperature: float = 0.8,
    progress: bool = True,
    **loading: Any,
) -> Sheet:
    """Have each model write; they are loaded one after the other. `loading` goes to `load`."""
    if not models or not prompts or not seeds:
        raise SettingsError("a sheet needs at least one model, one prompt and one seed")
    rows = tuple(product(prompts, seeds))
    texts: dict[tuple[str, str, int], str] = {}
    with progress_bar("writing", len(models), show=progress) as told:
        for number, (name, model) in enumerate(models.items()):
            told(number)
            with load(model, progress=False, **loading) as lm:
                for seed in seeds:
                    written = lm.generate(
                        list(prompts),
                        seed=seed,
                        max_tokens=max_tokens,
                        temperature=temperature,
                        progress=False,
                    )
                    for prompt, text in zip(prompts, written, strict=True):
                        texts[name, prompt, seed] = text.text
    return Sheet(tuple(models), rows, texts)


def named_models(models: Sequence[str], *, film: bool = False) -> dict[str, str | Path]:
    """Each model under a short name of its own; with `film`, a run as all its checkpoints."""
    found: dict[str, str | Path] = {}
    for model in models:
        saved = Run.open(model).checkpoints() if film else []
        parts: Sequence[str | Path] = [one.folder for one in saved] if film else [model]
        for part in parts:
            name = Path(part).name or str(part)
            if film and len(models) > 1:
                name = f"{Path(model).name} {name}"
            found[name if name not in found else str(part)] = part
    return found


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #ccc; --dim: #666; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --paper: #161616; --line: #444; --dim: #999; }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ border: 1px solid var(--line); padding: .5rem .75rem; text-align: left;
  vertical-align: top; min-width: 14rem; }}
td {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
small {{ display: block; color: var(--dim); font-weight: normal; }}
</style>
<h1>{title}</h1>
<div><table>
<thead><tr><th>prompt</th>{heads}</tr></thead>
<tbody>
{rows}</tbody>
</table></div>
</html>
"""
