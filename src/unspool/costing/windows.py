"""Less than the whole context: what the model is given of a text, and a model that looks less far.

A view is what is read before the tokens that are judged: all of the text, its last tokens, or its
first and last ones (what `endless` keeps in view). Each is read as a text of its own, so these are
exact. A model with windowed attention keeps the keys and values it has and only looks no further
back than its window: what a cache does that drops its oldest entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unspool.engine.endless import SINKS
from unspool.language_model import LanguageModel

_LARGEST = 2 << 30  # bytes of weights that are loaded a second time


def last_of(tokens: Sequence[int], judged: int, width: int, kept: int = 0) -> list[int]:
    """The judged tokens at the end of a text, behind `width` tokens of it: its first `kept`, and
    for the rest those right before."""
    before, end = list(tokens[: len(tokens) - judged]), list(tokens[len(tokens) - judged :])
    if len(before) <= width:
        return [*before, *end]
    return [*before[:kept], *before[len(before) - (width - kept) :], *end]


def sinks_and_last(tokens: Sequence[int], judged: int, width: int) -> list[int]:
    """... its first four, and those right before."""
    return last_of(tokens, judged, width, min(SINKS, width // 2))


def with_window(lm: LanguageModel, width: int) -> LanguageModel | str:
    """The same model, looking no further back than so many tokens in every layer; or, in words,
    why that cannot be had. It is loaded a second time, and is the caller's to close."""
    from unspool.loading import check_load_options, load_weights
    from unspool.model.checkpoint import open_checkpoint

    if lm.path is None or lm.adapter is not None:
        return "the model came from no file, so that it cannot be loaded a second time"
    if any(lm.config.windows):
        return "the model has windows of its own"
    checkpoint = open_checkpoint(lm.path)
    size = lm.path.stat().st_size if lm.path.is_file() else _folder_size(lm)
    if size > _LARGEST:
        return "the model is too large to be loaded a second time just for this"
    checkpoint.config = replace(checkpoint.config, windows=(width,) * checkpoint.config.layers)
    wanted = check_load_options(device=lm.model.device)
    weights = load_weights(checkpoint, wanted, wanted.chosen())
    return LanguageModel(weights, lm.tokenizer, path=lm.path, context=lm.context, memory=256 << 20)


def _folder_size(lm: LanguageModel) -> int:
    assert lm.path is not None
    return sum(file.stat().st_size for file in lm.path.glob("*.safetensors"))
