"""Lenses of the default model, and how close each comes to the final distribution.

python bench/lenses.py fit TEXTS...          # writes src/unspool/lens/lenses/*.safetensors
python bench/lenses.py compare TEXTS...      # KL to the final distribution, on texts not fitted
python bench/lenses.py gradients             # attribution patching beside exact patching
python bench/lenses.py figure                # docs/images/lenses.svg, from the results of compare

TEXTS are files of JSON lines: texts, or lists of token ids. Results are JSON on standard output, or
in the file of --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from lib.arguments import make_parser
from unspool.lens.activation_cache import activation_caches
from unspool.lens.activation_files import read_corpus
from unspool.lens.affine_lens import KINDS
from unspool.sampling import log_softmax

LENSES = Path(unspool.__file__).parent / "lens" / "lenses"
DOCS = Path(__file__).parent.parent / "docs"
DATA, IMAGE = DOCS / "research" / "data" / "lenses-135m.json", DOCS / "images" / "lenses.svg"
EVERY = 12  # every twelfth position is measured
CHUNK = 64  # positions whose logits are in memory together

PAIRS = (
    ("The capital of Italy is", "The capital of France is", " Rome", " Paris"),
    ("The colour of the sky is", "The colour of the grass is", " blue", " green"),
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("fit", "compare", "gradients", "figure"))
    parser.add_argument("texts", nargs="*", type=Path, help="files of JSON lines")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--most", type=int, default=200, help="texts of each file")
    parser.add_argument("--jacobian", type=int, default=50, help="of these, for the Jacobian lens")
    parser.add_argument("--probes", type=int, default=4, help="backward passes for each text")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="lenses to fit")
    parser.add_argument("--rank", type=int, default=64, help="of the lenses")
    parser.add_argument(
        "--folder", type=Path, default=LENSES, help="for the lenses that fit writes"
    )
    parser.add_argument("--also", nargs="*", default=(), type=Path, help="other lenses to compare")
    options = parser.parse_args()
    if options.what == "figure":
        results = json.loads((options.out or DATA).read_text(encoding="utf-8"))
        IMAGE.write_text(draw(results["kl"]), encoding="utf-8")
        return
    texts = [list(islice(read_corpus(path), options.most)) for path in options.texts]
    results = {
        "fit": lambda: fit(texts, options),
        "compare": lambda: compare([text for file in texts for text in file], options.also),
        "gradients": gradients,
    }[options.what]()
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": f"python bench/lenses.py {options.what}",
    }
    text = json.dumps({**facts, **results}, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")


def fit(texts: list[list[Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Fit lenses; the Jacobian lens to the first texts of each file."""
    options.folder.mkdir(exist_ok=True)
    written = {}
    for kind in options.kinds:
        is_jacobian = kind == "jacobian"
        most = options.jacobian if is_jacobian else None
        chosen = [text for file in texts for text in file[:most]]
        with unspool.load(backend="torch" if is_jacobian else "auto") as lm:
            started, started_cpu = time.perf_counter(), time.process_time()
            lens = lm.fit_lens(chosen, kind=kind, rank=options.rank, probes=options.probes)
            path = options.folder / f"{kind}.safetensors"
            lens.save(path)
            written[kind] = {
                "tokens": lens.num_tokens,
                "seconds": round(time.perf_counter() - started),
                "cpu_seconds": round(time.process_time() - started_cpu),
                "bytes": path.stat().st_size,
                "rank": lens.rank,
            }
            print(kind, written[kind], flush=True)
    return {"lenses": written}


