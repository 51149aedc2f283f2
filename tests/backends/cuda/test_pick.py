"""What a GPU picks by itself is what the chain of stages picks (here in Triton's interpreter)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from unspool.backends.cuda.pick import DevicePicker  # noqa: E402
from unspool.sampling import Chain, RowInput, SamplingSettings  # noqa: E402
from unspool.sampling.chain import Pick  # noqa: E402
from unspool.sampling.picker import (  # noqa: E402
    PickRows,
    history_range,
    is_ordinary,
    row_numbers,
    sees_history,
)

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-9, 0.3, 0.8, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 40, 10_000]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "penalty_window": st.sampled_from([-1, 0, 3]),
        "penalize_prompt": st.booleans(),
        "seed": st.integers(-(2**63), 2**70),
    },
)


def rows_of(asked: list[SamplingSettings], texts: list[Any], prompt: int = 1) -> PickRows:
    floats, ints, histories, at = [], [], [], 0
    for number, (one, text) in enumerate(zip(asked, texts, strict=True)):
        mine, whole = row_numbers(one, sample=number)
        whole[3] = len(text)
        start, end = history_range(one, prompt, len(text))
        if sees_history(one):
            whole[4], whole[5] = at, at + end - start
            histories.append(text[start:end])
            at += end - start
        floats.append(mine)
        ints.append(whole)
    history = np.concatenate(histories) if histories else np.empty(0, np.int64)
    return PickRows(np.array(floats), np.array(ints), history)


def filled(rows: PickRows, vocabulary: int) -> DevicePicker:
    count = len(rows.ints)
    picker = DevicePicker(count, vocabulary, "cpu", history=max(1, len(rows.history)))
    picker.floats.copy_(torch.from_numpy(rows.floats))
    picker.ints.copy_(torch.from_numpy(rows.ints))
    picker.history[: len(rows.history)] = torch.from_numpy(rows.history)
    return picker


def at_a_border(pick: Pick) -> bool:
    """Whether a last digit decides between this token and the next one in line."""
    draw = pick.draw
    return draw is not None and min(abs(draw.u - draw.low), abs(draw.u - draw.high)) < 1e-6


def check(picker: DevicePicker, wanted: list[Pick], logits: Any) -> None:
    picked = picker.picks.tolist()
    for row, one in enumerate(wanted):
        assert picked[row] == one.token or at_a_border(one), (row, picked[row], one)
        if picked[row] == one.token:
            assert picker.logprobs[row].item() == pytest.approx(one.logprob, abs=2e-6)
        peak, log_sum, entropy = picker.own[row].tolist()
        assert peak == logits[row].max()
        assert entropy == pytest.approx(one.entropy, abs=1e-5)
        assert peak - log_sum <= 1e-6


@settings(max_examples=25, deadline=None)
@given(
    options=st.lists(SETTINGS, min_size=1, max_size=4),
    width=st.sampled_from([3, 40, 700, 5_000]),
    spread=st.sampled_from([0.0, 0.1, 2.0, 9.0]),
    kind=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**32),
)
def test_the_same_token_as_the_chain(
    options: list[dict[str, Any]], width: int, spread: float, kind: str, seed: int
):
    """Any settings, any batch, rows with equal logits and with forbidden tokens among them."""
    chance = np.random.default_rng(seed)
    asked = [SamplingSettings(**one) for one in options]
    assert all(map(is_ordinary, asked))
    rounded = chance.standard_normal((len(asked), width)) * spread
    if chance.random() < 0.3:
        rounded = np.round(rounded)  # many equals
    if chance.random() < 0.3:
        rounded[:, chance.integers(0, width, width // 2)] = -np.inf
        rounded[:, 0] = 0.5
    tensor = torch.from_numpy(rounded).to(getattr(torch, kind))
    logits = tensor.float().numpy()
    texts = [chance.integers(0, width, chance.integers(1, 30)) for _ in asked]
    picker = filled(rows_of(asked, texts), width)
    picker.launch(tensor)
    inputs = [RowInput(text, 1, sample=n) for n, text in enumerate(texts)]
    check(picker, Chain(asked).pick(logits, inputs), logits)
