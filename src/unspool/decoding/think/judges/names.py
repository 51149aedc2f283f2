"""Verifiers by name, as given on the command line or over HTTP.

judge_named(lm, "regex:answer is \\\\d+")
judge_named(lm, "vote+reward:my-reward-model", conversation=messages)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unspool.decoding.think.judge import CertaintyVerifier, LogprobVerifier, Verifier, VoteVerifier
from unspool.decoding.think.judges.ask import AskVerifier
from unspool.decoding.think.judges.checkers import (
    FileVerifier,
    PatternVerifier,
    PatternVoteVerifier,
    UnitTestVerifier,
)
from unspool.decoding.think.judges.reading import Messages
from unspool.decoding.think.judges.reward import RewardVerifier
from unspool.errors import SettingsError
from unspool.session import Session

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
