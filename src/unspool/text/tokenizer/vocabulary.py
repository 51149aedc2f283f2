"""The common form of a vocabulary that all loaders return and `Tokenizer` uses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol

from tokenizers import Tokenizer as Library
from tokenizers import models

from unspool.text.tokenizer.pieces import (
    SPACE_MARK,
    PieceToBytes,
    byte_characters,
    byte_level_text_piece,
)

_BLANKS = " \t\n\v\f\r"
_BATCH_MIN_CHARS = 4_000  # texts at least this long go through the library's batch call
_FIRST_CHARS = 1_000  # characters that are encoded before the library's BPE model is built


class Encoder(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str, *, specials: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores, without `specials`."""

    def parts(self, text: str, *, specials: bool = False) -> Iterator[str | int]:
        """Split a text into plain text and the ids of user-defined tokens, in order.

        With `specials`, control tokens are split off too.
        """

    @property
    def library(self) -> Library:
        """The library's tokenizer, control tokens included."""

    @property
    def plain(self) -> Library:
        """The library's tokenizer without control tokens."""

    @property
    def drops_characters(self) -> bool:
        """Whether characters without a piece are dropped silently."""

    def has_character(self, character: str) -> bool:
        """Return whether a character can be encoded completely."""


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of the tokens, the longest one at each position."""
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_tree_pattern(tree)) if tree else None


def _tree_pattern(tree: dict[str, Any]) -> str:
    """Return a regular expression that shares common prefixes: fast with thousands of tokens."""
    single: list[str] = []
    longer: list[str] = []
    for character, below in tree.items():
        if character == "":
            continue
        # Join a chain without branches into one string, so that long tokens do not nest deeply.
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


class FirstTextEncoder:
    """Byte-level BPE of a process's first texts, which then do not wait for the library's model.

    The library takes 0.3 s for the tables of 150,000 merges. This encoder needs one dict, and is
    slow on long texts. The ids are the same.
    """

    def __init__(
        self, vocab: Mapping[str, int], merges: Sequence[str], pre_tokenizer: Any, whole_words: bool
    ) -> None:
        """`whole_words`: a word that is a token is not merged."""
        self._vocab = vocab
        self._ranks = dict(zip(merges, range(len(merges)), strict=True))
        self._pre_tokenizer = pre_tokenizer
        self._whole_words = whole_words
        self._chars_left = _FIRST_CHARS

    @cached_property
    def drops_characters(self) -> bool:
        return not self._vocab.keys() >= set(byte_characters())

    def has_character(self, character: str) -> bool:
        return self._vocab.keys() >= set(byte_level_text_piece(character))

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a text; None: from now on the library encodes."""
        self._chars_left -= len(text)
        if self._chars_left < 0:
            return None
        words = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        return [self._vocab[piece] for word in words for piece in self._merge(word)]

    def _merge(self, word: str) -> list[str]:
        """Merge the pair of neighbours with the best rank, leftmost first, while there is one."""
        if self._whole_words and word in self._vocab:
            return [word]
        pieces = [character for character in word if character in self._vocab]
        while True:
            ranks = [
                (rank, position)
                for position, (left_piece, right_piece) in enumerate(pairwise(pieces))
                if (rank := self._ranks.get(f"{left_piece} {right_piece}")) is not None
                and left_piece + right_piece in self._vocab
            ]
            if not ranks:
                return pieces
            _, position = min(ranks)
            pieces[position : position + 2] = ["".join(pieces[position : position + 2])]


