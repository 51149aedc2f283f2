"""Guards: watch the text as it grows; at trouble stop, or rewind, forbid, and go on.

    run = GuardRun(GuardPolicy.parse(["loop", "ban=foo|bar"]))
    verdict = run.push(token, piece, logprob, entropy)     # after every token
    # verdict.kind is keep, stop, or rewind: then go back to verdict.to, and let no token of
    # verdict.forbid be picked there.

Penalties forbid forms: a token that occurred gets less likely, wherever it stands. A guard forbids
a behaviour: only when the text has gone wrong is it taken back, to where that began, and only the
one continuation that led there is closed. `GuardRun` does all the bookkeeping; an engine obeys.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from unspool.errors import SettingsError
from unspool.sampling.loops import LoopGuard, repetition_rate
from unspool.sampling.patterns import check_size
from unspool.sampling.watches import (
    BannedGuard,
    Guard,
    GuardError,
    PredicateGuard,
    SurpriseGuard,
    Trouble,
    Watch,
    Watched,
    whole_number,
)

__all__ = [
    "BannedGuard",
    "Guard",
    "GuardError",
    "GuardPolicy",
    "GuardRun",
    "LoopGuard",
    "PredicateGuard",
    "SurpriseGuard",
    "Trouble",
    "Verdict",
    "Watch",
    "Watched",
    "repetition_rate",
]

Action = Literal["stop", "rewind"]
Exhausted = Literal["stop", "go on"]
RETRIES = 16
_MOST_GUARDS = 64  # each of them works on every token
_FORMS = "loop, ban=word|another, pattern=regex, surprise=nats"


@dataclass(frozen=True)
class GuardPolicy:
    """What to watch for in a text, and what to do about it.

    With the action `rewind` a text is repaired at most `retries` times; at the next trouble it is
    stopped, or goes on unguarded, as `exhausted` says.
    """

    guards: tuple[Guard, ...]
    action: Action = "rewind"
    retries: int = RETRIES
    exhausted: Exhausted = "stop"

    def __post_init__(self) -> None:
        object.__setattr__(self, "guards", tuple(self.guards))
        if len(self.guards) > _MOST_GUARDS:
            raise SettingsError(
                f"a text has {len(self.guards):,} guards; at most {_MOST_GUARDS} are allowed"
            )
        for name, kind in (("action", Action), ("exhausted", Exhausted)):
            if getattr(self, name) not in get_args(kind):
                raise SettingsError(
                    f"{name} of a guard was {getattr(self, name)!r}; it may be "
                    + " or ".join(get_args(kind))
                )
        whole_number("retries of a guard", self.retries, 0)
        bans = [guard for guard in self.guards if isinstance(guard, BannedGuard)]
        check_size(sum(guard.instructions for guard in bans))

    @classmethod
    def parse(
        cls, items: Iterable[str], *, retries: int = RETRIES, exhausted: Exhausted = "stop"
    ) -> GuardPolicy:
        """From words such as `loop`, `ban=foo|bar`, `surprise=8`, each also with `:stop`."""
        guards: list[Guard] = []
        actions: dict[str, str] = {}
        for item in items:
            guard, action = _parse_item(item)
            guards.append(guard)
            if action:
                actions.setdefault(action, item)
        if not guards:
            raise SettingsError(f"no guard was named; there are {_FORMS}")
        if len(actions) > 1:
            both = " and ".join(repr(item) for item in actions.values())
            raise SettingsError(f"{both} ask for two actions; all guards of a text share one")
        chosen: Action = "stop" if "stop" in actions else "rewind"
        return cls(tuple(guards), chosen, retries, exhausted)

    def start(self) -> GuardRun:
        return GuardRun(self)


def _parse_item(item: str) -> tuple[Guard, str | None]:
    body, colon, action = item.rpartition(":")
    named, equals, value = item.partition("=")
    if not colon or (equals and action not in get_args(Action)):
        body, action = item, ""  # a colon in a value may stand for itself
    elif action not in get_args(Action):
        raise SettingsError(f"{item!r} names the action {action!r}; it may be stop or rewind")
    named, equals, value = body.partition("=")
    if named not in _KINDS:
        near = difflib.get_close_matches(named, _KINDS, 1)
        hint = f"; did you mean {near[0]!r}? There are" if near else "; there are"
        raise SettingsError(f"there is no guard {named!r}{hint} {_FORMS}")
    if bool(equals and value) != (named != "loop"):
        raise SettingsError(f"{item!r} cannot be read as a guard; there are {_FORMS}")
    return _KINDS[named](value), action or None


def _parse_surprise(value: str) -> Guard:
    try:
        return SurpriseGuard(spike=float(value))
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"surprise was {value!r}; it may be a number of nats") from error


_KINDS: dict[str, Callable[[str], Guard]] = {
    "loop": lambda value: LoopGuard(),
    "ban": lambda value: BannedGuard(words=tuple(filter(None, value.split("|")))),
    "pattern": lambda value: BannedGuard(patterns=(value,), name="pattern"),
    "surprise": _parse_surprise,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a token.

    keep     go on.
    stop     the text ends here; the trouble began at token `to`.
    rewind   take back every token from `to` on, and pick another there, none of `forbid`.
    """

    kind: Literal["keep", "stop", "rewind"] = "keep"
    to: int | None = None
    forbid: frozenset[int] = frozenset()
    reason: str | None = None


