"""A batch worker: one model and its running rows.

`exchange` is the only call of a worker, local or remote: it adds rows and returns those that are
finished. Rows start immediately and run in one continuous batch; each finished row makes room for
the next, so that none waits for the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from unspool.decoding.batch import prefill_common_prefix
from unspool.engine.generation import Generation
from unspool.engine.request import NAMES, unknown_option
from unspool.engine.request_builder import as_strings
from unspool.errors import DataError, UnspoolError
from unspool.loading import check_load_options, load
from unspool.model.hub.catalogue import display_name
from unspool.scale.batch.rows import BatchRow, BatchSettings, row_seed
from unspool.session import Session

if TYPE_CHECKING:
    from concurrent.futures import Future

    from unspool.engine.results import StepStream
    from unspool.scale.batch.openai import InProcessApi, Reply


_ROW_FIELDS = ("id", "prompt", "messages", "think")


def prepare_generation(lm: Session, row: BatchRow, settings: BatchSettings) -> Generation:
    """Return the generation of a row, not started; raise UnspoolError if the row is invalid."""
    fields = {name: value for name, value in row.data.items() if name not in settings.carry}
    for name in fields:
        if name not in _ROW_FIELDS and name not in NAMES:
            unknown = unknown_option(name, fields[name])
            raise DataError(f"{unknown} (--carry {name} copies it to the answers)")
    seed = row_seed(settings.seed, row.key)
    options: dict[str, Any] = {"seed": seed, **settings.options}
    options |= {
        name: value for name, value in fields.items() if name in NAMES and value is not None
    }
    messages = _messages(lm, row.data, settings)
    if messages is None:
        return lm.prepare_generation(row.data["prompt"], **options)
    options["stop"] = as_strings(options.get("stop")) + lm.chat_template.stops
    think = fields.get("think")
    variables = lm.think_options(settings.think if think is None else think, options)
    return lm.prepare_generation(lm.chat_prompt(messages, **variables).ids, **options)


def _messages(
    lm: Session, fields: Mapping[str, Any], settings: BatchSettings
) -> Sequence[Mapping[str, Any]] | None:
    """Return the conversation to answer, None if the prompt is to be continued."""
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        fault = "neither prompt nor messages" if prompt is None else "both prompt and messages"
        raise DataError(f"the row has {fault}; give one of them")
    if messages is None:
        is_chat = lm.is_instruct if settings.chat is None else settings.chat
        if not is_chat or not isinstance(prompt, str):  # token ids are continued as they are
            return None
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise DataError("messages must be a string, or a list of {'role', 'content'}")
    if settings.system is not None and not any(turn.get("role") == "system" for turn in messages):
        messages = [{"role": "system", "content": settings.system}, *messages]
    return messages


def plain_answer(row: BatchRow, generation: Generation, carry: Sequence[str]) -> dict[str, Any]:
    """Return a finished row as an output line."""
    carried = {name: row.data[name] for name in carry if name in row.data}
    reasoning = {"reasoning": generation.reasoning} if generation.reasoning else {}
    return {
        **carried,
        "id": row.id,
        "text": generation.answer,
        **reasoning,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt),
        "completion_tokens": len(generation.steps),
        "seed": generation.seed,
    }


MAX_ROWS = 512  # per worker: more than fit into a step, so that the batch stays full
_POLL_INTERVAL_S = 0.02  # between checks for finished rows
_EXCHANGE_TIMEOUT_S = 0.5

# The outcome of a row as a journal line: its number `row`, and `answer` or `error`.
Outcome = dict[str, Any]


class _RunningRow(Protocol):
    """A row in progress."""

    @property
    def ended(self) -> bool: ...

    def outcome(self) -> Outcome: ...


class _PlainRow:
    """A plain row in the engine."""

    def __init__(self, row: BatchRow, text: Generation, steps: StepStream, carry: tuple[str, ...]):
        self.row, self.text, self.steps, self.carry = row, text, steps, carry

    @property
    def ended(self) -> bool:
        return self.steps.ended

    def outcome(self) -> Outcome:
        try:
            for _ in self.text.extend(self.steps):
                pass
        except Exception as error:  # fails this row only
            return failed_outcome(self.row, error)
        return {"row": self.row.number, "answer": plain_answer(self.row, self.text, self.carry)}


class _OpenAIRow:
    """A row in OpenAI's format in the ASGI application."""

    def __init__(self, row: BatchRow, reply: Future[Reply]) -> None:
        self.row, self.reply = row, reply

    @property
    def ended(self) -> bool:
        return self.reply.done()

    def outcome(self) -> Outcome:
        from unspool.scale.batch.openai import answer_line

        try:
            reply = self.reply.result()
        except Exception as error:
            return failed_outcome(self.row, error)
        kind = "answer" if reply.status == 200 else "error"
        return {"row": self.row.number, kind: answer_line(self.row, reply)}


