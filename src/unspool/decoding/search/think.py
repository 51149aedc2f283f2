"""Test-time search: a policy searches the tree of texts for the one that a verifier scores best.

    thought = think(lm, "What is 17 * 24?", policy="best-of", judge="logprob", budget=2000, n=8)
    thought.text, thought.score, thought.spent.total
    for event in stream_think(lm, prompt, policy="mcts"): ...      # live events

The budget counts every computed token and is a hard limit. The same seed gives the same tree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from unspool.decoding.search.checkers import (
    FileVerifier,
    PatternVerifier,
    PatternVoteVerifier,
    UnitTestVerifier,
)
from unspool.decoding.search.policies import (
    beam,
    best_of,
    compose,
    dvts,
    forcing,
    mcts,
    restarts,
    vote,
)
from unspool.decoding.search.search import Moves, Search
from unspool.decoding.search.tree import (
    SearchEvent,
    SearchNode,
    SearchTree,
    Spent,
    Thought,
    TokenBudget,
)
from unspool.decoding.search.verifiers import (
    AskVerifier,
    CertaintyVerifier,
    LogprobVerifier,
    Messages,
    RewardVerifier,
    Verifier,
    VoteVerifier,
    as_verifier,
)
from unspool.engine.generation import Generation
from unspool.engine.request import NAMES, Options
from unspool.errors import SettingsError, UnspoolError
from unspool.progress import progress_bar
from unspool.session import Prompt, Session

# -- Verifiers by name, as given on the command line or over HTTP


# Name patterns and descriptions, shown in help texts.
VERIFIER_NAMES = {
    "logprob": "mean log-probability of a token, by the model that wrote it",
    "certainty": "self-certainty of the model that wrote it",
    "regex:PATTERN": "1 if the pattern matches, else 0",
    "python:FILE.py:FUNCTION": "the return value of the function",
    "tests:FILE.py": "the share of unit tests that the code passes",
    "reward:MODEL": "the score of a reward model",
    "process:MODEL": "the lowest step score of a process reward model",
    "ask": "P(yes) when the model is asked whether the text is correct",
    "ask:MODEL": "the same, asking another model",
    "vote": "the share of texts with the same answer",
    "vote:PATTERN": "the same, with a pattern that extracts the answer",
    "vote+JUDGE": "the same, votes weighted by another verifier",
}
_NEEDS_ARGUMENT = ("regex", "python", "tests", "reward", "process")
_MODEL_KINDS = ("reward", "process", "ask")
_RUNS_CODE = ("python", "tests")


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """A parsed verifier name."""

    kind: str
    argument: str = ""
    weigher: VerifierSpec | None = None  # for weighted votes

    @classmethod
    def parse(cls, name: str) -> VerifierSpec:
        """Parse a name; raises `SettingsError` with the valid names."""
        if name.startswith("vote+"):
            weigher = cls.parse(name.removeprefix("vote+"))
            if weigher.kind == "vote":
                raise SettingsError(
                    f"{name!r} weighs votes by votes; name another verifier after the +"
                )
            return cls("vote", weigher=weigher)
        kind, colon, argument = name.partition(":")
        kinds = {listed.partition(":")[0].partition("+")[0] for listed in VERIFIER_NAMES}
        bare = kind in ("logprob", "certainty") and colon
        if kind not in kinds or bare or (kind in _NEEDS_ARGUMENT and not argument):
            raise SettingsError(
                f"there is no judge {name!r:.80}; there are {', '.join(VERIFIER_NAMES)}"
            )
        return cls(kind, argument)

    @property
    def model(self) -> str | None:
        """Name of the additional model that it needs, if any."""
        if self.weigher is not None:
            return self.weigher.model
        return self.argument or None if self.kind in _MODEL_KINDS else None

    @property
    def runs_code(self) -> bool:
        """Whether it runs a local file; such verifiers are not available over HTTP."""
        return self.kind in _RUNS_CODE or (self.weigher is not None and self.weigher.runs_code)


def make_verifier(
    lm: Session,
    name: str | VerifierSpec,
    *,
    conversation: Messages | None = None,
    load: Callable[[str], Session] | None = None,
) -> Verifier:
    """Build the verifier of this name for texts written by `lm`.

    Args:
        conversation: the messages that the texts answer, for verifier models with their own chat
            template.
        load: loads such a model by its name.
    """
    parsed = VerifierSpec.parse(name) if isinstance(name, str) else name
    kind, argument, load_model = parsed.kind, parsed.argument, load or lm.load_similar
    if kind == "logprob":
        return LogprobVerifier()
    if kind == "certainty":
        return CertaintyVerifier(lm)
    if kind == "regex":
        return PatternVerifier(lm, argument)
    if kind == "python":
        return FileVerifier(lm, *_file_and_function(argument))
    if kind == "tests":
        return UnitTestVerifier(lm, argument)
    if kind == "ask":
        return AskVerifier(
            lm, load_model(argument) if argument else None, conversation=conversation
        )
    if kind == "vote":
        if argument:
            return PatternVoteVerifier(lm, argument)
        weigher = parsed.weigher
        return VoteVerifier(
            weigher=make_verifier(lm, weigher, conversation=conversation, load=load)
            if weigher
            else None
        )
    return RewardVerifier(
        lm,
        load_model(argument),
        process=True if kind == "process" else None,
        conversation=conversation,
    )


def _file_and_function(argument: str) -> tuple[str, str]:
    file, _, function = argument.rpartition(":")
    return (file, function) if file and function.isidentifier() else (argument, "check")


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
_SINGLE_TEXT = ("think", "compose")  # policies with one text, which may use the whole budget
VerifierLike = str | Verifier | Callable[[Generation], Any] | None


class ThoughtStream(Iterator[SearchEvent]):
    """The events of a running search. Leaving the loop in any way releases all pages.

    `result` is available after the last event.
    """

    def __init__(self, search: Search, name: str, moves: Moves[None]) -> None:
        self._search, self._name, self._moves = search, name, self._run(moves)
        self._since, self._result = perf_counter(), cast(Thought | None, None)

    @property
    def spent(self) -> Spent:
        """Tokens computed so far."""
        return self._search.budget.spent

    @property
    def is_finished(self) -> bool:
        """Whether the result is available."""
        return self._result is not None

    @property
    def result(self) -> Thought:
        """The result; raises `UnspoolError` before the last event."""
        if self._result is None:
            raise UnspoolError("the search is not finished; read its events to the end")
        return self._result

    def _run(self, moves: Moves[None]) -> Moves[None]:
        with self._search as search:
            yield from moves
        if search.leaf is None:
            raise UnspoolError(
                f"the policy {self._name} chose no result; call search.select_best(nodes)"
            )
        self._result = Thought(
            tree=SearchTree(search.root, search.leaf),
            policy=self._name,
            budget=search.budget.limit,
            spent=search.budget.spent,
            answers=_answers(search.root),
            seconds=perf_counter() - self._since,
        )

    def __iter__(self) -> Iterator[SearchEvent]:
        try:
            yield from self._moves
        finally:
            self.close()

    def __next__(self) -> SearchEvent:
        return next(self._moves)

    def cancel(self) -> None:
        """Stop the search, from any thread; reading it then raises `UnspoolError`."""
        self._search.cancel()

    def close(self) -> None:
        """End the search and release its pages. Safe to call from another thread while it runs."""
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
    judge: VerifierLike = None,
    budget: int | None = 2000,
    **options: Any,
) -> ThoughtStream:
    """Run a search and yield its events; see `LanguageModel.think`."""
    text_options = {name: value for name, value in options.items() if name in NAMES}
    policy_kwargs = {name: value for name, value in options.items() if name not in NAMES}
    check_policy(policy, policy_kwargs)
    if budget is not None:
        _check_countable(text_options)
    if policy in _SINGLE_TEXT and text_options.get("max_tokens") is None:
        text_options["max_tokens"] = lm.context if budget is None else budget
    start = lm.prepare_generation(prompt, **cast(Options, text_options))
    search = Search(lm, start, _make_verifier(lm, judge), TokenBudget(budget))
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "own")
    return ThoughtStream(search, name, _function(policy)(search, **policy_kwargs))


def think(
    lm: Session,
    prompt: Prompt,
    *,
    budget: int | None = 2000,
    progress: bool = False,
    **options: Any,
) -> Thought:
    """Run a search and return its best text; see `LanguageModel.think`."""
    stream = stream_think(lm, prompt, budget=budget, **options)
    with progress_bar("thinking", budget or 0, show=progress and budget is not None) as tell:
        for _ in stream:
            tell(stream.spent.total)
    return stream.result


def _answers(root: SearchNode) -> dict[Hashable, float]:
    """Answers of all nodes with their vote scores, highest first."""
    answers = {
        node.answer: node.score
        for node in root.walk()
        if node.answer is not None and node.score is not None
    }
    return dict(sorted(answers.items(), key=lambda entry: -entry[1]))


def _make_verifier(lm: Session, verifier: VerifierLike) -> Verifier | None:
    if verifier is None:
        return None
    return make_verifier(lm, verifier) if isinstance(verifier, str) else as_verifier(verifier)


def default_max_tokens(policy: str, max_tokens: int | None, default: int = 256) -> int | None:
    """Token limit of each text for this policy; None: up to the whole budget."""
    return None if max_tokens is None and policy in _SINGLE_TEXT else max_tokens or default


def _function(policy: str | Policy) -> Policy:
    """Look up a policy by name; a callable is a policy already."""
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise SettingsError(f"there is no policy {policy!r:.80}; there are {', '.join(POLICIES)}")
    return POLICIES[policy]


def policy_options(policy: str | Policy) -> dict[str, Any]:
    """A policy's options and their defaults."""
    parameters = inspect.signature(_function(policy)).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def check_policy(policy: str | Policy, options: Collection[str] = ()) -> None:
    """Raise `SettingsError` for an unknown policy or an option it does not have."""
    available_options = policy_options(policy)
    for name in options:
        if name not in available_options:
            available = ", ".join(available_options) or "nothing"
            raise SettingsError(
                f"the policy {policy} has no option {name!r}; it has {available}, beside those of "
                "lm.generate"
            )


def _check_countable(options: dict[str, Any]) -> None:
    """Raise `SettingsError` for options whose token cost cannot be bounded in advance."""
    for name, why in (
        ("speculate", "rejected drafts are computed too"),
        ("guard", "rewound text is generated again"),
    ):
        if options.get(name) is not None:
            raise SettingsError(
                f"{name} cannot be used in a search: {why}, so the cost has no bound"
            )
    if options.get("cache") is False:
        raise SettingsError("cache=False cannot be used in a search: its texts share their past")
