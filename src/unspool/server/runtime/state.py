"""The server's state, and the path of one request through it.

    call = await state.enter(request, model, places=n)     # queues; 429, 503, 404
                                                            # places=0: computes nothing, no queue
    texts = await call.write(prompts, options, n)           # 400 if the options are invalid
    return await call.reply(answer(texts))                  # or call.stream(write)

A call is a context manager: it holds places, a model and texts, and releases them when it ends,
on every path. `enter` adds it to the resources of its request, which the middleware releases when
the request is over: answered, failed, timed out, or its client disconnected.

Features and dialects keep state of their own with `ServerState.extension`; this module knows none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from unspool.engine.page_files import PageFiles, page_access, remove_unfinished
from unspool.errors import UnspoolError
from unspool.server.http.admission import Admission, Lease
from unspool.server.http.errors import ApiError, bad_request, too_long
from unspool.server.http.events import EventStream, Writer, event
from unspool.server.http.logs import log_event
from unspool.server.http.middleware import CancelOnDisconnect
from unspool.server.http.replies import JsonReply, ignore, note
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.aliases import keep_alive_seconds
from unspool.server.runtime.metrics import Metrics
from unspool.server.runtime.registry import ModelRegistry, ServedModel
from unspool.server.runtime.schema import ForeignRequest, LoraScale
from unspool.server.runtime.slots import Slots
from unspool.server.runtime.texts import InfillGap, InfillTexts, RequestTexts
from unspool.server.runtime.threads import PREPARING, compute_pool, run_in
from unspool.session import Session
from unspool.store.database import Database, vocabulary_hash
from unspool.store.folder import StateFolder

Resource = TypeVar("Resource")
Extension = TypeVar("Extension")
MAX_WATCHERS = 512


def _log_warning(message: str) -> None:
    log_event("state", logging.WARNING, message=message)


class ServerState:
    """What all requests of one server share. Owned by the event loop."""

    def __init__(self, settings: ServerSettings, registry: ModelRegistry) -> None:
        self.settings, self.registry = settings, registry
        self.admission = Admission(settings.max_running, settings.max_queued)
        self.compute = compute_pool(settings.max_running)
        self.metrics = Metrics(
            lambda: self.admission.running,
            lambda: self.admission.queued,
            lambda: list(registry.loaded.values()),
        )
        self.folder: StateFolder | None = None  # of stored texts; None: they are in memory only
        self.database: Database | None = None
        if settings.state is not None:
            self.folder = StateFolder(settings.state, allow_readonly=True)
            is_readonly = self.folder.is_readonly
            if is_readonly:
                _log_warning(self.folder.readonly_note)
            else:
                remove_unfinished(self.folder.pages)
            try:
                self.database = Database(
                    self.folder.database, say=_log_warning, is_readonly=is_readonly
                )
            except BaseException:
                self.folder.close()
                raise
            registry.on_loaded = self._prepare_model
        # Saves KV-cache pages, one text at a time.
        self.slots = Slots(settings.slots, settings.max_running)
        self._page_saver = ThreadPoolExecutor(1, thread_name_prefix="unspool-pages")
        self.ready = False  # the first model is loaded
        self.startup_error: Exception | None = None  # why the first model could not be loaded
        self.num_watchers = 0
        self._extensions: dict[Hashable, Any] = {}
        self._extending = threading.RLock()  # `make` may ask for another extension

    def _prepare_model(self, lm: Session) -> None:
        """Let the stored texts of a model continue from saved KV-cache pages."""
        assert self.folder is not None
        vocabulary_hash(lm.tokenizer)  # now, instead of when its first stored text is opened
        if page_access(lm.engine) is None:
            _log_warning(
                f"KV-cache pages of {lm.model.device} are not stored; after a restart, texts are "
                "computed again"
            )
            return
        limit = 0 if self.folder.is_readonly else self.settings.state_bytes
        try:
            lm.engine.page_files = PageFiles(self.folder.pages, lm.engine.page_identity(), limit)
        except OSError as error:
            if not self.folder.is_readonly:
                _log_warning(f"KV-cache pages cannot be saved: {error}")
            return
        with suppress(RuntimeError):  # the server is stopping
            self._page_saver.submit(lm.engine.page_files.restore_latest, lm.engine)

    def save_pages(self, lm: Session, tokens: Callable[[], Sequence[int] | None]) -> None:
        """Save the pages of a text that has come to rest, on a thread.

        `tokens` is called then; None: the text is running again.
        """

        def save() -> None:
            with suppress(UnspoolError):  # the model was unloaded meanwhile
                files, text = lm.engine.page_files, tokens()
                if files is not None and text is not None:
                    files.save(lm.engine, text, lm.engine.adapters.number(lm.adapter))

        if self.folder is not None:
            with suppress(RuntimeError):  # the server is stopping
                self._page_saver.submit(save)

    def finish_saving(self) -> None:
        """Wait until the pages of texts at rest are saved."""
        self._page_saver.shutdown()

    def close(self) -> None:
        """Finish writing, and release the folder. Safe to call twice."""
        if self.database is not None:
            self.database.close()
        if self.folder is not None:
            self.folder.close()

    def extension(self, key: Hashable, make: Callable[[], Extension]) -> Extension:
        """State of a dialect or feature: what `make` returned when `key` was first used.

        Thread-safe; `make` is called once.
        """
        with self._extending:
            if key not in self._extensions:
                self._extensions[key] = make()
            return cast(Extension, self._extensions[key])

    @contextmanager
    def watcher(self) -> Iterator[None]:
        """Count an event stream that has no deadline. Raises 429 beyond `MAX_WATCHERS`."""
        if self.num_watchers >= MAX_WATCHERS:
            raise ApiError(429, f"at most {MAX_WATCHERS} event streams may be open", retry_after=5)
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1

    def call(self, request: Request, model: str | None, places: int = 1) -> Call:
        """A call to be entered: `async with state.call(request, model) as call`."""
        self.registry.entry(model)  # an unknown name fails here, before it queues
        return Call(self, request, model, places)

    async def enter(self, request: Request, model: str | None, places: int = 1) -> Call:
        """Enter a call that lasts until the response to its request is sent."""
        resources: AsyncExitStack = request.state.resources
        return await resources.enter_async_context(self.call(request, model, places))

    def adapted_model(self, model: str | None, lora: Sequence[LoraScale] | None) -> str | None:
        """The model that llama.cpp's `lora` requests; ids are those of `/lora-adapters`.

        The scale of an adapter is 0 (off) or 1 (as trained).
        """
        scales = [item for item in lora or () if item.scale != 0]
        if not scales:
            return model
        adapters = list(self.registry.adapters().values())
        if len(scales) > 1:
            raise bad_request("lora must name at most one adapter with a scale above 0", "lora")
        if not 0 <= scales[0].id < len(adapters):
            message = f"lora names adapter {scales[0].id}; /lora-adapters lists {len(adapters)}"
            raise bad_request(message, "lora")
        if scales[0].scale != 1:
            message = f"the scale of an adapter must be 0 or 1, got {scales[0].scale}"
            raise bad_request(message, "lora")
        adapter = adapters[scales[0].id]
        model_name = self.registry.entry(model).name
        if model_name not in (adapter.base, adapter.name):
            message = (
                f"adapter {adapter.short_name!r} belongs to {adapter.base!r}, not to {model_name!r}"
            )
            raise bad_request(message, "lora")
        return adapter.name


class Call:
    """One request in progress: holds places, a model and the texts it starts.

    With 0 places it never queues, and must not compute anything.
    """

    served: ServedModel
    lease: Lease

    def __init__(
        self, state: ServerState, request: Request, model: str | None, places: int
    ) -> None:
        self.state, self.request, self.model, self.places = state, request, model, places
        self.until = asyncio.get_running_loop().time() + state.settings.deadline
        self._resources = AsyncExitStack()
        self._texts: list[RequestTexts] = []
        self._slot: int | None = None  # llama.cpp's `id_slot`

    async def __aenter__(self) -> Call:
        """Wait for places and for the model. A disconnecting client leaves the queue."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(CancelOnDisconnect(self.request.receive))
            async with asyncio.timeout_at(self.until):
                places = self.state.admission.places(self.places)
                self.lease = await stack.enter_async_context(places)
                self.served = await stack.enter_async_context(self.state.registry.use(self.model))
            if not self.served.is_alive:
                raise ApiError(503, "the model's engine has stopped", code="engine_stopped")
            self._resources = stack.pop_all()
        self.request.state.log["model"] = self.served.name
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._resources.__aexit__(*error)

    @property
    def settings(self) -> ServerSettings:
        return self.state.settings

    def apply_hints(self, body: ForeignRequest) -> None:
        """Apply `keep_alive`, and report the parameters that are ignored."""
        ignore(self.request, *body.ignored)
        self._slot = getattr(body, "id_slot", None)
        if self._slot is not None and self.settings.slots is None:
            ignore(self.request, "id_slot")
        if body.keep_alive is not None:
            model = self.served.base or self.served  # an adapter has the keep_alive of its model
            model.keep_alive = keep_alive_seconds(body.keep_alive)

    def note(self, *notes: str) -> None:
        """Send these notes to the client, in a response header."""
        note(self.request, *notes)

    async def hold(self, resource: AbstractAsyncContextManager[Resource]) -> Resource:
        """Enter a context manager that is exited with the call."""
        return await self._resources.enter_async_context(resource)

    async def hold_model(self, name: str) -> ServedModel:
        """Hold a second model until the call ends."""
        async with asyncio.timeout_at(self.until):
            return await self.hold(self.state.registry.use(name, beside=self.served))

    def hold_texts(self, texts: RequestTexts) -> None:
        """Stop these texts when the call ends, and log and count their tokens."""
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
        gaps: list[InfillGap] | None = None,
        warms: bool = False,
    ) -> RequestTexts:
        """Make the texts of a request, and start them unless `start` is false.

        Args:
            options: Those of `LanguageModel.stream`.
            gaps: One for each prompt; the texts fill them.
            warms: Compute the prompts for the prefix cache; the texts have no tokens.
        """
        for ids in prompts:
            self.check_prompt(len(ids))
        arrived = self.request.state.arrived
        arguments = (self.served, self.state.metrics, arrived, prompts, n, options)
        has_gaps = gaps is not None and not warms
        texts = (
            InfillTexts(*arguments, gaps=gaps or [])
            if has_gaps
            else RequestTexts(*arguments, warms=warms)
        )
        self.hold_texts(texts)
        if start:
            async with asyncio.timeout_at(self.until):
                await texts.start()
        return texts

    def check_prompt(self, length: int) -> None:
        limit = self.settings.max_prompt
        if limit is not None and length > limit:
            message = f"the prompt has {length:,} tokens; this server accepts at most {limit:,}"
            raise too_long(message, length, limit)

    def check_text(self, *texts: str, longer: bool = False) -> None:
        """Reject a prompt that cannot fit, before it is tokenized.

        Args:
            longer: The text may exceed the context (`endless`); only `max_prompt` limits it.
        """
        length = sum(map(len, texts))
        limit = self.settings.max_prompt or (math.inf if longer else self.served.lm.context)
        longest = self.served.longest_token
        if length > limit and length > limit * longest:
            message = (
                f"the prompt has {length:,} characters: more than the model's context can hold"
            )
            raise too_long(message, -(-length // longest), int(limit))  # a lower bound

    def token_limit(
        self, max_tokens: int | None, prompt_len: int, default: int | None = None
    ) -> int:
        """The most tokens an answer may have: `max_tokens` of the request, or `default`, or what
        the context holds, up to the server's limit."""
        context = self.served.lm.context
        if max_tokens is None:
            max_tokens = default
        if max_tokens is None:  # a prompt longer than the context is endless
            max_tokens = context - prompt_len if prompt_len <= context else context
        limit = self.settings.max_tokens
        return max_tokens if limit is None else min(max_tokens, limit)

    async def run(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run work on a thread. It is cancelled when the client disconnects or the deadline passes;
        the call's places stay occupied until the thread has ended."""
        pool = self.state.compute if self.places else PREPARING
        job = partial(work, *arguments, **named)
        return await run_in(pool, job, group=self, lease=self.lease)

    async def compute(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """`run`, limited by the deadline of the request."""
        async with asyncio.timeout_at(self.until):
            return await self.run(work, *arguments, **named)

    async def compute_all(
        self, work: Callable[..., Any], items: Iterable[Any], **named: Any
    ) -> list[Any]:
        """Run work for each item, in parallel as far as the request gets places. If one fails,
        running ones are cancelled and the others are not started."""
        upcoming, results = deque(enumerate(items)), dict[int, Any]()
        running: dict[asyncio.Task[Any], int] = {}
        try:
            while upcoming or running:
                while upcoming and (not running or self.lease.grow(1)):
                    index, item = upcoming.popleft()
                    running[asyncio.create_task(self.compute(work, item, **named))] = index
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
        """The answer as JSON. All resources of the call are released before it is sent."""
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
        """The answer as server-sent events."""
        return EventStream(write, until=self.until, failed=failed)

    def stream_lines(self, write: Writer, failed: Callable[[ApiError], bytes]) -> Response:
        """The answer as lines of JSON (NDJSON)."""
        return EventStream(write, until=self.until, failed=failed, is_lines=True)

    def _end(self, texts: RequestTexts) -> None:
        texts.close()
        texts.account()
        user = self.request.state.user
        for text in texts.all[:1] if self.settings.slots is not None else ():
            tokens = [*text.generation.prompt, *text.generation.tokens]
            self.state.slots.record(user, self.served.name, tokens, self._slot)
        log = self.request.state.log
        usage = texts.usage()
        log["prompt_tokens"] = usage["prompt_tokens"]
        log["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        log["completion_tokens"] = usage["completion_tokens"]
        if self.settings.log_prompts:
            decode = self.served.lm.tokenizer.decode
            log["prompts"] = [decode(ids) for ids in texts.prompts]
            log["texts"] = [text.generation.text for text in texts.all]


def state_of(request: Request) -> ServerState:
    """The state of the server that handles a request."""
    state: ServerState = request.app.state.server
    return state
