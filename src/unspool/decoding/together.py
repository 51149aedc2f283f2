"""Many texts in one batch: a list of prompts, or samples of one prompt.

    lm.generate(["Once upon a time", "The capital of Germany is"])

What the prompts have in common at their beginning is computed once. Each text is the one that it
would be alone. Leaving in any way, an interrupt too, ends whatever is still being written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import takewhile
from time import perf_counter
from typing import Any

from unspool.decoding.progress import progress_bar
from unspool.engine.generation import Generation, Generations
from unspool.engine.stream import StepStream
from unspool.errors import BatchError, UnspoolError
from unspool.session import Prompt, Session

_AT_ONCE = 512  # texts handed in together: more than fit a batch, fewer than may wait
_LOOK_UP = 0.02  # seconds after which it is seen to whether some are done


def generate_all(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any], *, progress: bool = True
) -> Generations:
    """A text for each prompt, in their order, all with the same options.

    Prompts are checked before anything is written. A text that goes wrong later does not stop the
    others: once they are written, a `BatchError` tells what happened, and holds them all.
    """
    texts = Generations(_draft(lm, number, one, options) for number, one in enumerate(prompts))
    with progress_bar("writing", len(texts), show=progress) as tell:
        failed = write_all(lm, texts, tell)
    _raise_failures(texts, failed)
    return texts


async def write_async(lm: Session, text: Generation) -> None:
    """Write a draft without blocking the event loop; cancelling the task cancels the request."""
    import asyncio  # large, and only needed here

    # In a thread, because the first request starts the engine and a drafter may load a model.
    await text.extend_async(await asyncio.to_thread(_submit, lm, text))


async def generate_all_async(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any]
) -> Generations:
    """`generate_all` on an event loop; cancelling the task cancels all of its requests."""
    import asyncio

    async def write(text: Generation) -> None:
        async with running:
            await write_async(lm, text)

    running = asyncio.Semaphore(_AT_ONCE)
    texts = await asyncio.to_thread(_draft_all, lm, prompts, options)
    results = await asyncio.gather(*map(write, texts), return_exceptions=True)
    failed = {n: result for n, result in enumerate(results) if isinstance(result, Exception)}
    _raise_failures(texts, failed)
    return texts


def _submit(lm: Session, text: Generation) -> StepStream:
    return lm.engine.submit(text.request)


def _draft_all(lm: Session, prompts: Sequence[Prompt], options: dict[str, Any]) -> Generations:
    """Drafts of all prompts, with what they share at their beginning computed."""
    texts = Generations(_draft(lm, number, one, options) for number, one in enumerate(prompts))
    if len(texts) > 1:
        read_what_all_share(lm, texts)
    return texts


def _raise_failures(texts: Generations, failed: dict[int, Exception]) -> None:
    if failed:
        number, error = next(iter(failed.items()))
        raise BatchError(
            f"{len(failed)} of {len(texts)} texts went wrong, the first of them number {number}: "
            f"{error} (this error's `generations` holds what was written, its `errors` the rest)",
            texts,
            failed,
        ) from error


def _draft(lm: Session, number: int, prompt: Prompt, options: dict[str, Any]) -> Generation:
    try:
        return lm.draft(prompt, **options)
    except UnspoolError as error:
        raise type(error)(f"prompt {number}: {error}") from None


def write_all(
    lm: Session,
    texts: Sequence[Generation],
    tell: Callable[[int], object] = lambda done: None,
    *,
    patient: bool = True,
) -> dict[int, Exception]:
    """Have drafts written, in one batch; what went wrong, by the text's number.

    `tell` hears now and then how many are done. Not `patient`: the first error ends them all.
    """
    failed: dict[int, Exception] = {}
    if len(texts) > 1:
        read_what_all_share(lm, texts)
    writing = one_by_one(lm, texts, [], tell)
    for number, error in writing:
        if error is not None and not patient:
            writing.close()
            raise error
        if error is not None:
            failed[number] = error
    return failed


def one_by_one(
    lm: Session,
    texts: Sequence[Generation],
    started: list[StepStream],
    tell: Callable[[int], object] = lambda done: None,
) -> Generator[tuple[int, Exception | None], None, None]:
    """Have drafts written in one batch, and say in their order when each is done, or what went
    wrong with it. What is `started` is put there, so that it can be closed from elsewhere."""
    looked = 0.0

    def start_more() -> None:
        nonlocal looked
        looked = perf_counter()
        done = sum(steps.ended for steps in started)
        tell(done)
        for text in texts[len(started) : done + _AT_ONCE]:
            started.append(lm.engine.submit(text.request))

    try:
        start_more()
        for number, text in enumerate(texts):
            failure = None
            try:
                for _ in text.extend(started[number]):
                    if perf_counter() > looked + _LOOK_UP:
                        start_more()
            except Exception as error:
                failure = error
            start_more()
            yield number, failure
    finally:
        for steps in started:
            steps.close()


def read_what_all_share(lm: Session, texts: Sequence[Generation]) -> None:
    """Begun all at once, the texts would each find nothing computed, and each compute the same.

    The last token each reads itself, for the logits behind it.
    """
    if len({text.request.adapter for text in texts}) > 1:
        return
    prompts, adapter = [text.prompt for text in texts], texts[0].request.adapter
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    count = min(sum(1 for _ in alike), min(map(len, prompts)) - 1)
    if count > 0:
        with lm.opened(prompts[0][:count], adapter) as branch:
            lm.engine.extend(branch)
