"""Constrained text: at each step, which tokens keep the text inside a grammar. (llguidance)

    vocabulary = GrammarVocabulary(token_bytes, end_ids, encode=tokenizer.encode)  # once per model
    grammar = Grammar.compile(GrammarSpec.regex(r"\\d+ apples?"), vocabulary)       # shared
    state = grammar.start()                                                        # one per text
    pick = chain.pick(logits, [RowInput(history, allowed=state.mask())])
    state.advance(pick.token)

A grammar is about text, not about tokens: any spelling of an allowed text is allowed, so a mask
depends only on the text before it. `mask`, `advance` and `accepts` agree about every token. The end
tokens are allowed exactly where the text may end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.errors import SettingsError, UnspoolError
from unspool.sampling.grammar_spec import GrammarSpec

if TYPE_CHECKING:  # imported when a grammar is first used: nothing else needs it
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Mask = np.ndarray[Any, np.dtype[np.bool_]]

_END = b"\xff<|unspool-end|>"
"""A token of our own that stands for every end token: llguidance wants one, and knows no others, so
that no grammar can name one as if it were text. 0xff marks a token that is no text."""

_DEAD_END = "NoExtensionBias"  # how llguidance says that no token can follow
_KEPT = 32  # compiled grammars kept per vocabulary
_PROBE = 16  # steps tried when compiling


class GrammarVocabulary:
    """A model's tokens as bytes, ready for grammars. Build one per model: it takes a while.

    `token_bytes[id]` are the bytes a token adds to a text. `end_ids` end it. `control_ids` are no
    text; only a Lark grammar that names one (`<|tool|>`) allows it. `encode` spells a text in
    tokens, for `GrammarState.forced`; without it the longest token that fits is taken each time.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        end_ids: Iterable[int],
        *,
        control_ids: Iterable[int] = (),
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.size = len(token_bytes)
        self.end_ids = tuple(sorted(token for token in set(end_ids) if 0 <= token < self.size))
        self.encode = encode
        tokens = list(token_bytes)
        for token in control_ids:
            if 0 <= token < self.size and tokens[token]:
                tokens[token] = b"\xff" + tokens[token]
        for token in self.end_ids:
            tokens[token] = b""
        self.tokens = tokens
        self.lengths = np.array([len(data) for data in tokens], np.int64)
        self._lock = threading.RLock()
        self._tokenizer: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None
        self._grammars: OrderedDict[GrammarSpec, Grammar] = OrderedDict()

    @classmethod
    def of(cls, tokenizer: Any) -> GrammarVocabulary:
        """From anything with `vocab_size`, `token_bytes`, `end_ids`, `special_ids`, `encode`."""
        return cls(
            [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
            tokenizer.end_ids,
            control_ids=tokenizer.special_ids,
            encode=tokenizer.encode,
        )

    def spell(self, text: bytes) -> list[int]:
        """Tokens whose bytes are exactly this text; of a half character at the end, none."""
        whole = text.decode("utf-8", "ignore")
        if self.encode is not None:
            try:
                ids = self.encode(whole)
            except UnspoolError:  # a character that the vocabulary lacks
                ids = []
            if b"".join(self.tokens[token] for token in ids) == whole.encode("utf-8"):
                return ids  # else it begins with a space of the tokenizer's own
        return self._ready()[0].greedy_tokenize(whole)

    def _ready(self) -> tuple[LLTokenizer, LLParserLimits]:
        with self._lock:
            if self._tokenizer is None or self._limits is None:
                try:
                    from llguidance import LLParserLimits, LLTokenizer
                except ImportError:
                    raise SettingsError(
                        "a grammar needs the package llguidance: pip install llguidance"
                    ) from None
                # A state takes 1 to 2 kB, so this bounds the memory to about 100 MB a grammar.
                self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
                self._tokenizer = LLTokenizer(_Wrapper(self))  # type: ignore[arg-type]
            return self._tokenizer, self._limits

    def _compiled(self, spec: GrammarSpec) -> Grammar:
        with self._lock:
            found = self._grammars.get(spec)
        if found is None:  # not under the lock: a large one may take a second
            found = Grammar(spec, self, self._matcher(spec))
            found.probe()
        with self._lock:
            found = self._grammars.setdefault(spec, found)
            self._grammars.move_to_end(spec)
            while len(self._grammars) > _KEPT:
                self._grammars.popitem(last=False)
            return found

    def _matcher(self, spec: GrammarSpec) -> LLMatcher:
        tokenizer, limits = self._ready()
        from llguidance import LLMatcher

        text = LLMatcher.grammar_from_lark(spec.to_lark())
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise spec.refuse_as(matcher.get_error())
        return matcher


class _Wrapper:
    """The vocabulary as `LLTokenizer` wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = [*vocabulary.tokens, _END]
        self.eos_token_id = vocabulary.size

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("masks need no tokenization")  # see _NO_FORCING in grammar_spec.py


class Grammar:
    """A compiled grammar: shared by all texts that follow it, and never changed."""

    def __init__(self, spec: GrammarSpec, vocabulary: GrammarVocabulary, root: LLMatcher) -> None:
        self.spec = spec
        self.vocabulary = vocabulary
        self._root = root

    @classmethod
    def compile(cls, spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Grammar:
        """SettingsError, in one line, where it cannot be used; the same one for an equal spec."""
        return vocabulary._compiled(spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds what was asked for; it can be compiled again where the vocabulary is."""
        return _not_compiled, (self.spec,)

    def start(self) -> GrammarState:
        """The state of an empty text."""
        return GrammarState(self, self._root.deep_copy())

    def probe(self) -> None:
        """Tries the first steps: what is impossible or explodes shows before anything runs."""
        state = self.start()
        if state.is_dead_end:
            raise self.spec.refuse("no text of this model's tokens can satisfy it")
        for _ in range(_PROBE):
            likely = np.flatnonzero(state.mask())
            if state.must_end or not likely.size:
                return
            state.advance(int(likely[likely.size // 2]))


def _not_compiled(spec: GrammarSpec) -> Grammar:
    found = Grammar.__new__(Grammar)
    found.spec = spec
    return found


@dataclass(frozen=True, slots=True)
class _View:
    """What is known about a state, once looked at."""

    mask: Mask
    is_complete: bool
    goes_on: bool  # some token other than an end may follow


class GrammarState:
    """Where one text stands in its grammar. Not to be used by two threads at once."""

    __slots__ = ("_ended", "_matcher", "_tokens", "_view", "grammar")

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._tokens: list[int] = []
        self._ended = False
        self._view: _View | None = None

    def __len__(self) -> int:
        """How many tokens it has taken."""
        return len(self._tokens)

    def mask(self) -> Mask:
        """Which tokens may come next, [vocabulary]; not to be written to. Kept until it moves."""
        return self._look().mask

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self._look().is_complete

    @property
    def must_end(self) -> bool:
        """Whether the text can only end here: also where the model has no end token to say so."""
        view = self._look()
        return view.is_complete and not view.goes_on

    @property
    def is_dead_end(self) -> bool:
        """Whether the text can neither end nor go on. Rewind."""
        view = self._look()
        return not view.is_complete and not view.goes_on

    def advance(self, token: int) -> None:
        """Takes a token; SettingsError, and no change, where the grammar does not allow it."""
        if not self._take(token):
            known = 0 <= token < self.grammar.vocabulary.size
            data = self.grammar.vocabulary.tokens[token] if known else b""
            said = f" ({data.decode('utf-8', 'replace')!r})" if data else ""
            raise SettingsError(
                f"the grammar does not allow token {token}{said} after {len(self)} tokens"
            )

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of a draft's tokens, from the first on, could be taken. Changes nothing."""
        return self.copy()._follow(tokens) if len(tokens) else 0

    def rewind(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot take back {count} of {len(self._tokens)} tokens")
        if count == 0:
            return
        behind = count - self._ended  # an end token never reached the matcher
        del self._tokens[len(self._tokens) - count :]
        self._ended = False
        self._view = None
        # A matcher that met a dead end or a limit does not come back from it.
        if behind and (self._matcher.is_error() or not self._matcher.rollback(behind)):
            self._matcher = self.grammar._root.deep_copy()
            self._matcher.consume_tokens(self._tokens)

    def copy(self) -> GrammarState:
        """Another state at the same place: for a fork."""
        other = GrammarState(self.grammar, self._matcher.deep_copy())
        other._tokens = self._tokens.copy()
        other._ended = self._ended
        other._view = self._view
        return other

    def forced(self) -> list[int]:
        """Where only one text can follow: that text, in the tokens it is usually spelled with.

        Good as a draft. Other spellings are allowed too. Tokens at the end that might be part of
        a longer one are left out, and so are end tokens.
        """
        if self._ended:
            return []
        # Of a copy: before a control token the matcher does not come back from being asked.
        text = self._matcher.deep_copy().compute_ff_bytes()
        vocabulary = self.grammar.vocabulary
        ids = vocabulary.spell(text) if text else []
        trial = self.copy()
        ids = ids[: trial._follow(ids)]
        length = sum(len(vocabulary.tokens[token]) for token in ids)
        rest = len(text) - length
        while ids:
            trial.rewind(1)
            rest += len(vocabulary.tokens[ids[-1]])
            if int(vocabulary.lengths[trial.mask()].max()) <= rest:
                break  # no token here reaches beyond what is certain
            ids.pop()
        return ids

    def _follow(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if not self._take(token):
                return count
        return len(tokens)

    def _take(self, token: int) -> bool:
        """Advances if it may; says whether it did."""
        vocabulary = self.grammar.vocabulary
        if self._ended or not 0 <= token < vocabulary.size:
            return False
        if token in vocabulary.end_ids:
            if not self._matcher.is_accepting():
                return False
            self._ended = True
        elif self._matcher.try_consume_tokens([token]) != 1:
            self._check()
            return False
        self._tokens.append(token)
        self._view = None
        return True

    def _look(self) -> _View:
        if self._view is None:
            vocabulary = self.grammar.vocabulary
            if self._ended:
                self._view = _View(np.zeros(vocabulary.size, bool), True, False)
                return self._view
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            complete = self._matcher.is_accepting()
            bits = np.unpackbits(packed, count=vocabulary.size, bitorder="little").view(np.bool_)
            ends = list(vocabulary.end_ids)
            bits[ends] = False
            goes_on = bool(bits.any())
            bits[ends] = complete
            bits.flags.writeable = False
            self._view = _View(bits, complete, goes_on)
        return self._view

    def _check(self) -> None:
        """Raises where the matcher gave up: a limit was reached."""
        if self._matcher.is_error():
            why = self._matcher.get_error()
            if not why.startswith(_DEAD_END):
                raise self.grammar.spec.refuse_as(why)
