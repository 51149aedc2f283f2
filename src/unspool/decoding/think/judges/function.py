"""A caller's own function as a judge: `lm.think(prompt, judge=lambda text: -len(text.text))`.

It runs in this process, so it may use whatever the caller has. One that does not answer in time is
left behind on its thread, and its text has failed; the search goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from unspool.decoding.think.judge import Judge, Verdict, checked
from unspool.engine.generation import Generation
from unspool.errors import SettingsError

SECONDS = 60.0  # that a function may take for one text


class FunctionJudge:
    """A function of a `Generation` that gives a number, whether the text is right, or a `Verdict`.

    seconds    after which a text has failed that the function has not answered for.
    partial    whether it can judge a text that is not finished.
    """

    def __init__(
        self,
        function: Callable[[Generation], Any],
        *,
        seconds: float = SECONDS,
        partial: bool = True,
    ) -> None:
        self._function, self._seconds, self.partial = function, seconds, partial

    def cost(self, texts: Sequence[Generation]) -> int:
        """None that anybody counts."""
        return 0

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        found: list[Verdict] = []
        while len(found) < len(texts):
            found += self._until_it_hangs(texts[len(found) :])
        return found

    def _until_it_hangs(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Verdicts on the first texts: on all of them, or up to one that took too long."""
        said: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        left = threading.Event()

        def work() -> None:
            for text in texts:
                if left.is_set():  # nobody waits for us any more
                    return
                said.put(self._one(text))

        threading.Thread(target=work, name="unspool-judge", daemon=True).start()
        found: list[Verdict] = []
        try:
            for _ in texts:
                found.append(said.get(timeout=self._seconds))
        except queue.Empty:
            found.append(Verdict(None, f"the judge did not answer within {self._seconds:g} s"))
        finally:
            left.set()
        return found

    def _one(self, text: Generation) -> Verdict:
        try:
            return checked(self._function(text))
        except BaseException as error:  # also one that leaves: it ends a thread, and nothing else
            return Verdict(None, f"the judge raised {type(error).__name__}: {error}")


def as_judge(given: Judge | Callable[[Generation], Any]) -> Judge:
    """A judge from what a caller gave: a judge, or a function of a text."""
    if isinstance(given, Judge) and not isinstance(given, type):
        return given
    if callable(given):
        return FunctionJudge(given)
    raise SettingsError(
        f"judge is {given!r}; it may be a name such as 'logprob', a judge, or a function that "
        "gives a number for a Generation, higher for a better one"
    )
