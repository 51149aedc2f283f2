"""Edit a branch of the tree: fill and replace ranges, find doubtful words, revise."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.edit.edit import (
    MIN_SURPRISE,
    Doubt,
    EditUnit,
    causal_surprise,
    masked_surprise,
    propose_replacements,
    split_units,
)
from unspool.decoding.infill.fill import draft_settings, fill
from unspool.decoding.infill.masked import MaskedModel, masked_model
from unspool.decoding.infill.result import Gap
from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.server.http.errors import bad_request
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.http.replies import JsonReply
from unspool.server.runtime.schema import Strict
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import finite
from unspool.server.runtime.threads import Worker
from unspool.server.tree.branch_json import branches_of, reply, router
from unspool.server.tree.branches import TreeBranch, TreePrompt, fork_branch
from unspool.server.tree.edit_text import score_parts, text_position
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import Name, Place
from unspool.server.tree.turns import find_turns
from unspool.text.tokenizer.stream import TextStream
from unspool.text.tokenizer.tokenizer import Tokenizer

# -- A branch as plain text for infill and revision, and the steps of each part of it


class _Piece(Protocol):
    """A token of a text: the text that is complete with it, and bytes that were not before."""

    @property
    def text(self) -> str: ...
    @property
    def partial_utf8(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _TextPiece:
    text: str
    partial_utf8: bytes = b""


@dataclass(frozen=True)
class PlainText:
    """The generated text, and the text before it. Without the chat template: infill works on plain
    text without control tokens."""

    before: str
    steps: Sequence[_Piece]

    @classmethod
    def from_branch(cls, branch: TreeBranch) -> PlainText:
        return cls(_prompt_text(branch.prompt), list(branch.steps))

    @classmethod
    def of_message(
        cls, prompt: TreePrompt, steps: Sequence[Step], first: int, last: int, tokenizer: Tokenizer
    ) -> PlainText:
        """All tokens of a text, prompt included; messages are paragraphs.

        Raises:
            ApiError: 400 if the tokens from `first` to before `last` are not of one message.
        """
        template, offset = set(prompt.added), len(prompt.ids)
        for turn in find_turns(tokenizer, steps) if prompt.messages is not None else ():
            template.update(range(offset + turn.start, offset + turn.end))
            template.difference_update(range(*(offset + at for at in turn.content or (0, 0))))
        if not template.isdisjoint(range(first, last)):
            raise bad_request("the part must be words of one message", "last")
        words, pieces = TextStream(), list[_Piece]()
        data = [*map(tokenizer.token_bytes, prompt.ids), *(step.bytes for step in steps)]
        for at, token_bytes in enumerate(data):
            if at in template:
                pieces.append(_TextPiece("\n\n" if at and at - 1 not in template else ""))
            else:
                partial_utf8 = words.partial_utf8
                pieces.append(_TextPiece(words.push(token_bytes), partial_utf8))
        return cls("", pieces)

    @cached_property
    def written(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def text(self) -> str:
        return self.before + self.written

    @cached_property
    def ends(self) -> list[int]:
        """Where each step ends, in characters of the generated text."""
        return list(accumulate(len(step.text) for step in self.steps))

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The characters of the steps from `first` to before `last`."""
        return (self.ends[first - 1] if first else 0), (self.ends[last - 1] if last else 0)

    def steps_of(self, start: int, end: int) -> tuple[int, int]:
        """The steps that these characters of the generated text belong to."""
        first = bisect_right(self.ends, start)
        while 0 < first < len(self.steps) and self.steps[first].partial_utf8:
            first -= 1  # keep a character of several tokens together
        last = first
        while last < len(self.steps) and (self.ends[last - 1] if last else 0) < end:
            last += 1
        return first, last

    def replacement(self, start: int, end: int, words: str) -> tuple[int, int, str]:
        """Replace these characters: the steps to replace, and their new text."""
        first, last = self.steps_of(start, end)
        begin, stop = self.span(first, last)
        return first, last, self.written[begin:start] + words + self.written[end:stop]


def _prompt_text(prompt: TreePrompt) -> str:
    if prompt.messages is None:
        return prompt.text
    contents = [str(message.get("content") or "") for message in prompt.messages]
    return "".join(f"{text}\n\n" for text in contents if text)