class SplittingEncoder:
    """Encoder for vocabularies that are plain tables: GGUF files and tiktoken ranks."""

    def __init__(
        self,
        build_library: Callable[[], Library],
        user_defined: Mapping[str, int],
        control: Mapping[str, int],
        *,
        absorbs_before: frozenset[int] = frozenset(),
        absorbs_after: frozenset[int] = frozenset(),
        first_texts: FirstTextEncoder | None = None,
    ) -> None:
        """`absorbs_before` and `absorbs_after` are tokens that absorb whitespace on that side.

        With `first_texts` the library is built when it is first needed.
        """
        self._build_library = build_library
        self._first_texts = first_texts
        self._blanks_before = absorbs_before
        self._absorbs_after = absorbs_after
        self._user_defined = dict(user_defined)
        self._all = {**control, **user_defined}

    @cached_property
    def plain(self) -> Library:
        library = self._build_library()
        self._build_library, self._first_texts = lambda: library, None  # frees their tables
        return library

    @property
    def library(self) -> Library:
        return self.plain

    @cached_property
    def drops_characters(self) -> bool:
        first_texts = self._first_texts
        return first_texts.drops_characters if first_texts else drops_characters(self.plain)

    def has_character(self, character: str) -> bool:
        first_texts = self._first_texts
        if first_texts is not None:
            return first_texts.has_character(character)
        return has_character(self.plain, character)

    @property
    def split_tokens(self) -> Mapping[str, int]:
        """Tokens that are split off before the library encodes the text."""
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
        for part in self._split(text, pattern):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._user_defined_pattern is not None:
            return [self.encode(text, specials=False) for text in texts]
        return _batch_ids(self.plain, texts)

    def parts(self, text: str, *, specials: bool = False) -> Iterator[str | int]:
        pattern = self._all_pattern if specials else self._user_defined_pattern
        if pattern is not None:
            yield from self._split(text, pattern)
        elif text:
            yield text

    def _split(self, text: str, pattern: re.Pattern[str]) -> Iterator[str | int]:
        end, strip_left = 0, False
        for match in pattern.finditer(text):
            token = self._all[match.group()]
            before = text[end : match.start()]
            before = before.lstrip(_BLANKS) if strip_left else before
            before = before.rstrip(_BLANKS) if token in self._blanks_before else before
            if before:
                yield before
            yield token
            end, strip_left = match.end(), token in self._absorbs_after
        remainder = text[end:].lstrip(_BLANKS) if strip_left else text[end:]
        if remainder:
            yield remainder

    def _encode_plain(self, text: str) -> list[int]:
        first_texts = self._first_texts
        ids = None if first_texts is None else first_texts.encode(text)
        return _ids(self.plain, text) if ids is None else ids


class AddedTokenEncoder:
    """Encoder for a tokenizer.json: the library finds the added tokens by the file's rules."""

    def __init__(self, library: Library, control: Collection[int]) -> None:
        self._library = library
        self._control = frozenset(control)
        self._lock = Lock()
        self._without_control: Library | None = None

    @property
    def library(self) -> Library:
        return self._library

    @property
    def plain(self) -> Library:
        # BuiltTokenizer only when a text contains the text of a control token, which is rare.
        with self._lock:
            if self._without_control is None:
                self._without_control = without_tokens(self._library, self._control)
            return self._without_control

    @cached_property
    def drops_characters(self) -> bool:
        return drops_characters(self._library)

    def has_character(self, character: str) -> bool:
        return has_character(self._library, character)

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
    """Return a piece name that no text can match.

    Words contain no space when they are looked up, and U+FDD0 is not a Unicode character.
    """
    return f" \ufdd0{number}"


def without_tokens(library: Library, ids: Collection[int]) -> Library:
    """Return a copy of the tokenizer that never encodes a text to one of the tokens `ids`."""
    config = json.loads(library.to_str())
    added = config["added_tokens"]
    removed = {token["content"] for token in added if token["id"] in ids}
    removed |= {piece for token in ids if (piece := library.id_to_token(token)) is not None}
    config["added_tokens"] = [token for token in added if token["content"] not in removed]
    config["post_processor"] = None  # it may refer to removed tokens
    model = config["model"]
    # A removed piece keeps its id under a name that no word can have. The unknown token keeps its
    # name, by which the model finds it; without merges no text leads to it.
    hidden_pieces = sorted(removed - {model.get("unk_token")})
    hidden = {piece: hidden_name(number) for number, piece in enumerate(hidden_pieces)}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(piece, piece): n for piece, n in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            pair
            for pair in model["merges"]
            if not (pair[0] in removed or pair[1] in removed or pair[0] + pair[1] in removed)
        ]
    return Library.from_str(json.dumps(config))


