"""Sample sheet: texts of several models for the same prompts and seeds, side by side.

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

from unspool.errors import SettingsError
from unspool.loading import load
from unspool.progress import progress_bar
from unspool.train.running.runs import Run

DEFAULT_PROMPTS = ("Once upon a time", "The people of", "It is not")


@dataclass(frozen=True, slots=True)
class Sheet:
    """Texts by (prompt, seed) and model."""

    models: tuple[str, ...]
    rows: tuple[tuple[str, int], ...]
    texts: Mapping[tuple[str, str, int], str]  # (model, prompt, seed)

    def as_text(self, width: int = 100) -> str:
        """For a terminal: below each prompt the text of every model."""
        room = max(len(name) for name in self.models) + 2
        lines: list[str] = []
        for prompt, seed in self.rows:
            lines.append(f"\n{prompt!r}, seed {seed}")
            for model in self.models:
                text = " ".join(self.texts[model, prompt, seed].split())
                line, indent = f"  {model:<{room}}{text}", " " * (room + 2)
                lines.append(textwrap.fill(line, max(width, 60), subsequent_indent=indent))
        return "\n".join(lines).strip()

    def as_html(self, title: str = "Samples") -> str:
        """A standalone HTML page with light and dark colours."""
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in self.models)
        rows = "".join(self._html_row(prompt, seed) for prompt, seed in self.rows)
        return _HTML.format(title=html.escape(title), heads=heads, rows=rows)

    def _html_row(self, prompt: str, seed: int) -> str:
        prompt_html = html.escape(prompt)
        texts = (html.escape(self.texts[name, prompt, seed]) for name in self.models)
        cells = "".join(f"<td><b>{prompt_html}</b>{text}</td>" for text in texts)
        return f"<tr><th>{prompt_html}<small>seed {seed}</small></th>{cells}</tr>\n"

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
    """Generate with each model, loaded one after the other; `loading` are options of `load`."""
    if not models or not prompts or not seeds:
        raise SettingsError("a sheet needs at least one model, one prompt and one seed")
    rows = tuple(product(prompts, seeds))
    texts: dict[tuple[str, str, int], str] = {}
    with progress_bar("generating", len(models), show=progress) as on_progress:
        for number, (name, model) in enumerate(models.items()):
            on_progress(number)
            with load(model, progress=False, **loading) as lm:
                for seed in seeds:
                    generations = lm.generate(
                        list(prompts),
                        seed=seed,
                        max_tokens=max_tokens,
                        temperature=temperature,
                        progress=False,
                    )
                    for prompt, generation in zip(prompts, generations, strict=True):
                        texts[name, prompt, seed] = generation.text
    return Sheet(tuple(models), rows, texts)


def named_models(models: Sequence[str], *, film: bool = False) -> dict[str, str | Path]:
    """Models by unique short names; with `film`, every checkpoint of each run."""
    named: dict[str, str | Path] = {}
    for model in models:
        paths: Sequence[str | Path] = [model]
        if film:
            paths = [checkpoint.folder for checkpoint in Run.open(model).checkpoints()]
        for path in paths:
            name = Path(path).name or str(path)
            if film and len(models) > 1:
                name = f"{Path(model).name} {name}"
            named[name if name not in named else str(path)] = path
    return named


_HTML = """<!doctype html>
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
