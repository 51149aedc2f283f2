"""Edit any span of a branch, prompt included, and score what follows.

Only what changed is tokenized again: `splice_tokens` bounds the new tokens, everything else stays
as it was written. Tokens of the chat template are never changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.server.http.errors import bad_request
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.runtime.schema import Strict
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import finite
from unspool.server.runtime.threads import Worker
from unspool.server.tree.branch_json import branches_of, reply, router
from unspool.server.tree.branches import MessageSpan, TreeBranch, TreePrompt, fork_branch
from unspool.server.tree.parts import attach, with_parts
from unspool.server.tree.prompt import Name, Place, chat_tree_prompt
from unspool.server.tree.turns import find_turns
from unspool.session import Session
from unspool.text.tokenizer.splice import splice_tokens

_FIRST_SCORED, _MOST_SCORED = 32, 256  # tokens in a call: the first result comes soon


class EditRequest(Strict):
    """A new text for a span of the whole text."""

    first: Place = Field(description="the first token of the span, counted in the whole text")
    last: Place = Field(description="the token after the span; equal to `first`: insert")
    text: str = Field(description="the new text; empty: delete the span")
    after: Literal["keep", "drop"] = Field("keep", description="what to do with the text after it")
    score: bool = Field(True, description="score the new tokens and the text after them")
    fork: bool = Field(True, description="into a new branch; the old one stays")
    name: Name | None = None


class ScoreStepsRequest(Strict):
    """Which steps to score: all from the first without a score."""

    stream: bool = False


@dataclass(frozen=True)
class EditedText:
    """The text after an edit."""

    prompt: TreePrompt
    generation: Generation
    since: int  # the first step that differs


@router.post("/{identity}/edit", summary="Edit any span of the text; what follows is kept")
async def edit_span(identity: str, body: EditRequest, request: Request) -> Response:
    """Positions count tokens of the whole text, prompt included. Tokens of the chat template stay:
    in a chat, a span over several messages changes the words of each. Steps without a score
    (`logprob` and `rank` are null) get one from `score`."""
    branches = branches_of(request)
    branch = await branches.open(identity)
    length = len(branch.prompt.ids) + len(branch.steps)
    first, last = (text_position(at, length, name) for at, name in
                   ((body.first, "first"), (body.last, "last")))  # fmt: skip
    if first > last:
        raise bad_request(f"last must be at least first ({first}), got {last}", "last")
    branches.make_room(1 if body.fork else 0, branch)
    with nullcontext() if body.fork else branch.locked():
        copy = branch.generation.fork()  # the branch may be running
        async with state_of(request).call(request, branch.model) as call:
            draft = await call.compute(attach, branch, copy, call.served.lm)
            edited: EditedText = await call.compute(
                edit_text, call, branch, draft, first, last, body
            )
        is_new_prompt = edited.prompt is not branch.prompt
        since = edited.since
        if body.fork:
            branch = fork_branch(branch, edited.generation, since, body.name)
            branch.prompt = edited.prompt
            await branches.add(branch)
        else:
            await branches.store.replace_text(
                branch, edited.generation, since, "edit", prompt=edited.prompt
            )
    return await reply(branch, since, prompt=is_new_prompt)


def text_position(at: int, length: int, name: str) -> int:
    """A position in the whole text; negative ones count from the end. Raises 400."""
    if not -length <= at <= length:
        raise bad_request(f"{name} must be within the {length} tokens of the text, got {at}", name)
    return at if at >= 0 else length + at


def edit_text(
    call: Call, branch: TreeBranch, draft: Generation, first: int, last: int, body: EditRequest
) -> EditedText:
    """Compute an edit. Slow: run it on a thread."""
    lm: Session = call.served.lm
    prompt = branch.prompt
    call.check_text(body.text)
    num_prompt, text, drops = len(prompt.ids), body.text, body.after == "drop"
    new_prompt, changes = prompt, list[tuple[int, int, list[int]]]()
    start, end = max(0, first - num_prompt), max(0, last - num_prompt)
    if first < num_prompt:
        new_prompt = _edit_prompt(call, prompt, first, min(last, num_prompt), text, drops)
        text = ""
    if drops:
        is_prompt_kept = new_prompt is prompt
        turns = find_turns(lm.tokenizer, draft.steps) if prompt.messages is not None else []
        turn = _turn_at(turns, start, end) if is_prompt_kept else None
        draft = draft.rewind((end if turn is None else turn.end) if is_prompt_kept else 0)
        end = min(end, len(draft.steps))
    if text or end > start:
        changes = _change_steps(lm, prompt, draft.steps, start, end, text)
    ids = None if new_prompt is prompt else new_prompt.ids
    since = 0 if ids is not None else min([len(draft.steps), *(at for at, _, _ in changes)])
    generation = draft.edited(changes, prompt=ids)
    lm.prompt_ids([*new_prompt.ids, *generation.tokens])
    if generation.request.thinking is not None and ids is not None:
        generation.request = replace(generation.request, thinking=lm.thinking(ids))
    generation = with_parts(lm, new_prompt, generation, branch.extra_settings.values)
    if body.score:
        parts = score_parts(generation, since)
        generation.steps[since:] = [step for _, steps in parts for step in steps]
    return EditedText(new_prompt, generation, since)


def score_parts(generation: Generation, since: int) -> Iterator[tuple[int, list[Step]]]:
    """Yield (index, steps with scores) of consecutive parts."""
    at, size = since, _FIRST_SCORED
    while at < len(generation.steps):
        steps = generation.rescored(at, at + size)
        yield at, steps
        at, size = at + len(steps), min(2 * size, _MOST_SCORED)


# -- the prompt


def _edit_prompt(
    call: Call, prompt: TreePrompt, first: int, last: int, text: str, drops: bool
) -> TreePrompt:
    """The prompt with a new text for the tokens from `first` to before `last`.

    Args:
        drops: Without the text, or the messages, after the edit.
    """
    if prompt.messages is not None:
        messages, changed = _edit_messages(prompt, first, last, text)
        return chat_tree_prompt(call, messages[: changed + 1] if drops else messages)
    lm: Session = call.served.lm
    ids = list(prompt.ids)
    first = max(first, len(prompt.added))  # a start token stays
    last = len(ids) if drops else max(last, first)
    is_canonical = lm.prompt_ids(prompt.text) == ids
    kept, new, end = _splice(lm, ids, first, last, text, is_canonical)
    ids[kept:end] = new
    if not ids:
        raise bad_request("the prompt must not be empty", "text")
    words = lm.tokenizer.decode(ids[len(prompt.added) :])
    return replace(prompt, ids=tuple(ids), text=words)


def _edit_messages(
    prompt: TreePrompt, first: int, last: int, text: str
) -> tuple[list[dict[str, Any]], int]:
    """The messages with new words for a span, and the index of the first that changed."""
    assert prompt.messages is not None
    pieces = [words for _, words in prompt.pieces()]
    messages, changed = list(prompt.messages), list[int]()
    for number, span in enumerate(prompt.spans[: len(messages)]):
        content = messages[number].get("content")
        if not isinstance(content, str):
            continue
        begin, end = span.content or (span.start, span.end)
        is_inside = (
            first <= end and last >= begin if first == last else first < end and last > begin
        )
        if not is_inside or (span.content is None and content.strip()):
            continue
        inserted = "" if changed else text
        if span.content is None:
            messages[number] = {**messages[number], "content": inserted}
            changed.append(number)
            continue
        words_before = "".join(pieces[begin:end])
        core = content if content in words_before else content.strip()
        place = words_before.find(core)
        if place < 0:
            continue
        start = len("".join(pieces[begin : max(first, begin)]))
        stop = len("".join(pieces[begin : max(begin, min(last, end))]))
        # Tokens at the edges may have white space of the template too.
        inserted = inserted.removeprefix(words_before[start : max(start, place)])
        inserted = inserted.removesuffix(
            words_before[place + len(core) : max(stop, place + len(core))]
        )
        words = core[: max(0, start - place)] + inserted + core[max(0, stop - place) :]
        head, _, tail = content.partition(core)
        words = head + words + tail
        messages[number] = {**messages[number], "content": words}
        changed.append(number)
    if not changed:
        raise bad_request(
            "the span must contain words of a message: tokens of the chat template cannot be "
            f"edited, got {first} to {last}",
            "first",
        )
    return messages, changed[0]


# -- the steps


def _change_steps(
    lm: Session, prompt: TreePrompt, steps: Sequence[Step], start: int, end: int, text: str
) -> list[tuple[int, int, list[int]]]:
    """The changes of tokens that give the steps from `start` to before `end` this text."""
    tokens = [step.token for step in steps]
    turns = find_turns(lm.tokenizer, steps) if prompt.messages is not None else []
    changes = list[tuple[int, int, list[int]]]()
    for low, high, is_message in _editable_runs(turns, len(tokens)):
        if low > end or high < start or (start < end and not max(low, start) < min(high, end)):
            continue
        first, last = max(low, start), min(high, end)
        begin, new, stop = _splice(lm, tokens[low:high], first - low, last - low, text, is_message)
        changes.append((low + begin, low + stop, new))
        text = ""
        if start == end:
            break
    if not changes:
        raise bad_request(
            "tokens of the chat template cannot be edited; the span must have words of a message",
            "first",
        )
    return changes


def _editable_runs(turns: Sequence[MessageSpan], length: int) -> Iterator[tuple[int, int, bool]]:
    """(first, last, whether it is a message of the user) of the steps outside the template's."""
    at = 0
    for turn in turns:
        yield at, turn.start, False
        if turn.content is not None:
            yield *turn.content, True
        at = turn.end
    yield at, length, False