def _ids(library: Library, text: str) -> list[int]:
    """Encode a text with the library.

    Only the batch call releases the GIL, and a megabyte takes most of a second; for a short text
    the plain call is faster.
    """
    if len(text) < _BATCH_MIN_CHARS:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
    else:
        ids = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _batch_ids(library: Library, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def drops_characters(library: Library) -> bool:
    """Return whether the library silently drops characters that have no piece.

    Its BPE does so if the vocabulary has neither an unknown token nor all 256 bytes.
    """
    model, token_id = library.model, library.token_to_id
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return False
    if model.byte_fallback:
        return any(token_id(f"<0x{byte:02X}>") is None for byte in range(256))
    return any(token_id(character) is None for character in byte_characters())


def has_character(library: Library, character: str) -> bool:
    """Return whether a BPE vocabulary can encode a character completely."""
    model, token_id = library.model, library.token_to_id
    text = library.normalizer.normalize_str(character) if library.normalizer else character
    words = [text]
    if library.pre_tokenizer:
        words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
    for symbol in "".join(words):
        if symbol == SPACE_MARK and character not in (" ", SPACE_MARK):
            continue  # the normalizer put it before the text
        forms = (symbol, prefix + symbol, symbol + suffix)
        in_bytes = [token_id(f"<0x{byte:02X}>") for byte in symbol.encode()]
        if all(token_id(form) is None for form in forms) and not (
            model.byte_fallback and None not in in_bytes
        ):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A validated vocabulary."""

    kind: str
    size: int
    encoder: Encoder
    piece: Callable[[int], str | None]
    id_of: Callable[[str], int | None]
    piece_bytes: PieceToBytes
    text_piece: Callable[[str], str]  # the piece of a token with this text
    plain_text_ids: frozenset[int] = frozenset()  # tokens whose piece is their text, unescaped
    split_token_ids: frozenset[int] = frozenset()  # tokens split off before encoding
    control: Mapping[str, int] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None
    # Encoding adds a space before the text and decoding removes it: at the start, and with
    # `space_after_added` also after each token that was split off.
    leading_space: bool = False
    space_after_added: bool = False


# No vocabulary uses these as ordinary text, so the token type in the file does not matter.
UNAMBIGUOUS_END_TEXTS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|endofturn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<｜end▁of▁sentence｜>",
        # separators between files in the training text of code models
        "<|fim_pad|>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ]
)

# These also occur as ordinary text (</s> is a tag of HTML), so only a control token counts.
CONTROL_END_TEXTS = frozenset(
    ["</s>", "<eos>", "<EOT>", "_<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "<|tool_response>",
     "<fim-pad>", "<fim_pad>", "<fim-repo>", "<REPO>", "<reponame>"]
)  # fmt: skip


def end_ids(tokens: Mapping[str, int], control: Collection[int]) -> set[int]:
    """Return the ids in `tokens` (text to id) that end a text; `control` are the control tokens."""
    ends = {tokens[text] for text in UNAMBIGUOUS_END_TEXTS if text in tokens}
    ends |= {
        tokens[text] for text in CONTROL_END_TEXTS if text in tokens and tokens[text] in control
    }
    # In these two formats <|end|> ends one message of an answer, and another may follow.
    harmony = {"<|return|>", "<|call|>"} <= tokens.keys()
    solar = {"<|calls|>", "<|flush|>"} <= tokens.keys()
    if harmony or solar:
        ends.discard(tokens.get("<|end|>", -1))
    if "<|tool_response>" in tokens:
        ends.discard(tokens.get("</s>", -1))
    return ends


def merges_by_rank(best_first: Iterable[str], usable: Collection[str]) -> list[tuple[str, str]]:
    """Return every pair of usable pieces that forms a piece, in the order of the formed pieces."""
    pairs: list[tuple[str, str]] = []
    for piece in best_first:
        for split in range(1, len(piece)):
            left_piece = piece[:split]
            if left_piece in usable:
                right_piece = piece[split:]
                if right_piece in usable:
                    pairs.append((left_piece, right_piece))
    return pairs
