"""The server's state, and the way of one request through it.

    call = await house.enter(request, model, places=n)     # waits in line; 429, 503, 404
    texts = await call.write(prompts, options, n)           # 400 if that cannot be
    return await call.reply(answer(texts))                  # or call.stream(events(texts))

A call holds places and a model, and has a deadline. However it ends (answered, failed, out of
time, or its client gone), its texts are stopped and both are given back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from unspool.serve.admission import Admission
from unspool.serve.branches import Branches
from unspool.serve.events import EventStream, event, gone
from unspool.serve.faults import ApiError, refused
from unspool.serve.json_reply import JsonReply
from unspool.serve.kept import KeptResponses
from unspool.serve.metrics import Metrics
from unspool.serve.settings import ServeSettings
from unspool.serve.shelf import Served, Shelf
from unspool.serve.texts import Texts
from unspool.serve.threads import in_thread

Result = TypeVar("Result")


class House:
    """Everything that the requests of one server share."""

    def __init__(self, settings: ServeSettings, shelf: Shelf) -> None:
        self.settings, self.shelf = settings, shelf
        self.admission = Admission(settings.most_running, settings.most_queued)
        self.metrics = Metrics(
            lambda: self.admission.running,
            lambda: self.admission.queued,
            lambda: list(shelf.loaded.values()),
        )
        self.branches = Branches(settings.most_branches)  # of /v1/tree
        self.responses = KeptResponses()  # of /v1/responses
        self.ready = False  # the first model is loaded

    async def enter(self, request: Request, model: str | None, places: int = 1) -> Call:
        """Wait for places and for the model. Who waits and goes away leaves the line."""
        self.shelf.entry(model)  # a name that means nothing need not wait
        until = asyncio.get_running_loop().time() + self.settings.deadline

        def leave(_: None = None) -> None:
            self.admission.leave(places, None)

        await _unless_gone(request, self.admission.enter(places), until, undo=leave)
        try:
            taking = self.shelf.take(model)
            served = await _unless_gone(request, taking, until, undo=self.shelf.give_back)
        except BaseException:
            leave()
            raise
        request.state.log["model"] = served.name
        return Call(self, request, served, places, until)

    @asynccontextmanager
    async def visit(self, request: Request, model: str | None) -> AsyncIterator[Call]:
        """A call that is answered in one go, without `reply` or `stream`."""
        call = await self.enter(request, model)
        try:
            yield call
        finally:
            await call.leave(None)


@dataclass(eq=False)
class Call:
    """One request while it is worked on."""

    house: House
    request: Request
    served: Served
    places: int
    until: float  # on the event loop's clock
    entered: float = field(default_factory=perf_counter)
    texts: list[Texts] = field(default_factory=list)
    _left: bool = False

    @property
    def settings(self) -> ServeSettings:
        return self.house.settings

    async def write(self, prompts: list[list[int]], options: dict[str, Any], n: int = 1) -> Texts:
        """Begin the texts; `options` are those of `LanguageModel.stream`."""
        for ids in prompts:
            self.check_prompt(len(ids))
        arrived = self.request.state.arrived
        at_once = max(1, self.places // n)
        texts = Texts(self.served, self.house.metrics, arrived, prompts, n, options, at_once)
        self.texts.append(texts)
        await self.unless_gone(texts.begin())
        return texts

    def check_prompt(self, length: int) -> None:
        most = self.settings.most_prompt
        if most is not None and length > most:
            raise refused(
                f"the prompt has {length:,} tokens, and this server reads at most {most:,}",
                code="context_length_exceeded",
            )

    def check_text(self, *texts: str) -> None:
        """Refuse what cannot fit, before time is spent on cutting it into tokens."""
        length = sum(map(len, texts))
        most = self.settings.most_prompt or self.served.lm.context
        if length > most and length > most * self.served.longest_token:
            raise refused(
                f"the prompt has {length:,} characters: more than the model's context can hold",
                code="context_length_exceeded",
            )

    def most_tokens(self, asked: int | None, prompt: int, usual: int | None = None) -> int:
        """How many tokens an answer may have, when so many were asked for."""
        room = max(0, self.served.lm.context - prompt)
        wanted = asked if asked is not None else usual if usual is not None else room
        limit = self.settings.most_tokens
        return wanted if limit is None else min(wanted, limit)

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        """Do the work, unless the client leaves or the time is up."""
        return await _unless_gone(self.request, work, self.until)

    async def thread(self, work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Have something done on a thread; who leaves meanwhile does not wait for it."""
        return await self.unless_gone(in_thread(work, *given, **named))

    @asynccontextmanager
    async def or_leave(self) -> AsyncIterator[None]:
        """What must succeed before there is an answer; if it does not, the call is over."""
        try:
            yield
        except BaseException as error:
            await self.leave(error)
            raise

    async def reply(self, answer: Awaitable[Any]) -> Response:
        """The answer as JSON."""
        try:
            content = await self.unless_gone(answer)
            self._log()
        finally:
            await self.leave(None)
        return JsonReply(content)

    def stream(
        self,
        events: AsyncIterator[bytes],
        failed: Callable[[ApiError], bytes] = lambda error: event(error.openai()),
    ) -> Response:
        """The answer as events, sent as they come."""
        return EventStream(events, until=self.until, failed=failed, left=self.leave)

    async def leave(self, why: BaseException | None) -> None:
        """The end, however it came about."""
        if self._left:
            return
        self._left = True
        for texts in self.texts:
            texts.close()
            texts.account()
        if isinstance(why, ConnectionResetError):
            self.request.state.log["gone"] = True
        elif why is not None:
            self.request.state.log["error"] = str(why)
        self._log()
        self.house.shelf.give_back(self.served)
        self.house.admission.leave(self.places, perf_counter() - self.entered)

    def _log(self) -> None:
        """What the request's line in the log says of its texts."""
        log = self.request.state.log
        for texts in self.texts:
            used = texts.usage() if texts.texts else None
            if used is None:
                continue
            log["prompt_tokens"] = used["prompt_tokens"]
            log["cached_tokens"] = used["prompt_tokens_details"]["cached_tokens"]
            log["completion_tokens"] = used["completion_tokens"]
            if self.settings.log_prompts:
                decode = self.served.lm.tokenizer.decode
                log["prompts"] = [decode(ids) for ids in texts.prompts]
                log["texts"] = [text.generation.text for text in texts.all]


async def _unless_gone(
    request: Request,
    work: Awaitable[Result],
    until: float,
    undo: Callable[[Result], None] | None = None,
) -> Result:
    """The work's result. Cancelled when the client goes or the time is up; `undo` gives back what
    was had all the same, if that happens in the very moment in which the work is done."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone(request.receive))
    had = False
    try:
        async with asyncio.timeout_at(until):
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionResetError("the client has gone")
        had = True
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        if undo is not None and not had and not working.cancelled() and not working.exception():
            undo(working.result())


def house_of(request: Request) -> House:
    """The house that a request has come to."""
    house: House = request.app.state.house
    return house


def new_id(prefix: str) -> str:
    """An identifier such as OpenAI's: chatcmpl-..."""
    return f"{prefix}{secrets.token_hex(12)}"