_KEEP = Verdict()
_NOTHING: frozenset[int] = frozenset()


class GuardRun:
    """A policy at work on one text: told every token, it says what to do.

    When it says rewind, it has gone back itself already. What is forbidden at a position holds as
    long as everything before that position stands.
    """

    def __init__(self, policy: GuardPolicy) -> None:
        self.policy = policy
        self.repairs: list[Trouble] = []
        self._watches: list[Watch] = [guard.start() for guard in policy.guards]
        self._tokens: list[int] = []
        self._forbidden: dict[int, frozenset[int]] = {}
        self._off = False  # no retries were left, and the text goes on unguarded

    def __len__(self) -> int:
        return len(self._tokens)

    def forbidden(self, index: int) -> frozenset[int]:
        """Tokens that may not be picked as the index-th of the text."""
        return self._forbidden.get(index, _NOTHING)

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> Verdict:
        """The next token of the text. A `GuardError` means that this text cannot go on."""
        self._tokens.append(token)
        if self._off:
            return _KEEP
        found = [watch.push(token, piece, logprob, entropy) for watch in self._watches]
        return self._judge(found)

    def finish(self) -> Verdict:
        """The text is at its end: to be asked once, after an end token or the last one allowed."""
        return _KEEP if self._off else self._judge([watch.finish() for watch in self._watches])

    def _judge(self, found: Sequence[Trouble | None]) -> Verdict:
        troubles = [trouble for trouble in found if trouble is not None]
        if not troubles:
            return _KEEP
        first = min(troubles, key=lambda trouble: trouble.start)
        if self.policy.action == "stop":
            return Verdict("stop", first.start, reason=first.reason)
        if len(self.repairs) >= self.policy.retries:
            if self.policy.exhausted == "stop":
                reason = f"{first.reason}, after {len(self.repairs)} repairs"
                return Verdict("stop", first.start, reason=reason)
            self._off = True
            return _KEEP
        self.repairs.append(first)
        closed = self.forbidden(first.start) | {self._tokens[first.start]}
        self.rewind(first.start)
        self._forbidden[first.start] = closed
        return Verdict("rewind", first.start, closed, first.reason)

    def rewind(self, length: int) -> None:
        """Forget every token from index `length` on, and what was forbidden after it."""
        del self._tokens[length:]
        for watch in self._watches:
            watch.rewind(length)
        self._forbidden = {at: ids for at, ids in self._forbidden.items() if at <= length}
