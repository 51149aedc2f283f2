"""Judges by the names that people give on a command line or over HTTP."""

from __future__ import annotations

from unspool.decoding.think.judge import CertaintyJudge, Judge, LogprobJudge, VoteJudge
from unspool.errors import SettingsError
from unspool.session import Session

NAMES = ("logprob", "certainty", "vote", "vote:PATTERN", "vote+JUDGE")


def judge_named(lm: Session, name: str) -> Judge:
    """The judge that a name stands for; `lm` is who writes the texts."""
    kind, _, rest = name.partition(":")
    if kind == "logprob":
        return LogprobJudge()
    if kind == "certainty":
        return CertaintyJudge(lm)
    if kind == "vote":
        return VoteJudge(rest) if rest else VoteJudge()
    if name.startswith("vote+"):
        return VoteJudge(weigher=judge_named(lm, name.removeprefix("vote+")))
    raise SettingsError(f"there is no judge {name!r}; there are {', '.join(NAMES)}")
