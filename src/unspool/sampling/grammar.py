"""Constrained decoding: the tokens that a grammar allows at each step. (llguidance)

    vocabulary = GrammarVocabulary(token_bytes, end_ids, encode=tokenizer.encode)  # once per model
    grammar = Grammar.compile(GrammarSpec.regex(r"\\d+ apples?"), vocabulary)       # shared
    state = grammar.start()                                                        # per sequence
    pick = chain.pick(logits, [RowInput(history, allowed=state.mask())])
    state.advance(pick.token)

A grammar constrains text, not tokens: any tokenization of an allowed text is allowed, so a mask
depends only on the text before it. `mask`, `advance` and `accepts` agree on every token. End tokens
are allowed exactly where the text may end.
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

if TYPE_CHECKING:  # imported on first use of a grammar
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Mask = np.ndarray[Any, np.dtype[np.bool_]]

_END_TOKEN = b"\xff<|unspool-end|>"
"""An extra token that represents all end tokens: llguidance needs one, and does not know the
others, so that no grammar can use them as text. 0xff marks a token that is not text."""

_DEAD_END = "NoExtensionBias"  # llguidance's error if no token can follow
_CACHE_SIZE = 32  # compiled grammars per vocabulary
_PROBE_STEPS = 16  # steps that are tried after compiling


class GrammarVocabulary:
    """A model's tokens as bytes, for grammars. Build one per model: it is slow to build.

    Args:
        token_bytes: bytes of each token id.
        end_ids: end tokens.
        control_ids: tokens that are not text; only a Lark grammar that names one (`<|tool|>`)
            allows it.
        encode: tokenizes text for `GrammarState.forced`; None: greedily by longest token.
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
    def from_tokenizer(cls, tokenizer: Any) -> GrammarVocabulary:
        """From a tokenizer: `vocab_size`, `token_bytes`, `end_ids`, `special_ids`, `encode`."""
        return cls(
            [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
            tokenizer.end_ids,
            control_ids=tokenizer.special_ids,
            encode=tokenizer.encode,
        )

    def spell(self, text: bytes) -> list[int]:
        """Tokenize text exactly; an incomplete character at the end is dropped."""
        complete = text.decode("utf-8", "ignore")
        if self.encode is not None:
            try:
                ids = self.encode(complete)
            except UnspoolError:  # a character that is not in the vocabulary
                ids = []
            if b"".join(self.tokens[token] for token in ids) == complete.encode("utf-8"):
                return ids  # otherwise the tokenizer added a space
        return self._load_tokenizer()[0].greedy_tokenize(complete)

    def _load_tokenizer(self) -> tuple[LLTokenizer, LLParserLimits]:
        with self._lock:
            if self._tokenizer is None or self._limits is None:
                try:
                    from llguidance import LLParserLimits, LLTokenizer
                except ImportError:
                    raise SettingsError(
                        "a grammar needs the package llguidance: pip install llguidance"
                    ) from None
                # A state takes 1 to 2 kB, so a grammar takes at most about 100 MB.
                self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
                self._tokenizer = LLTokenizer(_TokenizerWrapper(self))  # type: ignore[arg-type]
            return self._tokenizer, self._limits

    def _get_or_compile(self, spec: GrammarSpec) -> Grammar:
        with self._lock:
            grammar = self._grammars.get(spec)
        if grammar is None:  # without the lock: a large one may take a second
            grammar = Grammar(spec, self, self._matcher(spec))
            grammar.probe()
        with self._lock:
            grammar = self._grammars.setdefault(spec, grammar)
            self._grammars.move_to_end(spec)
            while len(self._grammars) > _CACHE_SIZE:
                self._grammars.popitem(last=False)
            return grammar

    def _matcher(self, spec: GrammarSpec) -> LLMatcher:
        tokenizer, limits = self._load_tokenizer()
        from llguidance import LLMatcher

        text = LLMatcher.grammar_from_lark(spec.to_lark())
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise spec.error_from(matcher.get_error())
        return matcher


class _TokenizerWrapper:
    """The vocabulary with the interface that `LLTokenizer` expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = [*vocabulary.tokens, _END_TOKEN]
        self.eos_token_id = vocabulary.size

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("masks need no tokenization")  # see _NO_FORCING in grammar_spec.py


class Grammar:
    """A compiled grammar, immutable, shared by all sequences that use it."""

    def __init__(self, spec: GrammarSpec, vocabulary: GrammarVocabulary, root: LLMatcher) -> None:
        self.spec = spec
        self.vocabulary = vocabulary
        self._root = root

    @classmethod
    def compile(cls, spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Grammar:
        """Compile, or return the cached grammar of an equal spec.

        Raises:
            SettingsError: The grammar cannot be used.
        """
        return vocabulary._get_or_compile(spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling keeps the spec only; it must be compiled again with a vocabulary."""
        return _not_compiled, (self.spec,)

    def start(self) -> GrammarState:
        """The state of an empty text."""
        return GrammarState(self, self._root.deep_copy())

    def probe(self) -> None:
        """Try the first steps, so that impossible or exploding grammars fail early."""
        state = self.start()
        if state.is_dead_end:
            raise self.spec.error("no sequence of this model's tokens can satisfy it")
        for _ in range(_PROBE_STEPS):
            allowed = np.flatnonzero(state.mask())
            if state.must_end or not allowed.size:
                return
            state.advance(int(allowed[allowed.size // 2]))


def _not_compiled(spec: GrammarSpec) -> Grammar:
    grammar = Grammar.__new__(Grammar)
    grammar.spec = spec
    return grammar


@dataclass(frozen=True, slots=True)
class _Position:
    """Cached properties of a state."""

    mask: Mask
    is_complete: bool
    can_continue: bool  # a token other than an end token may follow


class GrammarState:
    """State of one sequence in its grammar. Not thread-safe."""

    __slots__ = ("_ended", "_matcher", "_position", "_tokens", "grammar")

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._tokens: list[int] = []
        self._ended = False
        self._position: _Position | None = None

    def __len__(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def mask(self) -> Mask:
        """Allowed next tokens, [vocabulary], read-only. Cached until the state changes."""
        return self._compute().mask

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self._compute().is_complete

    @property
    def must_end(self) -> bool:
        """Whether the text can only end here, even if the model has no end token."""
        position = self._compute()
        return position.is_complete and not position.can_continue

    @property
    def is_dead_end(self) -> bool:
        """Whether the text can neither end nor continue; the caller must rewind."""
        position = self._compute()
        return not position.is_complete and not position.can_continue

    def advance(self, token: int) -> None:
        """Add a token. Raises SettingsError, without a change, if it is not allowed."""
        if not self._try_advance(token):
            is_valid = 0 <= token < self.grammar.vocabulary.size
            data = self.grammar.vocabulary.tokens[token] if is_valid else b""
            text = f" ({data.decode('utf-8', 'replace')!r})" if data else ""
            raise SettingsError(
                f"the grammar does not allow token {token}{text} after {len(self)} tokens"
            )

    def num_accepted(self, tokens: Sequence[int]) -> int:
        """Number of a draft's tokens, from the first on, that are allowed. Changes nothing."""
        return self.copy()._advance_many(tokens) if len(tokens) else 0

    def rewind(self, count: int) -> None:
        """Drop the last `count` tokens."""
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot rewind {count} of {len(self._tokens)} tokens")
        if count == 0:
            return
        matcher_tokens = count - self._ended  # the matcher never sees end tokens
        del self._tokens[len(self._tokens) - count :]
        self._ended = False
        self._position = None
        # A matcher cannot roll back after a dead end or a limit.
        if matcher_tokens and (
            self._matcher.is_error() or not self._matcher.rollback(matcher_tokens)
        ):
            self._matcher = self.grammar._root.deep_copy()
            self._matcher.consume_tokens(self._tokens)

    def copy(self) -> GrammarState:
        """Copy the state, for a fork."""
        other = GrammarState(self.grammar, self._matcher.deep_copy())
        other._tokens = self._tokens.copy()
        other._ended = self._ended
        other._position = self._position
        return other

    def forced_tokens(self) -> list[int]:
        """Tokens of the only text that can follow, in its usual tokenization; for drafts.

        Other tokenizations are allowed too. Trailing tokens that might be part of a longer token
        are omitted, and so are end tokens.
        """
        if self._ended:
            return []
        # On a copy: before a control token this call breaks the matcher.
        text = self._matcher.deep_copy().compute_ff_bytes()
        vocabulary = self.grammar.vocabulary
        ids = vocabulary.spell(text) if text else []
        trial = self.copy()
        ids = ids[: trial._advance_many(ids)]
        length = sum(len(vocabulary.tokens[token]) for token in ids)
        remaining = len(text) - length
        while ids:
            trial.rewind(1)
            remaining += len(vocabulary.tokens[ids[-1]])
            if int(vocabulary.lengths[trial.mask()].max()) <= remaining:
                break  # no allowed token extends beyond the forced text
            ids.pop()
        return ids

    def _advance_many(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if not self._try_advance(token):
                return count
        return len(tokens)

    def _try_advance(self, token: int) -> bool:
        """Add a token if it is allowed; return whether it was."""
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
        self._position = None
        return True

    def _compute(self) -> _Position:
        if self._position is None:
            vocabulary = self.grammar.vocabulary
            if self._ended:
                self._position = _Position(np.zeros(vocabulary.size, bool), True, False)
                return self._position
            bitmask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            complete = self._matcher.is_accepting()
            mask = np.unpackbits(bitmask, count=vocabulary.size, bitorder="little").view(np.bool_)
            ends = list(vocabulary.end_ids)
            mask[ends] = False
            can_continue = bool(mask.any())
            mask[ends] = complete
            mask.flags.writeable = False
            self._position = _Position(mask, complete, can_continue)
        return self._position

    def _check(self) -> None:
        """Raise if the matcher reached a limit."""
        if self._matcher.is_error():
            message = self._matcher.get_error()
            if not message.startswith(_DEAD_END):
                raise self.grammar.spec.error_from(message)
