"""Text to ids, with one promise: without `specials`, no text becomes a control token.

Two kinds. `SplittingEncoder` cuts the known tokens out of the text itself; the library then sees
only plain text, and its model does not even hold the control tokens. `AddedTokenEncoder` leaves
the cutting to a tokenizer.json, whose rules (stripping, normalizing) the library knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

from tokenizers import Tokenizer as Library
from tokenizers import models

from unspool.text.tokenizer.pieces import byte_characters

SPACE_MARK = "▁"  # stands for a space in SentencePiece vocabularies
_BLANKS = " \t\n\v\f\r"
_LONG = 4_000  # characters, from which on a text is worth the way through a batch


class Encoder(Protocol):
    """What turns text into ids."""

    def encode(self, text: str, *, specials: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` without `specials` for many texts, on all cores."""

    def parts(self, text: str, *, specials: bool = False) -> Iterator[str | int]:
        """Plain text and the ids of user-defined tokens in it, in order; with `specials` also those
        of control tokens."""

    @property
    def library(self) -> Library:
        """The library's tokenizer for text of any kind."""

    @property
    def plain(self) -> Library:
        """The library's tokenizer for text that holds no control tokens."""


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the tokens; of those that begin at one place, the longest."""
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_tree_pattern(tree)) if tree else None


def _tree_pattern(tree: dict[str, Any]) -> str:
    """A regular expression that shares common beginnings: thousands of tokens stay quick."""
    single: list[str] = []
    longer: list[str] = []
    for character, below in tree.items():
        if character == "":
            continue
        # A chain without branches is written in one go, so that long tokens do not nest deeply.
        text = re.escape(character)
        while len(below) == 1 and "" not in below:
            ((character, below),) = below.items()
            text += re.escape(character)
        if below.keys() == {""}:
            single.append(text)
        else:
            longer.append(text + _tree_pattern(below))
    choices = "|".join([*longer, *single])
    if "" in tree:
        return f"(?:{choices})?" if choices else ""
    return f"(?:{choices})"


class SplittingEncoder:
    """For vocabularies that come as plain tables: GGUF files and tiktoken ranks."""

    def __init__(
        self,
        plain: Library,
        user_defined: Mapping[str, int],
        control: Mapping[str, int],
        *,
        blanks_before: frozenset[int] = frozenset(),
        blanks_after: frozenset[int] = frozenset(),
    ) -> None:
        """`blanks_before` and `blanks_after` are tokens that swallow the blanks beside them."""
        self._plain = plain
        self._blanks_before = blanks_before
        self._blanks_after = blanks_after
        self._user_defined = dict(user_defined)
        self._all = {**control, **user_defined}

    @property
    def plain(self) -> Library:
        return self._plain

    library = plain

    @property
    def cut_out(self) -> Mapping[str, int]:
        """The tokens that are cut out of the text before the library sees it."""
        return self._all

    @cached_property
    def _user_defined_pattern(self) -> re.Pattern[str] | None:
        return token_pattern(self._user_defined)

    @cached_property
    def _all_pattern(self) -> re.Pattern[str] | None:
        return token_pattern(self._all)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        pattern = self._all_pattern if specials else self._user_defined_pattern
        if pattern is None:
            return self._encode_plain(text)
        ids: list[int] = []
        for part in self._cut(text, pattern):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._user_defined_pattern is not None:
            return [self.encode(text, specials=False) for text in texts]
        return _batch_ids(self._plain, texts)

    def parts(self, text: str, *, specials: bool = False) -> Iterator[str | int]:
        pattern = self._all_pattern if specials else self._user_defined_pattern
        if pattern is not None:
            yield from self._cut(text, pattern)
        elif text:
            yield text

    def _cut(self, text: str, pattern: re.Pattern[str]) -> Iterator[str | int]:
        done, after = 0, False
        for match in pattern.finditer(text):
            token = self._all[match.group()]
            before = text[done : match.start()]
            before = before.lstrip(_BLANKS) if after else before
            before = before.rstrip(_BLANKS) if token in self._blanks_before else before
            if before:
                yield before
            yield token
            done, after = match.end(), token in self._blanks_after
        rest = text[done:].lstrip(_BLANKS) if after else text[done:]
        if rest:
            yield rest

    def _encode_plain(self, text: str) -> list[int]:
        return _ids(self._plain, text)


class AddedTokenEncoder:
    """For a tokenizer.json: the library finds the added tokens, by the file's own rules."""

    def __init__(self, library: Library, control: Collection[int]) -> None:
        self._library = library
        self._control = frozenset(control)
        self._lock = Lock()
        self._without_control: Library | None = None

    @property
    def library(self) -> Library:
        """The file as it was."""
        return self._library

    @property
    def plain(self) -> Library:
        # Built only when a text really holds a control token's text: most never do.
        with self._lock:
            if self._without_control is None:
                self._without_control = without_tokens(self._library, self._control)
            return self._without_control

    def encode(self, text: str, *, specials: bool) -> list[int]:
        ids = _ids(self._library, text)
        if specials or self._control.isdisjoint(ids):
            return ids
        return _ids(self.plain, text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            ids if self._control.isdisjoint(ids) else _ids(self.plain, text)
            for text, ids in zip(texts, _batch_ids(self._library, texts), strict=True)
        ]

    def parts(self, text: str, *, specials: bool = False) -> Iterator[str | int]:
        library = self._library if specials else self.plain
        added = library.get_added_tokens_decoder()
        encoding = library.encode(text, add_special_tokens=False)
        done = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in added and end > done:
                if start > done:
                    yield text[done:start]
                yield token
                done = end
        if done < len(text):
            yield text[done:]


