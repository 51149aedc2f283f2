"""Drafts: guesses at the next tokens, cheap to make, checked many at a time in one run.

    lm.generate(prompt, speculate="lookup")              # what followed the same words earlier on
    lm.generate(prompt, speculate="model:PATH")          # a smaller model with this vocabulary
    lm.generate(prompt, speculate="head")                # a head trained on the model's inside

The text is the same as without: a guess is kept exactly when it is the token that the draw of its
position picks anyway (`engine/sequence.py`). So a drafter may be as wrong as it likes. What it is
called by is the `Drafter` protocol there; one drafter serves one text. How long drafts should be,
and when to stop, is `controller.py`'s affair.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from unspool.decoding.controller import LONGEST, AdaptiveDrafter
from unspool.decoding.draft_texts import DraftTexts, common_length
from unspool.engine.request import Drafter, DraftMaker, Request
from unspool.errors import ModelFileError, SettingsError
from unspool.sampling import Chain, RowInput, StageState
from unspool.session import Session

__all__ = [
    "AdaptiveDrafter",
    "DraftMaker",
    "ModelDrafter",
    "PredictedText",
    "PromptLookup",
    "check_same_vocabulary",
    "drafter_from",
    "make_drafter",
]

KINDS = "lookup, model:PATH, head or head:FOLDER, each with :COUNT behind it for the longest draft"
_SURELY_SAME = 32  # last known tokens that are compared to see whether a text only grew


class PromptLookup:
    """Finds the longest end of the text that stood there before, and proposes what followed.

    For each length there is a table from the last tokens to the place behind them. A token enters
    when its follower is known, so what is found is always an earlier place. What an entry replaced
    is remembered: a text that was rewound takes its last entries back.
    """

    def __init__(self, *, longest: int = 5, shortest: int = 2, most: int = LONGEST) -> None:
        if not 1 <= shortest <= longest:
            raise SettingsError(f"cannot look up runs of {shortest} to {longest} tokens")
        self.most = most
        self._lengths = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._tables: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._replaced: list[list[int | None]] = []  # by place, then by length, longest first

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self.index(tokens)
        place = self.find(tokens)
        return [] if place is None else self._from(place, min(most, self.most))

    def find(self, tokens: Sequence[int]) -> int | None:
        """Position in the indexed text after the last match of the longest suffix of `tokens`."""
        for length in self._lengths:
            if len(tokens) >= length:
                place = self._tables[length].get(tuple(tokens[-length:]))
                if place is not None:
                    return place
        return None

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return None

    def _from(self, place: int, most: int) -> list[int]:
        """What stands there; beyond the end of the text, what the draft itself put there."""
        draft = self._text[place : place + most]
        period = len(draft)
        while len(draft) < most:
            draft.append(draft[-period])
        return draft

    def index(self, tokens: Sequence[int]) -> None:
        """Index the new tokens; where the text was rewound, first drop what is no longer in it."""
        known = len(self._text)
        tail = max(0, known - _SURELY_SAME)
        if len(tokens) < known or list(tokens[tail:known]) != self._text[tail:]:
            self._back_to(common_length(self._text, tokens))
        for token in tokens[len(self._text) :]:
            self._enter()
            self._text.append(token)

    def _enter(self) -> None:
        """The place behind the text so far gets its token now: from here on it can be found."""
        place, replaced = len(self._text), []
        for length in self._lengths:
            table, key = self._tables[length], self._key(place, length)
            replaced.append(table.get(key))
            table[key] = place
        self._replaced.append(replaced)

    def _back_to(self, length: int) -> None:
        while len(self._text) > length:
            self._text.pop()
            place, replaced = len(self._text), self._replaced.pop()
            for size, before in zip(self._lengths, replaced, strict=True):
                if before is None:
                    del self._tables[size][self._key(place, size)]
                else:
                    self._tables[size][self._key(place, size)] = before

    def _key(self, place: int, length: int) -> tuple[int, ...]:
        return tuple(self._text[max(0, place - length) : place])


class PredictedText:
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

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return None


class ModelDrafter:
    """Lets another model write on, with the same settings and the same draws as the text's own.

    Where the two models agree, the same draw falls on the same token, also at high temperatures.
    It runs on the engine's thread of the text's model, and waits for no other. A long prompt is
    read in pieces, one a round, so that no other text is held up. Drafters of one model share its
    backend (`draft_texts.py`).
    """

    def __init__(self, model: Session, request: Request, *, most: int = LONGEST) -> None:
        self.most = most
        self._request = request
        self._chain = Chain([request.settings])
        limits = request.limits
        longest = min(limits.context, len(request.prompt) + limits.max_tokens)
        self._capacity = min(longest, model.context)
        self._vocabulary: int = model.config.vocab_size
        self._text = _shared_texts(model).open(self._capacity)

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
                return []  # more of the prompt in the rounds to come
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

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return None


_draft_texts: WeakKeyDictionary[Session, weakref.ref[DraftTexts]] = WeakKeyDictionary()
_sharing = threading.Lock()


def _shared_texts(model: Session) -> DraftTexts:
    """The texts of a draft model: the same ones for all who draft with it at the same time. They
    are kept by those who use them, and by what `speculate="model:PATH"` has loaded."""
    root = _root(model)
    with _sharing:
        known = _draft_texts.get(root)
        texts = None if known is None else known()
        if texts is None:
            texts = DraftTexts(model)
            _draft_texts[root] = weakref.ref(texts)
        return texts


def _root(model: Session) -> Session:
    """The model itself, where this is a view of it with an adapter."""
    while model.seen_of is not None:
        model = model.seen_of
    return model


def check_same_vocabulary(draft: Session, target: Session) -> None:
    """A model can draft for another only if their token ids mean the same."""
    theirs, ours = _vocabulary(draft), _vocabulary(target)
    if (theirs is None) != (ours is None):
        raise SettingsError(
            "the draft model and the model cannot be compared: one of them has no vocabulary"
        )
    if theirs is None or ours is None:
        sizes = draft.config.vocab_size, target.config.vocab_size
        if sizes[0] != sizes[1]:
            raise SettingsError(
                f"the draft model's vocabulary has {sizes[0]:,} tokens and the model's "
                f"{sizes[1]:,}; a draft model needs the same vocabulary"
            )
        return
    if len(theirs) != len(ours):
        raise SettingsError(
            f"the draft model's vocabulary has {len(theirs):,} tokens and the model's "
            f"{len(ours):,}; a draft model needs the same vocabulary"
        )
    for token in range(len(ours)):
        if theirs.token_bytes(token) != ours.token_bytes(token):
            raise SettingsError(
                f"token {token} is {theirs.token_text(token)!r} to the draft model and "
                f"{ours.token_text(token)!r} to the model; a draft model needs the same vocabulary"
            )


def _vocabulary(model: Session) -> Any:
    try:
        return model.tokenizer
    except ModelFileError:
        return None


# -- from words to drafters ------------------------------------------------------------------


@dataclass(slots=True)
class _Loaded:
    """What one word for `speculate` stands for, once it is loaded."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    maker: DraftMaker | None = None


