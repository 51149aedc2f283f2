"""Judges by the names that people give on a command line or over HTTP.

judge_named(lm, "regex:answer is \\\\d+")
judge_named(lm, "vote+reward:my-reward-model", asked=messages)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unspool.decoding.think.judge import CertaintyJudge, Judge, LogprobJudge, VoteJudge
from unspool.decoding.think.judges.ask import AskJudge
from unspool.decoding.think.judges.checkers import (
    FileJudge,
    PatternJudge,
    PatternVoteJudge,
    UnitTestJudge,
)
from unspool.decoding.think.judges.reading import Messages
from unspool.decoding.think.judges.reward import RewardJudge
from unspool.errors import SettingsError
from unspool.session import Session

# Each name as people write it, and what it says of a text.
NAMES = {
    "logprob": "how likely the writer finds its text, a token on average",
    "certainty": "how sure the writer was at each token",
    "regex:PATTERN": "1 if the pattern is found, else 0",
    "python:FILE.py:FUNCTION": "what the function gives for the text",
    "tests:FILE.py": "the share of unit tests that its code passes",
    "reward:MODEL": "the number of a reward model",
    "process:MODEL": "the worst step, by a process-reward model",
    "ask": "how sure the writer is that it is right: P(yes)",
    "ask:MODEL": "the same, by another model",
    "vote": "the share of texts with the same answer",
    "vote:PATTERN": "the same, with the answer found by a pattern",
    "vote+JUDGE": "the same, each vote weighed by another judge",
}
_NEEDS_REST = ("regex", "python", "tests", "reward", "process")
_MODELS = ("reward", "process", "ask")
_RUNS_CODE = ("python", "tests")


@dataclass(frozen=True, slots=True)
class JudgeName:
    """A judge's name, taken apart."""

    kind: str
    rest: str = ""
    weigher: JudgeName | None = None  # of a weighted vote

    @classmethod
    def parse(cls, name: str) -> JudgeName:
        """The parts of a name, or an error that says which names there are."""
        if name.startswith("vote+"):
            weigher = cls.parse(name.removeprefix("vote+"))
            if weigher.kind == "vote":
                raise SettingsError(f"{name!r} weighs votes by votes; name another judge behind +")
            return cls("vote", weigher=weigher)
        kind, colon, rest = name.partition(":")
        known = {each.partition(":")[0].partition("+")[0] for each in NAMES}
        bare = kind in ("logprob", "certainty") and colon
        if kind not in known or bare or (kind in _NEEDS_REST and not rest):
            raise SettingsError(f"there is no judge {name!r:.80}; there are {', '.join(NAMES)}")
        return cls(kind, rest)

    @property
    def model(self) -> str | None:
        """The name of the model that it needs beside the writer."""
        if self.weigher is not None:
            return self.weigher.model
        return self.rest or None if self.kind in _MODELS else None

    @property
    def runs_code(self) -> bool:
        """Whether it runs a file of the caller's, which nobody may ask for from afar."""
        return self.kind in _RUNS_CODE or (self.weigher is not None and self.weigher.runs_code)


def judge_named(
    lm: Session,
    name: str | JudgeName,
    *,
    asked: Messages | None = None,
    load: Callable[[str], Session] | None = None,
) -> Judge:
    """The judge that a name stands for; `lm` is who writes the texts.

    `asked` is the conversation that they answer, for judges that are models with a template of
    their own; `load` finds such a model by its name.
    """
    parsed = JudgeName.parse(name) if isinstance(name, str) else name
    kind, rest, find = parsed.kind, parsed.rest, load or lm.beside
    if kind == "logprob":
        return LogprobJudge()
    if kind == "certainty":
        return CertaintyJudge(lm)
    if kind == "regex":
        return PatternJudge(lm, rest)
    if kind == "python":
        return FileJudge(lm, *_file_and_function(rest))
    if kind == "tests":
        return UnitTestJudge(lm, rest)
    if kind == "ask":
        return AskJudge(lm, find(rest) if rest else None, asked=asked)
    if kind == "vote":
        if rest:
            return PatternVoteJudge(lm, rest)
        weigher = parsed.weigher
        return VoteJudge(
            weigher=judge_named(lm, weigher, asked=asked, load=load) if weigher else None
        )
    return RewardJudge(lm, find(rest), process=True if kind == "process" else None, asked=asked)


def _file_and_function(rest: str) -> tuple[str, str]:
    file, _, function = rest.rpartition(":")
    return (file, function) if file and function.isidentifier() else (rest, "check")