def hidden_name(number: int) -> str:
    """A name for a piece that no text may reach: words never hold a space when they are looked up,
    and the second character is one that Unicode sets aside."""
    return f" \ufdd0{number}"


def without_tokens(library: Library, ids: Collection[int]) -> Library:
    """A copy that cannot write the tokens `ids`, whatever the text."""
    described = json.loads(library.to_str())
    added = described["added_tokens"]
    gone = {token["content"] for token in added if token["id"] in ids}
    gone |= {piece for token in ids if (piece := library.id_to_token(token)) is not None}
    described["added_tokens"] = [token for token in added if token["content"] not in gone]
    described["post_processor"] = None  # it may name the tokens that are gone
    model = described["model"]
    # A piece keeps its id under a name that no word can have. The one for the unknown keeps its
    # name, by which the model finds it; without the merges to it no text leads there.
    renamed = sorted(gone - {model.get("unk_token")})
    hidden = {piece: hidden_name(number) for number, piece in enumerate(renamed)}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(piece, piece): n for piece, n in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            pair
            for pair in model["merges"]
            if not (pair[0] in gone or pair[1] in gone or pair[0] + pair[1] in gone)
        ]
    return Library.from_str(json.dumps(described))


def _ids(library: Library, text: str) -> list[int]:
    """What the library makes of a text. Only its batches let other threads run meanwhile, and a
    megabyte takes most of a second; a short text is quicker without."""
    if len(text) < _LONG:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
    else:
        ids = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _batch_ids(library: Library, texts: Sequence[str]) -> list[list[int]]:
    return [each.ids for each in library.encode_batch_fast(texts, add_special_tokens=False)]


def drops_characters(library: Library) -> bool:
    """Whether the library leaves out characters that have no piece, without a word: its BPE does,
    where neither an unknown token nor all bytes are in the vocabulary."""
    model, known = library.model, library.token_to_id
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return False
    if model.byte_fallback:
        return any(known(f"<0x{byte:02X}>") is None for byte in range(256))
    return any(known(character) is None for character in byte_characters())


def has_character(library: Library, character: str) -> bool:
    """Whether a BPE vocabulary has pieces for all of a character."""
    model, known = library.model, library.token_to_id
    text = library.normalizer.normalize_str(character) if library.normalizer else character
    words = [text]
    if library.pre_tokenizer:
        words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    before, behind = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
    for symbol in "".join(words):
        if symbol == SPACE_MARK and character not in (" ", SPACE_MARK):
            continue  # put before the text
        forms = (symbol, before + symbol, symbol + behind)
        in_bytes = [known(f"<0x{byte:02X}>") for byte in symbol.encode()]
        if all(known(form) is None for form in forms) and not (
            model.byte_fallback and None not in in_bytes
        ):
            return False
    return True
