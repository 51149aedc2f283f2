"""Text quality by tokens per pass: python bench/diffuse.py [--model MODEL] [--tiny]

    python bench/diffuse.py --model GSAI-ML/LLaDA-8B-Instruct --judge qwen3-0.6b
    python bench/diffuse.py --twin FOLDER --mask 3 --block 8     a causal model's twin
    python bench/diffuse.py --tiny                               test of the benchmark itself

Each prompt is filled with several settings, from one position per pass to all in one pass. For each
setting: tokens per pass, seconds, the perplexity of the texts under a judge (a causal model that
reads prompt and text), the share of repeated 4-grams, and the entropy of the tokens. A low
perplexity with many repeats is a looping text: read the columns together. For a twin, the causal
model's own texts come first. At the end the threshold order is compared with a plain loop, which
must give the same tokens.
"""

import argparse
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import unspool
from lib.arguments import add_options, make_parser
from lib.report import Panel, sheet, write_json
from unspool.costs.part import Series
from unspool.sampling.monitors import repetition_rate

PROMPTS = (
    "Why do leaves change color in fall?",
    "Write a short story about a cat and the sea.",
    "How do I make pancakes?",
    "What is the difference between a frog and a toad?",
    "Describe a busy market in one paragraph.",
    "Give me three tips for sleeping better.",
)
CAUSAL = "causal, temperature"
SETTINGS: list[dict[str, Any]] = [
    {"order": "fixed", "k": 1},
    *({"order": "threshold", "threshold": value} for value in (0.95, 0.9, 0.7, 0.5, 0.3, 0.2)),
    *({"order": "left", "threshold": value} for value in (0.9, 0.7, 0.5, 0.3)),
    *({"order": "entropy", "entropy_bound": bound} for bound in (0.1, 0.5, 1.0, 2.0, 4.0)),
    {"order": "factor", "factor": 1.0},
    {"order": "margin", "k": 2},
    {"order": "random", "k": 2},
    {"order": "threshold", "steps": 1},
]


def chat_prompt(lm: Any, question: str) -> Any:
    return lm.chat_prompt(question).ids if lm.is_instruct else question


def measure(
    lm: Any, judge: Any, questions: list[str], setting: dict[str, Any], shared: dict[str, Any]
) -> dict[str, Any]:
    """One setting: all prompts, one after the other, so that the seconds are comparable."""
    prompts = [chat_prompt(lm, question) for question in questions]
    start = perf_counter()
    if CAUSAL in setting:
        options = {"max_tokens": shared["max_tokens"], "temperature": setting[CAUSAL]}
        texts = [lm.generate(prompt, seed=0, **options) for prompt in prompts]
        passes = sum(len(text.tokens) for text in texts)
    else:
        texts = [lm.diffuse(prompt, seed=0, **shared, **setting) for prompt in prompts]
        passes = sum(step.kind != "look" for text in texts for step in text.passes)
    seconds, tokens = perf_counter() - start, [text.tokens for text in texts]
    count = sum(map(len, tokens))
    return {
        "setting": setting, "passes": passes, "tokens": count,
        "tokens_per_pass": round(count / passes, 2), "seconds": round(seconds, 2),
        "judged_perplexity": round(perplexity(judge, questions, texts), 2),
        "repeated_4_grams": round(float(np.mean([repetition_rate(t) for t in tokens])), 3),
        "entropy_bits": round(float(np.mean([entropy(t) for t in tokens])), 2),
        "example": texts[0].text[:80],
    }  # fmt: skip


