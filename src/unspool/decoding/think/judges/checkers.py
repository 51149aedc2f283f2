"""Judges that are rules: a pattern, a function in a Python file, a file of unit tests.

All of them run in a process of their own with limits (`limited.py`), because a pattern can take for
ever, and a test runs what a model has written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from unspool.decoding.think.judge import Judge, Verdict, VoteJudge
from unspool.decoding.think.judges.limited import Kind, Limits, answers, check_loads
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.session import Session

_LONGEST_PATTERN = 1000  # characters
_PATTERN_SECONDS = 2.0  # for one text
_AT_ONCE = 4  # processes


class _Checker:
    """A rule that is asked about each text by itself."""

    partial = False
    kind: Kind

    def __init__(self, lm: Session, of: str, limits: Limits) -> None:
        self._lm, self._of, self._limits = lm, of, limits
        self._given_up = Event()

    def cost(self, texts: Sequence[Generation]) -> int:
        """No model, no tokens."""
        return 0

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        self._given_up.clear()
        return [verdict_of(answer) for answer in self._answers(texts)]

    def cancel(self) -> None:
        """End the process that is checking; what is left is not checked."""
        self._given_up.set()

    def _answers(self, texts: Sequence[Generation]) -> list[dict[str, Any]]:
        return answers(self.kind, self._of, self._given(texts), self._limits, self._given_up)

    def _given(self, texts: Sequence[Generation]) -> list[tuple[str, str]]:
        decode = self._lm.tokenizer.decode
        return [(text.text, decode(text.prompt, specials=False)) for text in texts]


class PatternJudge(_Checker):
    """1 where a regular expression is found in the text, 0 where it is not."""

    kind = "pattern"

    def __init__(self, lm: Session, pattern: str, limits: Limits | None = None) -> None:
        check_pattern(pattern)
        super().__init__(lm, pattern, limits or Limits(seconds=_PATTERN_SECONDS))

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [Verdict(one.score, one.why) for one in super().judge(texts)]

    def found(self, texts: Sequence[Generation]) -> list[Verdict]:
        """The same, with what the pattern found: its last match, of that the first group."""
        return super().judge(texts)


class PatternVoteJudge(VoteJudge):
    """A vote on what a pattern finds in each text: its last match, of that the first group."""

    def __init__(
        self,
        lm: Session,
        pattern: str,
        weigher: Judge | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(weigher=weigher)
        self._pattern = PatternJudge(lm, pattern, limits)

    def answers(self, texts: Sequence[Generation]) -> list[Verdict]:
        return self._pattern.found(texts)

    def cancel(self) -> None:
        super().cancel()
        self._pattern.cancel()


class FileJudge(_Checker):
    """What a function in a Python file says of a text: a number, or whether it is right.

    The function is called with the text; with the text and its prompt if it takes two arguments.
    """

    kind = "function"

    def __init__(
        self, lm: Session, file: str | Path, function: str = "check", limits: Limits | None = None
    ) -> None:
        super().__init__(lm, f"{_python_file(file)}:{function}", limits or Limits())
        check_loads(self.kind, self._of, self._limits)


class UnitTestJudge(_Checker):
    """The share of a file's unit tests that the code in a text passes.

    Code that does not run, or never ends, passes none; what is to blame is the text, so that is
    its score, and no failure of the judge.
    """

    kind = "tests"

    def __init__(self, lm: Session, file: str | Path, limits: Limits | None = None) -> None:
        super().__init__(lm, str(_python_file(file)), limits or Limits())
        check_loads(self.kind, self._of, self._limits)

    def _answers(self, texts: Sequence[Generation]) -> list[dict[str, Any]]:
        """Each in a process of its own: what one text's code leaves behind must not help others."""
        pool = ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1))
        try:
            asked = [
                pool.submit(answers, self.kind, self._of, [one], self._limits, self._given_up)
                for one in self._given(texts)
            ]
            found = [each.result()[0] for each in asked]
        finally:  # whoever leaves early, by Ctrl-C say, leaves nothing running
            self._given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return [{**one, "score": one["score"] or 0.0} for one in found]


def verdict_of(answer: dict[str, Any]) -> Verdict:
    """A checker's answer, which may be anything."""
    return Verdict(answer.get("score"), str(answer.get("why", "")), answer.get("answer"))


def check_pattern(pattern: str) -> None:
    """Refuse what is no regular expression, before anything is written."""
    if len(pattern) > _LONGEST_PATTERN:
        raise SettingsError(f"the judge's pattern is longer than {_LONGEST_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(
            f"the judge's pattern {pattern!r:.60} is not a regular expression: {error}"
        ) from error


def _python_file(given: str | Path) -> Path:
    path = Path(given).expanduser().resolve()
    if not path.is_file():
        raise SettingsError(f"the judge's file {given} is not there; give the path of a .py file")
    return path
