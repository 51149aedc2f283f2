"""`/v1/puzzles`: make puzzles for the models shipped with Unspool, and check answers."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from starlette.responses import Response

from unspool.server.http.errors import bad_request
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.schema import ShortText, Strict
from unspool.server.runtime.threads import in_thread
from unspool.train.twins.puzzles import puzzle_by_name

router = new_router("Puzzles", "/v1/puzzles")
Kind = Literal["sudoku"]


class PuzzleRequest(Strict):
    """The kind of puzzle to make."""

    puzzle: Kind
    empty: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, description="empty cells of a Sudoku; without it, 20 to 56"
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = Field(
        None, description="the same seed, the same puzzle"
    )


class AnswerRequest(Strict):
    """A puzzle and a solution to check."""

    puzzle: Kind
    prompt: ShortText
    answer: ShortText


@router.post("", summary="A new puzzle, and the models that solve it")
async def make(body: PuzzleRequest) -> Response:
    """`models` names one that fills it in any order (`/v1/diffuse` with `places` tokens) and one
    that writes it from left to right."""
    puzzle = puzzle_by_name(body.puzzle if body.empty is None else f"{body.puzzle}:{body.empty}")
    # The first boards are found by search, which takes a moment.
    prompts, _ = await in_thread(puzzle.generate, 1, np.random.default_rng(body.seed))
    return JsonReply(
        {
            "object": "puzzle",
            "puzzle": body.puzzle,
            "prompt": prompts[0],
            "places": puzzle.answer,
            "models": {"whole": body.puzzle, "causal": f"{body.puzzle}-causal"},
        }
    )


@router.post("/judge", summary="Check an answer")
async def judge(body: AnswerRequest) -> Response:
    puzzle = puzzle_by_name(body.puzzle)
    if len(body.prompt) != puzzle.prompt_length:
        raise bad_request(f"the prompt is not a {body.puzzle} puzzle", "prompt")
    solved = puzzle.is_solved(body.prompt, body.answer)
    return JsonReply({"object": "puzzle.judgement", "solved": solved})
