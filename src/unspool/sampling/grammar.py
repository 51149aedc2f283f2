r"""Constrained decoding: the tokens that a grammar allows at each step. (llguidance)

    vocabulary = GrammarVocabulary(token_bytes, end_ids, encode=tokenizer.encode)  # once per model
    grammar = Grammar.compile(GrammarSpec.regex(r"\d+ apples?"), vocabulary)       # shared
    state = grammar.start()                                                        # per sequence
    pick = chain.pick(logits, [RowInput(history, allowed=state.mask())])
    state.advance(pick.token)

A grammar constrains text, not tokens: any tokenization of an allowed text is allowed, so a mask
depends only on the text before it. `mask`, `advance` and `accepts` agree on every token. End tokens
are allowed exactly where the text may end.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from unspool.errors import SettingsError, UnspoolError
from unspool.sampling.json_schema import SchemaError, prepare_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


# -- Output constraints: JSON schema, regex, choice, Lark or GBNF grammar

Kind = Literal["json", "json_schema", "regex", "choice", "lark", "gbnf"]

_KIND_NAMES: dict[Kind, str] = {
    "json": "JSON",
    "json_schema": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}
_MAX_LENGTH: dict[Kind, int] = {
    "json": 0,
    "json_schema": 100_000,
    "regex": 10_000,
    "choice": 1_000_000,
    "lark": 32_000,
    "gbnf": 32_000,
}
_MAX_CHOICES = 20_000
_MAX_RULES = 1_000  # rules or $ref targets: each may be one level of recursion
_MAX_SCHEMA_STRING = 10_000  # characters of a string: it may be a pattern

_WHITESPACE = r"\x20|\n\x20{0,40}"
"""Whitespace in JSON: none, a space, or a newline with indentation. With arbitrary whitespace a
confused model writes blanks forever."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The mask must depend on the text only. Otherwise, where only one text can follow, llguidance
allows only one tokenization of it, and allowed tokens would differ from the mask."""

_RULE = re.compile(r"\b\w+\s*(?:\[[^\]\n]*\]|\{[^}\n]*\})?\s*:(?!:)|::=")
_REF = re.compile(r'"\$ref"\s*:\s*("(?:[^"\\]|\\.)*")')
# The compiler's messages about a schema, and messages for its author.
_SCHEMA_MESSAGES = {
    r"^Unimplemented keys: \[(.*)\]$": r"it uses \1, which is not supported; remove it",
    r"^Unsatisfiable schema: ": "no value can satisfy it: ",
    r"^Invalid type: (.*)$": r"it has the type '\1'; allowed: object, array, string, number,"
    " integer, boolean, null",
    r"^Anchor '(.*)' does not exist$": r"it refers to '#\1', which does not exist",
    r"^look-around, .* is not supported$": "look-around in a pattern is not supported;"
    " describe the whole text instead",
}
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.S)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint: kind and source. Equal specs are compiled once."""

    kind: Kind
    source: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)  # what is not enforced

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SettingsError(
                f"unknown kind of grammar {self.kind!r}; allowed: {', '.join(get_args(Kind))}"
            )
        if not isinstance(self.source, str):
            raise SettingsError(
                f"{self._label()} must be a string, got {type(self.source).__name__}"
            )
        max_length = _MAX_LENGTH[self.kind] or len(self.source)
        length = len(self.source)
        if length > max_length:
            raise SettingsError(
                f"{self._label()} has {length:,} characters; the maximum is {max_length:,}"
            )
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError:
            raise SettingsError(f"{self._label()} contains a lone surrogate") from None

    @classmethod
    def json(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """JSON of a schema: a dict, JSON text, or a class with `model_json_schema`.

        Objects have only the properties that the schema names (see `json_schema.py`).
        """
        describe = getattr(schema, "model_json_schema", None)
        if callable(describe):  # a pydantic class
            schema = describe()
        try:
            if isinstance(schema, str | bytes):
                schema = json.loads(schema)
            spec = cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"the JSON schema is not JSON: {_one_line(str(error))}") from None
        if not isinstance(schema, dict | bool):
            kind = type(schema).__name__
            raise SettingsError(f"the JSON schema must be an object or true, got {kind}")
        try:
            prepared, notes = prepare_schema(json.loads(spec.source))
        except SchemaError as error:
            raise spec.error(f"it {error}") from None
        except RecursionError:
            raise spec.error("it is nested too deep") from None
        return cls("json_schema", json.dumps(prepared), tuple(notes))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that a regular expression matches completely.

        Look-around and back references are not supported. `\\d` matches ASCII digits only.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> GrammarSpec:
        """One of several strings."""
        is_list = isinstance(choices, Iterable) and not isinstance(choices, str | bytes)
        strings = list(choices) if is_list else None
        if strings is None or not all(isinstance(choice, str) for choice in strings):
            raise SettingsError("the choice must be a list of strings")
        return cls("choice", json.dumps(strings, ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """A grammar in llguidance's dialect of Lark; its start rule is `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> GrammarSpec:
        """A grammar in llama.cpp's GBNF; its start rule is `root`."""
        return cls("gbnf", text)

    def error(self, why: str) -> SettingsError:
        """Error for a grammar that cannot be compiled, in one line."""
        if self.kind in ("json", "json_schema", "choice"):
            return SettingsError(f"{self._label()} cannot be used: {why}")
        return SettingsError(f"{self._label()} {_shorten(self.source)} cannot be used: {why}")

    def error_from(self, message: str) -> SettingsError:
        """Error with the essential part of the compiler's message, which has many lines."""
        alternatives = message.strip().splitlines() or ["no reason given"]
        match = re.search(r"^error: (.+)$", message, re.MULTILINE)  # of the regex parser
        summary = match[1] if match else alternatives[0]
        summary = re.sub(r"^panic: ", "it is too large, or of a form not supported: ", summary)
        if self.kind not in ("lark", "gbnf"):  # positions in a grammar that the user has not seen
            summary = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", summary)
        if self.kind == "json_schema":
            for pattern, message in _SCHEMA_MESSAGES.items():
                summary = re.sub(pattern, message, summary)
        return self.error(_one_line(summary))

    def to_lark(self) -> str:
        """Convert to a Lark grammar. Raises SettingsError if that is not possible."""
        if self.kind == "json":
            return _schema_to_lark({"type": "object"})
        if self.kind == "json_schema":
            return self._schema_lark()
        if self.kind == "regex":
            from llguidance import regex_to_lark

            if re.search(r"(?<!\\)(\\\\)*\\\Z", self.source):
                raise self.error("it ends in a lone backslash")  # it would escape the /
            pattern = regex_to_lark(self.source, use_ascii="d")
            return f"start: /{pattern or '(?:)'}/{_NO_FORCING}"  # // would start a comment
        if self.kind == "choice":
            return self._choice_lark()
        self._check_count("rules", len(_RULE.findall(self.source)))
        text = self._gbnf_lark() if self.kind == "gbnf" else self.source
        self._check_count("different $refs", len(set(_REF.findall(text))))
        return text + _NO_FORCING

    def _schema_lark(self) -> str:
        try:
            schema = json.loads(self.source)
        except (ValueError, RecursionError) as error:
            raise self.error(_one_line(str(error))) from None
        self._check_count("different $refs", len(set(_REF.findall(json.dumps(schema)))))
        if any(len(text) > _MAX_SCHEMA_STRING for text in _strings(schema)):
            raise self.error(f"it contains a string of more than {_MAX_SCHEMA_STRING:,} characters")
        return _schema_to_lark(schema)

    def _choice_lark(self) -> str:
        try:
            choices = json.loads(self.source)
        except (ValueError, RecursionError):
            choices = None
        if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
            raise self.error("it must be a list of strings")
        if not choices:
            raise self.error("it is empty; at least one string is required")
        self._check_count("strings", len(choices), _MAX_CHOICES)
        alternatives = "|".join(_escape_regex(text) for text in dict.fromkeys(choices))
        return f"start: /(?:{alternatives})/{_NO_FORCING}"

    def _gbnf_lark(self) -> str:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        def unescape(match: re.Match[str]) -> str:
            """Replace an escape by its character: the converter breaks some escapes."""
            digits = match[1] or match[2] or match[3]
            if digits is None:
                return match[0]
            code = int(digits, 16)
            if code < 0x80:
                return f"\\x{code:02x}"
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.error(f"{match[0]} is not a character")
            return chr(code)

        text = _GBNF_ESCAPE.sub(unescape, self.source)
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # it raises bare Exceptions, IndexError, RecursionError
            raise self.error(_one_line(str(error)) or type(error).__name__) from None

    def _check_count(self, items: str, count: int, maximum: int = _MAX_RULES) -> None:
        if count > maximum:
            raise self.error(f"it has {count:,} {items}; the maximum is {maximum:,}")

    def _label(self) -> str:
        return f"the {_KIND_NAMES[self.kind]}"


def _schema_to_lark(schema: Any) -> str:
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and "whitespace_flexible" not in options:
            defaults = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
            schema = schema | {"x-guidance": defaults | options}
    return f"start: %json {json.dumps(schema)}{_NO_FORCING}"


def _escape_regex(text: str) -> str:
    """Regex that matches exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _strings(value: Any) -> Iterable[str]:
    """All strings in a JSON value, names included. (json.loads has bounded its depth.)"""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _shorten(text: str, max_length: int = 60) -> str:
    return repr(text if len(text) <= max_length else text[:max_length] + "…")


def _one_line(text: str, max_length: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= max_length else text[:max_length] + "…"


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
        raise AssertionError("masks need no tokenization")  # see _NO_FORCING


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
