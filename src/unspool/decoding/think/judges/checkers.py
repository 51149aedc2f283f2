"""Rule-based verifiers: a regular expression, a function in a Python file, a file of unit tests.

All run in a separate process with limits (`limited.py`): a regular expression may backtrack without
end, and a unit test runs code that a model wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from unspool.decoding.think.judge import Verdict, Verifier, VoteVerifier
from unspool.decoding.think.judges.limited import CheckerKind, CheckerLimits, answers, check_loads
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.session import Session

_MAX_PATTERN_CHARS = 1000  # characters
_PATTERN_SECONDS = 2.0  # for one text
_MAX_PROCESSES = 4  # processes


class _CheckerVerifier:
    """A rule that scores each text independently."""

    partial = False
    kind: CheckerKind

    def __init__(self, lm: Session, source: str, limits: CheckerLimits) -> None:
        self._lm, self._source, self._limits = lm, source, limits
        self._cancelled = Event()

    def cost(self, texts: Sequence[Generation]) -> int:
        """Zero: no model is involved."""
        return 0

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        self._cancelled.clear()
        return [to_verdict(answer) for answer in self._answers(texts)]

    def cancel(self) -> None:
        """Kill the checking process; the remaining texts are not checked."""
        self._cancelled.set()

    def _answers(self, texts: Sequence[Generation]) -> list[dict[str, Any]]:
        return answers(self.kind, self._source, self._inputs(texts), self._limits, self._cancelled)

    def _inputs(self, texts: Sequence[Generation]) -> list[tuple[str, str]]:
        decode = self._lm.tokenizer.decode
        return [(text.text, decode(text.prompt, specials=False)) for text in texts]


class PatternVerifier(_CheckerVerifier):
    """1 if a regular expression matches somewhere in the text, else 0."""

    kind = "pattern"

    def __init__(self, lm: Session, pattern: str, limits: CheckerLimits | None = None) -> None:
        check_pattern(pattern)
        super().__init__(lm, pattern, limits or CheckerLimits(seconds=_PATTERN_SECONDS))

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [Verdict(verdict.score, verdict.why) for verdict in super().score(texts)]

    def score_with_match(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Like `score`, with the last match (its first group, if any) as the answer."""
        return super().score(texts)


class PatternVoteVerifier(VoteVerifier):
    """A vote on the last match of a pattern in each text (its first group, if any)."""

    def __init__(
        self,
        lm: Session,
        pattern: str,
        weigher: Verifier | None = None,
        limits: CheckerLimits | None = None,
    ) -> None:
        super().__init__(weigher=weigher)
        self._pattern = PatternVerifier(lm, pattern, limits)

    def answers(self, texts: Sequence[Generation]) -> list[Verdict]:
        return self._pattern.score_with_match(texts)

    def cancel(self) -> None:
        super().cancel()
        self._pattern.cancel()


class FileVerifier(_CheckerVerifier):
    """Score by a function in a Python file, which returns a number or a bool.

    The function is called with the text; with the text and its prompt if it takes two arguments.
    """

    kind = "function"

    def __init__(
        self,
        lm: Session,
        file: str | Path,
        function: str = "check",
        limits: CheckerLimits | None = None,
    ) -> None:
        super().__init__(lm, f"{_python_file(file)}:{function}", limits or CheckerLimits())
        check_loads(self.kind, self._source, self._limits)


class UnitTestVerifier(_CheckerVerifier):
    """The share of a file's unit tests that the code in a text passes.

    Code that fails to run or times out passes none: that is a score of 0, not a failure of the
    verifier.
    """

    kind = "tests"

    def __init__(self, lm: Session, file: str | Path, limits: CheckerLimits | None = None) -> None:
        super().__init__(lm, str(_python_file(file)), limits or CheckerLimits())
        check_loads(self.kind, self._source, self._limits)

    def _answers(self, texts: Sequence[Generation]) -> list[dict[str, Any]]:
        """Check each text in a separate process, so that code of one text cannot affect another."""
        pool = ThreadPoolExecutor(min(_MAX_PROCESSES, os.cpu_count() or 1))
        try:
            futures = [
                pool.submit(answers, self.kind, self._source, [pair], self._limits, self._cancelled)
                for pair in self._inputs(texts)
            ]
            results = [future.result()[0] for future in futures]
        finally:  # on an early exit too (Ctrl-C), leave no process running
            self._cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return [{**pair, "score": pair["score"] or 0.0} for pair in results]


def to_verdict(answer: dict[str, Any]) -> Verdict:
    """Convert a checker's answer, which may be malformed."""
    return Verdict(answer.get("score"), str(answer.get("why", "")), answer.get("answer"))


def check_pattern(pattern: str) -> None:
    """Raise `SettingsError` for an invalid regular expression, before anything is generated."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise SettingsError(
            f"the verifier's pattern is longer than {_MAX_PATTERN_CHARS} characters"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(
            f"the verifier's pattern {pattern!r:.60} is not a regular expression: {error}"
        ) from error


def _python_file(file: str | Path) -> Path:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise SettingsError(
            f"the verifier's file {file} does not exist; give the path of a .py file"
        )
    return path
