"""How good a text is at how many tokens a pass: python bench/diffuse.py [--model MODEL] [--tiny]

    python bench/diffuse.py --model GSAI-ML/LLaDA-8B-Instruct --judge qwen3-0.6b
    python bench/diffuse.py --twin FOLDER --mask 3 --block 8       a causal model's twin
    python bench/diffuse.py --tiny                                 does the bench itself work?

Each prompt is filled at several settings, from one place a pass to all at once. For each setting:
tokens a pass, seconds, the perplexity of the texts under a judge (a causal model that reads prompt
and text), how many runs of four tokens occurred before, and the entropy of the tokens used. A low
perplexity with many repeats is a text that loops: read the columns together. Of a twin, what the
causal model itself writes comes first. At the end the threshold order is written down once more as
a plain loop, which must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import unspool
from thinking.report import sheet
from unspool.costs.part import Series

PROMPTS = (
    "Why do leaves change color in fall?",
    "Write a short story about a cat and the sea.",
    "How do I make pancakes?",
    "What is the difference between a frog and a toad?",
    "Describe a busy market in one paragraph.",
    "Give me three tips for sleeping better.",
)
SETTINGS: list[dict[str, Any]] = [
    {"order": "fixed", "k": 1},
    *({"order": "threshold", "threshold": sure} for sure in (0.95, 0.9, 0.7, 0.5, 0.3, 0.2)),
    *({"order": "left", "threshold": sure} for sure in (0.9, 0.7, 0.5, 0.3)),
    *({"order": "entropy", "entropy_bound": bound} for bound in (0.1, 0.5, 1.0, 2.0, 4.0)),
    {"order": "factor", "factor": 1.0},
    {"order": "margin", "k": 2},
    {"order": "random", "k": 2},
    {"order": "threshold", "steps": 1},
]


def measured(lm: Any, judge: Any, prompts: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """One setting: all prompts, one after the other, so that seconds mean something."""
    texts = [lm.diffuse(lm_prompt(lm, prompt), seed=0, **options) for prompt in prompts]
    runs = sum(one.kind != "look" for text in texts for one in text.passes)
    return judged(judge, prompts, texts, runs, sum(text.seconds for text in texts))


def written(lm: Any, judge: Any, prompts: list[Any], temperature: float, most: int) -> Any:
    """What the causal model writes, a token a pass."""
    began = perf_counter()
    texts = [
        lm.generate(lm_prompt(lm, prompt), max_tokens=most, temperature=temperature, seed=0)
        for prompt in prompts
    ]
    runs = sum(len(text.tokens) for text in texts)
    return judged(judge, prompts, texts, runs, perf_counter() - began)


def judged(
    judge: Any, prompts: list[Any], texts: list[Any], runs: int, seconds: float
) -> dict[str, Any]:
    tokens = [text.tokens for text in texts]
    return {
        "passes": runs,
        "tokens": sum(map(len, tokens)),
        "tokens_per_pass": round(sum(map(len, tokens)) / runs, 2),
        "seconds": round(seconds, 2),
        "judged_perplexity": round(perplexity(judge, prompts, texts), 2),
        "repeated_4_grams": round(float(np.mean([repeated(one) for one in tokens])), 3),
        "entropy_bits": round(float(np.mean([entropy(one) for one in tokens])), 2),
        "example": texts[0].text[:80],
    }


def lm_prompt(lm: Any, question: str) -> Any:
    return lm.chat_prompt(question).ids if lm.is_instruct else question


def perplexity(judge: Any, prompts: list[str], texts: list[Any]) -> float:
    """Of the texts behind their prompts, by a model that did not write them, a token on average."""
    logprobs: list[float] = []
    for question, text in zip(prompts, texts, strict=True):
        if judge is None:
            break
        prompt = judge.prompt_ids(lm_prompt(judge, question))
        behind = judge.tokenizer.encode(text.text)
        if behind:
            scored = judge.score([*prompt, *behind]).logprobs[len(prompt) :]
            logprobs += [one for one in scored if one is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else math.nan


def repeated(tokens: list[int]) -> float:
    """The share of runs of four tokens that occurred before."""
    runs = [tuple(tokens[n : n + 4]) for n in range(len(tokens) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def entropy(tokens: list[int]) -> float:
    counts = np.array(list(Counter(tokens).values()), float)
    shares = counts / counts.sum() if len(counts) else counts
    return float(-(shares * np.log2(shares)).sum()) if len(counts) else 0.0


def plain_loop(lm: Any, prompt: list[int], length: int, threshold: float) -> list[int]:
    """The threshold order, written down once more: a canvas by hand, and nothing else."""
    with lm.canvas(prompt, length) as canvas:
        while canvas.masked:
            logits = np.array(canvas.logits(), np.float64)
            logits[:, canvas.kind.mask_id] = -np.inf
            logits -= logits.max(-1, keepdims=True)
            chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            order = sorted(canvas.masked, key=lambda place: -chances[place].max())
            sure = [place for place in order if chances[place].max() >= threshold]
            for place in sure or order[:1]:
                canvas.set(place, int(chances[place].argmax()))
        return canvas.tokens


def tiny_model(folder: str) -> Any:
    """Random weights that see the whole text."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from helpers import canvas_support

    return canvas_support.with_vocabulary(Path(folder), sight="whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a diffusion model; without it the default model")
    parser.add_argument("--judge", help="a causal model that reads the texts (the default one)")
    parser.add_argument("--twin", help="a folder with an adapter that fills the canvas")
    parser.add_argument("--mask", type=int, help="the mask token, where the model does not say")
    parser.add_argument("--block", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--plot", type=Path, help="draw it there, as SVG")
    parser.add_argument("--tiny", action="store_true", help="random weights and a few tokens")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lm = tiny_model(folder) if given.tiny else unspool.load(given.model)
        judge = None if given.tiny else unspool.load(given.judge)
        run(lm, judge, given)


def run(lm: Any, judge: Any, given: argparse.Namespace) -> None:
    shared: dict[str, Any] = {"max_tokens": 8 if given.tiny else given.tokens}
    shared |= {n: v for n, v in (("mask", given.mask), ("block", given.block)) if v is not None}
    if given.twin:
        lm.load_adapter("twin", given.twin)
        shared |= {"twin": "twin", "shifted": True}
    prompts = list(PROMPTS[:2] if given.tiny else PROMPTS)
    rows = []
    causal = [{"causal, temperature": number} for number in (0.0, 0.8)] if given.twin else []
    for options in [*causal, *SETTINGS]:
        if options in causal:
            number = options["causal, temperature"]
            row = {"setting": options, **written(lm, judge, prompts, number, given.tokens)}
        else:
            row = {"setting": options, **measured(lm, judge, prompts, {**shared, **options})}
        rows.append(row)
        shown = ", ".join(f"{name} {value}" for name, value in options.items())
        print(
            f"{shown:<32} {row['tokens_per_pass']:>6} a pass  perplexity "
            f"{row['judged_perplexity']:>9}  repeats {row['repeated_4_grams']:>5}  entropy "
            f"{row['entropy_bits']:>5} bits  {row['seconds']:>7} s  {row['example']!r}",
            flush=True,
        )
    if lm.config.sight == "whole" and not given.twin:
        ids, length = lm.prompt_ids(lm_prompt(lm, prompts[0])), shared["max_tokens"]
        ours = lm.diffuse(ids, threshold=0.7, end=False, **{**shared, "block": length})
        same = ours.tokens == plain_loop(lm, ids, length, 0.7)
        print("a plain loop over the same logits gives", "the same tokens" if same else "OTHERS")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    if given.plot:
        given.plot.write_text(drawn(rows), encoding="utf-8")


def drawn(rows: list[dict[str, Any]]) -> str:
    """Perplexity, repetition and entropy against tokens a pass, a line for each order."""
    columns = {
        "judged_perplexity": "perplexity under a judge",
        "repeated_4_grams": "runs of four that occurred before",
        "entropy_bits": "entropy of the tokens, bits",
    }
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        order = row["setting"].get("order")
        if order in ("threshold", "left", "entropy"):
            lines.setdefault(order, []).append(row)
    causal = [row for row in rows if "causal, temperature" in row["setting"]][:1]
    panels = []
    for column, label in columns.items():
        every = []
        for order, found in lines.items():
            found = sorted(found, key=lambda row: row["tokens_per_pass"])
            across = [row["tokens_per_pass"] for row in found]
            up = [row[column] for row in found]
            every.append(Series(order, across, up, None, None, "tokens a pass", label, log_x=True))
        ends = [min(x for one in every for x in one.x), max(x for one in every for x in one.x)]
        for row in causal:
            every.append(Series("causal", ends, [row[column]] * 2, log_x=True, kind="reference"))
        panels.append((label, every))
    return sheet(panels)


if __name__ == "__main__":
    main()
