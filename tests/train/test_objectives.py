"""Masked and block-diffusion objectives against plain loops that say what they mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from helpers import tiny
from helpers.tiny_training import Batch, CountingBatches, tiny_model, tiny_trainer
from unspool.errors import SettingsError
from unspool.model.files.checkpoint import save_checkpoint
from unspool.model.files.config_json import config_from_hf
from unspool.model.layers.transformer import Transformer, attention_weights
from unspool.model.weights import parameter_count
from unspool.train.learning import objectives
from unspool.train.learning.forward import AttentionMask, hidden_states
from unspool.train.learning.model_size import (
    ModelPlan,
    attention_flops,
    batch_tokens,
    batch_tokens_for_steps,
    compute_parameters,
    config_like,
    forward_flops,
    mfu,
    micro_batch_tokens,
    new_model,
    peak_flops,
    rates_for,
    training_flops,
)
from unspool.train.learning.objectives import (
    BlockDiffusion,
    Masked,
    MitigatedNextToken,
    block_diffusion_mask,
    next_token,
)
from unspool.train.learning.optimizers import (
    Muon,
    Rates,
    Schedule,
    make_optimizers,
    orthogonal,
    parameter_groups,
)
from unspool.train.pretrain import NewSettings
from unspool.train.running.events import StepLogged
from unspool.train.running.loop import Trainer, TrainSettings

MASK = 28


def ids(rows: int = 2, length: int = 21) -> Tensor:
    return torch.randint(0, MASK, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def random_draws(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What an objective drew: how much to hide, and which tokens."""
    observed: dict[str, Tensor] = {}
    shares, hide = objectives._mask_ratios, objectives._draw_mask

    def watch_shares(*arguments: Any) -> Tensor:
        observed["share"] = shares(*arguments)
        return observed["share"]

    def watch_hide(*arguments: Any) -> Tensor:
        observed["hide"] = hide(*arguments)
        return observed["hide"]

    monkeypatch.setattr(objectives, "_mask_ratios", watch_shares)
    monkeypatch.setattr(objectives, "_draw_mask", watch_hide)
    return observed


