"""Texts that are filled in any order, as methods of a model.

print(lm.diffuse("Once upon a time", max_tokens=64))
for one in lm.stream_diffusion("Once upon a time"):
    print(one)                                        # <Pass 3: 5 set, 40 masked>

The work is done in `decoding/diffusion.py`, which is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack, cast, overload

from unspool.request_options import several
from unspool.session import Prompt, Session

if TYPE_CHECKING:
    from unspool.decoding.diffusion import DiffusionStream
    from unspool.decoding.diffusion_options import DiffusionOptions
    from unspool.decoding.passes import Diffusion, Diffusions
    from unspool.engine.canvas import Canvas

Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | list[Prompt]


class Diffusing(Session):
    """What can be done with a model that has a mask token."""

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
