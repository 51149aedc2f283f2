"""Beam search: search for the likeliest text.

    beam_search(lm, prompt, beams=4).best
    beam_search(lm, prompt, beams=6, groups=3, results=3)      # diverse beams

At each step every beam is continued by its likeliest tokens, and the best continuations of all
beams are kept: forks and prunes of the tree, one batch per step. Texts, scores and stopping are
those of transformers' `generate`.

Diverse beam search (Vijayakumar et al. 2016) runs in groups, one after the other within a step: a
token is penalized for each beam of an earlier group that has chosen it in this step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.decoding.branches import (
    HeldBranches,
    NextTokens,
    PartialText,
    Prompt,
    Ranking,
    check_int,
    prepare_generation,
    top_next_tokens,
)
from unspool.engine.tree import Branch
from unspool.errors import SettingsError, check_bool, check_number
from unspool.session import Session


@dataclass(frozen=True, slots=True)
class _Beam:
    """A running beam."""

    line: PartialText
    score: float  # log-probability, less the diversity penalties
    branch: Branch  # the parent's, until the next fork
    row: int = 0  # row of its logits


@dataclass(slots=True)
class _BeamGroup:
    """Beams that compete with each other (a diversity group)."""

    size: int
    spare: int  # candidates considered, so that enough continue if some end
    length_penalty: float
    early_stopping: bool | str
    running: list[_Beam]
    done: list[tuple[float, PartialText]] = field(
        default_factory=list
    )  # best finished texts: (score, text)

    def advance(self, weighed: NextTokens, token_counts: Counter[int], penalty: float) -> None:
        """Extend all beams by one token and keep the best continuations.

        `token_counts` has the tokens chosen by earlier groups in this step; adds this group's.
        """
        candidates: list[tuple[float, int, int]] = []  # (score, beam index, candidate index)
        for number, beam in enumerate(self.running):
            tokens, logprobs = weighed.tokens[beam.row], weighed.logprobs[beam.row]
            for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                if logprob > float("-inf"):
                    cost = penalty * token_counts[int(token)]
                    candidates.append((beam.score + float(logprob) - cost, number, index))
        candidates.sort(key=lambda entry: -entry[0])
        running: list[_Beam] = []
        ended: list[tuple[float, PartialText]] = []
        for rank, (score, number, index) in enumerate(candidates[: self.spare]):
            parent = self.running[number]
            line = parent.line.add(weighed.pick(parent.row, index))
            if not line.finished:
                if len(running) < self.size:
                    running.append(_Beam(line, score, parent.branch))
            elif rank < self.size:  # lower ranks only replace finished beams
                ended.append((self._final(score, len(line.steps)), line))
        last = [beam.line.steps[-1] for beam in running] + [line.steps[-1] for _, line in ended]
        # End tokens are not penalized: ending in the same step does not make texts alike.
        token_counts.update(step.token for step in last if step.finish_reason != "stop")
        self.done = sorted(self.done + ended, key=lambda entry: -entry[0])[: self.size]
        self.running = running if self._can_improve(running) else []

    def _final(self, score: float, length: int) -> float:
        return float(score / length**self.length_penalty)

    def _can_improve(self, going: Sequence[_Beam]) -> bool:
        """Whether a running beam may still beat the worst finished text."""
        if not going:
            return False
        if len(self.done) < self.size:
            return True
        if self.early_stopping is True:
            return False
        best, length = going[0], len(going[0].line.steps)
        if self.early_stopping == "never" and self.length_penalty > 0:
            length += best.line.room  # a longer text has a smaller penalty
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
    """Return the best texts, best first; the score is log-probability / tokens ** length_penalty.

    beams            number of beams.
    groups           number of groups; `diversity_penalty` makes groups differ.
    length_penalty   above 0 favours longer texts, below 0 shorter ones.
    early_stopping   True: stop when as many texts have finished as there are beams. False: stop
                     when no running beam scores better now. "never": when none could.
    results          number of texts to return, at most `beams`.

    Other options as in `lm.stream`. Resuming a result (`resume`) is greedy.
    """
    check_number("diversity_penalty", diversity_penalty)
    check_number("length_penalty", length_penalty)
    check_bool("end", end)
    check_int("beams", beams)
    check_int("groups", groups)
    check_int("results", results, most=beams)
    if beams % groups:
        raise SettingsError(f"{beams} beams cannot be divided into {groups} equal groups")
    if early_stopping not in (True, False, "never"):
        raise SettingsError(
            f"early_stopping must be True, False or 'never', got {early_stopping!r}"
        )
    start = prepare_generation(
        lm, prompt, max_tokens=max_tokens, stop=stop, end=end, top=top, explain=False, temperature=0
    )
    line = PartialText(start, lm.engine.token_bytes)
    if line.finished:
        return Ranking((start,), (0.0,))
    size = beams // groups
    spare = max(2, 1 + len(start.request.limits.end_ids)) * size
    count = spare + (beams - size)  # a penalty can displace this many candidates
    with HeldBranches(lm.engine, lm.adapter) as branches:
        root = branches.open(start.prompt)
        logits = [lm.engine.extend(root)]
        parts = [
            _BeamGroup(size, spare, length_penalty, early_stopping, [_Beam(line, 0.0, root)])
            for _ in range(groups)
        ]
        while True:
            weighed, token_counts = top_next_tokens(logits, count, top), Counter[int]()
            for part in parts:
                part.advance(weighed, token_counts, diversity_penalty)
            logits = _read(lm, branches, parts)
            if not logits:
                break
    ended = sorted((entry for part in parts for entry in part.done), key=lambda entry: -entry[0])
    best = ended[:results]
    return Ranking(tuple(line.generation() for _, line in best), tuple(score for score, _ in best))


def _read(lm: Session, tracker: HeldBranches, parts: Sequence[_BeamGroup]) -> list[Any]:
    """Fork and prune branches, and compute all new tokens in one batch."""
    running = [beam for part in parts for beam in part.running]
    branches = tracker.move([beam.branch for beam in running])
    moved = [
        _Beam(beam.line, beam.score, branch, row)
        for row, (beam, branch) in enumerate(zip(running, branches, strict=True))
    ]
    following = iter(moved)
    for part in parts:
        part.running = [next(following) for _ in part.running]
    return lm.engine.extend_all([(b.branch, [b.line.steps[-1].token]) for b in moved])