def _turn_at(turns: Sequence[MessageSpan], start: int, end: int) -> MessageSpan | None:
    """The turn whose words contain this span."""
    for turn in turns:
        if turn.content is not None and turn.content[0] <= start <= end <= turn.content[1]:
            return turn
    return None


def _splice(
    lm: Session, tokens: Sequence[int], first: int, last: int, text: str, canonical: bool
) -> tuple[int, list[int], int]:
    """Replace `tokens[first:last]` by a text: (first, new tokens, last) of the change."""
    controls = lm.tokenizer.special_ids
    low, high = first, last
    while low and tokens[low - 1] not in controls:
        low -= 1
    while high < len(tokens) and tokens[high] not in controls:
        high += 1
    num_left, new, num_right = splice_tokens(
        tokens[low:first],
        text,
        tokens[last:high],
        lm.chat_template.encode_inside,
        lm.tokenizer.token_bytes,
        canonical=canonical,
    )
    return low + num_left, new, high - num_right


# -- scores


@router.post("/{identity}/score", summary="Score the steps that have no score yet")
async def score_steps(identity: str, body: ScoreStepsRequest, request: Request) -> Response:
    """With `stream`, event `scores` has `first` and the `logprob`, `rank` and `entropy` of steps
    from there on, in parts. If the branch changes meanwhile, the rest is not scored."""
    branch = await branches_of(request).open(identity)
    copy = branch.generation.fork()
    since = next((n for n, step in enumerate(copy.steps) if not step.is_scored), len(copy.steps))
    call = await state_of(request).enter(request, branch.model)
    draft: Generation = await call.compute(attach, branch, copy, call.served.lm)
    parts = await call.hold(Worker(score_parts(draft, since), call.run))
    if body.stream:
        return call.stream(writer_from(_score_events(branch, parts)), error_event)
    return await call.reply(_score_all(branch, parts))


async def _score_events(
    branch: TreeBranch, parts: Worker[tuple[int, list[Step]]]
) -> AsyncGenerator[bytes, None]:
    num_scored = 0
    async for first, steps in parts:
        if not branch.set_scores(first, steps):
            break
        num_scored += len(steps)
        yield event(
            {
                "first": first,
                "logprob": [finite(step.logprob) for step in steps],
                "rank": [step.rank for step in steps],
                "entropy": [finite(step.entropy or 0.0) for step in steps],
            },
            "scores",
        )
    yield event({"scored": num_scored, "of": branch.id}, "done")


async def _score_all(branch: TreeBranch, parts: Worker[tuple[int, list[Step]]]) -> dict[str, Any]:
    num_scored = 0
    async for first, steps in parts:
        if not branch.set_scores(first, steps):
            break
        num_scored += len(steps)
    return {"object": "tree.score", "branch": branch.id, "scored": num_scored}
