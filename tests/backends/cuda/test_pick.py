"""What a GPU picks by itself is what the chain of stages picks (here in Triton's interpreter)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.picker_support import (
    CANVAS_SETTINGS,
    SETTINGS,
    canvas_rows,
    check_canvas,
    random_logits,
    rows_of,
)

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from unspool.backends.cuda.sampler import DevicePicker  # noqa: E402
from unspool.sampling import Chain, RowInput, SamplingSettings  # noqa: E402
from unspool.sampling.chain import Pick  # noqa: E402
from unspool.sampling.picker import (  # noqa: E402
    PickedTokens,
    SamplingRows,
    can_sample_on_device,
)


def filled(rows: SamplingRows, vocabulary: int) -> DevicePicker:
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


def check(
    settings_list: list[SamplingSettings], texts: list[Any], tensor: Any, picker: DevicePicker
) -> None:
    """What was launched picked what the chain picks."""
    logits, picked = tensor.float().numpy(), picker.picks.tolist()
    inputs = [RowInput(text, 1, sample=n) for n, text in enumerate(texts)]
    for row, choice in enumerate(Chain(settings_list).pick(logits, inputs)):
        assert picked[row] == choice.token or at_a_border(choice), (row, picked[row], choice)
        if picked[row] == choice.token:
            assert picker.logprobs[row].item() == pytest.approx(choice.logprob, abs=2e-6)
        peak, log_sum, entropy = picker.summaries[row].tolist()
        assert peak == logits[row].max()
        assert entropy == pytest.approx(choice.entropy, abs=1e-5)
        assert peak - log_sum <= 1e-6


@settings(max_examples=4, deadline=None)
@given(
    options=st.lists(SETTINGS, min_size=1, max_size=4),
    width=st.sampled_from([3, 40, 700]),
    spread=st.sampled_from([0.0, 0.1, 2.0, 9.0]),
    kind=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**32),
)
def test_the_same_token_as_the_chain(
    options: list[dict[str, Any]], width: int, spread: float, kind: str, seed: int
):
    """Any settings, any batch, rows with equal logits and with forbidden tokens among them."""
    chance = np.random.default_rng(seed)
    settings_list = [SamplingSettings(**choice) for choice in options]
    assert all(map(can_sample_on_device, settings_list))
    rounded = random_logits(chance, len(settings_list), width, spread)
    tensor = torch.from_numpy(rounded).to(getattr(torch, kind))
    texts = [chance.integers(0, width, chance.integers(1, 30)) for _ in settings_list]
    picker = filled(rows_of(settings_list, texts), width)
    picker.launch(tensor)
    check(settings_list, texts, tensor, picker)


@pytest.mark.parametrize("options", CANVAS_SETTINGS)
def test_places_of_a_canvas(options: dict[str, Any]):
    chance = np.random.default_rng(1)
    logits = (chance.standard_normal((3, 2_100)) * 2).astype(np.float32)
    logits[2, 7] = logits[2, 9] = 20.0  # equally likely: no margin
    rows = canvas_rows(SamplingSettings(**options), 3, 2_100, chance)
    assert rows.canvas is not None
    picker = filled(rows, 2_100)
    picker.canvas.copy_(torch.from_numpy(rows.canvas))
    picker.launch(torch.from_numpy(logits.copy()), canvas=True)
    picked = PickedTokens(picker.picks.numpy(), picker.logprobs.numpy(), {}, picker.details.numpy())
    check_canvas(picked, rows, logits, 1e-5)


def draws(count: int, **options: Any) -> list[SamplingSettings]:
    values = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0, **options}
    return [SamplingSettings(seed=seed, **values) for seed in range(count)]


@pytest.mark.parametrize(
    ("spread", "options"),
    [
        (0.6, {}),  # nearly all of them are in the nucleus
        (4.0, {"top_k": 40, "min_p": 0.05}),
        pytest.param(4.0, {}, marks=pytest.mark.slow),
        pytest.param(4.0, {"top_p": 1.0, "temperature": 1.3}, marks=pytest.mark.slow),
        # where min-p cuts off more than top-p
        pytest.param(4.0, {"temperature": 1.0, "min_p": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_a_large_vocabulary(spread: float, options: dict[str, Any]):
    width = 6_000
    tensor = torch.randn(2, width, generator=torch.Generator().manual_seed(7)) * spread
    tensor = tensor.bfloat16()
    settings_list = draws(2, **options)
    texts = [np.arange(3)] * 2
    picker = filled(rows_of(settings_list, texts), width)
    picker.launch(tensor, penalties=False)
    check(settings_list, texts, tensor, picker)


def test_a_row_alone_is_as_among_others():
    """Bit-identical, also if kernels are skipped."""
    tensor = torch.randn(3, 1_100, generator=torch.Generator().manual_seed(3)) * 3
    settings_list = [*draws(2), SamplingSettings(temperature=0)]
    texts = [np.arange(5)] * 3
    rows = rows_of(settings_list, texts)
    together = filled(rows, 1_100)
    together.launch(tensor)
    for n in range(3):
        choice = SamplingRows(rows.floats[n : n + 1], rows.ints[n : n + 1], rows.history)
        alone = filled(choice, 1_100)
        alone.launch(tensor[n : n + 1], penalties=False, sampled=n < 2)
        assert alone.picks[0] == together.picks[n]
        assert alone.logprobs[0] == together.logprobs[n]
        assert (alone.summaries[0] == together.summaries[n]).all()


def test_a_picker_is_used_again_and_for_fewer_rows():
    chance = torch.Generator().manual_seed(5)
    settings_list = draws(2, repetition_penalty=1.5, frequency_penalty=0.5)
    texts = [np.array([1, 2, 2, 3, n]) for n in range(2)]
    picker = filled(rows_of(settings_list, texts), 300)
    for count in (2, 1, 2):
        tensor = torch.randn(count, 300, generator=chance) * 2
        picker.launch(tensor)
        check(settings_list[:count], texts[:count], tensor, picker)


def test_picks_of_the_step_before_count_as_history():
    """They are known on the device only: -1-n in a history is the n-th of them."""
    settings_list = draws(2, temperature=0.0, presence_penalty=50.0)
    texts = [np.array([0, 9, -1 - 1, -1 - 2]), np.array([0, -1 - 0])]
    picker = filled(rows_of(settings_list, texts), 64)
    picker.previous = torch.tensor([7, 8, -1])  # the last one was none
    tensor = torch.zeros(2, 64)
    tensor[:, [7, 8, 9, 10]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    picker.launch(tensor)
    assert picker.picks.tolist() == [7, 8]


def test_more_rows_than_are_picked_at_once(monkeypatch: pytest.MonkeyPatch):
    """The picks of the first do not change what the history of the others means."""
    monkeypatch.setattr("unspool.backends.cuda.sampler._ROWS_PER_LAUNCH", 2)
    settings_list = draws(3, temperature=0.0, presence_penalty=50.0)
    picker = filled(rows_of(settings_list, [np.array([0, -1 - n]) for n in range(3)][::-1]), 64)
    picker.picks.copy_(torch.tensor([7, 8, 9]))
    tensor = torch.zeros(3, 64)
    tensor[:, [7, 8, 9]] = torch.tensor([9.0, 8.0, 7.0])
    picker.launch(tensor)
    assert picker.picks.tolist() == [7, 7, 8]


@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 0.0), (0.8, 0.5)])
def test_logits_that_give_no_distribution_fail_alone(temperature: float, penalty: float):
    tensor = torch.zeros(6, 300)
    tensor[1, 7] = torch.nan
    tensor[2] = -torch.inf
    tensor[3, 5] = torch.inf  # infinitely likely is picked
    tensor[4, 299] = torch.nan
    tensor[5, [20, 30, 40]] = torch.inf  # and of several, as of equals
    settings_list = draws(6, temperature=temperature, frequency_penalty=penalty)
    texts = [np.array([0, 20, 20, 30])] * 6
    picker = filled(rows_of(settings_list, texts), 300)
    picker.launch(tensor)
    good = [0, 3, 5]
    inputs = [RowInput(texts[n], 1, sample=n) for n in good]
    expected = Chain([settings_list[n] for n in good]).pick(tensor[good].numpy(), inputs)
    assert picker.picks[good].tolist() == [choice.token for choice in expected]
    np.testing.assert_allclose(
        picker.logprobs[good].numpy(), [choice.logprob for choice in expected], atol=1e-6
    )
    assert picker.picks[[1, 2, 4]].tolist() == [-1, -1, -1]


def test_equals_at_the_border_of_top_k():
    """Logits in steps of 1/16, as bfloat16 has them: the k-th lies exactly where the reach ends."""
    tensor = torch.randn(3, 2_000, generator=torch.Generator().manual_seed(11))
    tensor = (tensor * 16).round() / 16
    settings_list = draws(3, temperature=1.0, top_k=5, top_p=1.0)
    texts = [np.arange(3)] * 3
    picker = filled(rows_of(settings_list, texts), 2_000)
    picker.launch(tensor, penalties=False)
    check(settings_list, texts, tensor, picker)
