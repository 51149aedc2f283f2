"""The engine: many texts computed together on one backend, each of them a branch of one tree.

    engine = Engine(backend, token_bytes)
    branch = engine.open(prompt_ids)
    logits = branch.append([token])                # append, compute, and get the logits
    other = branch.fork()                          # shares the whole past
    branch.rewind(12)                              # drop every token from the 12th on
    for step in engine.submit(request): ...        # generate a text

Any thread may call it. Each call becomes a command that the engine's thread (`loop.py`) runs
between two steps. Commands on idle branches do not wait for the step in flight: the device computes
steps in order, and only settled steps change what a branch has computed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from unspool import __version__
from unspool.backends.interventions import BranchInterventions, check_readable, check_supported
from unspool.backends.step import Backend, Logits, Observations
from unspool.engine.loop import Loop, concat_logits
from unspool.engine.page_files import PageFiles, StoredPages, page_access, read_computed
from unspool.engine.request import ReadingDrafter, Request, insert_tokens
from unspool.engine.results import StepQueue, StepStream
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.sequence import Sequence as RunningSequence
from unspool.engine.tree import Branch, Tree
from unspool.engine.work_scope import current_scope
from unspool.errors import BusyError, ContextError, SettingsError, UnspoolError, WorkCancelledError
from unspool.text.tokenizer.stream import TextStream

if TYPE_CHECKING:
    from unspool.backends.step import Adapter, CanvasAdapterSettings


class EngineAdapters:
    """Loads, numbers and frees the adapters of an engine."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._numbers: dict[str, int] = {}
        self._fingerprints: dict[int, str] = {0: ""}  # by number; 0: no adapter
        self._twins: dict[str, CanvasAdapterSettings] = {}
        self._retired: set[int] = set()  # unloaded, and perhaps still in use
        self._count = 0
        loop.tree.on_adapter_unused = self._free_unused

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def number(self, name: str | None) -> int:
        """Return the number of an adapter; 0 for None. Raises SettingsError if it is not loaded."""
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is None:
            loaded = ", ".join(self._numbers) or "none"
            raise SettingsError(
                f"there is no adapter {name[:100]!r} (loaded: {loaded}); load it with "
                "lm.load_adapter(name, folder)"
            )
        return number

    def fingerprint(self, number: int) -> str | None:
        """Return the hash of an adapter's weights, "" for 0; None: it was freed."""
        return self._fingerprints.get(number)

    def name(self, number: int) -> str | None:
        """Return the name of an adapter; None for 0, and for one that was unloaded."""
        return next((name for name, other in self._numbers.items() if other == number), None)

    def canvas_settings(self, name: str | None) -> CanvasAdapterSettings | None:
        """Return the adapter's settings for filling a canvas; None if it has none."""
        self.number(name)
        return None if name is None else self._twins.get(name)

    def load(self, name: str, adapter: Adapter) -> None:
        """Load an adapter under a name, and replace an earlier one of that name."""
        fingerprint = adapter.fingerprint()

        def load() -> None:
            self._loop.backend.set_adapter(self._count + 1, adapter)
            self._count += 1
            self._fingerprints[self._count] = fingerprint
            self._retire(name)
            self._numbers[name] = self._count
            if adapter.canvas is not None:
                self._twins[name] = adapter.canvas

        self._loop.call(load)

    def unload(self, name: str) -> None:
        """Unload an adapter; running texts with it are finished."""
        self.number(name)
        self._loop.call(lambda: self._retire(name))

    def _retire(self, name: str) -> None:
        if name in self._numbers:
            self._retired.add(self._numbers.pop(name))
            self._twins.pop(name, None)
        self._free_retired()

    def _free_unused(self, number: int) -> None:
        """Free an adapter whose last text has ended, between two steps, if it was unloaded."""
        if number in self._retired:
            with contextlib.suppress(UnspoolError):  # the engine is being closed
                self._loop.post(self._free_retired)

    def _free_retired(self) -> None:
        for number in sorted(self._retired):
            if self._loop.tree.index.drop_adapter(number):
                self._loop.backend.set_adapter(number, None)
                self._retired.discard(number)
                del self._fingerprints[number]


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Computed:
    """Logits of a branch's last tokens, and the activations that were observed."""

    logits: Logits  # [num_logits, vocabulary]
    inside: list[Observations] = field(default_factory=list)  # one for each chunk


