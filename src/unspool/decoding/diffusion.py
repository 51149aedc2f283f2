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

from collections.abc import Generator, Iterator, Sequence
from time import perf_counter
from typing import Any

from unspool.decoding.canvas_text import CanvasText
from unspool.decoding.diffusion_options import DiffusionPlan, plan_of
from unspool.decoding.passes import Diffusion, Diffusions, Pass
from unspool.decoding.progress import progress_bar
from unspool.engine.canvas import first_guesses, run_passes
from unspool.session import Prompt, Session


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
    """Run diffusions side by side; each pass comes with the number of its text."""
    texts: list[CanvasText] = []
    try:
        for plan, result in zip(plans, results, strict=True):
            texts.append(CanvasText(lm, plan, result))
        while going := [text for text in texts if not text.finished]:
            for text in going:
                text.since = perf_counter()
            fresh = [text for text in going if text.begins]
            guessed = first_guesses([text.canvas for text in fresh])
            for text, ahead in zip(fresh, guessed, strict=True):
                text.begins = False
                if ahead is not None and text.wants_first:
                    yield texts.index(text), text.take_first(ahead)
            going = [text for text in going if not (text.finished or text.begins)]
            wanted = [(canvas, text.window) for text in going for canvas in text.canvases]
            found = iter(run_passes(wanted))
            for text in going:
                yield texts.index(text), text.take([next(found) for _ in text.canvases])
    finally:
        for text in texts:
            text.close()