def checked_range(
    branch: TreeBranch, first: int, last: int, whole_text: bool = False
) -> tuple[int, int]:
    """A non-empty range of steps, or of tokens of the whole text. Raises 400."""
    if whole_text:
        length = len(branch.prompt.ids) + len(branch.steps)
        first, last = (
            text_position(at, length, name) for at, name in ((first, "first"), (last, "last"))
        )
    else:
        first, last = branch.step_index(first, "first"), branch.step_index(last, "last")
    if first >= last:
        raise bad_request(f"last must be after first, got {first} and {last}", "last")
    return first, last


MAX_CANDIDATES = 32
MAX_CHANGES = 256
_EXTRA_TOKENS = 2  # that a candidate may have more than the part it replaces
_GAP_TOKENS = 6  # most that `___` is filled with
_MAX_CANDIDATE_TOKENS = 24


class FillRequest(Strict):
    """A range of steps to propose replacements for."""

    first: Place
    last: Place = Field(description="the step after the part")
    whole_text: bool = Field(
        False, description="`first` and `last` count tokens of the whole text, as in `edit`"
    )
    candidates: int = Field(8, ge=1, le=MAX_CANDIDATES)
    least: int = Field(
        1, ge=1, le=_MAX_CANDIDATE_TOKENS, description="fewest tokens of a candidate"
    )
    most: int | None = Field(
        None,
        ge=1,
        le=_MAX_CANDIDATE_TOKENS,
        description=f"most tokens of a candidate (those of the part, and {_EXTRA_TOKENS} more)",
    )


class Replacement(Strict):
    """A new text for a range of steps."""

    first: Place
    last: Place
    text: str


class ReplaceRequest(Strict):
    """Changes to a branch. The text after each stays, and is scored again."""

    changes: Annotated[list[Replacement], Field(min_length=1, max_length=MAX_CHANGES)]
    fork: bool = Field(True, description="into a new branch; the old one stays")
    name: Name | None = None


@router.post("/{identity}/fill", summary="Propose replacements for a part, ranked by both sides")
async def fill_part(identity: str, body: FillRequest, request: Request) -> Response:
    """With FIM tokens or masks where the model has them, else with drafts from the left that are
    ranked by how likely they make the following text. Includes the current text, unless it is a
    gap of underscores (`___`)."""
    branch = await branches_of(request).open(identity)
    first, last = checked_range(branch, body.first, body.last, body.whole_text)
    plain = None if body.whole_text else PlainText.from_branch(branch)
    steps = list(branch.steps)
    async with state_of(request).call(request, branch.model) as call:
        if plain is None:
            tokenizer = call.served.lm.tokenizer
            plain = await call.compute(
                PlainText.of_message, branch.prompt, steps, first, last, tokenizer
            )
        filled: dict[str, Any] = await call.compute(_propose, call, plain, first, last, body)
    return JsonReply({"object": "tree.fill", "branch": identity, **filled})


def _propose(
    call: Call, plain: PlainText, first: int, last: int, body: FillRequest
) -> dict[str, Any]:
    lm = call.served.lm
    start, end = plain.span(first, last)
    part = plain.written[start:end]
    core = part.strip()
    if not core:
        raise bad_request("the part has no words", "first")
    is_gap = not core.strip("_")
    start += part.index(core)
    end = start + len(core)
    prefix, suffix = plain.before + plain.written[:start], plain.written[end:]
    call.check_text(prefix, core, suffix)
    most = body.most
    if most is None:
        size = _GAP_TOKENS if is_gap else last - first + _EXTRA_TOKENS
        most = min(size, _MAX_CANDIDATE_TOKENS)
    parts = (prefix, Gap(min(body.least, most), most), suffix)
    filling = fill(lm, parts, candidates=body.candidates)
    candidates = [(filled.texts[0], filled.score) for filled in filling.candidates]
    scores = {text: score for text, score in candidates if text.strip("_ \n")}
    if filling.by == "ranking" and core not in scores and not is_gap:
        now = fill(lm, parts, choices=[core], by="ranking").candidates[0]
        scores[core] = now.score
    best = max(scores.values(), default=0.0)
    total = math.fsum(math.exp(score - best) for score in scores.values()) or 1.0
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    proposals = [
        {
            **_change_json(plain, start, end, words),
            "score": finite(score),
            "probability": math.exp(score - best) / total,
            "now": words == core,
        }
        for words, score in ranked
    ]
    return {"by": filling.by, "old": core, "candidates": proposals}


