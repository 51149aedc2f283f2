"""Drafts as the engine runs them: a chain of guesses, or a tree of them, checked in one step.

A tree is cut into runs: the first goes on behind the text itself, each other one leaves it (or
another run) at some token. The first is computed in the text's own row. Every other run has a row
and a branch of its own, with the text's past and pages for what follows; the tokens between the
past and its beginning are computed once, in the row they belong to, and written into its pages as
well (`StepBatch.echoes`), or, where a backend cannot do that, computed once more. So every row is
an ordinary text to the kernels, and a token's numbers are the same to the bit as without drafts.

When the tokens are picked, the text follows the guesses that are right from run to run. The branch
it ends on becomes its branch; all others give their pages back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unspool.engine.branch import Branch
from unspool.engine.request import DraftTree
from unspool.engine.scheduler import Task
from unspool.engine.tree import Tree
from unspool.sampling import SamplingSettings
from unspool.sampling.picker import Ints, history_range


@dataclass(slots=True, eq=False)
class Run:
    """Guesses one behind the other, and what may follow instead of each."""

    tokens: list[int] = field(default_factory=list)
    parent: Run | None = None  # which run it leaves ...
    offset: int = 0  # ... behind so many of that one's tokens
    depth: int = 0  # of its first token; the token right behind the text has 0
    children: dict[tuple[int, int], Run] = field(default_factory=dict)  # by offset and first token
    row: Task | None = None  # in which it is computed, if it is

    def before(self) -> list[int]:
        """The guesses from the text to its first token."""
        if self.parent is None:
            return []
        return self.parent.before() + self.parent.tokens[: self.offset]


def as_runs(draft: Sequence[int] | DraftTree) -> list[Run]:
    """A draft cut into runs; the first of them is the one behind the text."""
    if not isinstance(draft, DraftTree):
        return [Run(list(draft))]
    runs = [Run()]
    ends: list[tuple[Run, int]] = []  # of each node: its run, how many tokens that has up to it
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        run, length = ends[parent] if parent >= 0 else (runs[0], 0)
        if length < len(run.tokens):  # somebody goes on there already
            run = Run(parent=run, offset=length, depth=run.depth + length)
            assert run.parent is not None
            run.parent.children[length, token] = run
            runs.append(run)
        run.tokens.append(token)
        ends.append((run, len(run.tokens)))
    return runs


def shortened(runs: list[Run], lengths: Sequence[int]) -> list[Run]:
    """The runs with so many of their tokens, and without those that leave one behind its end."""
    kept: list[Run] = []
    for run, length in zip(runs, lengths, strict=True):
        del run.tokens[length:]
        parent = run.parent
        hangs = parent is None or (parent in kept and run.offset <= len(parent.tokens))
        if hangs and (run.tokens or parent is None):
            kept.append(run)
    for run in kept:
        run.children = {at: child for at, child in run.children.items() if child in kept}
    return kept


class Guesses:
    """A draft being checked: where the text has come to in it."""

    __slots__ = ("at", "path", "rows", "run", "runs")

    def __init__(self, runs: list[Run] | None = None) -> None:
        self.runs = runs or [Run()]
        self.rows: list[SideRow] = []
        self.run, self.at = self.runs[0], 0  # the run, and how many of its tokens proved right
        self.path: list[Run] = [self.run]  # the runs that it followed

    @property
    def first(self) -> list[int]:
        """The guesses in the text's own row."""
        return self.runs[0].tokens

    @property
    def checked(self) -> int:
        """How many guesses proved right."""
        return self.run.depth + self.at

    @property
    def count(self) -> int:
        """How many guesses there are to be checked."""
        return len(self.first) + sum(len(row.run.tokens) for row in self.rows)

    @property
    def outcome(self) -> tuple[Task | None, int]:
        """Which row's outcome tells what follows here, and which number it has there."""
        return self.run.row, self.at if self.run.parent is None else self.at - 1

    def guessed(self) -> bool:
        """Whether there is any guess at the next token."""
        run, at = self.run, self.at
        if at < len(run.tokens):
            return True
        return any(
            place == at and child.row is not None for (place, _), child in run.children.items()
        )

    def follow(self, token: int) -> bool:
        """Whether this token was among the guesses; if so, go there."""
        if self.at < len(self.run.tokens) and self.run.tokens[self.at] == token:
            self.at += 1
            return True
        child = self.run.children.get((self.at, token))
        if child is None or child.row is None:
            return False
        self.run, self.at = child, 1
        self.path.append(child)
        return True


class SideRow(Task):
    """One run of a tree of guesses, computed beside its text; no task of its own."""

    __slots__ = ("run", "sources", "text")

    def __init__(self, text: Text, run: Run, branch: Branch) -> None:
        main = text.row
        super().__init__(branch, wanted=len(run.tokens))
        self.text, self.run = text, run
        self.pick_floats, self.pick_ints = main.pick_floats, main.pick_ints
        self.sees_history, self.watch = main.sees_history, main.watch
        self.first, self.until = main.first, branch.length
        # Whose tokens stand between the text's past and its own: the row, and their positions.
        self.sources: list[tuple[Task, range]] = []

    def echo(self) -> None:
        """Compute only its own tokens; what stands before them is written here by other rows."""
        self.first = self.until - len(self.run.tokens)
        end, run = self.first, self.run
        while run.parent is not None:
            row = run.parent.row
            assert row is not None
            begin = row.first if run.parent.parent is None else end - run.offset
            self.sources.append((row, range(begin, end)))
            end, run = begin, run.parent

    def penalized(self, count: int) -> tuple[Ints, list[tuple[int, int]]]:
        text, guesses = self.text, [*self.run.before(), *self.run.tokens]
        history = np.concatenate((text.history, np.array(guesses, np.int64)))
        lengths = range(len(history) - count + 1, len(history) + 1)
        return history, [history_range(text.settings, text.prompt, length) for length in lengths]


@dataclass(frozen=True, slots=True)
class Text:
    """What a side row needs to know of its text."""

    row: Task
    history: Ints
    prompt: int  # how many of its tokens were given
    settings: SamplingSettings
    forgotten: int  # how many of its tokens are not in its branch any more


def add_side_rows(guesses: Guesses, text: Text, tree: Tree, most: int, *, echoes: bool) -> None:
    """Rows for the runs beside the first, at most so many, as far as there are pages."""
    branch = text.row.branch
    known = text.history[branch.computed + text.forgotten :].tolist()
    guesses.runs[0].row = text.row
    if tree.states is not None:  # nor a state that another text may need
        most = min(most, tree.states.spare)
    for run in guesses.runs[1:]:
        assert run.parent is not None
        if run.parent.row is None:
            continue
        guessed_tokens = [*run.before(), *run.tokens]
        guessed = len(guessed_tokens)
        twin = tree.twin(branch, [*known, *guessed_tokens], guessed) if most else None
        if twin is None:
            return
        row = run.row = SideRow(text, run, twin)
        if echoes:
            row.echo()
        guesses.rows.append(row)
        most -= 1
