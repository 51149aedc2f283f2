"""How likely given continuations are, many at a time: what judging and lm-eval stand on.

    found = likelihoods(lm, [(context_ids, target_ids), ...])
    found[0].logprobs, found[0].greedy

Contexts that are asked about several times (a question and its four answers) are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unspool.errors import SettingsError
from unspool.sampling import score
from unspool.session import Session

_ROWS = 1024  # of logits that one step may give: bounds the memory
_TOGETHER = 32  # continuations that are read side by side ...
_TOKENS = 32_768  # ... of so many tokens at most

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """One continuation: each token's log-probability, and whether all were the likeliest."""

    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def likelihoods(
    lm: Session,
    pairs: Sequence[Pair],
    told: Callable[[int], object] = lambda done: None,
) -> list[Likelihood]:
    """The likelihood of each target behind its context, in the order given.

    A context that is too long is cut at its beginning; it has at least one token. `told` hears how
    many are done.
    """
    for context, _ in pairs:
        if not context:
            raise SettingsError("a continuation was given without a token before it")
    found: dict[int, Likelihood] = {number: Likelihood((), True) for number in range(len(pairs))}
    ready = [_Item(number, *_cut(pair, lm.context)) for number, pair in enumerate(pairs) if pair[1]]
    done = len(pairs) - len(ready)
    # In the order of their tokens those that begin alike meet; long ones come first.
    ready.sort(key=lambda item: (-len(item.context) // 512, item.context, item.target))
    for group in _groups(ready):
        _read(lm, group)
        found.update({item.number: item.likelihood() for item in group})
        done += len(group)
        told(done)
    return [found[number] for number in range(len(pairs))]


class _Item:
    """A continuation on its way."""

    def __init__(self, number: int, context: list[int], target: list[int]) -> None:
        self.number, self.context, self.target = number, context, target
        self.logprobs: list[float] = []
        self.greedy = True

    @property
    def left(self) -> int:
        return len(self.target) - len(self.logprobs)

    def next_tokens(self, count: int) -> list[int]:
        """What must be read for the next `count` targets: the token before each of them."""
        done = len(self.logprobs)
        return self.target[max(done - 1, 0) : done + count - 1]

    def likelihood(self) -> Likelihood:
        return Likelihood(tuple(self.logprobs), self.greedy)


def _cut(pair: Pair, most: int) -> tuple[list[int], list[int]]:
    context, target = list(pair[0]), list(pair[1])
    room = most + 1 - len(target)  # the last target is not read
    if room < 1:
        raise SettingsError(
            f"a continuation has {len(target):,} tokens, and the model's context holds {most:,}"
        )
    return context[-room:], target


def _groups(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    group: list[_Item] = []
    tokens = 0
    for item in items:
        size = len(item.context) + len(item.target)
        if group and (len(group) == _TOGETHER or tokens + size > _TOKENS):
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += size
    if group:
        yield group


def _read(lm: Session, group: Sequence[_Item]) -> None:
    """Side by side, each a branch, in pieces small enough for the logits' memory."""
    engine = lm.engine
    with ExitStack() as opened:
        _read_shared(lm, group, opened)
        branches = [opened.enter_context(lm.opened(item.context)) for item in group]
        while True:
            going = [pair for pair in zip(group, branches, strict=True) if pair[0].left]
            if not going:
                return
            rows = max(1, _ROWS // len(going))
            counts = [min(rows, item.left) for item, _ in going]
            additions = [
                (branch, item.next_tokens(count))
                for (item, branch), count in zip(going, counts, strict=True)
            ]
            logits = engine.extend_all(additions, wanted=max(counts))
            for (item, _), count, own in zip(going, counts, logits, strict=True):
                done = len(item.logprobs)
                scores = score(own[-count:], item.target[done : done + count])
                item.logprobs += scores.logprobs.tolist()
                item.greedy = item.greedy and not scores.ranks.any()


def _read_shared(lm: Session, group: Sequence[_Item], opened: ExitStack) -> None:
    """Contexts of several continuations, once; the branches behind them find them computed."""
    seen: set[tuple[int, ...]] = set()
    shared: set[tuple[int, ...]] = set()
    for item in group:
        context = tuple(item.context)
        (shared if context in seen else seen).add(context)
    branches = [opened.enter_context(lm.opened(context)) for context in sorted(shared)]
    if branches:
        lm.engine.extend_all([(branch, ()) for branch in branches])
