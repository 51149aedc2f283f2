"""Log-likelihoods of continuations in batches, the basis of bits per byte and lm-eval.

    results = likelihoods(lm, [(context_ids, target_ids), ...])
    results[0].logprobs, results[0].greedy

A context with several continuations (a question and its four answers) is prefilled once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unspool.errors import SettingsError
from unspool.sampling import score
from unspool.session import Session

_MAX_LOGIT_ROWS = 1024  # per step: bounds the memory
_MAX_GROUP = 32  # continuations in a batch
_MAX_GROUP_TOKENS = 32_768

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probabilities of one continuation, and whether greedy decoding would yield it."""

    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def score_continuations(
    lm: Session,
    pairs: Sequence[Pair],
    on_progress: Callable[[int], object] = lambda done: None,
) -> list[Likelihood]:
    """Score each target after its context, in the given order.

    A context that is too long is truncated at its start; it needs at least one token.
    `on_progress` is called with the number of scored pairs.
    """
    for context, _ in pairs:
        if not context:
            raise SettingsError("a continuation needs at least one context token")
    results: dict[int, Likelihood] = {number: Likelihood((), True) for number in range(len(pairs))}
    pending = [
        _Continuation(number, *_truncate(pair, lm.context))
        for number, pair in enumerate(pairs)
        if pair[1]
    ]
    done = len(pairs) - len(pending)
    # Sorted by tokens, so that equal prefixes are in one batch; long ones first.
    pending.sort(key=lambda item: (-len(item.context) // 512, item.context, item.target))
    for group in _groups(pending):
        _score_group(lm, group)
        results.update({item.number: item.likelihood() for item in group})
        done += len(group)
        on_progress(done)
    return [results[number] for number in range(len(pairs))]


class _Continuation:
    """A continuation that is being scored."""

    def __init__(self, number: int, context: list[int], target: list[int]) -> None:
        self.number, self.context, self.target = number, context, target
        self.logprobs: list[float] = []
        self.greedy = True

    @property
    def num_remaining(self) -> int:
        return len(self.target) - len(self.logprobs)

    def next_tokens(self, count: int) -> list[int]:
        """Inputs for the next `count` targets: the token before each of them."""
        done = len(self.logprobs)
        return self.target[max(done - 1, 0) : done + count - 1]

    def likelihood(self) -> Likelihood:
        return Likelihood(tuple(self.logprobs), self.greedy)


def _truncate(pair: Pair, max_context: int) -> tuple[list[int], list[int]]:
    context, target = list(pair[0]), list(pair[1])
    room = max_context + 1 - len(target)  # the last target is not an input
    if room < 1:
        raise SettingsError(
            f"a continuation has {len(target):,} tokens, more than the model's context of "
            f"{max_context:,}"
        )
    return context[-room:], target


def _groups(items: Sequence[_Continuation]) -> Iterator[list[_Continuation]]:
    group: list[_Continuation] = []
    tokens = 0
    for item in items:
        size = len(item.context) + len(item.target)
        if group and (len(group) == _MAX_GROUP or tokens + size > _MAX_GROUP_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += size
    if group:
        yield group


def _score_group(lm: Session, group: Sequence[_Continuation]) -> None:
    """Score a group as one batch of branches, in chunks that bound the memory of the logits."""
    engine = lm.engine
    with ExitStack() as stack:
        _prefill_shared(lm, group, stack)
        branches = [stack.enter_context(lm.open_branch(item.context)) for item in group]
        while True:
            active = [pair for pair in zip(group, branches, strict=True) if pair[0].num_remaining]
            if not active:
                return
            rows = max(1, _MAX_LOGIT_ROWS // len(active))
            counts = [min(rows, item.num_remaining) for item, _ in active]
            additions = [
                (branch, item.next_tokens(count))
                for (item, branch), count in zip(active, counts, strict=True)
            ]
            logits = engine.extend_all(additions, num_logits=max(counts))
            for (item, _), count, item_logits in zip(active, counts, logits, strict=True):
                done = len(item.logprobs)
                scores = score(item_logits[-count:], item.target[done : done + count])
                item.logprobs += scores.logprobs.tolist()
                item.greedy = item.greedy and not scores.ranks.any()


def _prefill_shared(lm: Session, group: Sequence[_Continuation], stack: ExitStack) -> None:
    """Prefill contexts with several continuations once; their branches hit the prefix cache."""
    counts = Counter(tuple(item.context) for item in group)
    shared = sorted(context for context, count in counts.items() if count > 1)
    branches = [stack.enter_context(lm.open_branch(context)) for context in shared]
    if branches:
        lm.engine.extend_all([(branch, ()) for branch in branches])