def _change_json(plain: PlainText, start: int, end: int, words: str) -> dict[str, Any]:
    """A change for `replace`, and its new words."""
    first, last, text = plain.replacement(start, end, words)
    return {"new": words, "first": first, "last": last, "text": text}


@router.post("/{identity}/replace", summary="Replace parts of the text; the rest stays")
async def replace_parts(identity: str, body: ReplaceRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = await branches.open(identity)
    changes = _sort_changes(branch, body.changes)
    at = changes[0][0]
    branches.make_room(1 if body.fork else 0, branch)
    with nullcontext() if body.fork else branch.locked():
        copy = branch.generation.fork()  # the branch may be running
        async with state_of(request).call(request, branch.model) as call:
            draft = await call.compute(attach, branch, copy, call.served.lm)
            changed: Generation = await call.compute(_replace_parts, call, draft, changes)
        if body.fork:
            branch = fork_branch(branch, changed, at, body.name)
            await branches.add(branch)
        else:
            at = min(at, await branches.store.set_text(branch, changed, "replace"))
    return await reply(branch, at)


def _sort_changes(
    branch: TreeBranch, replacements: list[Replacement]
) -> list[tuple[int, int, str]]:
    changes = sorted(
        (*checked_range(branch, change.first, change.last), change.text) for change in replacements
    )
    for (_, end, _), (start, _, _) in pairwise(changes):
        if start < end:
            raise bad_request("changes must not overlap", "changes")
    return changes


def _replace_parts(
    call: Call, draft: Generation, changes: list[tuple[int, int, str]]
) -> Generation:
    lm = call.served.lm
    call.check_text(*(text for _, _, text in changes))
    changed = draft.edited(
        [(first, last, lm.tokenizer.encode(text)) for first, last, text in changes]
    )
    lm.prompt_ids([*changed.prompt, *changed.tokens])
    first = changes[0][0]
    changed.steps[first:] = [step for _, steps in score_parts(changed, first) for step in steps]
    return changed


# Interactive: fewer candidates than in `lm.edit`.
_SINGLES, _DRAFTS, _CANDIDATES, _SHORTLIST, _REPEATED_CHARS = 16, 2, 8, 3, 80
_REACH = 16  # tokens after a word that are scored
_NUM_ALTERNATIVES = 5  # reported


class DoubtRequest(Strict):
    """The source of doubt: the model's surprise, a served masked model, or both."""

    by: Literal["auto", "causal", "masked", "both"] = "auto"
    twin: str | None = Field(None, description="a masked model of this server")


class ReviseRequest(DoubtRequest):
    """How many words to revise."""

    places: int = Field(24, ge=1, le=256, description="words to check, the most doubtful first")
    least: float = Field(0.0, ge=0, le=1, description="lowest probability of a proposal")
    stream: bool = False


@router.post("/{identity}/doubt", summary="How doubtful each step is, in nats")
async def doubt(identity: str, body: DoubtRequest, request: Request) -> Response:
    branch = await branches_of(request).open(identity)
    tokens, plain = branch.tokens, PlainText.from_branch(branch)
    call = await state_of(request).enter(request, branch.model)
    twin = await _hold_twin(call, body)
    levels = await call.compute(_levels, call, tokens, plain, body.by, twin)
    doubts = [round(level, 4) for level in levels]
    return JsonReply({"object": "tree.doubt", "branch": identity, "doubts": doubts})


@router.post("/{identity}/revise", summary="Proposals for doubtful words; nothing is changed")
async def revise(identity: str, body: ReviseRequest, request: Request) -> Response:
    """Each proposal is a change for `replace`. With `stream`, event `proposal` is sent as soon as
    there is one; `looked` counts the words checked so far."""
    branch = await branches_of(request).open(identity)
    _check_words(branch)
    tokens, plain = branch.tokens, PlainText.from_branch(branch)
    call = await state_of(request).enter(request, branch.model)
    if call.served.lm.config.sight != "causal":
        raise bad_request("revise needs a causal model; this one is a masked model")
    twin = await _hold_twin(call, body)
    proposed = await call.hold(Worker(_revise(call, tokens, plain, body, twin), call.run))
    if body.stream:
        return call.stream(writer_from(_revision_events(identity, proposed)), error_event)
    return await call.reply(_revision_json(identity, proposed))


def _check_words(branch: TreeBranch) -> None:
    if not branch.generation.text.strip():
        raise bad_request("the branch has no text to revise")


async def _hold_twin(call: Call, body: DoubtRequest) -> MaskedModel | None:
    """The masked model of the request, held until the call ends."""
    if body.twin is None:
        if body.by in ("masked", "both"):
            raise bad_request(f"by={body.by!r} needs a masked model", "twin")
        return None
    served = await call.hold_model(body.twin)
    return masked_model(served.lm)


def _levels(
    call: Call, tokens: list[int], plain: PlainText, by: str, twin: MaskedModel | None
) -> list[float]:
    """The doubt of each step. A causal model reads the branch, a masked one its plain text."""
    count = len(plain.steps)
    if not count:
        return []
    lm = call.served.lm
    causal = np.zeros(count)
    if by != "masked":
        if lm.config.sight != "causal":
            raise bad_request("by=causal needs a causal model; use this one as twin")
        surprise = causal_surprise(lm.score(tokens), len(tokens))
        causal = np.maximum(surprise[len(tokens) - count :], 0.0)
    if twin is None or by == "causal":
        return [float(level) for level in causal]
    masked = np.zeros(count)
    spans, levels = masked_surprise(twin, plain.text)
    for (start, end), level in zip(spans, levels, strict=True):
        first, last = plain.steps_of(start - len(plain.before), end - len(plain.before))
        if end > len(plain.before):
            masked[first:last] = np.maximum(masked[first:last], level)
    return [float(level) for level in (masked if by == "masked" else (causal + masked) / 2)]


def _revise(
    call: Call, tokens: list[int], plain: PlainText, body: ReviseRequest, twin: MaskedModel | None
) -> Iterator[dict[str, Any] | None]:
    """Yield a proposal or None for each word."""
    levels = _levels(call, tokens, plain, body.by, twin)
    shift, text = len(plain.before), plain.text
    ends = [shift, *(shift + at for at in plain.ends)]
    doubts = [
        Doubt(token, step.text, ends[n], ends[n + 1], level)
        for n, (token, step, level) in enumerate(
            zip(tokens[len(tokens) - len(levels) :], plain.steps, levels, strict=True)
        )
        if step.text
    ]
    options = draft_settings(call.served.lm, {}, candidates=_CANDIDATES, drafts=_DRAFTS)
    options = replace(options, singles=_SINGLES, repeated_chars=_REPEATED_CHARS)
    units = split_units(text, doubts)
    inside = [unit for unit in units if unit.start >= shift and unit.doubt >= MIN_SURPRISE]
    for unit in inside[: body.places]:
        ranked = propose_replacements(
            call.served.lm, text, unit, options, reach=_REACH, twin=twin, shortlist=_SHORTLIST
        )
        best = ranked[0]
        is_better = best.texts[0] != unit.text and best.probability >= body.least
        yield _proposal_json(plain, unit, ranked) if is_better else None


def _proposal_json(plain: PlainText, unit: EditUnit, ranked: Any) -> dict[str, Any]:
    start = unit.start - len(plain.before)
    current = next(filled for filled in ranked if filled.texts[0] == unit.text)
    new = ranked[0].texts[0]
    first, last, text = plain.replacement(start, start + len(unit.text), new)
    return {
        "first": first,
        "last": last,
        "text": text,
        "old": unit.text,
        "new": new,
        "probability": ranked[0].probability,
        "gain": ranked[0].score - current.score,
        "doubt": unit.doubt,
        "alternatives": [
            [filled.texts[0], filled.probability] for filled in ranked[:_NUM_ALTERNATIVES]
        ],
    }


async def _revision_events(
    identity: str, proposed: Worker[dict[str, Any] | None]
) -> AsyncGenerator[bytes, None]:
    looked = num_proposals = 0
    async for proposal in proposed:
        looked += 1
        if proposal is None:
            yield event({"looked": looked}, "looked")
        else:
            num_proposals += 1
            yield event({"looked": looked, **proposal}, "proposal")
    yield event({"looked": looked, "proposals": num_proposals, "of": identity}, "done")


async def _revision_json(identity: str, proposed: Worker[dict[str, Any] | None]) -> dict[str, Any]:
    results = [proposal async for proposal in proposed]
    data = [proposal for proposal in results if proposal is not None]
    return {"object": "tree.revision", "branch": identity, "looked": len(results), "data": data}
