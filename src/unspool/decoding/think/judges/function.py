"""A function as a verifier: `lm.think(prompt, judge=lambda text: -len(text.text))`.

It runs in this process, on a thread. If a call times out, that text fails, the thread is abandoned
and the search continues.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from unspool.decoding.think.judge import Verdict, Verifier, checked
from unspool.engine.generation import Generation
from unspool.errors import SettingsError

TIMEOUT_S = 60.0  # per text


class FunctionVerifier:
    """A function of a `Generation` that returns a number, a bool or a `Verdict`.

    seconds    timeout per text.
    partial    whether it can score unfinished texts.
    """

    def __init__(
        self,
        function: Callable[[Generation], Any],
        *,
        seconds: float = TIMEOUT_S,
        partial: bool = True,
    ) -> None:
        self._function, self._seconds, self.partial = function, seconds, partial

    def cost(self, texts: Sequence[Generation]) -> int:
        """Zero: the function's cost is not counted."""
        return 0

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while len(verdicts) < len(texts):
            verdicts += self._score_until_timeout(texts[len(verdicts) :])
        return verdicts

    def _score_until_timeout(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Score texts up to the end or the first timeout."""
        results: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        abandoned = threading.Event()

        def work() -> None:
            for text in texts:
                if abandoned.is_set():  # timed out: the results are ignored
                    return
                results.put(self._score_text(text))

        threading.Thread(target=work, name="unspool-judge", daemon=True).start()
        verdicts: list[Verdict] = []
        try:
            for _ in texts:
                verdicts.append(results.get(timeout=self._seconds))
        except queue.Empty:
            verdicts.append(
                Verdict(None, f"the verifier did not answer within {self._seconds:g} s")
            )
        finally:
            abandoned.set()
        return verdicts

    def _score_text(self, text: Generation) -> Verdict:
        try:
            return checked(self._function(text))
        except BaseException as error:  # SystemExit too: it must not end more than this thread
            return Verdict(None, f"the verifier raised {type(error).__name__}: {error}")


def as_verifier(verifier: Verifier | Callable[[Generation], Any]) -> Verifier:
    """Return a verifier; a function of a text is wrapped."""
    if isinstance(verifier, Verifier) and not isinstance(verifier, type):
        return verifier
    if callable(verifier):
        return FunctionVerifier(verifier)
    raise SettingsError(
        f"judge must be a name such as 'logprob', a verifier, or a function that returns a number "
        f"for a Generation (higher is better), got {verifier!r}"
    )
