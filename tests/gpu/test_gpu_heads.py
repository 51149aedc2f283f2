"""Drafting heads on a GPU: as graphs they guess what plain arithmetic does; texts stay theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import cuda_model, language_model
from helpers.heads_support import PROMPT, save_eagle, save_own
from helpers.paged_texts import RandomCheckpoint, config
from unspool.decoding.speculative.controller import FixedShape
from unspool.decoding.speculative.head import DraftShape, UnspoolHead, build_draft, read_head
from unspool.decoding.speculative.head_drafter import HeadDrafter, load_head

TINY = config(layers=2, context=4096, vocab_size=259, width=64)
TEXT = (PROMPT * 300)[:3000]


def test_a_chain_as_a_graph(device: str, tmp_path: Path):
    """Reading by ones, by handfuls and by hundreds; texts in turns; a room that grows."""
    with language_model(cuda_model(RandomCheckpoint(TINY), device=device)) as lm:
        save_own(tmp_path, lm, layers=(0, 1, 2))
        quick: Any = load_head(tmp_path, lm)
        slow: Any = UnspoolHead(read_head(tmp_path), lm.model, device)
        features = np.random.default_rng(1).standard_normal((3, len(TEXT), TINY.width)).astype("f4")
        ends = (1, 3, 40, 45, 48, 49, 700, 2500, 2501)
        contexts = [[head.context() for head in (quick, slow)] for _ in range(3)]
        for first, last in zip((0, *ends), ends, strict=False):
            for number, pair in enumerate(contexts):
                text = TEXT[number:]
                for context in pair:
                    part = features[:, first + number : last + number]
                    context.read(np.arange(first, last), part, text[first + 1 : last + 1])
                actual, expected = (
                    build_draft(context, text[: last + 1], quick.ids, DraftShape(5), 0.7)
                    for context in pair
                )
                assert actual == expected, (last, number)


@pytest.mark.parametrize("kind", ["own", "eagle"])
@pytest.mark.parametrize("exact", [True, False])
def test_the_text_is_the_same(device: str, tmp_path: Path, kind: str, exact: bool):
    """To the bit: where few lines are each multiplied by themselves, also without `exact`."""
    model = cuda_model(RandomCheckpoint(TINY), device=device, dtype="bfloat16", exact=exact)
    with language_model(model) as lm:
        if kind == "own":
            save_own(tmp_path, lm, layers=(0, 1, 2))
        else:
            save_eagle(tmp_path, lm, layers=(0, 1, 2))
        head = load_head(tmp_path, lm)
        for prompt in (PROMPT, PROMPT[:2], TEXT[:600]):
            options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 4}
            undrafted = lm.generate(prompt, **options)
            for shape in (DraftShape(1), DraftShape(5)):
                drafted = lm.generate(
                    prompt, **options,
                    speculate=lambda request, shape=shape: HeadDrafter(head, request,
                    FixedShape(shape)),
                )  # fmt: skip
                assert drafted.tokens == undrafted.tokens
                assert [s.logprob for s in drafted.steps] == [s.logprob for s in undrafted.steps]
                assert any(step.draft for step in drafted.steps)