class AwaitedTask(EngineTask, Generic[Result]):
    """A task whose caller waits for its result; see `Engine.run_tasks`."""

    __slots__ = ("future",)

    def __init__(self, branch: Branch, num_logits: int) -> None:
        super().__init__(branch, num_logits)
        self.future: Future[Result] = Future()

    def begin(self, scheduler: Scheduler) -> None:
        """Queue the task. Called on the engine's thread."""
        scheduler.add(self)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class _Computation(AwaitedTask[Computed]):
    """A branch whose logits and activations a caller waits for."""

    __slots__ = ("loop",)

    def __init__(self, loop: Loop, branch: Branch, num_logits: int) -> None:
        super().__init__(branch, num_logits)
        self.loop = loop

    def complete(self) -> None:
        self.loop.scheduler.remove(self)
        self.future.set_result(Computed(concat_logits(self.logits), self.inside))


class Engine:
    """Runs branches together on one backend."""

    def __init__(
        self,
        backend: Backend,
        token_bytes: Callable[[int], bytes] = lambda token: b"",
        *,
        max_waiting: int = 1024,
        check_head: Callable[[], None] = lambda: None,
        identity: Callable[[], object] = lambda: None,
    ) -> None:
        """Start an engine on a backend.

        Args:
            backend: Computes the steps.
            token_bytes: The text of a token, as bytes.
            max_waiting: Requests without a token yet that are accepted.
            identity: What the bits of keys and values depend on besides the tokens.
            check_head: Raises if the model has no output head: then its logits mean nothing.
        """
        self.backend, self.token_bytes = backend, token_bytes
        self.check_head = check_head
        self._identity = identity
        self.max_waiting = max_waiting
        self.loop = Loop(backend)
        self.adapters = EngineAdapters(self.loop)
        self.page_files: PageFiles | None = None  # saved pages, to continue texts after a restart
        self._waiting: set[StepQueue] = set()

    @property
    def tree(self) -> Tree:
        return self.loop.tree

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def steps(self) -> int:
        """Steps settled so far."""
        return self.loop.steps

    def open(
        self,
        tokens: Sequence[int],
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> Branch:
        """Open a branch; cached pages of its tokens are used."""
        self._check_length(len(tokens))
        for intervention in () if interventions is None else interventions.interventions:
            check_supported(intervention.site, self.backend.sites)
        current_scope().check()
        self._restore_pages(tokens, adapter)
        number = self.adapters.number
        branch = self.loop.call(
            lambda: self.tree.open(tokens, adapter=number(adapter), interventions=interventions),
            at_rest=False,
        )
        branch.owner = self
        return branch

    def page_identity(self, adapter: int = 0) -> str:
        """Return what must be the same for saved KV-cache pages to be used.

        `adapter` is the number of a LoRA adapter; 0: none.
        """
        backend = self.backend
        layout = (backend.page_size, backend.page_bytes, backend.state_bytes)
        content = repr((__version__, self._identity(), layout)).encode()
        return hashlib.sha256(content).hexdigest() + (self.adapters.fingerprint(adapter) or "")

    def save(self, branch: Branch, path: str | Path) -> None:
        """Write a branch to a file: its tokens, and what is computed of them."""
        self.release(self.fork(branch))  # puts its unfinished page into the prefix cache
        tokens = branch.tokens
        stored = None
        if not (branch.private_id or branch.interventions):
            stored = read_computed(self, tokens, adapter=branch.adapter)
        if stored is None:
            width = self.backend.page_bytes if page_access(self) is not None else 0
            stored = StoredPages([], np.empty((0, width), np.uint8))
        stored.following = tokens[len(stored.tokens) :]
        stored.adapter = self.adapters.name(branch.adapter)
        try:
            stored.write(
                Path(path).expanduser(), self.page_identity(branch.adapter), is_durable=True
            )
        except OSError as error:
            raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error

    def _restore_pages(self, tokens: Sequence[int], adapter: str | None) -> None:
        """Read saved pages of a text; never on the engine's thread, as it reads files."""
        if self.page_files is not None and not self.loop.is_own_thread():
            self.page_files.restore(self, tokens, self.adapters.number(adapter))

    def extend(self, branch: Branch, tokens: Sequence[int] = (), *, num_logits: int = 1) -> Logits:
        """Append tokens, compute the branch to its end, and return the last `num_logits` logits."""
        return self.extend_all([(branch, tokens)], num_logits=num_logits)[0]

    def extend_all(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        *,
        num_logits: int | Sequence[int] = 1,
    ) -> list[Logits]:
        """`extend` for several branches, computed in the same steps.

        `num_logits` is the number of logits of every branch, or one number for each.
        """
        self.check_head()
        return [
            result.logits for result in self._compute(additions, num_logits, frozenset(), False)
        ]

    def look(
        self,
        branch: Branch,
        tokens: Sequence[int] = (),
        *,
        at: frozenset[int],
        num_logits: int = 1,
        deep: bool = True,
        sites: Sequence[tuple[str, int]] = (),
    ) -> Computed:
        """`extend`, with the activations at some positions.

        Returns residuals and, if `deep`, attention weights and each layer's contribution; or only
        the values at `sites`, each a site (`backends/interventions.py`) and a layer.
        """
        return self._compute([(branch, tokens)], num_logits, at, deep, tuple(sites))[0]

    def look_all(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        *,
        at: frozenset[int] | Sequence[frozenset[int]],
        num_logits: int | Sequence[int] = 1,
        sites: Sequence[tuple[str, int]] = (),
    ) -> list[Computed]:
        """`look` at the residuals, or the `sites`, of several branches, computed in the same steps.

        `at` is one set of positions for all branches, or one set for each.
        """
        return self._compute(additions, num_logits, at, False, tuple(sites))

    def _compute(
        self,
        additions: Sequence[tuple[Branch, Sequence[int]]],
        num_logits: int | Sequence[int],
        positions: frozenset[int] | Sequence[frozenset[int]],
        deep: bool,
        sites: tuple[tuple[str, int], ...] = (),
    ) -> list[Computed]:
        for site, _ in sites:
            check_readable(site, self.backend.sites)
        for branch, tokens in additions:
            self._check_length(branch.length + len(tokens))
        counts = [num_logits] * len(additions) if isinstance(num_logits, int) else num_logits
        if isinstance(positions, frozenset):
            positions = [positions] * len(additions)
        observed = positions
        tasks = [
            _Computation(self.loop, branch, count)
            for (branch, _), count in zip(additions, counts, strict=True)
        ]

        def add() -> list[_Computation]:
            if len({branch for branch, _ in additions}) < len(additions):
                raise UnspoolError("a branch was given twice; fork it, and give the fork")
            for branch, _ in additions:  # before anything is changed
                self.scheduler.check_idle(branch)
            for task, observed_positions, (branch, tokens) in zip(
                tasks, observed, additions, strict=True
            ):
                task.observed_positions, task.observe_attention = observed_positions, deep
                task.observed_sites = sites
                self.tree.append(branch, tokens)
            return tasks

        return self.run_tasks(add)

    def run_tasks(self, plan: Callable[[], Sequence[AwaitedTask[Result]]]) -> list[Result]:
        """Compute the tasks that `plan` creates on the engine's thread, and wait for all of them.

        `plan` may change idle branches only: it runs while a step is in flight. The tasks share
        one turn in the scheduler with the rest of their caller's scope, and are cancelled with it.
        """
        scope, tasks = current_scope(), list[AwaitedTask[Result]]()

        def add() -> None:
            scope.check()
            tasks.extend(plan())
            for task in tasks:
                task.group = scope.group
                task.begin(self.scheduler)

        def fail_tasks() -> None:
            for task in tasks:
                self.loop.fail(task, WorkCancelledError("the work was cancelled"))

        def cancel() -> None:
            with suppress(UnspoolError):  # a closed engine fails its tasks itself
                self.loop.post(fail_tasks, at_rest=False)

        with scope.on_cancel(cancel):
            self.loop.call(add, at_rest=False)
            return [self.loop.wait_for(task.future) for task in tasks]

    def fork(self, branch: Branch) -> Branch:
        """Return another branch with the same past; the branch may be in use."""
        return self.call(lambda: self.tree.fork(branch))

    def rewind(self, branch: Branch, length: int) -> None:
        """Drop every token of an idle branch from `length` on."""

        def rewind() -> None:
            self.scheduler.check_idle(branch)
            self.tree.rewind(branch, length)

        self.loop.call(rewind, at_rest=False)

    def release(self, branch: Branch) -> None:
        """Close a branch; its pages stay in the prefix cache. A task that computes it fails."""

        def close() -> None:
            task = self.scheduler.task_of(branch)
            if task is not None:  # its caller was interrupted while waiting
                self.loop.fail(task, UnspoolError("the branch was released"))
            self.tree.close(branch)

        self.loop.clean_up(close, at_rest=False)

    def submit(self, request: Request) -> StepStream:
        """Start generating a text; return the stream of its steps.

        Raises:
            BusyError: Too many requests are waiting.
            UnspoolError: The request does not fit the KV cache, or names an unknown adapter.
        """
        self.check_head()
        self.loop.check_caller(allow_commands=True)  # the reader of the steps would wait for itself
        limits = request.limits
        length = len(request.prompt) + request.num_inserted
        scope = current_scope()
        scope.check()
        self.scheduler.check_fits(min(length + limits.room(length), limits.context))
        self.adapters.number(request.adapter)  # raises for an unknown name
        for intervention in request.interventions:
            check_supported(intervention.site, self.backend.sites)
        if len(self._waiting) >= self.max_waiting:
            raise BusyError(
                f"{len(self._waiting)} requests are waiting, which is the limit; try again later"
            )
        if limits.endless is None and request.cached:
            written = [step.token for step in request.written]
            tokens = insert_tokens([*request.prompt, *written], request.inserts)
            self._restore_pages(tokens, request.adapter)
        TextStream(limits.stop)  # compiled here: the engine's thread finds it in a cache
        drafter = request.drafter
        if callable(drafter):
            drafter = drafter(request)
        if limits.endless is not None and isinstance(drafter, ReadingDrafter):
            raise SettingsError(
                "a drafting head cannot follow a text beyond the context; leave endless out, or "
                "use another drafter: speculate='lookup'"
            )
        if request.inserts and (limits.endless is not None or isinstance(drafter, ReadingDrafter)):
            raise SettingsError(
                "a memory, an author's note or a lorebook cannot be used together with endless or "
                "a drafting head; leave one out"
            )
        queue, loop, sequences = StepQueue(), self.loop, list[RunningSequence]()

        def begin() -> None:
            try:
                sequence = RunningSequence(
                    self.scheduler, self.backend.vocab_size, self.token_bytes, request, queue,
                    drafter, self.adapters.number(request.adapter),
                )  # fmt: skip
                sequences.append(sequence)
                sequence.group = scope.group
                sequence.begin()
            except BaseException as error:
                if sequences:
                    sequences[0].end(error)
                queue.end(error)

        def cancel() -> None:
            for sequence in sequences:
                sequence.end(None)

        self._waiting.add(queue)
        queue.on_start = lambda: self._waiting.discard(queue)
        try:
            loop.post(begin, at_rest=False)
        except UnspoolError:  # the engine is closed
            self._waiting.discard(queue)
            raise
        return StepStream(
            queue, lambda: loop.post(cancel, at_rest=False), loop.check_alive, loop.check_caller
        )

    def call(self, command: Callable[[], Result]) -> Result:
        """Run a command on the engine's thread, with no step in flight, and return its result."""
        return self.loop.call(command)

    def close(self) -> None:
        """Stop the thread. Running requests fail with "the engine was closed"."""
        self.loop.check_caller()
        self.loop.close()

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise UnspoolError("a branch needs at least one token")
        if length > self.backend.context:
            raise ContextError(
                f"the text has {length:,} tokens and the model's context holds "
                f"{self.backend.context:,}; shorten it",
                num_tokens=length,
                context=self.backend.context,
            )
        self.scheduler.check_fits(length)
