"""Beyond left to right, as methods of a model: gaps filled, texts gone over once more, texts that
are filled in any order, and the best of many that a search has looked at.

    lm.fill("The ", unspool.gap, " sat on the mat").text
    lm.edit("The cat sat at the mat.").changes
    lm.diffuse("Once upon a time", max_tokens=64).text
    for one in lm.stream_diffusion("Once upon a time"):
        print(one)                                        # <Pass 3: 5 set, 40 masked>
    lm.think("What is 17 * 24?", policy="vote", budget=2000).text

The work is done in `decoding/fill`, `decoding/edit`, `decoding/diffusion.py` and `decoding/think`,
which are imported when first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from unspool.engine.options import Options, tells_options
from unspool.request_options import several
from unspool.session import Prompt, Session

if TYPE_CHECKING:
    from unspool.decoding.diffusion import DiffusionStream
    from unspool.decoding.diffusion_options import DiffusionOptions
    from unspool.decoding.edit.edit import Edit
    from unspool.decoding.fill.gaps import Gap
    from unspool.decoding.fill.masked import MaskedModel
    from unspool.decoding.fill.result import Filling
    from unspool.decoding.passes import Diffusion, Diffusions
    from unspool.decoding.think.think import JudgeGiven, Policy, ThoughtStream
    from unspool.decoding.think.thought import Thought
    from unspool.engine.canvas import Canvas

Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | list[Prompt]


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
        threshold: float = 0.99,
        trust: float = 10.0,
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
        trust        nats by which another word must beat the one that somebody wrote before the two
                     count alike; a word that is one slip of the hand away needs 3 less. 0: none.
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
            trust=trust,
            passes=passes,
            budget=budget,
            places=places,
            candidates=candidates,
            reach=reach,
            progress=progress,
        )

    # -- in any order ---------------------------------------------------------------------------

    @overload
    def diffuse(
        self, prompt: Prompt, *, progress: bool = True, **options: Unpack[DiffusionOptions]
    ) -> Diffusion: ...

    @overload
    def diffuse(
        self, prompt: Prompts, *, progress: bool = True, **options: Unpack[DiffusionOptions]
    ) -> Diffusions: ...

    def diffuse(
        self,
        prompt: Prompt | Prompts,
        *,
        progress: bool = True,
        **options: Unpack[DiffusionOptions],
    ) -> Diffusion | Diffusions:
        """Fill masked places behind a prompt in any order, several a pass; needs a mask token.

        max_tokens, block    how many places (128), and how many are filled before the next.
        given                tokens that stand there from the start; None: a masked place.
        order                threshold (0.9), factor (1), entropy (entropy_bound=0.1), left,
                             fixed, margin, random (k=1 a pass, or steps=), or a function.
        steps                the most passes a block may take; 1: all of it at once.
        remask, edit         take a token back that has become less likely than this; replace it by
                             another that is likelier than this.
        guidance, cache      go by the prompt so much more; "prefix" and "dual" are approximate.
        twin                 a loaded adapter that fills the canvas behind the model's own text.
        temperature, ...     as in `generate`, but 0 unless it is given; seed, stop, top as there.
        json, grammar, ...   as there, with order="left" alone.
        """
        from unspool.decoding.diffusion import diffuse, diffuse_all

        if texts := several(prompt):
            return diffuse_all(self, texts, dict(options), progress=progress)
        return diffuse(self, cast(Prompt, prompt), **options)

    def stream_diffusion(
        self, prompt: Prompt, **options: Unpack[DiffusionOptions]
    ) -> DiffusionStream:
        """`diffuse`, pass by pass: iterate over it; `.result` is the text so far."""
        from unspool.decoding.diffusion import stream_diffusion

        return stream_diffusion(self, prompt, **options)

    def canvas(
        self,
        prompt: Prompt,
        length: int,
        *,
        block: int | None = None,
        twin: str | None = None,
        mask: int | str | None = None,
        shifted: bool | None = None,
    ) -> Canvas:
        """Masked places behind a prompt, to be filled by hand: set, clear, logits, commit, fork."""
        from unspool.decoding.diffusion_options import canvas_kind
        from unspool.engine.canvas import open_canvas

        asked = {"block": block, "twin": twin, "mask": mask, "shifted": shifted}
        kind = canvas_kind(
            self, {name: value for name, value in asked.items() if value is not None}
        )
        return open_canvas(self.engine, self.prompt_ids(prompt), length, kind)

    # -- thinking longer ------------------------------------------------------------------------

    def think(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "best-of",
        judge: JudgeGiven = None,
        budget: int | None = 2000,
        progress: bool = True,
        **options: Any,
    ) -> Thought:
        """Spend more tokens on a text: a search for one that a judge likes best.

        policy    how it is searched for: "best-of" writes n=8 texts and keeps the best; the
                  others, and what each can be told, are in docs/thinking.md. Or one of your own.
        judge     who says what is better: a name ("logprob", "certainty", "vote", ...), a function
                  of a `Generation` that gives a number or True and False, or a `Judge`. By default
                  the likeliest text wins.
        budget    how many tokens may be computed in all: the prompt, all that is written, kept or
                  not, and what a judge's model reads. Never more than that; None: no limit.
        options   those of the policy, and those of `generate` (max_tokens is the most of each
                  text). The same seed gives the same tree.
        """
        from unspool.decoding.think.think import think

        return think(
            self, prompt, policy=policy, judge=judge, budget=budget, progress=progress, **options
        )

    def stream_think(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "best-of",
        judge: JudgeGiven = None,
        budget: int | None = 2000,
        **options: Any,
    ) -> ThoughtStream:
        """`think`, watched live: iterate over its events; `.result` is the thought afterwards."""
        from unspool.decoding.think.think import stream_think

        return stream_think(self, prompt, policy=policy, judge=judge, budget=budget, **options)
