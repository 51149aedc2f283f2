"""Infilling: `lm.fill("The ", gap, " sat on the mat")`.

Three methods; the model decides which: a masked model sees both sides (`places.py`); a vocabulary
with FIM tokens belongs to a model trained to write the middle (`fim.py`); any other causal model
drafts after the prefix and ranks the drafts with the suffix (`causal.py`).
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
from unspool.decoding.written import check_int
from unspool.errors import SettingsError
from unspool.session import Session

WAYS = ("auto", "masked", "fim", "ranking")
REACH = 64  # tokens of the suffix that are scored
_UNSUPPORTED = ("json", "json_schema", "regex", "choice", "grammar", "guard", "speculate")


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
    """Fill the gaps of a text; see `LanguageModel.fill`."""
    if by not in WAYS:
        raise SettingsError(f"by must be one of {', '.join(WAYS)}, got {by!r}")
    check_int("candidates", candidates)
    check_int("drafts", drafts)
    if reach is not None:
        check_int("reach", reach)
    if options.get("max_tokens") is not None:
        raise SettingsError("set the length in the gap, gap(1, 8), not with max_tokens")
    gapped = GappedText.parse(parts, usual)
    method = _choose_method(lm, by, choices, twin)
    top = options.get("top") or 0
    candidates_found: tuple[Filled, ...]
    if method == "masked":
        candidates_found = fill_by_masks(WholeText(lm), gapped, candidates=candidates, top=top)
    elif method == "fim":
        tokens = fim_tokens(lm.tokenizer)
        if tokens is None:
            raise SettingsError(
                "this model's vocabulary has no FIM tokens; leave out by='fim' to draft and rank "
                "candidates"
            )
        candidates_found = fill_by_fim(lm, tokens, gapped, options, drafts=drafts)
    else:
        proposed: list[tuple[str, ...]] = []
        if choices is not None:
            proposed = _check_choices(choices, gapped)
        elif twin is not None:
            fillings = fill_by_masks(masked_model(twin), gapped, candidates=candidates)
            proposed = [filled.texts for filled in fillings]
        candidates_found = fill_by_ranking(
            lm,
            gapped,
            draft_settings(lm, options, candidates=candidates, drafts=drafts),
            reach=reach,
            top=top,
            proposed=proposed,
            only=choices is not None,
        )
    return Filling(candidates_found[:candidates], method, gapped.texts)


def draft_settings(
    lm: Session, options: dict[str, Any], *, candidates: int, drafts: int
) -> Drafting:
    """Draft settings from the caller's options; greedy by default."""
    for name in _UNSUPPORTED:
        if options.get(name):
            raise SettingsError(
                f"{name} cannot be used when a gap is filled by ranking: candidates are drafts cut "
                "at any token; leave it out"
            )
    request = lm.prepare_generation([0], **{"temperature": 0, **options}).request
    stop = request.limits.stop
    return Drafting(request.settings, max(64, candidates), drafts, candidates, stop)


def _choose_method(lm: Session, by: str, choices: object, twin: object) -> str:
    if by != "auto":
        return by
    if lm.config.sight != "causal":
        return "masked"
    if choices is None and twin is None and fim_tokens(lm.tokenizer) is not None:
        return "fim"
    return "ranking"


def _check_choices(choices: Sequence[str], gapped: GappedText) -> list[tuple[str, ...]]:
    """The caller's candidates for the only gap."""
    if len(gapped.gaps) > 1:
        raise SettingsError(f"choices need a text with one gap, this one has {len(gapped.gaps)}")
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(choice, str) for choice in choices):
        raise SettingsError(f"choices must be a list of at least one text, got {choices!r}")
    return [(choice,) for choice in dict.fromkeys(choices)]
