"""`patch` of `/v1/tree`: activation patching between the text of a branch and a corrupted one.

The clean text is that of the branch up to a position. Each cell of the table is a run of the
corrupted text with one activation of the clean run. Rows are sent as they are computed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.backends.interventions import Intervention, Replace, site_layers
from unspool.lens.activation_cache import activation_cache
from unspool.lens.patching import patch
from unspool.sampling import log_softmax
from unspool.server.http.errors import bad_request
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.runtime.schema import Strict, Tokens
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.threads import Worker
from unspool.server.tree.branch_json import branches_of, router
from unspool.server.tree.branches import TreeBranch
from unspool.server.tree.prompt import Place
from unspool.session import Session

MAX_CELLS = 4096
MAX_LENGTH = 512  # tokens of the text
MAX_CELL_TOKENS = 64
_GROUP_RUNS = 48  # cells that are computed before they are sent
_TOP = 5  # candidate answers


class TokenSwap(Strict):
    """Another token at a position of the clean text."""

    position: int = Field(ge=0, lt=1 << 31)
    token: int | str = Field(description="id, or text that is one token")


class PatchCell(Strict):
    """A cell of the table."""

    layer: int = Field(ge=0, lt=1 << 16)
    position: int = Field(ge=0, lt=1 << 31)


class PatchRequest(Strict):
    """The two texts, the metric, and where activations are patched."""

    end: Place | None = Field(None, description="tokens of the clean text; by default, all")
    replace: TokenSwap | None = Field(None, description="the corrupted text: one other token")
    corrupted: str | Tokens | None = Field(
        None, description="or all of it, with as many tokens as the clean text"
    )
    answer: int | str | None = Field(
        None, description="a token; by default, the most likely one after the clean text"
    )
    other: int | str | None = Field(
        None, description="a token; by default, the most likely other one after the corrupted text"
    )
    site: Literal["resid_post", "attn_out", "mlp_out"] = "resid_post"
    cell: PatchCell | None = Field(None, description="only the text that this cell gives")
    max_tokens: int = Field(20, ge=1, le=MAX_CELL_TOKENS, description="of that text")


@router.post("/{identity}/patch", summary="Activation patching, as a table that grows")
async def patch_text(identity: str, body: PatchRequest, request: Request) -> Response:
    """Events: `start` has both texts as tokens, the `answer` and the `other` token with candidates,
    the logit difference of the `clean` and the `corrupted` run, and the `layers` and `positions` of
    the table; `row` has a layer and its values, last layers first; `done` comes last. Positions
    before the first difference change nothing and are left out. The table ends when the client
    leaves. With `cell` the reply is JSON: the text that the corrupted run continues with, greedily,
    under the patch of this cell."""
    branch = await branches_of(request).open(identity)
    tokens = branch.tokens
    end = len(tokens) if body.end is None else body.end
    if not 0 < end <= min(len(tokens), MAX_LENGTH):
        raise bad_request(
            f"end must be 1 to {min(len(tokens), MAX_LENGTH)}, the tokens of the text (at most "
            f"{MAX_LENGTH}), got {end}",
            "end",
        )
    call = await state_of(request).enter(request, branch.model)
    clean = tokens[:end]
    corrupted = await call.compute(_corrupted, call, clean, body)
    if body.cell is not None:
        return await call.reply(call.compute(_cell_json, call, clean, corrupted, body))
    table = await call.compute(_plan_table, call.served.lm, clean, corrupted, body)
    rows = await call.hold(Worker(table.rows(call.served.lm), call.run))
    return call.stream(writer_from(_events(branch, rows)), error_event)


def _corrupted(call: Call, clean: list[int], body: PatchRequest) -> list[int]:
    """The tokens of the corrupted text. Raises 400 if it cannot be compared."""
    lm = call.served.lm
    if (body.replace is None) == (body.corrupted is None):
        raise bad_request("give either replace or corrupted", "corrupted")
    if body.replace is not None:
        position, token = body.replace.position, body.replace.token
        if position >= len(clean):
            raise bad_request(f"position must be 0 to {len(clean) - 1}, got {position}", "replace")
        other = lm.single_token(token) if isinstance(token, str) else token
        corrupted = [*clean[:position], other, *clean[position + 1 :]]
    elif isinstance(body.corrupted, str):
        call.check_text(body.corrupted)
        corrupted = lm.tokenizer.encode_prompt(body.corrupted, specials=True)
    else:
        corrupted = list(body.corrupted or ())
    corrupted = lm.prompt_ids(corrupted)
    if len(corrupted) != len(clean):
        raise bad_request(
            f"both texts must have the same number of tokens: the clean one has {len(clean)}, the "
            f"corrupted one {len(corrupted)} ({_pieces(lm, corrupted)})",
            "corrupted",
        )
    if corrupted == clean:
        raise bad_request("the clean and the corrupted text are the same", "corrupted")
    return corrupted


def _pieces(lm: Session, tokens: list[int]) -> str:
    pieces = lm.readable_all(tokens)
    return " ".join(map(repr, pieces[:40])) + (" ..." if len(pieces) > 40 else "")


def _first_difference(clean: list[int], corrupted: list[int]) -> int:
    return next(n for n, (a, b) in enumerate(zip(clean, corrupted, strict=True)) if a != b)


@dataclass(frozen=True, slots=True)
class _Table:
    """What the cells are: computed in groups of rows, last layers first."""

    clean: list[int]
    corrupted: list[int]
    site: str
    layers: list[int]
    positions: list[int]
    answer: int
    other: int
    candidates: dict[str, list[dict[str, Any]]]

    def rows(self, lm: Session) -> Iterator[dict[str, Any]]:
        """The start of the table, and then its rows."""
        size = max(1, _GROUP_RUNS // len(self.positions))
        for end in range(len(self.layers), 0, -size):
            group = self.layers[max(0, end - size) : end]
            sweep = patch(
                lm, self.clean, self.corrupted, answer=self.answer, other=self.other,
                site=self.site, layers=group, positions=self.positions, progress=False,
            )  # fmt: skip
            if end == len(self.layers):
                yield {**self._head(lm), "clean": sweep.clean, "corrupted": sweep.baseline}
            values = np.round(sweep.values.astype(np.float64), 5).tolist()
            for layer, row in reversed(list(zip(group, values, strict=True))):
                yield {"layer": layer, "values": row}

    def _head(self, lm: Session) -> dict[str, Any]:
        return {
            "clean_tokens": _tokens_json(lm, self.clean),
            "corrupted_tokens": _tokens_json(lm, self.corrupted),
            "answer": {"id": self.answer, "text": lm.readable(self.answer)},
            "other": {"id": self.other, "text": lm.readable(self.other)},
            "candidates": self.candidates,
            "site": self.site,
            "layers": self.layers,
            "positions": self.positions,
        }


def _plan_table(lm: Session, clean: list[int], corrupted: list[int], body: PatchRequest) -> _Table:
    """Check what depends on the model. Raises 400 if the table cannot be computed."""
    layers = list(site_layers(lm.config, body.site))
    positions = list(range(_first_difference(clean, corrupted), len(clean)))
    if len(layers) * len(positions) > MAX_CELLS:
        raise bad_request(
            f"the table would have {len(layers)} x {len(positions)} cells, and may have "
            f"{MAX_CELLS:,}; replace a later token, or end the text earlier",
            "end",
        )
    candidates = {"clean": _likeliest(lm, clean), "corrupted": _likeliest(lm, corrupted)}
    answer = _answer(lm, body.answer, candidates["clean"], None)
    other = _answer(lm, body.other, candidates["corrupted"], answer)
    if answer == other:
        raise bad_request("answer and other must be two tokens", "other")
    return _Table(clean, corrupted, body.site, layers, positions, answer, other, candidates)


def _likeliest(lm: Session, tokens: list[int]) -> list[dict[str, Any]]:
    with lm.open_branch(tokens) as branch:
        logprobs = np.asarray(log_softmax(lm.engine.extend(branch)[-1:]))[0]
    best = np.argsort(-logprobs, kind="stable")[:_TOP]
    return [
        {"id": int(t), "text": lm.readable(int(t)), "probability": float(np.exp(logprobs[t]))}
        for t in best
    ]


def _answer(
    lm: Session, value: int | str | None, likeliest: list[dict[str, Any]], excluded: int | None
) -> int:
    if value is None:
        return next(int(item["id"]) for item in likeliest if item["id"] != excluded)
    token = lm.single_token(value) if isinstance(value, str) else value
    if not 0 <= token < lm.vocab_size:
        raise bad_request(f"a token must be 0 to {lm.vocab_size - 1}, got {token}", "answer")
    return token


def _tokens_json(lm: Session, tokens: list[int]) -> list[dict[str, Any]]:
    pieces = lm.readable_all(tokens)
    return [{"id": t, "text": text} for t, text in zip(tokens, pieces, strict=True)]


def _cell_json(
    call: Call, clean: list[int], corrupted: list[int], body: PatchRequest
) -> dict[str, Any]:
    """The text under the patch of one cell."""
    lm, cell = call.served.lm, body.cell
    assert cell is not None
    if cell.position >= len(clean) or cell.layer >= lm.config.layers:
        raise bad_request(
            f"the table has layers 0 to {lm.config.layers - 1} and positions 0 to "
            f"{len(clean) - 1}, got {cell.layer} and {cell.position}",
            "cell",
        )
    cache = activation_cache(
        lm, clean, sites=body.site, layers=[cell.layer], positions=cell.position
    )
    values = cache[body.site, cell.layer][0]
    patched = Intervention(body.site, Replace(values), (cell.layer,), cell.position)
    limit = call.token_limit(body.max_tokens, len(corrupted))
    texts = []
    for interventions in ((patched,), ()):
        draft = lm.prepare_generation(corrupted, temperature=0, interventions=interventions)
        texts.append(draft.resume(max_tokens=limit).text)
    head = {"object": "tree.patch", "cell": cell.model_dump()}
    return {**head, "text": texts[0], "corrupted": texts[1]}


async def _events(branch: TreeBranch, rows: Worker[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    async for row in rows:
        yield event(row, "row" if "layer" in row else "start")
    yield event({"branch": branch.id}, "done")
