"""The server's state, and the way of one request through it.

    call = await state.enter(request, model, places=n)     # waits in line; 429, 503, 404
                                                            # places=0: computes nothing, no line
    texts = await call.write(prompts, options, n)           # 400 if that cannot be
    return await call.reply(answer(texts))                  # or call.stream(write)

A call is a context: it holds places, a model and texts, and gives all of them back at its end,
however that comes about. `enter` puts it among the resources of its request, which the middleware
releases when the request is over: answered, failed, out of time, or its client gone.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from unspool.serve.core.filling import Between, GapTexts
from unspool.serve.core.foreign import keep_alive_seconds
from unspool.serve.core.passing import shipped_entry
from unspool.serve.core.registry import ModelRegistry, ServedModel
from unspool.serve.core.schema import ForeignRequest, LoraScale
from unspool.serve.core.texts import Texts
from unspool.serve.http.admission import Admission, Lease
from unspool.serve.http.disconnect import CancelOnDisconnect
from unspool.serve.http.errors import ApiError, bad_request, too_long
from unspool.serve.http.events import EventStream, Writer, event
from unspool.serve.http.metrics import Metrics
from unspool.serve.http.notes import ignore, note
from unspool.serve.http.routes import JsonReply
from unspool.serve.http.settings import ServeSettings
from unspool.serve.http.threads import PREPARING, compute_pool, run_in
from unspool.serve.openai.response_store import ResponseStore
from unspool.serve.runs.library import RunLibrary
from unspool.serve.runs.trainer import Trainer
from unspool.serve.tree.branches import Branches

Held = TypeVar("Held")


class ServerState:
    """Everything that the requests of one server share."""

    def __init__(self, settings: ServeSettings, registry: ModelRegistry) -> None:
        self.settings, self.registry = settings, registry
        self.admission = Admission(settings.max_running, settings.max_queued)
        self.compute = compute_pool(settings.max_running)
        self.metrics = Metrics(
            lambda: self.admission.running,
            lambda: self.admission.queued,
            lambda: list(registry.loaded.values()),
        )
        self.branches = Branches(settings.max_branches, settings.replica)  # of /v1/tree
        self.responses = ResponseStore()  # of /v1/responses
        self.threads = ResponseStore()  # of /v1/messages: each reply with all before it
        self.runs = RunLibrary(settings.runs)  # of /v1/runs
        self.trainer = Trainer(self.runs)
        registry.find = lambda name: shipped_entry(name) or self.runs.checkpoint(name)
        self.ready = False  # the first model is loaded
        self.fault: Exception | None = None  # why it could not be

    def call(self, request: Request, model: str | None, places: int = 1) -> Call:
        """A call to be entered: `async with state.call(request, model) as call`."""
        self.registry.entry(model)  # a name that means nothing need not wait
        return Call(self, request, model, places)

    async def enter(self, request: Request, model: str | None, places: int = 1) -> Call:
        """A call that lasts as long as its request, until the answer is sent."""
        resources: AsyncExitStack = request.state.resources
        return await resources.enter_async_context(self.call(request, model, places))

    def adapted_model(self, model: str | None, lora: Sequence[LoraScale] | None) -> str | None:
        """The model that llama.cpp's `lora` asks for; ids are those of `/lora-adapters`.

        An adapter is applied as it was trained or not at all: its scale is 1 or 0.
        """
        wanted = [item for item in lora or () if item.scale != 0]
        if not wanted:
            return model
        adapters = list(self.registry.adapters().values())
        if len(wanted) > 1:
            raise bad_request("lora must name at most one adapter with a scale above 0", "lora")
        if not 0 <= wanted[0].id < len(adapters):
            message = f"lora names adapter {wanted[0].id}; /lora-adapters lists {len(adapters)}"
            raise bad_request(message, "lora")
        if wanted[0].scale != 1:
            message = f"the scale of an adapter must be 0 or 1, got {wanted[0].scale}"
            raise bad_request(message, "lora")
        adapter = adapters[wanted[0].id]
        named = self.registry.entry(model).name
        if named not in (adapter.base, adapter.name):
            message = f"adapter {adapter.short!r} belongs to {adapter.base!r}, not to {named!r}"
            raise bad_request(message, "lora")
        return adapter.name


class Call:
    """One request while it is worked on: holds places, a model and the texts it starts.

    With 0 places it never waits for others, and must not compute anything.
    """

    served: ServedModel
    lease: Lease

    def __init__(
        self, state: ServerState, request: Request, model: str | None, places: int
    ) -> None:
        self.state, self.request, self.model, self.places = state, request, model, places
        self.until = asyncio.get_running_loop().time() + state.settings.deadline
        self._resources = AsyncExitStack()
        self._texts: list[Texts] = []

    async def __aenter__(self) -> Call:
        """Wait for places and for the model. Who goes away meanwhile leaves the line."""
        async with AsyncExitStack() as taken:
            await taken.enter_async_context(CancelOnDisconnect(self.request.receive))
            async with asyncio.timeout_at(self.until):
                places = self.state.admission.places(self.places)
                self.lease = await taken.enter_async_context(places)
                self.served = await taken.enter_async_context(self.state.registry.use(self.model))
            if not self.served.is_alive:
                raise ApiError(503, "the model's engine has stopped", code="engine_stopped")
            self._resources = taken.pop_all()
        self.request.state.log["model"] = self.served.name
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._resources.__aexit__(*error)

    @property
    def settings(self) -> ServeSettings:
        return self.state.settings

    def heed(self, body: ForeignRequest) -> None:
        """What a request says beside what is to be written."""
        ignore(self.request, *body.ignored)
        if body.keep_alive is not None:
            model = self.served.base or self.served  # an adapter stays as long as its model
            model.keep_alive = keep_alive_seconds(body.keep_alive)

    def note(self, *notes: str) -> None:
        """Tell the client something beside the answer: in a header."""
        note(self.request, *notes)

    async def hold(self, resource: AbstractAsyncContextManager[Held]) -> Held:
        """Enter a context that is left with the call."""
        return await self._resources.enter_async_context(resource)

    async def hold_model(self, name: str) -> ServedModel:
        """Hold another model beside the call's own, until the call is left."""
        async with asyncio.timeout_at(self.until):
            return await self.hold(self.state.registry.use(name, beside=self.served))

    def hold_texts(self, texts: Texts) -> None:
        """Texts that are stopped with the call, if they still run; and what they came to."""
        texts.run, texts.lease = self.run, self.lease
        self._texts.append(texts)
        self._resources.callback(self._end, texts)

    async def write(
        self,
        prompts: list[list[int]],
        options: dict[str, Any],
        n: int = 1,
        *,
        start: bool = True,
        gaps: list[Between] | None = None,
        warms: bool = False,
    ) -> Texts:
        """Texts, started unless that is put off; `options` are those of `LanguageModel.stream`.
        With `gaps`, they are what stands there. With `warms`, the prompts are computed for the
        prefix cache, and the texts have no tokens."""
        for ids in prompts:
            self.check_prompt(len(ids))
        arrived = self.request.state.arrived
        asked = (self.served, self.state.metrics, arrived, prompts, n, options)
        has_gaps = gaps is not None and not warms
        texts = GapTexts(*asked, gaps=gaps or []) if has_gaps else Texts(*asked, warms=warms)
        self.hold_texts(texts)
        if start:
            async with asyncio.timeout_at(self.until):
                await texts.start()
        return texts

    def check_prompt(self, length: int) -> None:
        limit = self.settings.max_prompt
        if limit is not None and length > limit:
            message = f"the prompt has {length:,} tokens, and this server reads at most {limit:,}"
            raise too_long(message, length, limit)

    def check_text(self, *texts: str, longer: bool = False) -> None:
        """Refuse what cannot fit, before time is spent on cutting it into tokens; an endless text
        (`longer`) fits, unless this server reads no more."""
        length = sum(map(len, texts))
        limit = self.settings.max_prompt or (math.inf if longer else self.served.lm.context)
        longest = self.served.longest_token
        if length > limit and length > limit * longest:
            message = (
                f"the prompt has {length:,} characters: more than the model's context can hold"
            )
            raise too_long(message, -(-length // longest), int(limit))  # at least so many tokens

    def token_limit(self, given: int | None, prompt: int, default: int | None = None) -> int:
        """How many tokens an answer may have, when the request says so many."""
        context = self.served.lm.context
        room = context - prompt if prompt <= context else context  # more only if it is endless
        wanted = given if given is not None else default if default is not None else room
        limit = self.settings.max_tokens
        return wanted if limit is None else min(wanted, limit)

    async def run(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run work on a thread. It is cancelled when the client leaves or the deadline passes; the
        call's places stay taken until the thread has ended."""
        pool = self.state.compute if self.places else PREPARING
        job = partial(work, *arguments, **named)
        return await run_in(pool, job, group=self, lease=self.lease)

    async def thread(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """`run`, up to the request's deadline."""
        async with asyncio.timeout_at(self.until):
            return await self.run(work, *arguments, **named)

    async def threads(
        self, work: Callable[..., Any], items: Iterable[Any], **named: Any
    ) -> list[Any]:
        """Run work for each item, as many at once as the request gets places for. If one fails,
        those that run are cancelled and the others are not begun."""
        upcoming, results = deque(enumerate(items)), dict[int, Any]()
        running: dict[asyncio.Task[Any], int] = {}
        try:
            while upcoming or running:
                while upcoming and (not running or self.lease.grow(1)):
                    index, item = upcoming.popleft()
                    running[asyncio.create_task(self.thread(work, item, **named))] = index
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if len(running) > 1:
                        self.lease.shrink(1)
                    results[running.pop(task)] = task
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
        return [results[index].result() for index in range(len(results))]

    async def reply(self, answer: Awaitable[Any]) -> Response:
        """The answer as JSON; all that the call held is free before it is sent."""
        async with asyncio.timeout_at(self.until):
            content = await answer
        self.note(*(note for texts in self._texts for note in texts.notes))
        await self._resources.aclose()
        return JsonReply(content)

    def stream(
        self,
        write: Writer,
        failed: Callable[[ApiError], bytes] = lambda error: event(error.openai()),
    ) -> Response:
        """The answer as events, sent as they come."""
        return EventStream(write, until=self.until, failed=failed)

    def stream_lines(self, write: Writer, failed: Callable[[ApiError], bytes]) -> Response:
        """The answer as lines of JSON, sent as they come."""
        return EventStream(write, until=self.until, failed=failed, is_lines=True)

    def _end(self, texts: Texts) -> None:
        texts.close()
        texts.account()
        log = self.request.state.log
        used = texts.usage()
        log["prompt_tokens"] = used["prompt_tokens"]
        log["cached_tokens"] = used["prompt_tokens_details"]["cached_tokens"]
        log["completion_tokens"] = used["completion_tokens"]
        if self.settings.log_prompts:
            decode = self.served.lm.tokenizer.decode
            log["prompts"] = [decode(ids) for ids in texts.prompts]
            log["texts"] = [text.generation.text for text in texts.all]


def state_of(request: Request) -> ServerState:
    """The state of the server that a request has come to."""
    state: ServerState = request.app.state.server
    return state


def new_id(prefix: str, replica: str = "") -> str:
    """An identifier such as OpenAI's: chatcmpl-...; with a replica's name, of what it keeps."""
    return f"{prefix}{replica}{'_' if replica else ''}{secrets.token_hex(12)}"
