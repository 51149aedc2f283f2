"""Guards: monitor generated text; on a violation stop, or rewind, ban a token and continue.

    run = GuardRun(GuardPolicy.parse(["loop", "ban=foo|bar"]))
    verdict = run.push(token, piece, logprob, entropy)     # after every token
    # verdict.kind is keep, stop or rewind: then rewind to verdict.to and ban the tokens
    # verdict.forbid there.

Penalties act on tokens: any token that occurred becomes less likely. A guard acts on behaviour: the
text is rewound only when something went wrong, to where that started, and only the continuation
that led there is banned. `GuardRun` does the bookkeeping; the engine acts on its verdicts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from unspool.errors import SettingsError
from unspool.sampling.monitors import (
    BannedGuard,
    Guard,
    GuardMonitor,
    LoopGuard,
    SurpriseGuard,
    Violation,
    check_int,
    check_size,
)

Action = Literal["stop", "rewind"]
Exhausted = Literal["stop", "go on"]
RETRIES = 16
_MAX_GUARDS = 64  # each runs on every token
_SYNTAX = "loop, ban=word|another, pattern=regex, surprise=nats"


@dataclass(frozen=True)
class GuardPolicy:
    """Guards of a text and the action on a violation.

    With the action `rewind` a text is repaired at most `retries` times; at the next violation it
    stops, or continues without guards, depending on `exhausted`.
    """

    guards: tuple[Guard, ...]
    action: Action = "rewind"
    retries: int = RETRIES
    exhausted: Exhausted = "stop"

    def __post_init__(self) -> None:
        object.__setattr__(self, "guards", tuple(self.guards))
        if len(self.guards) > _MAX_GUARDS:
            raise SettingsError(f"got {len(self.guards):,} guards; the maximum is {_MAX_GUARDS}")
        for name, kind in (("action", Action), ("exhausted", Exhausted)):
            if getattr(self, name) not in get_args(kind):
                raise SettingsError(
                    f"{name} of a guard must be {' or '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}"
                )
        check_int("retries of a guard", self.retries, 0)
        bans = [guard for guard in self.guards if isinstance(guard, BannedGuard)]
        check_size(sum(guard.instructions for guard in bans))

    @classmethod
    def parse(
        cls, items: Iterable[str], *, retries: int = RETRIES, exhausted: Exhausted = "stop"
    ) -> GuardPolicy:
        """Parse items such as `loop`, `ban=foo|bar`, `surprise=8`, optionally with `:stop`."""
        guards: list[Guard] = []
        actions: dict[str, str] = {}
        for item in items:
            guard, action = _parse_item(item)
            guards.append(guard)
            if action:
                actions.setdefault(action, item)
        if not guards:
            raise SettingsError(f"no guard given; there are {_SYNTAX}")
        if len(actions) > 1:
            conflict = " and ".join(repr(item) for item in actions.values())
            raise SettingsError(f"{conflict} have different actions; all guards share one action")
        shared: Action = "stop" if "stop" in actions else "rewind"
        return cls(tuple(guards), shared, retries, exhausted)

    def start(self) -> GuardRun:
        return GuardRun(self)


def _parse_item(item: str) -> tuple[Guard, str | None]:
    body, colon, action = item.rpartition(":")
    kind_name, equals, value = item.partition("=")
    if not colon or (equals and action not in get_args(Action)):
        body, action = item, ""  # the colon belongs to the value
    elif action not in get_args(Action):
        raise SettingsError(f"the action of {item!r} must be stop or rewind, got {action!r}")
    kind_name, equals, value = body.partition("=")
    if kind_name not in _PARSERS:
        suggestions = difflib.get_close_matches(kind_name, _PARSERS, 1)
        hint = f"; did you mean {suggestions[0]!r}? There are" if suggestions else "; there are"
        raise SettingsError(f"unknown guard {kind_name!r}{hint} {_SYNTAX}")
    if bool(equals and value) != (kind_name != "loop"):
        raise SettingsError(f"{item!r} is not a valid guard; there are {_SYNTAX}")
    return _PARSERS[kind_name](value), action or None


def _parse_surprise(value: str) -> Guard:
    try:
        return SurpriseGuard(spike=float(value))
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"surprise must be a number of nats, got {value!r}") from error


_PARSERS: dict[str, Callable[[str], Guard]] = {
    "loop": lambda value: LoopGuard(),
    "ban": lambda value: BannedGuard(words=tuple(filter(None, value.split("|")))),
    "pattern": lambda value: BannedGuard(patterns=(value,), name="pattern"),
    "surprise": _parse_surprise,
}


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """What to do after a token.

    keep     continue.
    stop     end the text; the violation started at token `to`.
    rewind   drop all tokens from `to` on and pick another one there, none of `forbid`.
    """

    kind: Literal["keep", "stop", "rewind"] = "keep"
    to: int | None = None
    forbid: frozenset[int] = frozenset()
    reason: str | None = None


_KEEP = GuardVerdict()
_NO_TOKENS: frozenset[int] = frozenset()


class GuardRun:
    """Applies a policy to one text. Not thread-safe.

    When a verdict says rewind, this object is rewound already. Tokens stay forbidden at a position
    as long as the text before that position does not change.
    """

    def __init__(self, policy: GuardPolicy) -> None:
        self.policy = policy
        self.repairs: list[Violation] = []
        self._monitors: list[GuardMonitor] = [guard.start() for guard in policy.guards]
        self._tokens: list[int] = []
        self._forbidden: dict[int, frozenset[int]] = {}
        self._is_disabled = False  # out of retries: the text continues without guards

    def __len__(self) -> int:
        return len(self._tokens)

    def forbidden(self, index: int) -> frozenset[int]:
        """Tokens that must not be picked at this index of the generated text."""
        return self._forbidden.get(index, _NO_TOKENS)

    def push(self, token: int, piece: bytes, logprob: float, entropy: float) -> GuardVerdict:
        """Add a token. A `GuardError` means that this text must fail."""
        self._tokens.append(token)
        if self._is_disabled:
            return _KEEP
        return self._decide(
            [monitor.push(token, piece, logprob, entropy) for monitor in self._monitors]
        )

    def finish(self) -> GuardVerdict:
        """Check the finished text. Call once, after an end token or at the token limit."""
        return (
            _KEEP
            if self._is_disabled
            else self._decide([monitor.finish() for monitor in self._monitors])
        )

    def _decide(self, reports: Sequence[Violation | None]) -> GuardVerdict:
        violations = [violation for violation in reports if violation is not None]
        if not violations:
            return _KEEP
        first = min(violations, key=lambda violation: violation.start)
        if self.policy.action == "stop":
            return GuardVerdict("stop", first.start, reason=first.reason)
        if len(self.repairs) >= self.policy.retries:
            if self.policy.exhausted == "stop":
                reason = f"{first.reason}, after {len(self.repairs)} repairs"
                return GuardVerdict("stop", first.start, reason=reason)
            self._is_disabled = True
            return _KEEP
        self.repairs.append(first)
        banned = self.forbidden(first.start) | {self._tokens[first.start]}
        self.rewind(first.start)
        self._forbidden[first.start] = banned
        return GuardVerdict("rewind", first.start, banned, first.reason)

    def rewind(self, length: int) -> None:
        """Drop all tokens from index `length` on, and bans after it."""
        del self._tokens[length:]
        for monitor in self._monitors:
            monitor.rewind(length)
        self._forbidden = {at: ids for at, ids in self._forbidden.items() if at <= length}
