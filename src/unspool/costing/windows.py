"""Limited context: truncated texts, and a model with sliding-window attention.

Truncated are the tokens before those that are scored: to the last tokens, or to the first and last
ones (as `endless` does). Each is read as a new text, so the results are exact. A model with
sliding-window attention keeps its KV cache and attends only to the window, like a cache that drops
its oldest entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unspool.engine.endless import SINKS
from unspool.language_model import LanguageModel

_MAX_WEIGHT_BYTES = 2 << 30  # of a model to load a second time


def truncate_context(
    tokens: Sequence[int], judged: int, width: int, num_sinks: int = 0
) -> list[int]:
    """Return the last `judged` tokens of a text after `width` tokens of context.

    The context is the first `kept` tokens, and the ones directly before.
    """
    before, end = list(tokens[: len(tokens) - judged]), list(tokens[len(tokens) - judged :])
    if len(before) <= width:
        return [*before, *end]
    return [*before[:num_sinks], *before[len(before) - (width - num_sinks) :], *end]


def truncate_with_sinks(tokens: Sequence[int], judged: int, width: int) -> list[int]:
    """As `last_of`, with the attention sinks (the first four tokens) in the context."""
    return truncate_context(tokens, judged, width, min(SINKS, width // 2))


def load_with_window(lm: LanguageModel, width: int) -> LanguageModel | str:
    """Load the model again with sliding-window attention of `width` tokens in every layer.

    Returns the reason as text if that is not possible. The caller closes the model.
    """
    from unspool.loading import check_load_options, load_weights
    from unspool.model.checkpoint import open_checkpoint

    if lm.path is None or lm.adapter is not None:
        return "the model was not loaded from a file, so it cannot be loaded again"
    if any(lm.config.windows):
        return "the model already has sliding-window attention"
    checkpoint = open_checkpoint(lm.path)
    size = lm.path.stat().st_size if lm.path.is_file() else _folder_size(lm)
    if size > _MAX_WEIGHT_BYTES:
        return "the model is too large to be loaded again for this"
    checkpoint.config = replace(checkpoint.config, windows=(width,) * checkpoint.config.layers)
    load_options = check_load_options(device=lm.model.device)
    weights = load_weights(checkpoint, load_options, load_options.resolve())
    return LanguageModel(weights, lm.tokenizer, path=lm.path, context=lm.context, memory=256 << 20)


def _folder_size(lm: LanguageModel) -> int:
    assert lm.path is not None
    return sum(file.stat().st_size for file in lm.path.glob("*.safetensors"))
