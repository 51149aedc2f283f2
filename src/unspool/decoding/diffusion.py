"""Diffusion: a text that is filled in any order, several places a pass.

    diffuse(lm, "Once upon a time", max_tokens=64, order="threshold", threshold=0.9)
    for one in stream_diffusion(lm, "Once upon a time"): print(one)      # pass by pass

The text begins as masked places (a canvas). A pass of the model guesses all of them at once; the
order (`orders.py`) says which guesses are kept; the next pass sees those. Long texts are filled
block by block. With `steps=1` all of a block is kept at once: the words then do not know of each
other, which a last look shows.

The random number of a guess is a function of seed, sample, position and pass, so the same seed
gives the same text, whatever else the engine computes in the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from time import perf_counter
from typing import Any

from unspool.decoding.canvas_text import CanvasText
from unspool.decoding.diffusion_options import DiffusionPlan, plan_of
from unspool.decoding.passes import Diffusion, Diffusions, Pass
from unspool.decoding.progress import progress_bar
from unspool.engine.canvas import first_guesses, run_passes
from unspool.session import Prompt, Session

_AT_ONCE = 64  # texts: more rows make a pass longer, and each of them hardly cheaper
_SHARE = 0.9  # of all pages, for their canvases


def diffuse(lm: Session, prompt: Prompt, **options: Any) -> Diffusion:
    """A text for one prompt."""
    return diffuse_all(lm, [prompt], options, progress=False)[0]


def diffuse_all(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any], *, progress: bool = True
) -> Diffusions:
    """A text for each prompt, their passes computed together."""
    plans = [plan_of(lm, prompt, options) for prompt in prompts]
    results = Diffusions(Diffusion(plan.request) for plan in plans)
    with progress_bar("filling", sum(plan.length for plan in plans), show=progress) as tell:
        filled = [0] * len(plans)
        for number, one in _passes(lm, plans, results):
            filled[number] = len(one.tokens) - one.masked
            tell(sum(filled))
    return results


class DiffusionStream(Iterator[Pass]):
    """The passes of one diffusion as they are made; leaving the loop in any way ends it."""

    def __init__(self, lm: Session, prompt: Prompt, options: dict[str, Any]) -> None:
        plan = plan_of(lm, prompt, options)
        self.result = Diffusion(plan.request)
        self.length = plan.length  # places in all
        self._passes = _passes(lm, [plan], [self.result])

    def __iter__(self) -> Iterator[Pass]:
        try:
            for _, one in self._passes:
                yield one
        finally:
            self.close()

    def __next__(self) -> Pass:
        return next(self._passes)[1]

    def close(self) -> None:
        """End it here; what is set so far is in `result`."""
        self._passes.close()


def stream_diffusion(lm: Session, prompt: Prompt, **options: Any) -> DiffusionStream:
    """A diffusion, pass by pass."""
    return DiffusionStream(lm, prompt, options)


def _passes(
    lm: Session, plans: Sequence[DiffusionPlan], results: Sequence[Diffusion]
) -> Generator[tuple[int, Pass], None, None]:
    """Run diffusions side by side, as many as there is memory for; each pass comes with the number
    of its text."""
    going: list[tuple[int, CanvasText]] = []
    waiting = deque(enumerate(zip(plans, results, strict=True)))
    try:
        while going or waiting:
            while waiting and _fits(lm, [text.plan for _, text in going], waiting[0][1][0]):
                number, (plan, result) = waiting.popleft()
                going.append((number, CanvasText(lm, plan, result)))
            yield from _round(going)
            for _, text in (one for one in going if one[1].finished):
                text.close()
            going = [one for one in going if not one[1].finished]
    finally:
        for _, text in going:
            text.close()


def _round(going: Sequence[tuple[int, CanvasText]]) -> Iterator[tuple[int, Pass]]:
    """One pass of every text; where a block begins, its first place may be guessed before that."""
    for _, text in going:
        text.since = perf_counter()
    fresh = [(number, text) for number, text in going if text.begins]
    guessed = first_guesses([text.canvas for _, text in fresh])
    for (number, text), ahead in zip(fresh, guessed, strict=True):
        text.begins = False
        if ahead is not None and text.wants_first:
            yield number, text.take_first(ahead)
    ready = [(number, text) for number, text in going if not (text.finished or text.begins)]
    wanted = [(canvas, text.window) for _, text in ready for canvas in text.canvases]
    found = iter(run_passes(wanted))
    for number, text in ready:
        yield number, text.take([next(found) for _ in text.canvases])


def _fits(lm: Session, running: Sequence[DiffusionPlan], more: DiffusionPlan) -> bool:
    """Whether the pages are enough for one more: between two passes a canvas keeps its own."""
    tree, size = lm.engine.tree, lm.engine.tree.page_size
    needed = 0
    for plan in (*running, more):
        tokens = len(plan.request.prompt) + plan.length + plan.kind.block
        needed += (-(-tokens // size) + 1) * (2 if plan.guidance else 1)
    return not running or (len(running) < _AT_ONCE and needed <= tree.pool.count * _SHARE)
