"""Filling gaps in a text: `lm.fill("The ", gap, " sat on the mat")`.

Three ways, and which one is taken follows from the model: a masked model sees both sides at once
(`places.py`); a vocabulary with FIM tokens belongs to a model that was trained to write the middle
(`fim.py`); any other causal model drafts from the left and ranks with the right (`causal.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.decoding.fill.causal import fill_by_ranking
from unspool.decoding.fill.drafts import Drafting
from unspool.decoding.fill.fim import fill_by_fim, fim_tokens
from unspool.decoding.fill.gaps import Gap, GappedText, gap
from unspool.decoding.fill.masked import MaskedModel, WholeText, masked_model
from unspool.decoding.fill.places import fill_by_masks
from unspool.decoding.fill.result import Filled, Filling
from unspool.decoding.written import whole
from unspool.errors import SettingsError
from unspool.session import Session

WAYS = ("auto", "masked", "fim", "ranking")
REACH = 64  # tokens of the right side that are weighed
_NOT_HERE = ("json", "json_schema", "regex", "choice", "grammar", "guard", "speculate")


def fill(
    lm: Session,
    parts: Sequence[str | Gap],
    *,
    by: str = "auto",
    candidates: int = 20,
    drafts: int = 6,
    reach: int | None = REACH,
    choices: Sequence[str] | None = None,
    twin: Session | MaskedModel | None = None,
    usual: Gap = gap,
    **options: Any,
) -> Filling:
    """A text with its gaps filled; see `LanguageModel.fill`."""
    if by not in WAYS:
        raise SettingsError(f"by is {by!r}; it may be {', '.join(WAYS)}")
    whole("candidates", candidates)
    whole("drafts", drafts)
    if reach is not None:
        whole("reach", reach)
    if options.get("max_tokens") is not None:
        raise SettingsError("the gap itself says how long it may be: gap(1, 8), not max_tokens")
    gapped = GappedText.of(parts, usual)
    way = _way(lm, by, choices, twin)
    top = options.get("top") or 0
    found: tuple[Filled, ...]
    if way == "masked":
        found = fill_by_masks(WholeText(lm), gapped, candidates=candidates, top=top)
    elif way == "fim":
        tokens = fim_tokens(lm.tokenizer)
        if tokens is None:
            raise SettingsError(
                "this model's vocabulary has no FIM tokens; leave by='fim' out, and candidates "
                "are drafted and ranked"
            )
        found = fill_by_fim(lm, tokens, gapped, options, drafts=drafts)
    else:
        proposed: list[tuple[str, ...]] = []
        if choices is not None:
            proposed = _given(choices, gapped)
        elif twin is not None:
            made = fill_by_masks(masked_model(twin), gapped, candidates=candidates)
            proposed = [filled.texts for filled in made]
        found = fill_by_ranking(
            lm,
            gapped,
            drafting(lm, options, candidates=candidates, drafts=drafts),
            reach=reach,
            top=top,
            proposed=proposed,
            only=choices is not None,
        )
    return Filling(found[:candidates], way, gapped.texts)


def drafting(lm: Session, options: dict[str, Any], *, candidates: int, drafts: int) -> Drafting:
    """How drafts are written, from a caller's options: greedily, unless told otherwise."""
    for name in _NOT_HERE:
        if options.get(name):
            raise SettingsError(
                f"{name} cannot be had in a gap that is filled by ranking: candidates come from "
                "drafts that are cut anywhere; leave it out"
            )
    request = lm.draft([0], **{"temperature": 0, **options}).request
    stop = request.limits.stop
    return Drafting(request.settings, max(64, candidates), drafts, candidates, stop)


def _way(lm: Session, by: str, choices: object, twin: object) -> str:
    if by != "auto":
        return by
    if lm.config.sight != "causal":
        return "masked"
    if choices is None and twin is None and fim_tokens(lm.tokenizer) is not None:
        return "fim"
    return "ranking"


def _given(choices: Sequence[str], gapped: GappedText) -> list[tuple[str, ...]]:
    """A caller's own candidates, for the one gap that there is."""
    if len(gapped.gaps) > 1:
        raise SettingsError(f"choices are for one gap, and the text has {len(gapped.gaps)}")
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(choice, str) for choice in choices):
        raise SettingsError(f"choices are {choices!r}; they may be a list of texts, at least one")
    return [(choice,) for choice in dict.fromkeys(choices)]
