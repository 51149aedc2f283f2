"""Which branches run in the next batch.

Every task has a branch with tokens that are not computed yet. Next tokens go first, so that texts
keep flowing; beside them prompts are read, in chunks, shared among those that wait.
When memory runs out, the task that came last is put aside and computed again later: slower, never
different. A task that cannot begin yet waits; it never pushes aside one that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unspool.engine.pages import OutOfPagesError
from unspool.engine.tree import Branch, Tree
from unspool.errors import UnspoolError

TOKENS_AT_ONCE = 256  # of prompts in one run
TOKENS_BESIDE_TEXTS = 64  # the same while texts are written: bounds how long their tokens wait
ROWS_AT_ONCE = 64
SMALLEST_CHUNK = 16  # of a prompt that does not end with it


@dataclass(eq=False, slots=True)
class Task:
    """A branch that somebody wants computed."""

    branch: Branch
    wanted: int  # logits are needed for this many of its last tokens
    done: Callable[[Any, Any], None]  # called with (logits, inside) when it is computed
    failed: Callable[[BaseException], None]
    priority: int = 0  # higher first
    look: frozenset[int] = frozenset()  # positions to look inside at
    deep: bool = True  # at attention and the layers' parts too, not only at the vectors
    number: int = 0  # in order of arrival
    started: bool = False
    rows: list[Any] = field(default_factory=list)  # logits of the chunks so far
    inside: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return len(self.branch.tokens) - self.branch.computed

    @property
    def first_needed(self) -> int:
        """From which token on they must be run: logits and looks come from running a token."""
        first = len(self.branch.tokens) - max(1, self.wanted)
        return max(0, min([first, *self.look]))


@dataclass(frozen=True, slots=True)
class Row:
    """A task's share of a batch."""

    task: Task
    count: int


def _shares(prompts: list[Task], budget: int) -> list[tuple[Task, int]]:
    """How many tokens of each prompt run next; the prompts come in the order of their turn.

    Half goes to the one that waits longest, so that nobody waits for ever; the other half to those
    that need least, so that a short question is not held up by a long document.
    """
    if not prompts:
        return []
    first = prompts[0]
    kept = min(first.left, max(SMALLEST_CHUNK, budget // 2))
    room, others = budget - kept, list[tuple[Task, int]]()
    for task in sorted(prompts[1:], key=lambda task: (-task.priority, task.left, task.number)):
        count = min(task.left, room)
        if count < min(task.left, SMALLEST_CHUNK):
            break
        others.append((task, count))
        room -= count
    return [(first, min(first.left, kept + room)), *others]


class Scheduler:
    """The tasks, and the choice of what runs next."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.tasks: list[Task] = []
        self.put_aside = 0  # how often memory made a task wait and start over
        self._count = 0

    def add(self, task: Task) -> None:
        self.check_fits(len(task.branch.tokens))
        self.tree.unwind(task.branch, task.first_needed)
        if not task.number:  # a text that goes on keeps its place
            self._count += 1
            task.number = self._count
        self.tasks.append(task)

    def remove(self, task: Task) -> None:
        self.tasks.remove(task)

    def of(self, branch: Branch) -> list[Task]:
        """The tasks that want this branch computed."""
        return [task for task in self.tasks if task.branch is branch]

    def check_fits(self, length: int) -> None:
        """A text that could not even run alone is refused at once."""
        room = self.tree.pool.count * self.tree.page_size
        if length > room:
            raise UnspoolError(
                f"a text of {length:,} tokens does not fit the memory for keys and values, which "
                f"holds {room:,}; allow more memory, or make the text shorter"
            )

    def choose(self) -> list[Row]:
        """The rows of the next batch, their pages reserved. Empty if nothing can run."""
        order = sorted(self.tasks, key=lambda task: (-task.priority, task.number))
        running = [task for task in order if task.left == 1 and task.started]
        prompts = [task for task in order if not (task.left == 1 and task.started)]
        rows: list[Row] = []
        for task in running[:ROWS_AT_ONCE]:
            if self._fits(task, 1, rows):
                rows.append(Row(task, 1))
        for task in prompts:
            if task.started and not task.branch.pages:
                self.tree.adopt(task.branch)  # put aside before: perhaps its pages are still here
                self.tree.unwind(task.branch, task.first_needed)
        budget = TOKENS_BESIDE_TEXTS if rows else TOKENS_AT_ONCE
        for task, count in _shares(prompts, budget)[: ROWS_AT_ONCE - len(rows)]:
            if self._fits(task, count, rows):
                rows.append(Row(task, count))
                task.started = True
        if not rows and order:  # nobody can go on: the first one may push all others aside
            count = min(order[0].left, SMALLEST_CHUNK)
            order[0].started = True
            if self._fits(order[0], count, rows):
                rows.append(Row(order[0], count))
        return rows

    def _fits(self, task: Task, count: int, rows: list[Row]) -> bool:
        """Reserve pages, making room if the task may; False if it has to wait."""
        chosen = {row.task for row in rows}
        while True:
            try:
                self.tree.reserve(task.branch, task.branch.computed + count)
                return True
            except OutOfPagesError:
                victim = self._victim(task, chosen)
                if victim is None:
                    return False
                self.tree.put_aside(victim.branch)
                victim.rows.clear()
                victim.inside.clear()
                self.put_aside += 1

    def _victim(self, task: Task, chosen: set[Task]) -> Task | None:
        """Whom to put aside: of those that count less or came later, the last one."""
        if not task.started:
            return None
        others = [
            other
            for other in self.tasks
            if other is not task and other not in chosen and other.branch.pages
        ]
        later = [o for o in others if (-o.priority, o.number) > (-task.priority, task.number)]
        return max(later, key=lambda o: (-o.priority, o.number), default=None)