class BatchWorker:
    """A model and its running rows."""

    def __init__(self, lm: Session, settings: BatchSettings, name: str) -> None:
        self.lm, self.settings, self.name = lm, settings, name
        self._running: dict[int, _RunningRow] = {}
        self._refused: list[Outcome] = []
        self._is_first = True

    def __len__(self) -> int:
        return len(self._running)

    def fingerprint(self) -> str:
        """Return a fingerprint of weights and adapter, to avoid mixing answers of two models."""
        model = self.lm.model
        return f"{model.fingerprint()} {model.precision} {self.lm.adapter or ''}".strip()

    def exchange(
        self, rows: Iterable[BatchRow], poll_interval_s: float = _POLL_INTERVAL_S
    ) -> list[Outcome]:
        """Start rows; wait until any row is finished or a timeout, and return finished rows."""
        self._start(list(rows))
        deadline = time.monotonic() + _EXCHANGE_TIMEOUT_S
        ended: list[int] = []
        while self._running and not ended and not self._refused and time.monotonic() < deadline:
            time.sleep(poll_interval_s)
            if not self.lm.engine.loop.alive:
                raise UnspoolError("the engine has stopped; rerun the same command to resume")
            ended = [number for number, row in self._running.items() if row.ended]
        refused, self._refused = self._refused, []
        return refused + [self._running.pop(number).outcome() for number in ended]

    def close(self) -> None:
        """Stop all running rows and close the model."""
        self._running.clear()
        if "_api" in self.__dict__:
            self._api.close()
        self.lm.close()

    def _start(self, rows: list[BatchRow]) -> None:
        drafts: list[tuple[BatchRow, Generation]] = []
        for row in rows:
            try:
                if row.is_openai:
                    reply = self._api.start(row, self.settings)
                    self._running[row.number] = _OpenAIRow(row, reply)
                else:
                    drafts.append((row, prepare_generation(self.lm, row, self.settings)))
            except Exception as error:
                self._refused.append(failed_outcome(row, error))
        if self._is_first and len(drafts) > 1:  # later rows find it in the prefix cache
            prefill_common_prefix(self.lm, [text for _, text in drafts])
            self._is_first = False
        for row, text in drafts:
            try:
                steps = self.lm.engine.submit(text.request)
            except UnspoolError as error:
                self._refused.append(failed_outcome(row, error))
            else:
                self._running[row.number] = _PlainRow(row, text, steps, self.settings.carry)

    @cached_property
    def _api(self) -> InProcessApi:
        from unspool.scale.batch.openai import InProcessApi

        return InProcessApi(self.lm, self.name, MAX_ROWS)


def failed_outcome(row: BatchRow, error: Exception | str) -> Outcome:
    """Return the outcome of a row that failed."""
    if row.is_openai:
        from unspool.scale.batch.openai import fault_line

        return {"row": row.number, "error": fault_line(row, error)}
    reason = str(error) or type(error).__name__
    line = {"row": row.number, "id": row.id, "error": reason, "given": row.data}
    return {"row": row.number, "error": line}


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A model, its load options and its generation settings."""

    model: str | None
    options: dict[str, Any]  # of `unspool.load`
    settings: BatchSettings
    adapter: str | None = None

    def worker(self, cpus: int | None = None) -> BatchWorker:
        """Load the model in this process and return the worker; on `cpus` cores, or all."""
        placement = {name: value for name, value in self.options.items() if name != "offline"}
        backend = check_load_options(**placement).resolve().backend
        options = dict(self.options)
        if backend == "native" and options.get("threads") is None:
            options["threads"] = cpus
        # Texts must not depend on the batch composition.
        lm = load(self.model, **{**options, "exact": options["exact"] or backend == "cuda"})
        name = display_name(self.model or "", lm.path) if lm.path is not None else "model"
        if self.adapter is not None:
            lm.load_adapter("adapter", self.adapter)
            lm = lm.adapted("adapter")
        return BatchWorker(lm, self.settings, name)
