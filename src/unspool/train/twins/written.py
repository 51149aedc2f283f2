"""Texts that a model wrote itself, by our own engine: what its twins learn from first of all.

    packed = written_texts(path, config, WritingSettings(texts=16000), load)   # written once, kept

A model with a chat template first writes what a user might ask (it is given the template's words up
to the user's own, arXiv 2406.08464), and then answers that, and the questions that it was given
besides. A model without one goes on with beginnings of texts. Tokens are kept as they were written.

What is done is kept in parts, so that writing can be broken off and gone on with at any time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unspool.decoding.together import write_all
from unspool.engine.generation import Generation
from unspool.errors import DataError
from unspool.language_model import LanguageModel
from unspool.model.config import ModelConfig
from unspool.model.packaged import cache_folder
from unspool.text.chat.template import ChatTemplate
from unspool.train.data.shards import Packed

PART = 512  # texts that are written together
TEMPERATURES = (0.0, 0.5, 0.8)  # of answers, in turn
_QUESTION = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.03}
_ANSWER = {"top_k": 0, "top_p": 0.95, "min_p": 0.0}
_PROBE = "unspool probe"
_FEWEST = 8  # letters of a question

Tell = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingSettings:
    """What is written, and from what."""

    texts: int = 16000
    max_tokens: int = 256  # of an answer
    question_tokens: int = 48
    seed: int = 0
    questions: tuple[str, ...] = ()  # half of the questions are these, if there are any


def written_texts(
    path: Path,
    config: ModelConfig,
    settings: WritingSettings,
    load: Callable[[], LanguageModel],
    *,
    beginnings: Sequence[Sequence[int]] = (),
    seconds: float | None = None,
    tell: Tell = lambda done: None,
) -> Packed:
    """The texts that the model at `path` wrote; if some are still missing, it is loaded and writes
    them, for at most so many seconds (what is there then must do)."""
    folder = _folder(path, config, settings)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{number:05}.npz" for number in range(-(-settings.texts // PART))]
    since = time.monotonic()
    missing = [number for number, file in enumerate(parts) if not _is_whole(file, number, settings)]
    if missing:
        with load() as lm:
            for number in missing:
                late = seconds is not None and time.monotonic() - since > seconds
                if late and number:
                    break
                count = min(PART, settings.texts - number * PART)
                _save(_Writer(lm, settings, number, beginnings).write(count), parts[number], count)
                tell(number * PART + count)
    return _open([file for file in parts if file.exists()], config.vocab_size)


def _is_whole(file: Path, number: int, settings: WritingSettings) -> bool:
    """Whether a part is there, with all the texts that are wanted of it."""
    if not file.exists():
        return False
    with np.load(file, allow_pickle=False) as kept:
        return int(kept["asked"]) >= min(PART, settings.texts - number * PART)


def _folder(path: Path, config: ModelConfig, settings: WritingSettings) -> Path:
    """By what the texts depend on; how many there are to be is no part of that."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    weights = [
        (file.name, file.stat().st_size)
        for file in files
        if file.suffix in (".safetensors", ".gguf")
    ]
    known = [asdict(replace(settings, texts=0)), config.to_dict(), str(path.resolve()), weights]
    name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "written" / name


@dataclass(frozen=True, slots=True)
class _Text:
    ids: list[int]
    prompt: int  # how many of them were there before


class _Writer:
    """Writes one part; which texts follows from the seed and the part's number alone."""

    def __init__(
        self, lm: LanguageModel, settings: WritingSettings, part: int,
        beginnings: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        self._lm, self._settings, self._part = lm, settings, part
        self._beginnings = beginnings

    def write(self, count: int) -> list[_Text]:
        if self._lm.chat_template.is_plain:
            return self._went_on(count)
        questions = self._questions(count)
        prompts = [list(self._lm.chat_prompt(question).ids) for question in questions]
        return self._answered(prompts, prompt_counts=False)

    def _went_on(self, count: int) -> list[_Text]:
        if not self._beginnings:
            raise DataError("the model has no chat template: give text whose beginnings it goes on")
        first = self._part * PART
        several = [self._beginnings[n % len(self._beginnings)] for n in range(first, first + count)]
        return self._answered([list(each) for each in several], prompt_counts=True)

    def _answered(self, prompts: list[list[int]], *, prompt_counts: bool) -> list[_Text]:
        drafts = [
            self._draft(
                prompt, number, max_tokens=self._settings.max_tokens,
                temperature=TEMPERATURES[number % len(TEMPERATURES)], **_ANSWER,
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        write_all(self._lm, drafts, patient=False)
        return [
            _Text([*draft.prompt, *draft.tokens], 0 if prompt_counts else len(draft.prompt))
            for draft in drafts
        ]

    def _questions(self, count: int) -> list[str]:
        """Given ones, and the model's own; where too few of those are any good, once more."""
        given = self._settings.questions
        first = self._part * PART
        found = [given[n % len(given)] for n in range(first, first + count // 2)] if given else []
        asked = question_prompt(self._lm.chat_template)
        for turn in range(8):
            drafts = [
                self._draft(
                    asked, n + PART * (turn + 1), max_tokens=self._settings.question_tokens,
                    **_QUESTION,
                )
                for n in range(count - len(found))
            ]  # fmt: skip
            write_all(self._lm, drafts, patient=False)
            found += [draft.text.strip() for draft in drafts if _is_question(draft)]
            if len(found) == count:
                break
        return found or [_PROBE] * count

    def _draft(self, prompt: list[int], number: int, **options: Any) -> Generation:
        seed = self._settings.seed * 1_000_003 + self._part
        stops = self._lm.chat_template.stops
        return self._lm.draft(prompt, seed=seed, sample=number, stop=stops or None, **options)


def question_prompt(template: ChatTemplate) -> list[int]:
    """What a conversation begins with, up to the user's first word."""
    text = template.render_as_is([{"role": "user", "content": _PROBE}], add_generation_prompt=False)
    before, found, _ = text.partition(_PROBE)
    if not found:
        raise DataError("the chat template does not show what a user writes")
    return template.tokenizer.encode(before, specials=True)


def _is_question(draft: Generation) -> bool:
    return draft.finish_reason == "stop" and len(draft.text.strip()) >= _FEWEST


def _save(texts: list[_Text], file: Path, asked: int) -> None:
    part = file.with_name(f".{file.name}.part.npz")
    np.savez(
        part,
        ids=np.concatenate([np.array(text.ids, np.uint32) for text in texts]),
        lengths=np.array([len(text.ids) for text in texts]),
        prompts=np.array([text.prompt for text in texts]),
        asked=np.array(asked),
    )
    part.replace(file)


def _open(files: list[Path], vocabulary: int) -> Packed:
    if not files:
        raise DataError("nothing was written yet; give more time")
    found = [np.load(file, allow_pickle=False) for file in files]
    ids = np.concatenate([part["ids"] for part in found])
    ids = ids.astype(np.uint16) if vocabulary <= 1 << 16 else ids
    lengths = np.concatenate([part["lengths"] for part in found])
    prompts = np.concatenate([part["prompts"] for part in found])
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    place = np.arange(len(ids)) - np.repeat(borders[:-1], lengths)
    return Packed(ids, borders, place >= np.repeat(prompts, lengths))
