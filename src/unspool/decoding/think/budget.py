"""The token budget of a search: a hard limit, as tokens are reserved before they are computed.

It counts the prompt (once), every generated token (discarded ones too), and every token that a
verifier's model reads. Recomputation after preemption is not counted.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Literal

from unspool.decoding.written import check_int
from unspool.errors import UnspoolError

CostKind = Literal["prompt", "written", "judged"]


@dataclass(slots=True)
class Spent:
    """Tokens computed so far, by purpose."""

    prompt: int = 0  # not counting tokens from the prefix cache
    written: int = 0  # including discarded ones
    judged: int = 0  # read by the verifier's model

    @property
    def total(self) -> int:
        return self.prompt + self.written + self.judged

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {**asdict(self), "total": self.total}


class TokenBudget:
    """A token limit and the tokens reserved so far."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = None if limit is None else check_int("budget", limit)
        self.spent = Spent()
        self._cached_tokens = 0  # prompt tokens that came from the prefix cache

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be computed."""
        if self.limit is None:
            return sys.maxsize
        return self.limit - self.spent.total - self._cached_tokens

    def reserve(self, kind: CostKind, tokens: int) -> None:
        """Reserve tokens that are about to be computed."""
        if tokens > self.remaining:
            raise UnspoolError(
                f"{tokens} more tokens do not fit the budget of {self.limit}, of which "
                f"{max(0, self.remaining)} are left; give a larger one"
            )
        setattr(self.spent, kind, getattr(self.spent, kind) + tokens)

    def refund(self, kind: CostKind, tokens: int) -> None:
        """Return reserved tokens that were not computed."""
        setattr(self.spent, kind, getattr(self.spent, kind) - tokens)

    def credit_cached(self, tokens: int) -> None:
        """Count prompt tokens found in the prefix cache as not spent. They still use up the limit:
        the result of a search must not depend on the state of the cache."""
        self.refund("prompt", tokens)
        self._cached_tokens += tokens
