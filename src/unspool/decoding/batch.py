"""Generate many texts in one batch: for a list of prompts, or samples of one prompt.

    lm.generate(["Once upon a time", "The capital of Germany is"])

The common prefix of the prompts is computed once. Each text is the same as if generated alone.
Any exit, Ctrl-C included, cancels all running requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import takewhile
from typing import Any

from unspool.engine.generation import Generation, Generations
from unspool.engine.results import StepStream
from unspool.errors import BatchError, UnspoolError
from unspool.progress import progress_bar
from unspool.session import Prompt, Session

_MAX_SUBMITTED = 512  # requests: more than fit a batch, fewer than the queue limit
_POLL_S = 0.02  # interval of checks for finished requests


def generate_all(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any], *, progress: bool = True
) -> Generations:
    """Generate one text per prompt, in order, all with the same options.

    Prompts are validated first. A text that fails later does not stop the others; at the end a
    `BatchError` reports the failures and holds all texts.
    """
    texts = Generations(
        _draft(lm, number, prompt, options) for number, prompt in enumerate(prompts)
    )
    with progress_bar("writing", len(texts), show=progress) as report:
        failed = run_all(lm, texts, report)
    _raise_failures(texts, failed)
    return texts


async def run_async(lm: Session, text: Generation) -> None:
    """Run a prepared request on an event loop; cancelling the task cancels the request."""
    import asyncio  # slow to import, and only needed here

    # In a thread, because the first request starts the engine and a drafter may load a model.
    await text.extend_async(await asyncio.to_thread(_submit, lm, text))


async def generate_all_async(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any]
) -> Generations:
    """`generate_all` on an event loop; cancelling the task cancels all of its requests."""
    import asyncio

    async def write(text: Generation) -> None:
        async with running:
            await run_async(lm, text)

    running = asyncio.Semaphore(_MAX_SUBMITTED)
    texts = await asyncio.to_thread(_draft_all, lm, prompts, options)
    results = await asyncio.gather(*map(write, texts), return_exceptions=True)
    failed = {n: result for n, result in enumerate(results) if isinstance(result, Exception)}
    _raise_failures(texts, failed)
    return texts


def _submit(lm: Session, text: Generation) -> StepStream:
    return lm.engine.submit(text.request)


def _draft_all(lm: Session, prompts: Sequence[Prompt], options: dict[str, Any]) -> Generations:
    """Prepare the requests of all prompts, with their common prefix prefilled."""
    texts = Generations(
        _draft(lm, number, prompt, options) for number, prompt in enumerate(prompts)
    )
    if len(texts) > 1:
        prefill_common_prefix(lm, texts)
    return texts


def _raise_failures(texts: Generations, failed: dict[int, Exception]) -> None:
    if failed:
        number, error = next(iter(failed.items()))
        raise BatchError(
            f"{len(failed)} of {len(texts)} texts failed, the first of them number {number}: "
            f"{error} (this error's `generations` holds all texts, its `errors` the failures)",
            texts,
            failed,
        ) from error


def _draft(lm: Session, number: int, prompt: Prompt, options: dict[str, Any]) -> Generation:
    try:
        return lm.prepare_generation(prompt, **options)
    except UnspoolError as error:
        raise type(error)(f"prompt {number}: {error}") from None


def run_all(
    lm: Session,
    texts: Sequence[Generation],
    tell: Callable[[int], object] = lambda done: None,
    *,
    patient: bool = True,
) -> dict[int, Exception]:
    """Run prepared requests in one batch; returns the failures by index.

    `tell` is called from time to time with the number of finished texts. With `patient=False` the
    first error cancels all and is raised.
    """
    failed: dict[int, Exception] = {}
    if len(texts) > 1:
        prefill_common_prefix(lm, texts)
    writing = run_in_order(lm, texts, [], tell)
    for number, error in writing:
        if error is not None and not patient:
            writing.close()
            raise error
        if error is not None:
            failed[number] = error
    return failed


def run_in_order(
    lm: Session,
    texts: Sequence[Generation],
    started: list[StepStream],
    tell: Callable[[int], object] = lambda done: None,
) -> Generator[tuple[int, Exception | None], None, None]:
    """Run prepared requests in one batch; yields (index, error or None) in order as they finish.
    Streams are added to `started`, so that another thread can close them."""

    def start_more(done: int) -> None:
        done += sum(steps.ended for steps in started[done:])
        tell(done)
        for text in texts[len(started) : done + _MAX_SUBMITTED]:
            started.append(lm.engine.submit(text.request))

    try:
        start_more(0)
        for number, text in enumerate(texts):
            failure = None
            try:
                while not started[number].wait_for_end(_POLL_S):
                    start_more(number)
                text.extend_to_end(started[number])
            except Exception as error:
                failure = error
            start_more(number + 1)
            yield number, failure
    finally:
        for steps in started:
            steps.close()


def prefill_common_prefix(lm: Session, texts: Sequence[Generation]) -> None:
    """Prefill the common prefix of all prompts once.

    Without this, texts that start in the same step would each compute it. Each text computes its
    last prompt token itself, for the logits.
    """
    if len({(text.request.adapter, text.request.interventions) for text in texts}) > 1:
        return
    prompts, request = [text.prompt for text in texts], texts[0].request
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    count = min(sum(1 for _ in alike), min(map(len, prompts)) - 1)
    if count > 0:
        with lm.open_branch(
            prompts[0][:count], request.adapter, request.branch_interventions()
        ) as branch:
            lm.engine.extend(branch)
