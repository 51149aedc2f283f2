"""What the routes of the tree have in common."""

from __future__ import annotations

from functools import partial

from fastapi import Request
from starlette.responses import Response

from unspool.serve.branch_told import told_branch, with_steps
from unspool.serve.branches import Branches, TreeBranch
from unspool.serve.house import house_of
from unspool.serve.json_reply import JsonReply
from unspool.serve.routes import new_router
from unspool.serve.threads import in_thread

router = new_router("The tree of tokens", "/v1/tree")


def branches_of(request: Request) -> Branches:
    return house_of(request).branches


async def reply(branch: TreeBranch, since: int | None, *, prompt: bool = False) -> Response:
    """A branch as it stands now, with its steps from `since` on; None: without steps.

    A verb answers with the steps that are new, because those before it can be many.
    """
    steps = None if since is None else branch.steps[since:]
    work = partial(with_steps, told_branch(branch), branch.prompt, steps, since or 0, prompt=prompt)
    return await in_thread(lambda: JsonReply(work()))
