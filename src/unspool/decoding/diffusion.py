"""Masked diffusion: fill a text in any order, several positions per denoising pass.

    diffuse(lm, "Once upon a time", max_tokens=64, order="threshold", threshold=0.9)
    for step in stream_diffusion(lm, "Once upon a time"): print(step)      # pass by pass

The text starts as mask tokens (a canvas). A pass predicts all masked positions; the order
(`orders.py`) decides which predictions are kept; the next pass sees those. Long texts are filled
block by block (block diffusion). With `steps=1` a whole block is set in one pass; one more pass
then reports how likely its tokens are together.

The random number of a position is a function of seed, sample, position and pass, so the same seed
gives the same text in any batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from time import perf_counter
from typing import Any

from unspool.decoding.canvas_text import CanvasText
from unspool.decoding.diffusion_options import DiffusionPlan, make_plan
from unspool.decoding.passes import Diffusion, DiffusionPass, Diffusions
from unspool.decoding.progress import progress_bar
from unspool.engine.canvas import first_place_logits, run_passes
from unspool.session import Prompt, Session

_MAX_TEXTS = 64  # per pass: more rows make it longer and hardly more efficient
_PAGE_SHARE = 0.9  # of all pages, for canvases


def diffuse(lm: Session, prompt: Prompt, **options: Any) -> Diffusion:
    """Generate one text by diffusion."""
    return diffuse_all(lm, [prompt], options, progress=False)[0]


def diffuse_all(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any], *, progress: bool = True
) -> Diffusions:
    """Generate one text per prompt, with their passes batched."""
    plans = [make_plan(lm, prompt, options) for prompt in prompts]
    results = Diffusions(Diffusion(plan.request) for plan in plans)
    with progress_bar("filling", sum(plan.length for plan in plans), show=progress) as report:
        filled = [0] * len(plans)
        for number, denoising_pass in _run_passes(lm, plans, results):
            filled[number] = len(denoising_pass.tokens) - denoising_pass.masked
            report(sum(filled))
    return results


class DiffusionStream(Iterator[DiffusionPass]):
    """The denoising passes of one text; leaving the loop in any way ends it."""

    def __init__(self, lm: Session, prompt: Prompt, options: dict[str, Any]) -> None:
        plan = make_plan(lm, prompt, options)
        self.result = Diffusion(plan.request)
        self.length = plan.length  # number of positions
        self._passes = _run_passes(lm, [plan], [self.result])

    def __iter__(self) -> Iterator[DiffusionPass]:
        try:
            for _, denoising_pass in self._passes:
                yield denoising_pass
        finally:
            self.close()

    def __next__(self) -> DiffusionPass:
        return next(self._passes)[1]

    def close(self) -> None:
        """Stop; `result` has the tokens set so far."""
        self._passes.close()


def stream_diffusion(lm: Session, prompt: Prompt, **options: Any) -> DiffusionStream:
    """Generate by diffusion and yield each pass."""
    return DiffusionStream(lm, prompt, options)


def _run_passes(
    lm: Session, plans: Sequence[DiffusionPlan], results: Sequence[Diffusion]
) -> Generator[tuple[int, DiffusionPass], None, None]:
    """Run diffusions in parallel, as many as fit in memory; yields (text index, pass)."""
    active: list[tuple[int, CanvasText]] = []
    waiting = deque(enumerate(zip(plans, results, strict=True)))
    try:
        while active or waiting:
            while waiting and _fits(lm, [text.plan for _, text in active], waiting[0][1][0]):
                number, (plan, result) = waiting.popleft()
                active.append((number, CanvasText(lm, plan, result)))
            yield from _run_round(active)
            for _, text in (entry for entry in active if entry[1].finished):
                text.close()
            active = [entry for entry in active if not entry[1].finished]
    finally:
        for _, text in active:
            text.close()


def _run_round(active: Sequence[tuple[int, CanvasText]]) -> Iterator[tuple[int, DiffusionPass]]:
    """Run one pass of every text; a new block may get its first token before that."""
    for _, text in active:
        text.since = perf_counter()
    starting = [(number, text) for number, text in active if text.begins]
    guessed = first_place_logits([text.canvas for _, text in starting])
    for (number, text), logits in zip(starting, guessed, strict=True):
        text.begins = False
        if logits is not None and text.needs_first:
            yield number, text.apply_first(logits)
    ready = [(number, text) for number, text in active if not (text.finished or text.begins)]
    inputs = [(canvas, text.window) for _, text in ready for canvas in text.canvases]
    results = iter(run_passes(inputs))
    for number, text in ready:
        yield number, text.apply_pass([next(results) for _ in text.canvases])


def _fits(lm: Session, running: Sequence[DiffusionPlan], new: DiffusionPlan) -> bool:
    """Whether the pages suffice for one more text; canvases hold pages between passes."""
    tree, size = lm.engine.tree, lm.engine.tree.page_size
    needed = 0
    for plan in (*running, new):
        tokens = len(plan.request.prompt) + plan.length + plan.kind.block
        needed += (-(-tokens // size) + 1) * (2 if plan.guidance else 1)
    return not running or (len(running) < _MAX_TEXTS and needed <= tree.pool.count * _PAGE_SHARE)
