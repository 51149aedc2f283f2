"""Accuracy against tokens, with intervals, from recorded samples and searches.

A point is the mean over problems. Samples are cut into blocks of n; each block is one run of the
policy, and a problem's value is the mean over its blocks. The 95 % intervals are bootstraps over
problems, also those of the gain over one sample of the same problem. Tokens are those written and
scored for a problem; the prompt, which every policy reads once, is reported separately.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lib.report import Panel, sheet, table, write_json
from unspool.costs.part import Series, bootstrap_means

# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One complete text, without its words."""

    tokens: int
    logprob: float  # mean per token
    right: bool
    score: float  # of the exact check
    answer: str | None = None
    certainty: float | None = None  # None: not computed


@dataclass(frozen=True)
class ProblemSamples:
    """The samples of one problem."""

    id: str
    prompt: int  # its tokens
    samples: list[Sample]
    greedy: Sample
    text: str = ""  # the first sample, for readers


@dataclass(frozen=True)
class SearchResult:
    id: str
    policy: str  # with its verifier: "beam by log-probability"
    n: int  # the budget is the cost of n samples of this problem
    budget: int  # in tokens, prompt included
    spent: int  # tokens written and scored
    right: bool
    error: str = ""
    text: str = field(default="", compare=False)


def append(file: Path, rows: Iterable[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_samples(file: Path) -> list[ProblemSamples]:
    problems = []
    for row in _read_rows(file):
        row["samples"] = [Sample(**sample) for sample in row["samples"]]
        problems.append(ProblemSamples(**{**row, "greedy": Sample(**row["greedy"])}))
    return problems


def read_searches(file: Path) -> list[SearchResult]:
    return [SearchResult(**row) for row in _read_rows(file)]


def _read_rows(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


# -- policies that select among samples ------------------------------------------------------------

Choice = Callable[[Sequence[Sample]], Sample | None]


def best_by(value: Callable[[Sample], float]) -> Choice:
    """Best of n: the highest score; ties go to the likeliest, then the first."""
    return lambda samples: max(samples, key=lambda sample: (value(sample), sample.logprob))


def vote_by(weight: Callable[[Sample], float]) -> Choice:
    """The answer with most votes; ties go to the likeliest text; None if no text has an answer.

    Negative weights count as e^weight, like in `VoteVerifier`.
    """

    def choose(samples: Sequence[Sample]) -> Sample | None:
        weights = [weight(sample) for sample in samples]
        if min(weights) < 0:
            weights = [math.exp(value - max(weights)) for value in weights]
        votes: dict[str, float] = {}
        for sample, value in zip(samples, weights, strict=True):
            if sample.answer is not None:
                votes[sample.answer] = votes.get(sample.answer, 0.0) + value
        voters = [sample for sample in samples if sample.answer is not None]
        return max(voters, key=lambda s: (votes[s.answer or ""], s.logprob), default=None)

    return choose


def _certainty(sample: Sample) -> float:
    assert sample.certainty is not None
    return sample.certainty


# Policy: the choice, whether it needs certainties (which cost tokens), and whether it votes.
CHOICES: dict[str, tuple[Choice, bool, bool]] = {
    "best-of by the exact check": (best_by(lambda s: s.score), False, False),
    "best-of by log-probability": (best_by(lambda s: s.logprob), False, False),
    "best-of by certainty": (best_by(_certainty), True, False),
    "vote": (vote_by(lambda s: 1.0), False, True),
    "vote weighed by log-probability": (vote_by(lambda s: s.logprob), False, True),
    "vote weighed by certainty": (vote_by(_certainty), True, True),
}

# -- curves ----------------------------------------------------------------------------------------

SINGLE, GREEDY = "one sample", "greedy"
Point = dict[str, Any]


def curves(
    problems: Sequence[ProblemSamples], searches: Sequence[SearchResult]
) -> dict[str, list[Point]]:
    """The points of every policy: n, tokens, accuracy and gain with 95 % intervals."""
    single = {p.id: fmean(sample.right for sample in p.samples) for p in problems}
    size = min(len(p.samples) for p in problems)
    certain = min(sum(s.certainty is not None for s in p.samples) for p in problems)
    greedy = {p.id: (float(p.greedy.right), float(p.greedy.tokens)) for p in problems}

    def block_point(n: int, most: int, choice: Choice, is_scored: bool) -> Point:
        """A policy over blocks of n among the first `most` samples."""
        values = {}
        for p in problems:
            blocks = [p.samples[start : start + n] for start in range(0, most - n + 1, n)]
            tokens = sum(sample.tokens for block in blocks for sample in block) / len(blocks)
            values[p.id] = (accuracy(blocks, choice), tokens * (2 if is_scored else 1))
        return _point(n, values, single, most // n)

    points = {
        SINGLE: [block_point(1, size, lambda samples: samples[0], False)],
        GREEDY: [_point(1, greedy, single, 1)],
    }
    for name, (choice, is_scored, votes) in CHOICES.items():
        if votes and not any(has_answers(p) for p in problems):
            continue
        most = certain if is_scored else size
        sizes = [2**power for power in range(1, 12) if 2**power <= most]
        points[name] = [block_point(n, most, choice, is_scored) for n in sizes]
    for search in searches:
        points.setdefault(search.policy, [])
    for name, n in sorted({(search.policy, search.n) for search in searches}):
        results = [search for search in searches if (search.policy, search.n) == (name, n)]
        values = {result.id: (float(result.right), float(result.spent)) for result in results}
        errors = sum(bool(result.error) for result in results)
        points[name].append(_point(n, values, single, 1, errors))
    return {name: line for name, line in points.items() if line}


def has_answers(problem: ProblemSamples) -> bool:
    return any(sample.answer is not None for sample in problem.samples)


def accuracy(blocks: Sequence[Sequence[Sample]], choice: Choice) -> float:
    selected = [choice(block) for block in blocks]
    return fmean(bool(sample and sample.right) for sample in selected)


def _point(
    n: int, values: dict[str, tuple[float, float]], single: dict[str, float], runs: int,
    errors: int = 0,
) -> Point:  # fmt: skip
    right = np.array([value[0] for value in values.values()])
    gains = right - np.array([single[name] for name in values])
    (low, gain_low), (high, gain_high) = bootstrap_means(np.stack([right, gains], axis=1))
    return {
        "n": n, "tokens": fmean(value[1] for value in values.values()),
        "accuracy": float(right.mean()), "low": low, "high": high, "gain": float(gains.mean()),
        "gain_low": gain_low, "gain_high": gain_high, "problems": len(values), "runs": runs,
        "errors": errors,
    }  # fmt: skip


EDGES = (0.0, 1e-9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0 + 1e-9)


def voting(problems: Sequence[ProblemSamples], sizes: Sequence[int] = (4, 16)) -> dict[str, Any]:
    """Gain of a vote over one sample, by how often a sample of that problem is right.

    How often is estimated on one half of the samples, and the other half votes, so that luck in
    the estimate does not select the voters.
    """
    rows = []
    for problem in problems:
        half = len(problem.samples) // 2
        voters, reference = problem.samples[:half], problem.samples[half:]
        if not reference or half < max(sizes):
            continue
        single = fmean(sample.right for sample in voters)
        gains = []
        for n in sizes:
            blocks = [voters[start : start + n] for start in range(0, half - n + 1, n)]
            gains.append(accuracy(blocks, CHOICES["vote"][0]) - single)
        rows.append((fmean(sample.right for sample in reference), *gains))
    values = np.array(rows).reshape(len(rows), 1 + len(sizes))
    bins = []
    for low, high in pairwise(EDGES):
        inside = values[(values[:, 0] >= low) & (values[:, 0] < high)]
        if len(inside) < 5:
            continue
        lows, highs = bootstrap_means(inside[:, 1:])
        means = inside.mean(axis=0).tolist()
        columns = zip(sizes, means[1:], map(float, lows), map(float, highs), strict=True)
        figures = [dict(zip(("n", "gain", "low", "high"), c, strict=True)) for c in columns]
        bins.append({"right": means[0], "problems": len(inside), "gains": figures})
    return {"bins": bins, "problems": len(rows)}


# -- report ----------------------------------------------------------------------------------------

# Few enough to distinguish: with and without the answer, and searches over pieces.
PLOTTED = (
    "best-of by the exact check", "mcts by the exact check", "best-of by log-probability",
    "best-of by certainty", "vote", "beam by log-probability", "dvts by log-probability",
    "restarts by log-probability",
)  # fmt: skip


def write_report(out: Path) -> dict[str, Any]:
    """Write results.json, results.md and charts from all records in a folder."""
    settings = [json.loads(file.read_text()) for file in sorted(out.glob("settings.*.json"))]
    results: dict[str, Any] = {"settings": settings, "models": {}}
    voters: dict[str, list[ProblemSamples]] = {}
    for file in sorted((out / "samples").glob("*.jsonl")):
        model, task = file.stem.split("~")
        problems, searches = read_samples(file), read_searches(out / "searches" / file.name)
        voters.setdefault(model, []).extend(p for p in problems if has_answers(p))
        entry = results["models"].setdefault(model, {"tasks": {}})
        entry["tasks"][task] = {
            "problems": len(problems), "samples": len(problems[0].samples),
            "prompt_tokens": sum(p.prompt for p in problems) / len(problems),
            "curves": curves(problems, searches),
        }  # fmt: skip
    votes = []
    for model, entry in results["models"].items():
        entry["voting"] = voting(voters[model]) if voters[model] else {"bins": [], "problems": 0}
        if entry["voting"]["bins"]:
            votes.append(_vote_panel(model, entry["voting"]))
        panels = [_task_panel(task, figures) for task, figures in entry["tasks"].items()]
        (out / f"think-{model}.svg").write_text(sheet(panels))
    if votes:
        (out / "voting.svg").write_text(sheet(votes))
    write_json(out / "results.json", results)
    (out / "results.md").write_text(_tables(results))
    return results


def _tables(results: dict[str, Any]) -> str:
    """Every point of every curve, in Markdown."""
    header = ("policy", "n", "tokens", "right, %", "95 %", "gain, points", "95 %", "runs")
    texts = []
    for model, entry in results["models"].items():
        for task, figures in entry["tasks"].items():
            points = [(name, p) for name, line in figures["curves"].items() for p in line]
            texts.append(
                f"### {model}, {task}\n\n{figures['problems']} problems, {figures['samples']} "
                f"samples of each; prompts of {figures['prompt_tokens']:.0f} tokens.\n\n"
                f"{table(header, [_row(*item) for item in points])}\n"
            )
    return "\n".join(texts)


def _row(name: str, point: Point) -> list[str]:
    p = {key: 100 * value for key, value in point.items()}
    failed = f" ({point['errors']} failed)" if point["errors"] else ""
    return [
        name, f"{point['n']}", f"{point['tokens']:.0f}", f"{p['accuracy']:.1f}",
        f"{p['low']:.1f} … {p['high']:.1f}", f"{p['gain']:+.1f}",
        f"{p['gain_low']:+.1f} … {p['gain_high']:+.1f}", f"{point['runs']}{failed}",
    ]  # fmt: skip


def _task_panel(task: str, figures: dict[str, Any]) -> Panel:
    """Accuracy against tokens; each policy starts at one sample."""
    points = figures["curves"]
    lines = []
    for name in PLOTTED:
        if name in points:
            line = [points[SINGLE][0], *points[name]]
            bands = [[100 * p[key] for p in line] for key in ("accuracy", "low", "high")]
            labels = ("tokens for a problem", "right, %", task)
            lines.append(Series(name, [p["tokens"] for p in line], *bands, *labels, log_x=True))
    x = [x for line in lines for x in line.x]
    levels = [100 * points[GREEDY][0]["accuracy"]] * 2
    lines.append(Series(GREEDY, [min(x), max(x)], levels, log_x=True, kind="reference"))
    return f"{task} ({figures['problems']} problems)", lines


def _vote_panel(model: str, figures: dict[str, Any]) -> Panel:
    """Gain of a vote by how often one sample is right."""
    bins = figures["bins"]
    x = [100 * b["right"] for b in bins]
    labels = ("how often one sample is right, %", "gain over one sample, points", model)
    lines = []
    for k, gain in enumerate(bins[0]["gains"]):
        bands = [[100 * b["gains"][k][key] for b in bins] for key in ("gain", "low", "high")]
        lines.append(Series(f"vote of {gain['n']}", x, *bands, *labels))
    lines.append(Series("no gain", [x[0], x[-1]], [0, 0], kind="reference"))
    return f"{model} ({figures['problems']} problems)", lines
