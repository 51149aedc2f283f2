"""What the routes of the tree have in common."""

from __future__ import annotations

from functools import partial

from fastapi import Request
from starlette.responses import Response

from unspool.serve.core.state import state_of
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.http.threads import in_thread
from unspool.serve.tree.branch_json import branch_json, branch_with_steps
from unspool.serve.tree.branches import Branches, TreeBranch

router = new_router("The tree of tokens", "/v1/tree")


def branches_of(request: Request) -> Branches:
    return state_of(request).branches


async def reply(branch: TreeBranch, since: int | None, *, prompt: bool = False) -> Response:
    """A branch as it stands now, with its steps from `since` on; None: without steps.

    A verb answers with the steps that are new, because those before it can be many.
    """
    steps = None if since is None else branch.steps[since:]
    work = partial(
        branch_with_steps, branch_json(branch), branch.prompt, steps, since or 0, prompt=prompt
    )
    return await in_thread(lambda: JsonReply(work()))
