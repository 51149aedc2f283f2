"""One model and the rows that it is writing: rows go in, what is finished comes out.

`exchange` is all that is ever asked of a worker, on this machine or on another: take these rows
as well, and give what has been finished since. Rows are begun as soon as they come and written
side by side; one that ends makes room for the next, and nobody waits for the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from unspool.decoding.together import read_what_all_share
from unspool.errors import UnspoolError
from unspool.scale.batch.plain import answer_of, draft_of
from unspool.scale.batch.rows import Row
from unspool.scale.batch.settings import BatchSettings
from unspool.session import Session

if TYPE_CHECKING:
    from concurrent.futures import Future

    from unspool.engine.generation import Generation
    from unspool.engine.stream import StepStream
    from unspool.scale.batch.openai import Api, Reply

AT_ONCE = 512  # rows that a worker holds: more than fit a step, so that none runs dry
_LOOK_UP = 0.02  # seconds from one look at what is finished to the next
_PATIENCE = 0.5  # ... until it is said that nothing is

# What became of a row, as the journal keeps it: its number, and `answer` or `error`.
Outcome = dict[str, Any]


class _Begun(Protocol):
    """A row that is being written."""

    @property
    def ended(self) -> bool: ...

    def outcome(self) -> Outcome: ...


class _Text:
    """A plain row on its way through the engine."""

    def __init__(self, row: Row, text: Generation, steps: StepStream, carry: tuple[str, ...]):
        self.row, self.text, self.steps, self.carry = row, text, steps, carry

    @property
    def ended(self) -> bool:
        return self.steps.ended

    def outcome(self) -> Outcome:
        try:
            for _ in self.text.extend(self.steps):
                pass
        except Exception as error:  # it fails this text alone
            return failed(self.row, error)
        return {"row": self.row.number, "answer": answer_of(self.row, self.text, self.carry)}


class _Request:
    """A row in OpenAI's format on its way through the application."""

    def __init__(self, row: Row, reply: Future[Reply]) -> None:
        self.row, self.reply = row, reply

    @property
    def ended(self) -> bool:
        return self.reply.done()

    def outcome(self) -> Outcome:
        from unspool.scale.batch.openai import answer_line

        try:
            reply = self.reply.result()
        except Exception as error:
            return failed(self.row, error)
        kind = "answer" if reply.status == 200 else "error"
        return {"row": self.row.number, kind: answer_line(self.row, reply)}


class Worker:
    """A model, and the rows that it holds."""

    def __init__(self, lm: Session, settings: BatchSettings, name: str) -> None:
        self.lm, self.settings, self.name = lm, settings, name
        self._begun: dict[int, _Begun] = {}
        self._refused: list[Outcome] = []
        self._is_first = True

    def __len__(self) -> int:
        return len(self._begun)

    def fingerprint(self) -> str:
        """Of the weights and the adapter: another model's rows must not be mixed with these."""
        model = self.lm.model
        return f"{model.fingerprint()} {model.precision} {self.lm.adapter or ''}".strip()

    def exchange(self, rows: Iterable[Row], look_up: float = _LOOK_UP) -> list[Outcome]:
        """Begin these rows; what has ended since the last time, looked at every so many seconds,
        or nothing if nothing does."""
        self._begin(list(rows))
        until = time.monotonic() + _PATIENCE
        ended: list[int] = []
        while self._begun and not ended and not self._refused and time.monotonic() < until:
            time.sleep(look_up)
            if not self.lm.engine.loop.alive:
                raise UnspoolError("the model's engine has stopped; the same command goes on")
            ended = [number for number, one in self._begun.items() if one.ended]
        refused, self._refused = self._refused, []
        return refused + [self._begun.pop(number).outcome() for number in ended]

    def close(self) -> None:
        """Stop whatever is still being written."""
        self._begun.clear()
        if "_api" in self.__dict__:
            self._api.close()
        self.lm.close()

    def _begin(self, rows: list[Row]) -> None:
        drafts: list[tuple[Row, Generation]] = []
        for row in rows:
            try:
                if row.is_openai:
                    reply = self._api.start(row, self.settings)
                    self._begun[row.number] = _Request(row, reply)
                else:
                    drafts.append((row, draft_of(self.lm, row, self.settings)))
            except Exception as error:
                self._refused.append(failed(row, error))
        if self._is_first and len(drafts) > 1:  # later rows find it in the tree
            read_what_all_share(self.lm, [text for _, text in drafts])
            self._is_first = False
        for row, text in drafts:
            try:
                steps = self.lm.engine.submit(text.request)
            except UnspoolError as error:
                self._refused.append(failed(row, error))
            else:
                self._begun[row.number] = _Text(row, text, steps, self.settings.carry)

    @cached_property
    def _api(self) -> Api:
        from unspool.scale.batch.openai import Api

        return Api(self.lm, self.name, AT_ONCE)


def failed(row: Row, error: Exception | str) -> Outcome:
    """The outcome of a row that cannot be written."""
    if row.is_openai:
        from unspool.scale.batch.openai import fault_line

        return {"row": row.number, "error": fault_line(row, error)}
    reason = str(error) or type(error).__name__
    told = {"row": row.number, "id": row.id, "error": reason, "given": row.given}
    return {"row": row.number, "error": told}
