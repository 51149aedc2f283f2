"""Beyond left to right, as methods of a model: gaps filled, texts gone over once more.

    lm.fill("The ", unspool.gap, " sat on the mat").text
    lm.edit("The cat sat at the mat.").changes

The work is done in `decoding/fill` and `decoding/edit`, which are imported when first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack

from unspool.engine.options import Options, tells_options
from unspool.session import Session

if TYPE_CHECKING:
    from unspool.decoding.edit.edit import Edit
    from unspool.decoding.fill.gaps import Gap
    from unspool.decoding.fill.masked import MaskedModel
    from unspool.decoding.fill.result import Filling


class BeyondLeftToRight(Session):
    """What else can be done with a text than to go on with it."""

    @tells_options
    def fill(
        self,
        *parts: str | Gap,
        by: Literal["auto", "masked", "fim", "ranking"] = "auto",
        candidates: int = 20,
        drafts: int = 6,
        reach: int | None = 64,
        choices: Sequence[str] | None = None,
        twin: Session | MaskedModel | None = None,
        **options: Unpack[Options],
    ) -> Filling:
        """Fill the gaps of a text: `lm.fill("The ", unspool.gap, " sat on the mat")`.

        parts        texts and gaps in turn, or one text with ___ where a gap is. `gap(2)` has two
                     tokens, `gap(1, 8)` one to eight, `gap` alone up to sixteen.
        by           how: by a masked model's places, by FIM tokens, or by drafting candidates from
                     the left and ranking them with the right; by default what the model can.
        candidates   how many are ranked in full, and told.
        drafts       how many first tokens are gone on with where a gap may be longer.
        reach        how many tokens behind a gap are weighed; None: all.
        choices      rank only these.
        twin         a masked model that proposes candidates too.

        Options are those of sampling, for the drafts: greedy unless a temperature is given.
        """
        from unspool.decoding.fill.fill import fill

        return fill(
            self,
            parts,
            by=by,
            candidates=candidates,
            drafts=drafts,
            reach=reach,
            choices=choices,
            twin=twin,
            **options,
        )

    def edit(
        self,
        text: str,
        *,
        twin: Session | MaskedModel | None = None,
        doubt: Literal["auto", "causal", "masked", "both"] = "auto",
        threshold: float = 0.9,
        passes: int = 3,
        budget: int | None = None,
        places: int = 24,
        candidates: int = 12,
        reach: int | None = 24,
        progress: bool = True,
    ) -> Edit:
        """Revise a text: doubtful words are replaced where something fits both sides better.

        twin         a masked model, which doubts and proposes too.
        doubt        who says what is doubtful: the causal model's surprise, the masked model, or
                     both; by default both where there is a twin.
        threshold    changes at least so probable are made; the others are only proposed, and can be
                     made by hand: `edit.apply(number)`, `edit.undo(number)`.
        passes       over the text, at most; it ends when one changes nothing.
        budget       tokens that may be weighed to rank proposals; None: as many as it takes.
        places       words looked at in a pass, the most doubtful first.
        candidates   for each of them.
        reach        how many tokens behind a word are weighed; None: all.
        """
        from unspool.decoding.edit.edit import edit

        return edit(
            self,
            text,
            twin=twin,
            doubt=doubt,
            threshold=threshold,
            passes=passes,
            budget=budget,
            places=places,
            candidates=candidates,
            reach=reach,
            progress=progress,
        )