def compare(texts: list[Any], other_lenses: Sequence[Path]) -> dict[str, Any]:
    """Mean KL divergence of each layer's prediction from the final one, in nats."""
    with unspool.load() as lm:
        for path in other_lenses:
            lm.load_lens(path, name=path.as_posix())
        last = lm.config.layers - 1
        prompts = [lm.prompt_ids(text, longer=True)[:128] for text in texts]
        caches = activation_caches(lm, prompts, sites=("resid_pre", f"resid_post.{last}"))
        residuals = np.concatenate(
            [
                np.concatenate((c["resid_pre"], c["resid_post", last][None]))[:, EVERY - 1 :: EVERY]
                for c in caches
            ],
            1,
        )
        lenses = {name: lm.find_lens(name) for name in ("logit", *lm.lenses)}
        sums = {name: np.zeros((last + 2, 2)) for name in lenses}
        for start in range(0, residuals.shape[1], CHUNK):
            rows = residuals[:, start : start + CHUNK]
            final = log_softmax(lm.model.logits(rows[-1]))
            for name, lens in lenses.items():
                vectors = rows if lens is None else lens.translate(rows)
                for layer, row in enumerate(vectors):
                    sums[name][layer] += _divergence(lm, row, final)
            print(f"{start + rows.shape[1]} of {residuals.shape[1]} positions", flush=True)
    measured = {name: (total / residuals.shape[1]).round(4).T for name, total in sums.items()}
    return {
        "positions": residuals.shape[1],
        "texts": len(texts),
        "kl": {name: columns[0].tolist() for name, columns in measured.items()},
        "same_top_token": {name: columns[1].tolist() for name, columns in measured.items()},
    }


def _divergence(lm: Any, vectors: Any, final: Any) -> tuple[float, int]:
    """Sum of the KL to the final distribution, and how often the most likely token is the same."""
    logprobs = log_softmax(lm.model.logits(vectors))
    divergence = (np.exp(final) * (final - logprobs)).sum(dtype=np.float64)
    return float(divergence), int((final.argmax(-1) == logprobs.argmax(-1)).sum())


def gradients() -> dict[str, Any]:
    """Attribution patching beside exact patching, at every layer and position."""
    rows = []
    with unspool.load(backend="torch") as lm:
        for clean, corrupted, answer, other in PAIRS:
            for site in ("resid_post", "mlp_out"):
                effects = []
                for is_approximate in (False, True):
                    sweep = lm.patch(
                        clean,
                        corrupted,
                        answer=answer,
                        other=other,
                        site=site,
                        approximate=is_approximate,
                        progress=False,
                    )
                    effects.append(sweep.effects.ravel().astype(np.float64))
                rows.append(
                    {
                        "clean": clean,
                        "site": site,
                        "correlation": round(float(np.corrcoef(*effects)[0, 1]), 3),
                        "cells": len(effects[0]),
                    }
                )
                print(rows[-1], flush=True)
    return {"gradients": rows}


# -- figure

_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 240, 60, 40
_COLOURS = {"logit": "#888888", "tuned": "#4477aa", "jacobian": "#b8860b"}


def draw(kl: dict[str, list[float]]) -> str:
    """Draw the KL by layer on a square-root scale, as SVG."""
    highest = max(max(values) for values in kl.values())

    def y_of(value: float) -> float:
        return _TOP + _HEIGHT * (1 - math.sqrt(value / highest))

    parts = [
        f'<text x="{_LEFT}" y="{_TOP - 14}" font-weight="600">KL to the final distribution, nats, '
        "by layer</text>",
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#888" stroke-opacity="0.5"/>',
    ]
    for tick in (0, 1, 5, 20, 50, 100):
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for number, (name, values) in enumerate(kl.items()):
        last, colour = len(values) - 1, _COLOURS[name]
        points = [
            f"{_LEFT + _WIDTH * n / last:.1f},{y_of(value):.1f}" for n, value in enumerate(values)
        ]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        x, y = _LEFT + number * 110, _TOP + _HEIGHT + 46
        parts.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{name}</text>')
    for layer in range(0, last + 1, 5):
        x = _LEFT + _WIDTH * layer / last
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{layer}</text>'
        )
    width, height = _LEFT + _WIDTH + 20, _TOP + _HEIGHT + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#888">'
        "<title>KL divergence of each layer's prediction from the final one, by "
        f"lens</title>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()
