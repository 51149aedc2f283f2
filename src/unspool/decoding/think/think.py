"""Spend more at writing time: a policy searches the tree of texts for one that a judge likes best.

    thought = think(lm, "What is 17 * 24?", policy="best-of", judge="logprob", budget=2000, n=8)
    thought.text, thought.score, thought.spent.total
    for event in stream_think(lm, prompt, policy="mcts"): ...      # watched live

The budget counts every token that is computed, and is never overrun. The same seed gives the same
tree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator
from time import perf_counter
from typing import Any, cast

from unspool.decoding.progress import progress_bar
from unspool.decoding.search_tree import Node, SearchTree
from unspool.decoding.think.budget import Budget, Spent
from unspool.decoding.think.events import Event
from unspool.decoding.think.judge import Judge
from unspool.decoding.think.judges.function import as_judge
from unspool.decoding.think.judges.names import judge_named
from unspool.decoding.think.policies.beam import beam
from unspool.decoding.think.policies.best_of import best_of
from unspool.decoding.think.policies.compose import compose
from unspool.decoding.think.policies.dvts import dvts
from unspool.decoding.think.policies.forcing import forcing
from unspool.decoding.think.policies.mcts import mcts
from unspool.decoding.think.policies.restarts import restarts
from unspool.decoding.think.policies.vote import vote
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.think.thought import Thought
from unspool.engine.generation import Generation
from unspool.engine.options import NAMES, Options
from unspool.errors import SettingsError, UnspoolError
from unspool.session import Prompt, Session

Policy = Callable[..., Moves[None]]
POLICIES: dict[str, Policy] = {
    "best-of": best_of,
    "vote": vote,
    "beam": beam,
    "dvts": dvts,
    "mcts": mcts,
    "restarts": restarts,
    "think": forcing,
    "compose": compose,
}
_LONG = ("think", "compose")  # one text, which may be as long as the budget
JudgeGiven = str | Judge | Callable[[Generation], Any] | None


class ThoughtStream(Iterator[Event]):
    """The events of a search as they happen; leaving the loop in any way gives everything back.

    `result` is the thought, once the last event has come.
    """

    def __init__(self, search: Search, name: str, moves: Moves[None]) -> None:
        self._search, self._name, self._moves = search, name, self._run(moves)
        self._since, self._thought = perf_counter(), cast(Thought | None, None)

    @property
    def spent(self) -> Spent:
        """Tokens that were computed so far."""
        return self._search.budget.spent

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self._thought is not None

    @property
    def result(self) -> Thought:
        """What came of it."""
        if self._thought is None:
            raise UnspoolError("the search is not over yet; read its events to the end")
        return self._thought

    def _run(self, moves: Moves[None]) -> Moves[None]:
        with self._search as search:
            yield from moves
        if search.leaf is None:
            raise UnspoolError(f"the policy {self._name} named no winner; let it search.win(nodes)")
        self._thought = Thought(
            tree=SearchTree(search.root, search.leaf),
            policy=self._name,
            budget=search.budget.limit,
            spent=search.budget.spent,
            answers=_answers(search.root),
            seconds=perf_counter() - self._since,
        )

    def __iter__(self) -> Iterator[Event]:
        try:
            yield from self._moves
        finally:
            self.close()

    def __next__(self) -> Event:
        return next(self._moves)

    def cancel(self) -> None:
        """Have the search end soon; from any thread. Whoever reads it gets an error then."""
        self._search.cancel()

    def close(self) -> None:
        """End the search, and give back what it holds. Another thread may do so while it runs."""
        self._search.cancel()
        if inspect.getgeneratorstate(self._moves) != inspect.GEN_RUNNING:
            self._moves.close()

    def __enter__(self) -> ThoughtStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stream_think(
    lm: Session,
    prompt: Prompt,
    *,
    policy: str | Policy = "best-of",
    judge: JudgeGiven = None,
    budget: int | None = 2000,
    **options: Any,
) -> ThoughtStream:
    """A search, event by event; see `LanguageModel.think`."""
    of_text = {name: value for name, value in options.items() if name in NAMES}
    of_policy = {name: value for name, value in options.items() if name not in NAMES}
    check_policy(policy, of_policy)
    _check_countable(of_text)
    if policy in _LONG and of_text.get("max_tokens") is None:
        of_text["max_tokens"] = lm.context if budget is None else budget
    start = lm.draft(prompt, **cast(Options, of_text))
    search = Search(lm, start, _judge(lm, judge), Budget(budget))
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "own")
    return ThoughtStream(search, name, _function(policy)(search, **of_policy))


def think(
    lm: Session,
    prompt: Prompt,
    *,
    budget: int | None = 2000,
    progress: bool = False,
    **options: Any,
) -> Thought:
    """The best text that a search finds; see `LanguageModel.think`."""
    stream = stream_think(lm, prompt, budget=budget, **options)
    with progress_bar("thinking", budget or 0, show=progress and budget is not None) as tell:
        for _ in stream:
            tell(stream.spent.total)
    return stream.result


def _answers(root: Node) -> dict[Hashable, float]:
    """What the texts answer, with the scores that a vote gave, most votes first."""
    found = {
        node.answer: node.score
        for node in root.walk()
        if node.answer is not None and node.score is not None
    }
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _judge(lm: Session, given: JudgeGiven) -> Judge | None:
    if given is None:
        return None
    return judge_named(lm, given) if isinstance(given, str) else as_judge(given)


def most_tokens(policy: str, given: int | None, usual: int = 256) -> int | None:
    """How long each text may be where somebody must say so; None: as long as the budget."""
    return None if given is None and policy in _LONG else given or usual


def _function(policy: str | Policy) -> Policy:
    """A policy by its name, or a caller's own."""
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise SettingsError(f"there is no policy {policy!r:.80}; there are {', '.join(POLICIES)}")
    return POLICIES[policy]


def policy_options(policy: str | Policy) -> dict[str, Any]:
    """What a policy can be told, by name, and what it does without."""
    known = inspect.signature(_function(policy)).parameters.values()
    return {one.name: one.default for one in known if one.kind is one.KEYWORD_ONLY}


def check_policy(policy: str | Policy, options: Collection[str] = ()) -> None:
    """Refuse a policy that is none, or options that it has not."""
    known = policy_options(policy)
    for name in options:
        if name not in known:
            told = ", ".join(known) or "nothing"
            raise SettingsError(
                f"the policy {policy} has no option {name!r}; it has {told}, beside those of "
                "lm.generate"
            )


def _check_countable(options: dict[str, Any]) -> None:
    """Refuse what computes tokens that nobody could count beforehand."""
    for name, why in (
        ("speculate", "guesses are computed that are thrown away"),
        ("guard", "what a guard takes back is written again"),
    ):
        if options.get(name) is not None:
            raise SettingsError(f"{name} cannot be used in a search: {why}, which no budget bounds")
    if options.get("cache") is False:
        raise SettingsError("cache=False cannot be used in a search: its texts share their past")
