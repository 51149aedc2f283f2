"""Beam search: the likeliest whole text, not the likeliest next token.

    beam_search(lm, prompt, beams=4).best
    beam_search(lm, prompt, beams=6, groups=3, results=3)      # beams that keep apart

Some texts grow side by side. At each step every one of them is continued by its likeliest tokens,
and only the best of all continuations live on: forks and prunings of the tree, computed in one
batch a step. Texts, scores and the moment it stops are those of transformers' `generate`.

Diverse beams (Vijayakumar et al. 2016) search in groups, one after the other within a step: a
token costs a penalty for each beam of an earlier group that has just taken it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.decoding.written import (
    Branches,
    Line,
    Prompt,
    Ranking,
    Weighed,
    blank,
    weigh,
    whole,
)
from unspool.engine.branch import Branch
from unspool.errors import SettingsError, check_bool, check_number
from unspool.session import Session


@dataclass(frozen=True, slots=True)
class _Beam:
    """A text that still grows."""

    line: Line
    score: float  # log-probability, less the diversity penalties
    branch: Branch  # the parent's, until the next move
    row: int = 0  # of the logits behind it


@dataclass(slots=True)
class _Group:
    """Beams that compete with each other."""

    size: int
    spare: int  # how many continuations to look at, so that enough go on if some end
    length_penalty: float
    early_stopping: bool | str
    running: list[_Beam]
    done: list[tuple[float, Line]] = field(default_factory=list)  # the best ended ones

    def advance(self, weighed: Weighed, taken: Counter[int], penalty: float) -> None:
        """One more token: the best continuations of all beams, ended or running.

        `taken` counts the tokens that earlier groups took in this step; ours are added.
        """
        found: list[tuple[float, int, int]] = []  # (score, beam, place among its candidates)
        for number, beam in enumerate(self.running):
            tokens, logprobs = weighed.tokens[beam.row], weighed.logprobs[beam.row]
            for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                if logprob > float("-inf"):
                    cost = penalty * taken[int(token)]
                    found.append((beam.score + float(logprob) - cost, number, place))
        found.sort(key=lambda entry: -entry[0])
        going: list[_Beam] = []
        ended: list[tuple[float, Line]] = []
        for place_here, (score, number, place) in enumerate(found[: self.spare]):
            parent = self.running[number]
            line = parent.line.add(weighed.pick(parent.row, place))
            if not line.finished:
                if len(going) < self.size:
                    going.append(_Beam(line, score, parent.branch))
            elif place_here < self.size:  # those further down only stand in for others
                ended.append((self._final(score, len(line.steps)), line))
        last = [beam.line.steps[-1] for beam in going] + [line.steps[-1] for _, line in ended]
        # All groups may end their texts at once: that alone makes them no more alike.
        taken.update(step.token for step in last if step.finish_reason != "stop")
        self.done = sorted(self.done + ended, key=lambda entry: -entry[0])[: self.size]
        self.running = going if self._can_improve(going) else []

    def _final(self, score: float, length: int) -> float:
        return float(score / length**self.length_penalty)

    def _can_improve(self, going: Sequence[_Beam]) -> bool:
        """Whether a running beam might still end better than the worst of the ended ones."""
        if not going:
            return False
        if len(self.done) < self.size:
            return True
        if self.early_stopping is True:
            return False
        best, length = going[0], len(going[0].line.steps)
        if self.early_stopping == "never" and self.length_penalty > 0:
            length += best.line.room  # it may yet grow, and the more tokens, the smaller the loss
        return self._final(best.score, length) > self.done[-1][0]


def beam_search(
    lm: Session,
    prompt: Prompt,
    *,
    beams: int = 4,
    groups: int = 1,
    diversity_penalty: float = 0.5,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    results: int = 1,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    end: bool = True,
    top: int = 5,
) -> Ranking:
    """The best texts found, best first; a score is log-probability / tokens ** length_penalty.

    beams            how many texts grow side by side.
    groups           into how many groups they are divided; `diversity_penalty` keeps these apart.
    length_penalty   above 0 favours longer texts, below 0 shorter ones.
    early_stopping   True: stop once as many texts have ended as there are beams. False: go on
                     while a running one scores better as it is. "never": while it could at all.
    results          how many texts to give, at most `beams`.

    The rest as in `lm.stream`. Going on with a result (`resume`) is greedy.
    """
    check_number("diversity_penalty", diversity_penalty)
    check_number("length_penalty", length_penalty)
    check_bool("end", end)
    whole("beams", beams)
    whole("groups", groups)
    whole("results", results, most=beams)
    if beams % groups:
        raise SettingsError(f"{beams} beams cannot be divided into {groups} equal groups")
    if early_stopping not in (True, False, "never"):
        raise SettingsError(f"early_stopping is {early_stopping!r}; True, False or 'never'")
    start = blank(
        lm, prompt, max_tokens=max_tokens, stop=stop, end=end, top=top, explain=False, temperature=0
    )
    line = Line.of(lm, start)
    if line.finished:
        return Ranking((start,), (0.0,))
    size = beams // groups
    spare = max(2, 1 + len(start.request.limits.end_ids)) * size
    count = spare + (beams - size)  # so many tokens at most may be pushed down by a penalty
    with Branches(lm.engine, lm.adapter) as held:
        root = held.open(start.prompt)
        logits = [lm.engine.extend(root)]
        parts = [
            _Group(size, spare, length_penalty, early_stopping, [_Beam(line, 0.0, root)])
            for _ in range(groups)
        ]
        while True:
            weighed, taken = weigh(logits, count, top), Counter[int]()
            for part in parts:
                part.advance(weighed, taken, diversity_penalty)
            logits = _read(lm, held, parts)
            if not logits:
                break
    ended = sorted((entry for part in parts for entry in part.done), key=lambda entry: -entry[0])
    best = ended[:results]
    return Ranking(tuple(line.generation() for _, line in best), tuple(score for score, _ in best))


def _read(lm: Session, held: Branches, parts: Sequence[_Group]) -> list[Any]:
    """Fork and prune as the groups decided, and have all new tokens computed in one batch."""
    running = [beam for part in parts for beam in part.running]
    branches = held.move([beam.branch for beam in running])
    moved = [
        _Beam(beam.line, beam.score, branch, row)
        for row, (beam, branch) in enumerate(zip(running, branches, strict=True))
    ]
    following = iter(moved)
    for part in parts:
        part.running = [next(following) for _ in part.running]
    return lm.engine.extend_all([(b.branch, [b.line.steps[-1].token]) for b in moved])