_makers: WeakKeyDictionary[Session, dict[str, _Loaded]] = WeakKeyDictionary()


def make_drafter(
    speculate: str | DraftMaker | Drafter | None,
    lm: Session,
    load: Callable[[str], Session] | None = None,
) -> Drafter | DraftMaker | None:
    """What `Request.drafter` takes, from what a caller gave as `speculate`.

    A word (see `drafter_from`; what it loads is kept with the model), a function from a request to
    a drafter, or a drafter, which can serve one text only.
    """
    if speculate is None or callable(speculate):
        return speculate
    if not isinstance(speculate, str):
        if callable(getattr(speculate, "propose", None)) and hasattr(speculate, "learn"):
            return speculate
        raise SettingsError(f"speculate is {speculate!r}; it may be {KINDS}, or a drafter")
    root = _root(lm)
    with _sharing:
        loaded = _makers.setdefault(root, {}).setdefault(speculate, _Loaded())
    with loaded.lock:  # of this word alone: loading one model holds up no other request
        if loaded.maker is None:
            try:
                loaded.maker = drafter_from(speculate, lm, load)
            finally:
                if loaded.maker is None:
                    with _sharing:
                        _makers[root].pop(speculate, None)
        return loaded.maker


def drafter_from(
    spec: str, lm: Session, load: Callable[[str], Session] | None = None
) -> DraftMaker:
    """Build the factory for `lookup`, `model:PATH`, `head` or `head:FOLDER`; a trailing `:COUNT`
    limits the draft length. Loads the model (by `load`) now, once for all requests.
    """
    kind, what, most = check_drafter(spec)
    if kind == "head":
        from unspool.decoding.heads.drafter import head_maker

        return head_maker(what, lm, most if spec.endswith(f":{most}") else None)
    if kind == "lookup":
        return lambda request: AdaptiveDrafter(PromptLookup(most=most), longest=most)
    if load is None:
        raise SettingsError(f"speculate is {spec!r}, and there is nothing to load models with")
    model = load(what)
    check_same_vocabulary(model, lm)
    texts = _shared_texts(model)  # kept from request to request

    def make(request: Request, texts: DraftTexts = texts) -> Drafter:
        return AdaptiveDrafter(ModelDrafter(model, request, most=most), longest=most)

    return make


def check_drafter(spec: str) -> tuple[str, str, int]:
    """What a word for `speculate` says: the kind, the file or model, the longest draft."""
    kind, _, what = spec.partition(":")
    what, most = _with_count(what, spec)
    needs = {"lookup": False, "model": True, "head": bool(what)}
    if needs.get(kind) != bool(what):
        raise SettingsError(f"speculate is {spec!r}; it may be {KINDS}")
    if kind == "head" and what:
        from unspool.decoding.heads.files import head_folder

        head_folder(what)
    return kind, what, most


def _with_count(what: str, spec: str) -> tuple[str, int]:
    """Take the number off the end: `PATH:8` is (`PATH`, 8)."""
    before, _, count = what.rpartition(":")
    if not (count.isascii() and count.isdigit()):
        return what, LONGEST
    if int(count) < 1:
        raise SettingsError(f"speculate is {spec!r}; the longest draft has at least 1 token")
    return before, int(count)
