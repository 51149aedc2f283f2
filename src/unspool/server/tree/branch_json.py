"""Branches and their steps as JSON, and the router of `/v1/tree`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool.engine.results import Step
from unspool.sampling import SamplingSettings
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.state import ServerState, state_of
from unspool.server.runtime.texts import finite, step_json
from unspool.server.runtime.threads import in_thread
from unspool.server.tree.branches import MessageSpan, TreeBranch, TreePrompt
from unspool.server.tree.library import Branches, UserBranches
from unspool.server.tree.parts import NAMES as PART_NAMES
from unspool.server.tree.prompt import DEFAULT_TOKENS
from unspool.server.tree.storage import TreeStorage
from unspool.server.tree.turns import find_turns
from unspool.text.tokenizer.tokenizer import Tokenizer


def summary(branch: TreeBranch) -> dict[str, Any]:
    """A branch in a list. Fast for branches of any length."""
    digest = branch.digest
    return {
        "id": branch.id,
        "object": "tree.branch",
        "model": branch.model,
        "name": branch.name,
        "parent": branch.parent,
        "forked_at": branch.forked_at,
        "session": branch.session,
        "bookmarks": [asdict(bookmark) for bookmark in branch.bookmarks],
        "created": round(branch.created, 6),
        "updated": round(branch.updated, 3),
        "length": digest.length,
        "prompt_tokens": digest.prompt_tokens,
        "preview": digest.preview,
        "finish_reason": branch.finish_reason,
        "writing": branch.writing is not None,
    }


def branch_json(branch: TreeBranch) -> dict[str, Any]:
    """A branch without its prompt and steps."""
    generation = branch.generation
    return {
        **summary(branch),
        "text": generation.text,
        "logprob": finite(generation.logprob),
        "seed": generation.seed,
        "settings": settings_json(branch),
        "usage": {**asdict(generation.usage), "total_tokens": generation.usage.total_tokens},
        "last": branch.last,
        "notes": list(generation.notes),
        "error": None if branch.fault is None else branch.fault.openai()["error"],
    }


def branch_with_steps(
    branch: dict[str, Any],
    prompt_of: TreePrompt,
    steps: Sequence[Step] | None,
    since: int,
    *,
    prompt: bool = False,
) -> dict[str, Any]:
    """A branch with these steps, whose first has the index `since`; optionally with its prompt.

    Slow for many steps; reads nothing that changes, so it can run on a thread.
    """
    if prompt:
        branch["prompt"] = prompt_json(prompt_of)
    if steps is not None:
        branch["since"] = since
        branch["steps"] = [
            step_json(step, len(prompt_of.ids), prompt_of.readable) for step in steps
        ]
    return branch


def prompt_json(prompt: TreePrompt) -> dict[str, Any]:
    tokens = [
        {"id": token, "piece": piece, "text": text, "added": place in prompt.added}
        for place, (token, (piece, text)) in enumerate(
            zip(prompt.ids, prompt.pieces(), strict=True)
        )
    ]
    return {
        "text": prompt.text,
        "tokens": tokens,
        "messages": prompt.messages,
        "spans": [_span(span) for span in prompt.spans],
    }


def _span(span: MessageSpan) -> dict[str, Any]:
    content = None if span.content is None else list(span.content)
    return {"role": span.role, "start": span.start, "end": span.end, "content": content}


def settings_json(branch: TreeBranch) -> dict[str, Any]:
    """All settings of the branch."""
    request, settings = branch.generation.request, branch.generation.settings
    values: dict[str, Any] = sampling_json(settings)
    values.update(
        stop=list(request.limits.stop),
        sample=request.limits.sample,
        top=request.limits.top,
        trace=request.limits.explain,
        max_tokens=DEFAULT_TOKENS if branch.max_tokens is None else branch.max_tokens,
        priority=request.priority,
        interventions=[intervention.summary() for intervention in request.interventions],
    )
    values |= branch.extra_settings.values
    for name in PART_NAMES:  # they may be long; `context` shows them
        values.pop(name, None)
    return values


def sampling_json(settings: SamplingSettings) -> dict[str, Any]:
    """Sampling settings; infinite biases are -100 (forbidden) and 100 (forced), as in requests."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    values["stages"] = list(settings.stages)
    values["dry_breakers"] = [list(run) for run in settings.dry_breakers]
    values["logit_bias"] = {
        str(token): amount if math.isfinite(amount) else math.copysign(100.0, amount)
        for token, amount in settings.logit_bias.items()
    }
    return values


router = new_router("The tree of tokens", "/v1/tree")


def branch_store(state: ServerState) -> Branches:
    """All branches of a server."""
    return state.extension("tree", lambda: _open_store(state))


def _open_store(state: ServerState) -> Branches:
    settings, storage = state.settings, None
    if state.database is not None:
        loaded = state.registry.loaded
        storage = TreeStorage(
            state.database, lambda: [served.lm.tokenizer for served in list(loaded.values())]
        )
        storage.index_remaining()
    store = Branches(settings.max_branches, settings.replica, storage)
    store.purge()
    return store


def branches_of(request: Request) -> UserBranches:
    """The branches of the user who sends the request."""
    store = branch_store(state_of(request))
    return store.of_user(request.state.user, request.state.resources)


async def reply(branch: TreeBranch, since: int | None, *, prompt: bool = False) -> Response:
    """The current branch with its steps from `since` on; None: without steps.

    Verbs reply with new steps only, because there may be many before them.
    """
    all_steps = list(branch.steps)
    steps = None if since is None else all_steps[since:]
    work = partial(
        branch_with_steps, branch_json(branch), branch.prompt, steps, since or 0, prompt=prompt
    )

    def build() -> JsonReply:
        json = work()
        tokenizer = branch.prompt.tokenizer  # of a stored text: only tokens, until its model runs
        has_turns = steps is not None and branch.prompt.messages is not None
        if has_turns and isinstance(tokenizer, Tokenizer):
            turns = find_turns(tokenizer, all_steps)
            json["turns"] = [_span(turn) for turn in turns]
        return JsonReply(json)

    return await in_thread(build)
