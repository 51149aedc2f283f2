"""Drafters for speculative decoding: prompt lookup, predicted text, and a draft model."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from unspool.backends.placement import check_torch
from unspool.backends.step import Logits
from unspool.decoding.speculative.controller import LONGEST, AdaptiveDrafter
from unspool.engine.loop import Loop
from unspool.engine.request import Drafter, DraftMaker, Request
from unspool.engine.scheduler import EngineTask
from unspool.engine.tree import Branch
from unspool.errors import ModelFileError, SettingsError
from unspool.sampling import Chain, RowInput, StageState
from unspool.session import Session

# -- Sequences of a draft model: one backend for all of them, driven by the caller's thread
#
# A drafter runs on the engine thread of the target model, which must not wait for another thread.
# So the draft model has no thread: the caller that requests logits runs its steps. Its sequences
# are branches of one tree and share their common prefixes. When memory is short, the least
# recently used sequence loses its pages and is recomputed when needed.

_MIN_TOKENS = 4096  # KV-cache capacity of the backend
_MAX_TOKENS = 1 << 17  # ... unless a single text is longer
_LARGEST_PAGE = 256  # tokens: spare room for a partly filled page
_MIN_STATES = 32  # of recurrent layers: more than the tokens of a draft
_STATES_PER_SEQUENCE = 4


class _UpdateTask(EngineTask):
    """Task that computes the new tokens of a draft sequence."""

    __slots__ = ("done", "error", "loop")

    def __init__(self, loop: Loop, branch: Branch) -> None:
        super().__init__(branch)
        self.loop, self.done = loop, False
        self.error: BaseException | None = None

    def complete(self) -> None:
        self.loop.scheduler.remove(self)
        self.done = True

    def fail(self, error: BaseException) -> None:
        self.done, self.error = True, error


class DraftSequences:
    """The sequences of one draft model. Thread-safe; the backend is built on first use."""

    def __init__(self, model: Session) -> None:
        model.config.require_causal()
        self._model = model
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._tokens = 0  # capacity of the backend
        self._numbers = count()
        self._capacities: dict[int, int] = {}  # of the open sequences
        self._branches: dict[int, Branch] = {}  # of computed sequences, least recently used first
        self._closed: deque[int] = deque()  # closed, not yet released

    def open(self, capacity: int) -> DraftSequence:
        """Open a sequence of at most `capacity` tokens."""
        with self._lock:
            self._release_closed()
            number = next(self._numbers)
            self._capacities[number] = capacity
        return DraftSequence(self, number)

    def close(self, number: int) -> None:
        """Release a sequence. Never blocks: the garbage collector may call it anywhere."""
        self._closed.append(number)
        self._release_if_idle()

    def read(
        self, number: int, previous: Sequence[int], tokens: Sequence[int], max_tokens: int | None
    ) -> Logits | None:
        """Update a sequence from `previous` to `tokens`.

        Computes about `max_tokens` tokens; None: as many as one step of the backend.

        Returns:
            The logits after the last token, or None if it was not reached.
        """
        try:
            with self._lock:
                self._release_closed()
                return self._read(number, previous, tokens, max_tokens)
        finally:
            self._release_if_idle()

    def _read(
        self, number: int, previous: Sequence[int], tokens: Sequence[int], max_tokens: int | None
    ) -> Logits | None:
        loop = self._ready_loop()
        tree, branch = loop.tree, self._branches.pop(number, None)
        if branch is None:
            branch = tree.open(tokens)
        else:
            shared = min(common_length(previous, tokens), len(tokens) - 1)
            tree.rewind(branch, shared, store=False)
            tree.append(branch, tokens[shared:])
        self._branches[number] = branch  # most recently used last
        if branch.num_computed == 0 and not branch.pages:
            tree.adopt(branch)
        task = _UpdateTask(loop, branch)
        max_tokens = loop.scheduler.limits.prefill_tokens if max_tokens is None else max_tokens
        if branch.length - branch.num_computed > max_tokens:
            task.compute_end = branch.num_computed + max_tokens
        self._free_pages(loop, branch)
        loop.scheduler.add(task)
        while not task.done:
            loop.work()
        if task.error is not None:
            raise task.error
        return task.logits[-1][-1] if task.logits else None

    def _ready_loop(self) -> Loop:
        """The loop, its KV cache sized for all open sequences within the limits."""
        longest = max(self._capacities.values(), default=1)
        total = max(_MIN_TOKENS, longest, min(sum(self._capacities.values()), _MAX_TOKENS))
        if self._loop is None or total > self._tokens:
            self._loop, self._tokens = None, 0  # first, so that both never exist together
            self._branches.clear()
            tokens = 1 << (total - 1).bit_length()
            config = self._model.config
            # 32-bit floats are the widest KV cache.
            memory = (tokens + _LARGEST_PAGE) * config.kv_floats_per_token * 4
            if config.state_bytes:  # recurrent states get half of it
                states = max(_MIN_STATES, _STATES_PER_SEQUENCE * len(self._capacities))
                memory = 2 * max(memory, states * config.state_bytes)
            backend = self._model.model.backend(memory=memory, context=self._model.context)
            self._loop, self._tokens = Loop(backend), tokens
        return self._loop

    def _free_pages(self, loop: Loop, branch: Branch) -> None:
        """Preempt least recently used sequences until this one fits."""
        tree = loop.tree
        needed = -(-branch.length // tree.page_size) - branch.node.depth - len(branch.pages) + 1
        for other in list(self._branches.values()):
            if needed <= tree.available:
                return
            if other is not branch:
                tree.preempt(other)

    def _release_closed(self) -> None:
        while self._closed:
            number = self._closed.popleft()
            self._capacities.pop(number, None)
            branch = self._branches.pop(number, None)
            if branch is not None and self._loop is not None:
                self._loop.tree.close(branch)
        if not self._capacities and self._tokens > _MIN_TOKENS:
            self._loop, self._tokens = None, 0  # free the large KV cache

    def _release_if_idle(self) -> None:
        """Release closed sequences, unless another thread is working here: it does so at the
        end."""
        while self._closed and self._lock.acquire(blocking=False):
            try:
                self._release_closed()
            finally:
                self._lock.release()


class DraftSequence:
    """One sequence of a draft model. Not thread-safe."""

    def __init__(self, texts: DraftSequences, number: int) -> None:
        self._texts, self._number = texts, number
        self._previous: list[int] = []
        self._end = weakref.finalize(self, texts.close, number)

    def logits(self, tokens: Sequence[int], max_tokens: int | None = None) -> Logits | None:
        """Logits after these tokens; None if more calls are needed to compute them all."""
        previous, self._previous = self._previous, list(tokens)
        return self._texts.read(self._number, previous, tokens, max_tokens)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: comparing list slices is fast."""
    low, high = 0, min(len(first), len(second))
    if list(first[:high]) == list(second[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if list(first[low:middle]) == list(second[low:middle]):
            low = middle
        else:
            high = middle
    return low


# -- Drafters

KINDS = "lookup, mtp, model:PATH or eagle:FOLDER, each optionally with :COUNT, the longest draft"
_COMPARED_TAIL = 32  # indexed tokens compared to detect that a text was rewound
_TEXT_END = -1  # between two earlier texts


class PromptLookup(Drafter):
    """Prompt lookup: finds the last occurrence of the longest suffix, and proposes what followed.

    One table per n-gram length maps an n-gram to the position after its last occurrence. An n-gram
    is added when the token after it is known, so matches are always earlier. Replaced entries are
    kept, so that a rewound text can restore them.
    """

    def __init__(self, *, longest: int = 5, shortest: int = 2, most: int = LONGEST) -> None:
        if not 1 <= shortest <= longest:
            raise SettingsError(
                f"n-grams need 1 <= shortest <= longest, got {shortest} and {longest}"
            )
        self.most = most
        self._lengths = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._tables: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._replaced: list[list[int | None]] = []  # by position, then by length, longest first

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self.index(tokens)
        place = self.find(tokens)
        return [] if place is None else self._copy_from(place, min(most, self.most))

    def find(self, tokens: Sequence[int]) -> int | None:
        """Position in the indexed text after the last match of the longest suffix of `tokens`."""
        for length in self._lengths:
            if len(tokens) >= length:
                position = self._tables[length].get(tuple(tokens[-length:]))
                if position is not None:
                    return position
        return None

    def _copy_from(self, place: int, most: int) -> list[int]:
        """Tokens from a position on; past the end of the text the draft repeats itself."""
        draft = self._text[place : place + most]
        period = len(draft)
        while len(draft) < most:
            draft.append(draft[-period])
        return draft

    def index(self, tokens: Sequence[int]) -> None:
        """Index the new tokens; where the text was rewound, first drop what is no longer in it."""
        num_indexed = len(self._text)
        tail = max(0, num_indexed - _COMPARED_TAIL)
        if len(tokens) < num_indexed or list(tokens[tail:num_indexed]) != self._text[tail:]:
            self._truncate(common_length(self._text, tokens))
        for token in tokens[len(self._text) :]:
            self._add_ngrams()
            self._text.append(token)

    def _add_ngrams(self) -> None:
        """Add the n-grams that end before the next token."""
        position, replaced = len(self._text), []
        for length in self._lengths:
            table, key = self._tables[length], self._key(position, length)
            replaced.append(table.get(key))
            table[key] = position
        self._replaced.append(replaced)

    def _truncate(self, length: int) -> None:
        while len(self._text) > length:
            self._text.pop()
            position, replaced = len(self._text), self._replaced.pop()
            for size, previous in zip(self._lengths, replaced, strict=True):
                if previous is None:
                    del self._tables[size][self._key(position, size)]
                else:
                    self._tables[size][self._key(position, size)] = previous

    def _key(self, place: int, length: int) -> tuple[int, ...]:
        return tuple(self._text[max(0, place - length) : place])


class EarlierTexts:
    """The last tokens of earlier requests, shared by the lookup drafters of a model.

    Used by one engine thread. The texts lie one behind the other in one array, which is scanned:
    65,536 tokens take about 15 microseconds.
    """

    def __init__(self, *, capacity: int = 1 << 16, shortest: int = 6) -> None:
        self._capacity, self._shortest = capacity, shortest
        self._tokens = np.empty(0, np.int64)

    def record(self, tokens: Sequence[int]) -> None:
        """Add a text; the oldest tokens are dropped."""
        self._tokens = np.concatenate((self._tokens, [_TEXT_END], tokens))[-self._capacity :]

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return what followed the last `shortest` tokens in the latest text that has them."""
        if len(tokens) < self._shortest or not len(self._tokens):
            return []
        places = np.flatnonzero(self._tokens[:-1] == tokens[-1])
        places = places[places >= self._shortest - 1]
        for back in range(1, self._shortest):
            places = places[self._tokens[places - back] == tokens[-1 - back]]
        if not len(places):
            return []
        draft: list[int] = self._tokens[places[-1] + 1 : places[-1] + 1 + most].tolist()
        return draft[: draft.index(_TEXT_END)] if _TEXT_END in draft else draft


class SharedLookup(PromptLookup):
    """Lookup in earlier requests, whose matches are longer, and then in the own text."""

    def __init__(self, earlier: EarlierTexts, *, most: int = LONGEST) -> None:
        super().__init__(most=most)
        self._earlier = earlier

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return self._earlier.propose(tokens, min(most, self.most)) or super().propose(tokens, most)

    def record(self, tokens: Sequence[int]) -> None:
        self._earlier.record(tokens)


class PredictedText(Drafter):
    """Draft from the output that the caller expects (OpenAI's predicted outputs).

    Copies it from the start; where the text has diverged, from where the two agree again.
    """

    def __init__(self, ids: Sequence[int], *, start: int, most: int = LONGEST) -> None:
        self.ids, self.start, self.most = list(ids), start, most
        self._lookup: PromptLookup | None = None  # built when the text diverges

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        most, output = min(most, self.most), list(tokens[self.start :])
        if output == self.ids[: len(output)]:
            return self.ids[len(output) : len(output) + most]
        if self._lookup is None:
            self._lookup = PromptLookup(longest=8)
            self._lookup.index(self.ids)
        place = self._lookup.find(output)
        return [] if place is None else self.ids[place : place + most]


class ModelDrafter(Drafter):
    """Drafts with another model, with the same settings and random numbers as the text.

    Where the two models agree, the same random number picks the same token, also at high
    temperatures. It runs on the target model's engine thread and never blocks. A long prompt is
    computed in chunks, one per round, so that other texts are not delayed. Drafters of one model
    share its backend.
    """

    def __init__(self, model: Session, request: Request, *, most: int = LONGEST) -> None:
        self.most = most
        self._request = request
        self._chain = Chain([request.settings])
        limits = request.limits
        longest = min(limits.context, len(request.prompt) + limits.max_tokens)
        self._capacity = min(longest, model.context)
        self._vocabulary: int = model.config.vocab_size
        self._text = _shared_sequences(model).open(self._capacity)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        most = min(most, self.most, self._capacity - len(tokens))
        if most <= 0 or max(tokens) >= self._vocabulary:
            return []
        text, draft = list(tokens), list[int]()
        history = np.empty(len(tokens) + most, np.int64)
        history[: len(tokens)] = tokens
        state: StageState | None = None
        for length in range(len(tokens), len(tokens) + most):
            logits: Any = self._text.logits(text)
            if logits is None:
                return []  # the prompt is not computed yet
            row = RowInput(
                history[:length], len(self._request.prompt), self._request.limits.sample,
                state=state,
            )  # fmt: skip
            pick = self._chain.pick(logits[None], [row])[0]
            history[length], state = pick.token, pick.state
            draft.append(pick.token)
            text.append(pick.token)
            if pick.token in self._request.limits.end_ids:
                break
        return draft


_draft_sequences: WeakKeyDictionary[Session, weakref.ref[DraftSequences]] = WeakKeyDictionary()
_registry_lock = threading.Lock()


def _shared_sequences(model: Session) -> DraftSequences:
    """The sequences of a draft model, shared by all its drafters. Kept alive by those drafters and
    by the factory that `speculate="model:PATH"` has loaded."""
    root = _base_session(model)
    with _registry_lock:
        reference = _draft_sequences.get(root)
        texts = None if reference is None else reference()
        if texts is None:
            texts = DraftSequences(model)
            _draft_sequences[root] = weakref.ref(texts)
        return texts


def _base_session(model: Session) -> Session:
    """The base model, if this is a view of it with an adapter."""
    while model.view_of is not None:
        model = model.view_of
    return model


def check_same_vocabulary(draft: Session, target: Session) -> None:
    """Raise `SettingsError` unless both models have the same token ids."""
    draft_tokens, target_tokens = _vocabulary(draft), _vocabulary(target)
    if (draft_tokens is None) != (target_tokens is None):
        raise SettingsError(
            "the draft model and the model cannot be compared: one of them has no vocabulary"
        )
    if draft_tokens is None or target_tokens is None:
        sizes = draft.config.vocab_size, target.config.vocab_size
        if sizes[0] != sizes[1]:
            raise SettingsError(
                f"the draft model's vocabulary has {sizes[0]:,} tokens and the model's "
                f"{sizes[1]:,}; a draft model needs the same vocabulary"
            )
        return
    if len(draft_tokens) != len(target_tokens):
        raise SettingsError(
            f"the draft model's vocabulary has {len(draft_tokens):,} tokens and the model's "
            f"{len(target_tokens):,}; a draft model needs the same vocabulary"
        )
    for token in range(len(target_tokens)):
        if draft_tokens.token_bytes(token) != target_tokens.token_bytes(token):
            raise SettingsError(
                f"token {token} is {draft_tokens.token_text(token)!r} to the draft model and "
                f"{target_tokens.token_text(token)!r} to the model; a draft model needs the same "
                "vocabulary"
            )


def _vocabulary(model: Session) -> Any:
    try:
        return model.tokenizer
    except ModelFileError:
        return None


# -- drafters by name ------------------------------------------------------------------------


@dataclass(slots=True)
class _LoadedDrafter:
    """The drafter factory of one `speculate` string, once loaded."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    maker: DraftMaker | None = None


_makers: WeakKeyDictionary[Session, dict[str, _LoadedDrafter]] = WeakKeyDictionary()


def make_drafter(
    speculate: str | DraftMaker | Drafter | None,
    lm: Session,
    load: Callable[[str], Session] | None = None,
) -> Drafter | DraftMaker | None:
    """Convert the `speculate` option to what `Request.drafter` takes.

    A string (see `drafter_from`; what it loads is cached with the model), a function from a request
    to a drafter, or a drafter, which can serve only one text.
    """
    if speculate is None or callable(speculate):
        return speculate
    if not isinstance(speculate, str):
        if callable(getattr(speculate, "propose", None)) and hasattr(speculate, "learn"):
            return speculate
        raise SettingsError(f"speculate is {speculate!r}; it must be {KINDS}, or a drafter")
    root = _base_session(lm)
    with _registry_lock:
        loaded = _makers.setdefault(root, {}).setdefault(speculate, _LoadedDrafter())
    with loaded.lock:  # per string: loading one model does not block other requests
        if loaded.maker is None:
            try:
                loaded.maker = drafter_from(speculate, lm, load)
            finally:
                if loaded.maker is None:
                    with _registry_lock:
                        _makers[root].pop(speculate, None)
        return loaded.maker


def drafter_from(
    spec: str, lm: Session, load: Callable[[str], Session] | None = None
) -> DraftMaker:
    """Build the factory for `lookup`, `mtp`, `model:PATH` or `eagle:FOLDER`; a trailing `:COUNT`
    limits the draft length. Loads the model (by `load`) or the head now, once for all requests.
    """
    kind, what, most = check_drafter(spec)
    if kind in ("eagle", "mtp"):
        check_torch()
        from unspool.decoding.speculative.head_drafter import eagle_maker, mtp_maker

        longest = most if spec.endswith(f":{most}") else None
        return mtp_maker(lm, longest) if kind == "mtp" else eagle_maker(what, lm, longest)
    if kind == "lookup":
        earlier = EarlierTexts()
        return lambda request: AdaptiveDrafter(SharedLookup(earlier, most=most), longest=most)
    if load is None:
        raise SettingsError(f"speculate is {spec!r}, but models cannot be loaded here")
    model = load(what)
    check_same_vocabulary(model, lm)
    texts = _shared_sequences(model)  # kept from request to request

    def make(request: Request, texts: DraftSequences = texts) -> Drafter:
        return AdaptiveDrafter(ModelDrafter(model, request, most=most), longest=most)

    return make


def check_drafter(spec: str) -> tuple[str, str, int]:
    """Parse a `speculate` string into kind, file or model, and maximum draft length."""
    kind, _, what = spec.partition(":")
    what, most = _split_count(what, spec)
    needs = {"lookup": False, "mtp": False, "model": True, "eagle": True}
    if needs.get(kind) != bool(what):
        raise SettingsError(f"speculate is {spec!r}; it must be {KINDS}")
    if kind == "eagle" and not Path(what).expanduser().is_dir():
        raise SettingsError(f"{what} is not a folder; give the folder of an EAGLE-3 head")
    return kind, what, most


def _split_count(what: str, spec: str) -> tuple[str, int]:
    """Split off the number at the end: `PATH:8` is (`PATH`, 8)."""
    before, _, count = what.rpartition(":")
    if not (count.isascii() and count.isdigit()):
        return what, LONGEST
    if int(count) < 1:
        raise SettingsError(f"speculate is {spec!r}; the maximum draft length must be at least 1")
    return before, int(count)