def perplexity(judge: Any, questions: list[str], texts: list[Any]) -> float:
    """Perplexity of the texts after their prompts, by a model that did not write them."""
    logprobs: list[float] = []
    for question, text in zip(questions, texts, strict=True):
        if judge is None:
            break
        prompt = judge.prompt_ids(chat_prompt(judge, question))
        ids = judge.tokenizer.encode(text.text)
        if ids:
            scored = judge.score([*prompt, *ids]).logprobs[len(prompt) :]
            logprobs += [value for value in scored if value is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else math.nan


def entropy(tokens: list[int]) -> float:
    """Bits of the distribution of tokens in a text."""
    shares = np.array(list(Counter(tokens).values()), float) / max(1, len(tokens))
    return float(-(shares * np.log2(shares)).sum())


def plain_loop(lm: Any, prompt: list[int], length: int, threshold: float) -> list[int]:
    """The threshold order as a plain loop over a canvas."""
    with lm.canvas(prompt, length) as canvas:
        while canvas.masked:
            logits = np.array(canvas.logits(), np.float64)
            logits[:, canvas.kind.mask_id] = -np.inf
            logits -= logits.max(-1, keepdims=True)
            probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            order = sorted(canvas.masked, key=lambda position: -probabilities[position].max())
            certain = [p for p in order if probabilities[p].max() >= threshold]
            for position in certain or order[:1]:
                canvas.set(position, int(probabilities[position].argmax()))
        return list(canvas.tokens)


def run(lm: Any, judge: Any, args: argparse.Namespace) -> None:
    shared: dict[str, Any] = {"max_tokens": 8 if args.tiny else args.tokens}
    shared |= {n: v for n, v in (("mask", args.mask), ("block", args.block)) if v is not None}
    causal: list[dict[str, Any]] = []
    if args.twin:
        lm.load_adapter("twin", args.twin)
        shared |= {"twin": "twin", "shifted": True}
        causal = [{CAUSAL: temperature} for temperature in (0.0, 0.8)]
    questions = list(PROMPTS[:2] if args.tiny else PROMPTS)
    rows = []
    for setting in [*causal, *SETTINGS]:
        row = measure(lm, judge, questions, setting, shared)
        rows.append(row)
        text = ", ".join(f"{name} {value}" for name, value in setting.items())
        print(
            f"{text:<32} {row['tokens_per_pass']:>6} per pass  perplexity "
            f"{row['judged_perplexity']:>9}  repeats {row['repeated_4_grams']:>5}  entropy "
            f"{row['entropy_bits']:>5} bits  {row['seconds']:>7} s  {row['example']!r}",
            flush=True,
        )
    if lm.config.sight == "whole" and not args.twin:
        ids, length = lm.prompt_ids(chat_prompt(lm, questions[0])), shared["max_tokens"]
        text = lm.diffuse(ids, threshold=0.7, end=False, **{**shared, "block": length})
        is_same = text.tokens == plain_loop(lm, ids, length, 0.7)
        print("a plain loop gives", "the same tokens" if is_same else "OTHER tokens")
    if args.json:
        write_json(args.json, rows)
    if args.plot:
        args.plot.write_text(draw(rows), encoding="utf-8")


def draw(rows: list[dict[str, Any]]) -> str:
    """Perplexity, repetition and entropy against tokens per pass, a line for each order."""
    columns = {
        "judged_perplexity": "perplexity under a judge",
        "repeated_4_grams": "share of repeated 4-grams",
        "entropy_bits": "entropy of the tokens, bits",
    }
    rows = sorted(rows, key=lambda row: row["tokens_per_pass"])
    panels: list[Panel] = []
    for column, label in columns.items():
        lines = []
        for order in ("threshold", "left", "entropy"):
            line = [row for row in rows if row["setting"].get("order") == order]
            x, y = [row["tokens_per_pass"] for row in line], [row[column] for row in line]
            labels = {"x_label": "tokens per pass", "y_label": label}
            lines.append(Series(order, x, y, **labels, log_x=True))
        ends = [min(x for line in lines for x in line.x), max(x for line in lines for x in line.x)]
        levels = [row[column] for row in rows if row["setting"].get(CAUSAL) == 0.0]
        for level in levels:
            lines.append(Series("causal", ends, [level] * 2, log_x=True, kind="reference"))
        panels.append((label, lines))
    return sheet(panels)


def main() -> None:
    parser = make_parser(__doc__)
    add_options(
        parser,
        ("--model", str, "diffusion model; default: the default model"),
        ("--judge", str, "causal model that reads the texts (the default model)"),
        ("--twin", str, "folder of an adapter that fills the canvas"),
        ("--mask", int, "mask token, if the model does not define one"),
        ("--block", int),
        ("--tokens", 64),
        ("--json", Path, "file for the table"),
        ("--plot", Path, "file for the chart, SVG"),
        ("--tiny", False, "random weights and a few tokens"),
    )
    args = parser.parse_args()
    if not args.tiny:
        run(unspool.load(args.model), unspool.load(args.judge), args)
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from helpers import canvas_support

    with tempfile.TemporaryDirectory() as folder:
        run(canvas_support.with_vocabulary(Path(folder), sight="whole"), None, args)


if __name__ == "__main__":
    main()
