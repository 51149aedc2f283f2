"""Tokens that a pass of the causal model brings with a drafting head, on texts that it wrote.

At every place the head drafts behind the text's own tokens; a walk through each text then counts
the passes that drafting k tokens at a time would have taken. Where the text is what the model finds
likeliest everywhere, that is the very number of greedy drafting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.twins.draft_head import DraftHead, UnrolledDrafts, answer_mask, open_head

AHEAD = 7


def opened_head(clean: Transformer, folder: Path, device: torch.device) -> DraftHead:
    shape, weights = open_head(folder)
    head = DraftHead(clean.config, shape, weights["ids"])
    head.load_state_dict(weights)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return head.to(device, dtype).requires_grad_(False).eval()


@torch.no_grad()
def tokens_a_pass(
    clean: Transformer,
    head: DraftHead,
    batches: list[TrainingBatch],
    counts: tuple[int, ...] = (1, 2, 3, 5, 7),
) -> dict[str, Any]:
    written = 0
    passes = dict.fromkeys(counts, 0)
    hits, seen = torch.zeros(AHEAD), torch.zeros(AHEAD)
    for batch in batches:
        drafts = UnrolledDrafts(clean, head, batch, {})
        right, there = _right(drafts), _there(drafts, batch)
        hits += (right & there).sum((0, 1)).cpu()
        seen += there.sum((0, 1)).cpu()
        for row in range(len(right)):
            for begin, end in _answers(batch, drafts.documents, row):
                written += end - begin
                for count in counts:
                    passes[count] += _walk(right[row].tolist(), begin, end, count)
    told = {str(count): written / max(1, each) for count, each in passes.items()}
    return {"tokens a pass": told, "agreement": (hits / seen.clamp(min=1)).tolist()}


def _right(drafts: UnrolledDrafts) -> Tensor:
    """Whether the token drafted `ahead` + 1 places behind each is the text's: [rows, length, 7]."""
    found = []
    for ahead in range(AHEAD):
        guess = drafts.step(ahead)
        picked = [part @ drafts.table.T for part in guess.flatten(0, 1).split(8192)]
        tokens = drafts.head.ids[torch.cat([part.argmax(-1) for part in picked])]
        found.append(tokens.view(guess.shape[:2]) == drafts.tokens.roll(-(ahead + 1), 1))
    return torch.stack(found, 2)


def _there(drafts: UnrolledDrafts, batch: TrainingBatch) -> Tensor:
    answers = answer_mask(batch)
    return torch.stack([answers & drafts.inside(ahead) for ahead in range(AHEAD)], 2)


def _answers(batch: TrainingBatch, documents: Tensor, row: int) -> list[tuple[int, int]]:
    """Stretches of places whose successors are an answer."""
    counts = (answer_mask(batch)[row] & (documents[row] >= 0)).tolist()
    numbers, found, begin = documents[row].tolist(), [], None
    for place in range(len(counts) + 1):
        ends = (
            place == len(counts)
            or not counts[place]
            or (begin is not None and numbers[place] != numbers[begin])
        )
        if begin is not None and ends:
            found.append((begin, place - 1))
            begin = None
        if place < len(counts) and counts[place] and begin is None:
            begin = place
    return [(a, b) for a, b in found if b > a]


def _walk(right: list[list[bool]], begin: int, end: int, count: int) -> int:
    """Passes from one end of a text to the other."""
    place = begin
    passes = 0
    while place < end:
        taken = 0
        while taken < count and place + taken + 1 <= end and right[place][taken]:
            taken += 1
        place += taken + 1
        passes += 1
    return passes