def looking(model: Transformer, tokens: Tensor, positions: list[int], ends: list[int]) -> Tensor:
    """Vectors of one row by the specification's own weights: token i sees those before ends[i]."""
    where = torch.tensor(positions)
    angles = model.rope_tables(where.numpy(), max(positions) + 1)
    x = model.embed(tokens)[None]
    for layer, turned in zip(model.layers, angles, strict=True):

        def attend(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            order, visible = torch.arange(len(tokens)), torch.tensor(ends)
            weights = attention_weights(attention.config, 0, query, key, order, order, visible)
            return weights @ value.repeat_interleave(2, 1)

        x = layer(x, turned, None, attend)
    return x[0]


def surprise(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model.logits(x), targets, reduction="none")


def run(objective: Any, batch: Batch) -> tuple[Transformer, Any]:
    model = tiny_model().requires_grad_(True)
    return model, objective(model, batch, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("weighting", ["bound", "plain"])
def test_masked_is_the_bound_of_masked_diffusion(weighting: Any, random_draws: dict[str, Tensor]):
    """Or, with plain weighting, the mean over all guesses."""
    batch = Batch(ids())
    model, loss = run(Masked(MASK, weighting=weighting), batch)
    share, hide, tokens = random_draws["share"], random_draws["hide"], batch.ids[:, :-1]
    total = torch.tensor(0.0)
    for row in range(2):
        x = looking(model, tokens[row].masked_fill(hide[row], MASK), list(range(20)), [20] * 20)
        guessed = surprise(model, x, tokens[row])[hide[row]].sum()
        total += guessed if weighting == "plain" else guessed / share[row, 0]
    count = int(hide.sum()) if weighting == "plain" else 40
    assert torch.allclose(loss.mean, total / count, rtol=1e-4)
    assert int(loss.tokens) == count
    loss.mean.backward()
    assert model.embed.weight.grad is not None


def test_masked_hides_only_what_counts(random_draws: dict[str, Tensor]):
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[:, 10:] = True  # the targets from token 11 on
    model = tiny_model()
    observed: list[Tensor] = []
    embed = model.embed.forward
    model.embed.forward = lambda tokens: (observed.append(tokens), embed(tokens))[1]  # type: ignore[method-assign]
    loss = Masked(MASK)(model, Batch(ids(), loss_mask), torch.Generator().manual_seed(1))
    assert int(loss.tokens) == 2 * 9
    assert torch.equal(observed[0][:, :11], ids()[:, :11])
    assert (observed[0][:, 11:] == MASK).any()


def test_block_diffusion_is_a_block_behind_clean_text(random_draws: dict[str, Tensor]):
    """Each noisy block, alone behind its clean past, gives the vectors of the joint pass."""
    batch, block = Batch(ids()), 8
    model, loss = run(BlockDiffusion(MASK, block), batch)
    share, hide, tokens = random_draws["share"], random_draws["hide"], batch.ids[:, :-1]
    total = torch.tensor(0.0)
    for row in range(2):
        for start in range(0, 20, block):
            end = min(20, start + block)
            noisy = tokens[row, start:end].masked_fill(hide[row, start:end], MASK)
            pair = torch.cat((tokens[row, :start], noisy))
            ends = [*range(1, start + 1), *[end] * (end - start)]
            x = looking(model, pair, list(range(end)), ends)[start:]
            guessed = surprise(model, x, tokens[row, start:end])
            total += guessed[hide[row, start:end]].sum() / share[row, start // block]
    assert torch.allclose(loss.mean, total / 40, rtol=1e-4)


def test_the_clean_half_is_the_causal_model():
    """So what a finished block leaves behind is what a causal model would have left."""
    model, tokens = tiny_model(), ids()[:, :20]
    allowed = block_diffusion_mask(20, 8, None)
    pair = torch.cat((tokens, torch.full_like(tokens, MASK)), 1)
    attention = AttentionMask.build(model.config, pair, allowed)
    x = hidden_states(model, pair, attention, np.tile(np.arange(20), 2))
    assert torch.allclose(model.logits(x[:, :20]), model(tokens), atol=1e-4)


def test_shifted_block_diffusion_begins_each_block_with_the_causal_guess(
    random_draws: dict[str, Tensor],
):
    batch = Batch(ids())
    objective = BlockDiffusion(MASK, 4, shifted=True, weighting="plain")
    model, loss = run(objective, batch)
    hide, tokens = random_draws["hide"], batch.ids[:, :-1]
    causal = model(tokens)
    total, count = torch.tensor(0.0), 0
    for row in range(2):
        for place in hide[row].nonzero().flatten().tolist():
            start = place // 4 * 4
            if place == start and place:
                guess = causal[row, place - 1]
            else:
                here = slice(start, start + 4)
                noisy = tokens[row, here].masked_fill(hide[row, here], MASK)
                ends = [*range(1, start + 1), *[start + 4] * 4]
                pair = torch.cat((tokens[row, :start], noisy))
                x = looking(model, pair, list(range(start + 4)), ends)
                guess = model.logits(x[max(place - 1, 0)])
            total += functional.cross_entropy(guess, tokens[row, place])
            count += 1
    assert torch.allclose(loss.mean, total / count, rtol=1e-4)
    assert int(loss.tokens) == count


def test_shares_are_spread_evenly():
    shares = objectives._mask_ratios(8, 4, torch.Generator().manual_seed(0), torch.device("cpu"))
    ordered = shares.flatten().sort().values
    assert shares.shape == (8, 4)
    assert ordered[0] > 0
    assert (ordered.diff() - 1 / 32).abs().max() < 1e-3


# -- Scheduled sampling and unlikelihood against their formulas -----------------------------------


def some_ids(rows: int = 2, length: int = 15, tokens: int = 6) -> Tensor:
    """Few different tokens, so that many occur again."""
    return torch.randint(0, tokens, (rows, length), generator=torch.Generator().manual_seed(3))


def run_steps(objective: Any, batch: Batch) -> tuple[Transformer, Any]:
    model = tiny_model().requires_grad_(True)
    with torch.no_grad():  # a model as unsure as one that has learned something
        model.embed.weight.mul_(0.2)
    return model, objective(model, batch, torch.Generator().manual_seed(1))


def by_hand(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The losses of all counted targets and of all that occurred before them, as in the paper."""
    likelihood, repeated = torch.tensor(0.0), torch.tensor(0.0)
    for row, tokens in enumerate(batch.ids):
        for place in range(len(tokens) - 1):
            if batch.loss_mask is not None and not batch.loss_mask[row, place]:
                continue
            first = 0
            if batch.document_ids is not None:
                documents = batch.document_ids[row].tolist()
                first = documents.index(documents[place])
            shares = model(tokens[None, first : place + 1])[0, -1].softmax(-1)
            target = int(tokens[place + 1])
            likelihood = likelihood - shares[target].log()
            for token in {*tokens[first : place + 1].tolist()} - {target}:
                repeated = repeated - (1 - shares[token]).log()
    return likelihood, repeated


@pytest.mark.parametrize("limited", [False, True])
def test_unlikelihood_is_the_formula_with_its_gradients(limited: bool):
    batch = Batch(some_ids())
    if limited:
        batch.loss_mask = torch.arange(14).remainder(3).bool().expand(2, -1)
        batch.document_ids = torch.tensor([[0] * 6 + [1] * 8, [0] * 9 + [1] * 5])
    model, loss = run_steps(MitigatedNextToken(unlikelihood=0.5), batch)
    likelihood, repeated = by_hand(model, batch)
    count = 28 if batch.loss_mask is None else int(batch.loss_mask.sum())
    expected = (likelihood + 0.5 * repeated) / count
    assert int(loss.tokens) == count
    assert torch.allclose(loss.mean, expected, rtol=1e-4)
    assert loss.extra["unlikelihood"] == pytest.approx(float(repeated) / count, rel=1e-4)
    parameters = list(model.parameters())
    result = torch.autograd.grad(loss.mean, parameters)
    for first, other in zip(result, torch.autograd.grad(expected, parameters), strict=True):
        assert torch.allclose(first, other, atol=1e-5)


def test_scheduled_sampling_reads_its_own_tokens_and_learns_the_texts(
    monkeypatch: pytest.MonkeyPatch,
):
    batch = Batch(some_ids(4, 41, 29))
    read: list[Tensor] = []
    usual = objectives.hidden_states
    monkeypatch.setattr(
        objectives,
        "hidden_states",
        lambda model, tokens, sight: (read.append(tokens), usual(model, tokens, sight))[1],
    )
    model, loss = run_steps(MitigatedNextToken(scheduled_sampling=0.5), batch)
    first, second = read
    assert torch.equal(first, batch.ids[:, :-1]) and torch.equal(first[:, 0], second[:, 0])
    changed = (first != second).float().mean()
    assert 0.35 < changed < 0.6, "half, less those random_draws as they stood"
    logits = model(second)
    expected = functional.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten())
    assert torch.allclose(loss.mean, expected, rtol=1e-4)
    assert loss.mean.requires_grad


def test_what_is_drawn_has_the_models_chances():
    model = tiny_model()
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    shares = model.logits(x).float().softmax(-1)[0]
    chances = (torch.arange(20_000) + 0.5) / 20_000
    random_draws = objectives._sample_tokens(model, x.expand(20_000, -1), chances)
    counts = torch.bincount(random_draws, minlength=29) / 20_000
    assert torch.allclose(counts, shares, atol=2e-4)


def test_what_the_model_never_writes_is_never_replaced():
    loss_mask = (torch.arange(20) >= 10).expand(4, -1)  # the targets from token 11 on
    documents = torch.tensor([[0] * 14 + [1] * 6] * 4)
    batch: Any = Batch(some_ids(4, 21, 29), loss_mask, documents)
    model = tiny_model()
    sight = AttentionMask.build(model.config, batch.ids[:, :-1])
    mixed = objectives._replace_tokens(model, batch, sight, 1.0, torch.Generator().manual_seed(0))
    is_same = mixed == batch.ids[:, :-1]
    assert is_same[:, :11].all() and is_same[:, 14].all() and not is_same[:, 11:].all()


def test_off_it_is_next_token_training_and_the_share_grows():
    batch = Batch(some_ids())
    _, plain = run_steps(next_token, batch)
    _, off = run_steps(MitigatedNextToken(), batch)
    _, early = run_steps(MitigatedNextToken(scheduled_sampling=1.0, progress=0.0), batch)
    assert torch.equal(plain.mean, off.mean) and torch.equal(plain.mean, early.mean)

    objective, observed = MitigatedNextToken(scheduled_sampling=0.5), list[float]()

    model = tiny_model().requires_grad_(True)
    optimizers = make_optimizers(model, Rates(1e-3, 1e-3, 1e-3, 1e-3), "adamw")
    trainer = Trainer(model, CountingBatches(), objective, optimizers, TrainSettings(steps=4))
    trainer.run(lambda event: observed.append(objective.progress))
    assert {0.0, 0.25, 0.5, 0.75} <= set(observed)


def test_what_cannot_be_is_refused():
    for wrong in ({"scheduled_sampling": 1.5}, {"unlikelihood": -1}, {"unlikelihood": math.nan}):
        with pytest.raises(SettingsError, match=r"scheduled_sampling|unlikelihood"):
            NewSettings(**wrong)
    with pytest.raises(SettingsError, match="next_token"):
        NewSettings(unlikelihood=1.0, objective="masked")


# -- Muon against torch's own, the groups, the schedule -------------------------------------------


def newton_schulz_in_float32(grad: Any, coefficients: Any, steps: int, eps: float) -> Any:
    """What torch's Muon does in bfloat16, which would hide everything behind its rounding."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def test_muon_is_torchs_muon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz_in_float32)
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=rng) for shape in ((8, 12), (12, 8), (8, 12), (5, 5))]
    reference, actual = ([torch.nn.Parameter(item.clone()) for item in start] for _ in range(2))
    expected = torch.optim.Muon(
        reference, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    result = Muon(actual, lr=0.02, weight_decay=0.1)
    for _ in range(4):
        for first, other in zip(reference, actual, strict=True):
            first.grad = torch.randn(first.shape, generator=rng)
            other.grad = first.grad.clone()
        expected.step()
        result.step()
    for first, other in zip(reference, actual, strict=True):
        assert torch.allclose(first, other, atol=1e-5)


def test_orthogonal_brings_singular_values_near_one():
    matrices = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.allclose(orthogonal(matrices[1:2])[0], orthogonal(matrices)[1], atol=1e-5)
    experts = orthogonal(matrices[None])  # a stack of stacks
    assert experts.shape == (1, 3, 6, 10)


def test_every_weight_has_its_optimizer():
    model = tiny_model(tied=False)
    groups = parameter_groups(model)
    assert [id(item) for item in groups["embedding"]] == [id(model.embed.weight)]
    assert model.head is not None
    assert [id(item) for item in groups["head"]] == [id(model.head.weight)]
    assert len(groups["matrices"]) == 2 * 7
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    for kind, count in (("muon", 2), ("adamw", 1)):
        optimizers = make_optimizers(model, Rates(), kind)  # type: ignore[arg-type]
        assert len(optimizers) == count
        held_open = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        assert len(held_open) == len(list(model.parameters()))
    model.embed.requires_grad_(False)
    assert parameter_groups(model)["embedding"] == []


def test_warm_up_constant_decay():
    share = Schedule(steps=10, warmup=3, decay=0.4)
    assert [round(share(step), 3) for step in range(10)] == [
        0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25,
    ]  # fmt: skip
    assert Schedule(steps=5, decay=0.0)(3) == 1
    assert Schedule(steps=10, decay=1.0, floor=0.1)(9) == pytest.approx(0.19)


# -- One dial: what follows from the depth, and the values that a new model begins with -----------


def test_depth_12_is_about_gpt2_small():
    shape = ModelPlan.for_depth(12, 32768)
    config = shape.config
    assert (config.width, config.heads, config.kv_heads, config.head_width) == (768, 6, 3, 128)
    assert 100e6 < parameter_count(config) < 130e6
    assert shape.tokens == 20 * parameter_count(config)
    assert shape.batch_tokens == 2**19
    assert config.family == "qwen3" and config.qk_norm == "head" and config.gated and config.tied


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 20, 64])
def test_every_depth_is_a_model(depth: int):
    config = ModelPlan.for_depth(depth, 4096).config
    assert config.layers == depth
    assert config.heads * config.head_width <= config.width
    assert config.heads % config.kv_heads == 0
    shallow = ModelPlan.for_depth(1, 4096).config
    assert depth == 1 or rates_for(config).matrices < rates_for(shallow).matrices


def test_what_is_said_stays_and_batches_grow_with_what_there_is_to_learn():
    shape = {"width": 96, "heads": 3, "kv_heads": 1, "head_width": 32, "tied": False}
    config = ModelPlan.for_depth(4, 300, **shape).config
    assert shape.items() <= config.to_dict().items()
    with pytest.raises(SettingsError, match="depth must be from 1 to 128, got 0"):
        ModelPlan.for_depth(0, 300)
    assert batch_tokens(10**5) == 2**11
    assert batch_tokens(10**9) < batch_tokens(10**10)
    for steps in (3000, 5000):
        by_steps = batch_tokens_for_steps(steps)
        assert by_steps / 2 <= batch_tokens(steps * by_steps) <= by_steps * 2


def test_a_new_model_knows_nothing_and_transformers_agrees(tmp_path: Path):
    import transformers

    config = ModelPlan.for_depth(2, 300, context=64).config
    model, is_same, other = (new_model(config, seed) for seed in (3, 3, 4))
    assert torch.equal(model.embed.weight, is_same.embed.weight)
    assert not torch.equal(model.embed.weight, other.embed.weight)
    tokens = torch.randint(0, 300, (1, 20))
    logits = model(tokens)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.min() > math.log(300) - 0.2
    for layer in model.layers:  # so that later layers do not begin as nothing
        layer.attention.out.weight.data.normal_(0, 0.1)
        layer.feed.down.weight.data.normal_(0, 0.1)
    save_checkpoint(model, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(reference(tokens).logits, model(tokens), atol=1e-4)


def test_another_familys_shape_for_a_vocabulary_of_ones_own():
    reference = config_from_hf(tiny.make("gemma3").config.to_dict())
    config = config_like(reference, 300)
    assert (config.vocab_size, config.windows) == (300, reference.windows)
    logits = new_model(config)(torch.randint(0, 300, (1, 9)))
    assert torch.isfinite(logits).all()


def test_a_gpu_takes_as_many_tokens_at_once_as_its_memory_holds():
    small, large = ModelPlan.for_depth(4, 300).config, ModelPlan.for_depth(24, 300).config
    roomy, narrow = 140 << 30, 24 << 30
    assert micro_batch_tokens(small, roomy) == 2**17  # and no more, however small the model is
    assert micro_batch_tokens(large, narrow) < micro_batch_tokens(large, roomy) < 2**17
    for config in (small, large):
        for memory in (roomy, narrow):
            held_bytes = micro_batch_tokens(config, memory) * config.layers * config.width * 48
            assert held_bytes <= max(memory // 6, 2**11 * config.layers * config.width * 48)
    assert micro_batch_tokens(large, 1 << 30) == 2**11  # no fewer: what does not fit then is said
    assert micro_batch_tokens(small, None) == micro_batch_tokens(large, None) == 4096


# -- Arithmetic is counted as torch counts it, operation by operation -----------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "gemma2-file", "llama-tied-bias"])
def test_as_torch_counts(family: str):
    config = config_from_hf(tiny.make(family).config.to_dict())
    model, length = Transformer(config), 7
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.zeros(2, length, dtype=torch.long)).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == 2 * length * forward_flops(config, length)
    assert counter.get_total_flops() == 2 * length * training_flops(config, length)


def test_only_picked_experts_and_what_a_token_sees_cost():
    config = config_from_hf(tiny.make("mixtral").config.to_dict())
    dense = config_from_hf(tiny.make("llama").config.to_dict())
    router = config.layers * config.experts * config.width
    feed = config.layers * 3 * config.width * config.expert_width
    extra = router + (config.experts_per_token - 1) * feed
    assert compute_parameters(config) == compute_parameters(dense) + extra
    config = config_from_hf(tiny.make("mistral").config.to_dict())  # a window of 7
    observed = [min(position + 1, 7) for position in range(20)]
    per_key = 4 * config.heads * config.head_width * config.layers
    assert attention_flops(config, 20, causal=True) == pytest.approx(per_key * sum(observed) / 20)
    assert attention_flops(config, 20) == per_key * 7


def test_the_log_tells_the_share_of_the_peak_where_it_is_known(monkeypatch: pytest.MonkeyPatch):
    config = config_from_hf(tiny.make("qwen3").config.to_dict())
    peak = peak_flops("NVIDIA H200")
    assert peak == 989e12 and peak_flops("some processor") is None
    half = peak / training_flops(config, 64) / 2
    assert mfu(config, 64, half, peak) == pytest.approx(0.5)
    events: list[StepLogged] = []

    def listen(event: object) -> None:
        if isinstance(event, StepLogged):
            events.append(event)

    tiny_trainer(steps=1).run(listen)
    assert "mfu" not in events[-1].extra
    monkeypatch.setattr("unspool.train.running.loop.device_peak", lambda device: 1e12)
    first = tiny_trainer(steps=1)
    first.run(listen)
    expected = mfu(first.model.config, first.batches.length, events[-1].tokens_per_second, 1e12)
    assert events[-1].extra["mfu"] == pytest.approx(expected)
