"""From text to a tokenizer: byte-level byte-pair encoding, learned by the `tokenizers` library.

    made = make_tokenizer("sotu", TokenizerSettings(vocab_size=4096))
    made.tokenizer.encode("Fellow citizens"), made.bytes_per_token

It is saved as the folder that transformers and `Tokenizer.from_file` read: tokenizer.json and
tokenizer_config.json with a chat template. Made once, it is found again by a hash of the text and
the settings. The documents that `prepare` holds out with the same settings are not learned from.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from unspool.errors import SettingsError
from unspool.model.packaged import cache_folder
from unspool.text.tokenizer import pretokenizers as cuts
from unspool.text.tokenizer.pieces import byte_level_bytes
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.chat_template import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TURN,
    START_OF_TURN,
)
from unspool.train.data.made_once import made_once
from unspool.train.data.shapes import Document
from unspool.train.data.sources import Source
from unspool.train.data.survey import (
    HELD_OUT,
    TRAIN,
    Progress,
    Selection,
    Survey,
    select,
    survey,
)

CUTS = {
    "gpt2": cuts.GPT2,  # a run of digits is a word
    "qwen2": cuts.QWEN2,  # each digit is a word: numbers are read alike everywhere
    "llama3": cuts.LLAMA3,  # up to three digits are a word
    "o200k": cuts.O200K,  # and words are cut where small letters turn to capitals
}
SPECIALS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)

_VERSION = 1


@dataclass(frozen=True)
class TokenizerSettings:
    """All that a tokenizer depends on beside the text."""

    vocab_size: int = 4096
    pretokenizer: str = "qwen2"
    specials: tuple[str, ...] = SPECIALS  # the first of them ends a text
    chat_template: str | None = CHAT_TEMPLATE
    most_bytes: int = 2_000_000_000  # of text that is learned from: more hardly changes the merges

    def __post_init__(self) -> None:
        least = 256 + len(self.specials)
        if self.vocab_size < least:
            raise SettingsError(
                f"a vocabulary needs at least {least} tokens (256 bytes and {len(self.specials)}"
                f" special ones), not {self.vocab_size}"
            )
        if self.pretokenizer not in CUTS:
            raise SettingsError(
                f"there is no pre-tokenizer {self.pretokenizer!r}: choose from {', '.join(CUTS)}"
            )
        if not self.specials or len(set(self.specials)) < len(self.specials):
            raise SettingsError("special tokens must be different texts, at least one of them")


@dataclass(frozen=True)
class MadeTokenizer:
    """A tokenizer in its folder, and how well it does on text that it has not seen."""

    folder: Path
    tokenizer: Tokenizer
    bytes_per_token: float

    def merges(self) -> list[tuple[bytes, bytes]]:
        """Its merges in the order in which they were learned."""
        described = json.loads((self.folder / "tokenizer.json").read_text("utf-8"))
        return [
            (byte_level_bytes(left), byte_level_bytes(right))
            for left, right in described["model"]["merges"]
        ]


def make_tokenizer(
    source: Source,
    settings: TokenizerSettings | None = None,
    *,
    field: str | None = None,
    limit: int | None = None,
    held_out: float | Source = 0.01,
    seed: int = 0,
    progress: Progress | None = None,
    offline: bool = False,
) -> MadeTokenizer:
    """Learn a tokenizer from a source, or find the one that was learned before."""
    chosen = select(source, field=field, limit=limit, held_out=held_out, seed=seed, offline=offline)
    return tokenizer_of(chosen, settings or TokenizerSettings(), progress)


def tokenizer_of(
    chosen: Selection, settings: TokenizerSettings, progress: Progress | None = None
) -> MadeTokenizer:
    """`make_tokenizer` for a source that is looked up already."""
    everything = json.dumps([_VERSION, chosen.content_hash(), asdict(settings)])
    name = hashlib.sha256(everything.encode()).hexdigest()[:32]

    def make(fresh: Path) -> None:
        found = survey(chosen, progress)
        library = learn(texts_of(found, TRAIN, settings.most_bytes, progress), settings)
        save(library, settings, fresh)
        facts = {"bytes_per_token": _bytes_per_token(Tokenizer.from_file(fresh), found)}
        (fresh / "made.json").write_text(json.dumps(facts), encoding="utf-8")

    folder = made_once(cache_folder() / "tokenizers" / name, make)
    facts = json.loads((folder / "made.json").read_text("utf-8"))
    return MadeTokenizer(folder, Tokenizer.from_file(folder), facts["bytes_per_token"])


def learn(texts: Iterable[str], settings: TokenizerSettings) -> Library:
    """The library's tokenizer, learned from these texts."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizer(settings.pretokenizer)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(settings.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def pre_tokenizer(name: str) -> Any:
    """What cuts a text into words, over which no merge reaches; words are written in bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save(library: Library, settings: TokenizerSettings, folder: Path) -> None:
    """Write the folder that transformers and `Tokenizer.from_file` read."""
    library.save(str(folder / "tokenizer.json"))
    end = settings.specials[0]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    if settings.chat_template is not None:
        config["chat_template"] = settings.chat_template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
    )


def texts_of(
    found: Survey, place: int, most_bytes: int, progress: Progress | None = None
) -> Iterator[str]:
    """The words of the documents of one place, up to so many bytes."""
    done = 0
    for document, where in found.documents():
        if where != place:
            continue
        for text in words_in(document):
            yield text
            done += len(text.encode())
        if progress is not None:
            progress("counting words", done, min(found.bytes, most_bytes))
        if done >= most_bytes:
            return


def words_in(document: Document) -> Iterator[str]:
    """All that people or models wrote in a document."""
    if document.text is not None:
        yield document.text
    for text, _ in document.pieces or ():
        yield text
    for message in document.messages or ():
        for key, value in message.items():
            if key != "role" and value:
                yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def count_words(texts: Iterable[str], name: str) -> dict[bytes, int]:
    """How often each word occurs, cut as the tokenizer named cuts them: what merges come from."""
    cut, counts = pre_tokenizer(name), Counter[str]()
    for text in texts:
        counts.update(word for word, _ in cut.pre_tokenize_str(text))
    return {byte_level_bytes(word): count for word, count in counts.items()}


def _bytes_per_token(tokenizer: Tokenizer, found: Survey) -> float:
    """On what is held out; on the text itself if nothing is."""
    place = HELD_OUT if (found.place == HELD_OUT).any() else TRAIN
    texts = list(texts_of(found, place, 10_000_000))
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    return sum(len(text.encode()) for text in texts) / max(1, tokens)
