"""Kernels of recurrent layers against plain torch, run by Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.recurrent_support import SLOTS, RecurrentStep, make_step
from unspool.backends.cuda import recurrent
from unspool.backends.cuda.recurrent import (
    RecurrentScratch,
    StateRows,
    prefill_state_rows,
    recur,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("conv", "delta", "mamba2")
SMALL: dict[str, Any] = {
    "width": 20, "key_heads": 1, "value_heads": 2, "key_width": 5, "value_width": 6,
    "device": DEVICE,
}  # fmt: skip
# Rows that continue in place, share the slot they read, start from zero, and are empty.
MANY_WAYS = {
    "counts": [1, 3, 0, 2, 1],
    "slots": [(0, 0), (1, 5), (2, 2), (-1, 6), (1, 7)],
    "captures": [(1, 8), (2, 9), (6, 11)],  # one of a row's last token
}
LAYERS: dict[str, dict[str, Any]] = {
    "conv": {"kind": "conv", "conv_kernel": 5, "conv_bias": True},
    "delta": {"kind": "delta", "conv_kernel": 4},
    "delta, shared key heads, tiled": {
        "kind": "delta", "key_heads": 2, "value_heads": 4, "tiled": True, "value_width": 18,
        "conv_bias": True,
    },
    "mamba2": {"kind": "mamba2", "conv_kernel": 2, "conv_bias": True},
    "mamba2, norm groups, shared key heads": {
        "kind": "mamba2", "key_heads": 2, "value_heads": 4, "norm_groups": 2, "key_width": 17,
    },
}  # fmt: skip


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def check(step: RecurrentStep, close: float = 2e-6, **options: Any) -> None:
    for actual, expected in zip(step.run(**options), step.expected(), strict=True):
        assert torch.isfinite(actual).all()
        assert relative_error(actual, expected) < close


@pytest.mark.parametrize("name", LAYERS)
def test_token_by_token_as_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent, "TOKEN_TILES", {99: (16, 1)})
    check(make_step(**{**SMALL, **MANY_WAYS, **LAYERS[name]}))


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_as_plain_torch(name: str):
    counts, captures = [40, 1, 0, 2, 3], [(5, 8), (37, 9), (45, 11)]
    step = make_step(**{**SMALL, **MANY_WAYS, **LAYERS[name], "counts": counts,
                        "captures": captures})  # fmt: skip
    check(step, chunked=True)


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_numbers(kind: str):
    step = make_step(kind, [2, 1], **SMALL, dtype=torch.bfloat16)
    check(step, close=0.015)
    check(make_step(kind, [2, 1], **SMALL, dtype=torch.float16), close=0.002)
    check(make_step(kind, [100], **SMALL, dtype=torch.float16), close=0.002, chunked=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bits of bfloat16")
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_in_bfloat16(kind: str):
    sizes = {"key_heads": 2, "value_heads": 4, "key_width": 128, "value_width": 64, "width": 256}
    step = make_step(kind, [300, 64], **sizes, device=DEVICE, dtype=torch.bfloat16)
    check(step, close=0.01, chunked=True)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_bits_do_not_depend_on_the_cut(kind: str):
    step = make_step(kind, [5], **SMALL, dtype=torch.bfloat16)
    out, states = step.run(chunked=True, exact=True)
    state, outputs = step.states, []
    for first, end in ((0, 3), (3, 4), (4, 5)):
        # Beside another row, and with other slots.
        part = step.copy(
            projected=torch.cat((step.projected[1:2], step.projected[first:end])),
            states=state, row_starts=np.array([0, 1, 1 + end - first]),
            state_slots=np.array([[3, 4], [0, 0]]),
        )  # fmt: skip
        part_out, state = part.run(exact=True)
        outputs.append(part_out[1:])
    assert torch.equal(torch.cat(outputs), out)
    assert torch.equal(state[0], states[0])


def test_a_captured_state_has_the_bits_of_a_final_one():
    step = make_step("delta", [5], captures=[(2, 7)], **SMALL)
    short = step.copy(
        projected=step.projected[:3], row_starts=np.array([0, 3]), captures=step.captures[:0]
    )
    assert torch.equal(step.run(exact=True)[1][7], short.run(exact=True)[1][0])


@pytest.mark.parametrize("kind", KINDS)
def test_observed_values(kind: str):
    step = make_step(**{**SMALL, **MANY_WAYS, "kind": kind, "value_width": 18})
    expected = step.expected(stats=True)
    stats = torch.full(expected[2].shape, torch.nan, device=DEVICE)
    out, states = step.run(stats=stats, chunked=True)
    torch.testing.assert_close(stats.cpu(), expected[2], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert relative_error(out, expected[0]) < 2e-6
    assert relative_error(states, expected[1]) < 2e-6


def test_chunks_of_similar_keys():
    """An ill-conditioned system: keys are almost equal, and what is written replaces all."""
    step = make_step("delta", [64], **SMALL, conv_kernel=2)
    layer = step.layer
    generator = torch.Generator().manual_seed(0)
    keys = slice(layer.recurrence.key_dim, 2 * layer.recurrence.key_dim)
    noise = torch.randn(64, layer.recurrence.key_dim, generator=generator) * 0.01
    step.projected[:, keys] = (1.0 + noise).to(DEVICE)
    step.projected[:, -4:-2] = 6.0  # beta
    step.projected[:, -2:] = -9.0  # hardly any decay
    check(step, close=2e-5, chunked=True)


@pytest.mark.parametrize("kind", ("delta", "mamba2"))
def test_strong_decay_overflows_nowhere(kind: str):
    step = make_step(kind, [64], **SMALL)
    step.projected[::3, -2:] = 60.0
    step.projected[1::3, -2:] = -60.0
    check(step, close=3e-5, chunked=True)


def test_padding_of_a_captured_graph_is_not_touched():
    step = make_step("delta", [1, 1], **SMALL, slots=[(0, 0), (1, 1)])
    starts = torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 99_999], dtype=torch.int32, device=DEVICE)
    rows = StateRows(starts, slots, slots, torch.full_like(slots, -1))
    out, states = step.run(rows=rows)
    expected_out, expected_states = step.expected()
    assert relative_error(out[0], expected_out[0]) < 2e-6
    assert not out[1].any()
    assert relative_error(states[0], expected_states[0]) < 2e-6
    assert torch.equal(states[1:], step.states[1:])


def test_a_step_without_tokens():
    step = make_step("delta", [0, 0], **SMALL)
    out, states = step.run(chunked=True)
    assert not len(out)
    assert torch.equal(states, step.states)


def test_scratch_may_be_larger_or_missing():
    step = make_step("mamba2", [1], **SMALL)
    layer, rows = step.layer, step.rows(chunked=False)
    outs = []
    for tokens in (0, 3):
        out = torch.zeros(1, layer.out_width, device=DEVICE)
        scratch = RecurrentScratch.for_tokens(tokens, step.config, out.device) if tokens else None
        fresh = replace(layer, states=step.states.clone())
        recur(step.projected, out, fresh, rows, pdl=False, scratch=scratch)
        outs.append(out)
    assert torch.equal(*outs)


def test_chunks_end_at_captured_tokens():
    starts, slots = np.array([0, 70, 70, 200]), np.array([[3, 3], [-1, 4], [-1, 5]])
    captures = np.array([[9, 6], [69, 8], [133, 9]])
    rows = prefill_state_rows(starts, slots, captures, torch.device("cpu"), torch.bfloat16)
    assert rows.chunks is not None
    assert rows.chunks.table.tolist() == [
        [0, 10, 0, 3, 6], [10, 60, 0, 3, 8], [70, 64, 70, -1, 9], [134, 64, 70, -1, -1],
        [198, 2, 70, -1, -1],
    ]  # fmt: skip
    assert rows.chunks.starts.tolist() == [0, 2, 2, 5]
    assert rows.starts.tolist() == starts.tolist()
    assert [rows.reads.tolist(), rows.writes.tolist()] == slots.T.tolist()
    captured = {token: slot for token, slot in enumerate(rows.captures.tolist()) if slot >= 0}
    assert captured == {9: 6, 69: 8, 133: 9}


@given(
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    num_captures=st.integers(0, 4),
    conv_kernel=st.integers(2, 6),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    key_width=st.sampled_from((1, 7, 16)),
    value_width=st.sampled_from((1, 16, 19)),
    tiled=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=3, deadline=None)
def test_random_steps(
    kind: str, counts: list[int], num_captures: int, key_heads: int, group: int, seed: int,
    **options: Any,
):  # fmt: skip
    chance = np.random.default_rng(seed)
    slots = chance.permutation(SLOTS)
    pairs = [
        (int(chance.choice([-1, slot, slots[-1]])), int(slot)) for slot in slots[: len(counts)]
    ]
    captured = np.unique(
        chance.integers(0, max(1, sum(counts)), num_captures if sum(counts) else 0)
    )
    captures = [(int(token), int(slots[3 + n])) for n, token in enumerate(captured)]
    step = make_step(
        kind, counts, slots=pairs, captures=captures, device=DEVICE, seed=seed,
        key_heads=key_heads, value_heads=key_heads * group, **options,
    )  # fmt: skip
    if sum(counts):
        check(step, close=5e-6, chunked=True)
