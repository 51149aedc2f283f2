"""Every family gives the logits of transformers: prefill, decode, saved, and from GGUF."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers import tiny
from helpers.gguf_converted import CAUSAL, converted_models
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count, weight_shapes

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLOSE = 1e-4


def some_tokens(count: int = 30) -> torch.Tensor:
    return torch.randint(3, 259, (1, count), generator=torch.Generator().manual_seed(1))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module", params=[*tiny.FAMILIES, *tiny.TODAY])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A family's model in transformers and in Unspool, from the same files."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = tiny.save(request.param, folder)
    return reference, load_transformer(open_checkpoint(folder))


@torch.no_grad()
def test_prompt_at_once(pair):
    reference, model = pair
    tokens = some_tokens()
    expected = reference(tokens).logits
    assert expected.std() > 0.1, "logits of a constant model would prove nothing"
    assert difference(model(tokens), expected) < CLOSE


@torch.no_grad()
def test_token_by_token(pair):
    reference, model = pair
    tokens = some_tokens()
    cache = model.new_cache(tokens.shape[1])
    steps = [model(tokens[:, :5], cache)]
    steps += [model(tokens[:, i : i + 1], cache) for i in range(5, tokens.shape[1])]
    assert difference(torch.cat(steps, 1), reference(tokens).logits) < CLOSE


@torch.no_grad()
def test_the_mask_hides_the_future(pair):
    _, model = pair
    tokens = some_tokens(12)
    changed = tokens.clone()
    changed[0, 6] = (tokens[0, 6] + 1) % 250
    before, after = model(tokens), model(changed)
    # Experts process their tokens in a batch, whose content may change the last digit.
    rounding = 1e-5 if model.config.experts else 0
    assert difference(before[:, :6], after[:, :6]) <= rounding
    assert difference(before[:, 6], after[:, 6]) > 1e-3


@torch.no_grad()
def test_rewinding_the_cache_gives_what_a_fresh_run_gives(pair):
    _, model = pair
    tokens = some_tokens()
    cache = model.new_cache(tokens.shape[1])
    model(tokens.flip(1), cache)
    cache.rewind(0)
    model(tokens[:, :20], cache)
    cache.rewind(11)
    again = model(tokens[:, 11:20], cache)
    assert difference(again, model(tokens[:, :20])[:, 11:]) < CLOSE


@torch.no_grad()
def test_saved_checkpoint_loads_in_transformers(pair, tmp_path: Path):
    reference, model = pair
    save_checkpoint(model, tmp_path, largest_file=40_000)
    assert (tmp_path / "model.safetensors.index.json").exists(), "small enough to need shards"
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = some_tokens()
    assert difference(again(tokens).logits, reference(tokens).logits) < CLOSE
    assert difference(load_transformer(open_checkpoint(tmp_path))(tokens), model(tokens)) == 0


def test_names_and_shapes_are_those_of_the_module(pair):
    _, model = pair
    listed = weight_shapes(model.config)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == listed
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_scalings_that_depend_on_the_length(name: str, tmp_path: Path):
    """Beyond the original context these turn differently; the planned length decides."""
    reference = tiny.save(name, tmp_path)
    model = load_transformer(open_checkpoint(tmp_path))
    tokens = some_tokens(150)
    expected = reference(tokens).logits
    assert difference(model(tokens), expected) < CLOSE
    cache = model.new_cache(150)
    stepped = torch.cat([model(tokens[:, :70], cache), model(tokens[:, 70:], cache)], 1)
    assert difference(stepped, expected) < CLOSE


@torch.no_grad()
def test_a_batch_gives_what_its_rows_give_alone(tmp_path: Path):
    tiny.save("qwen3-moe", tmp_path)
    model = load_transformer(open_checkpoint(tmp_path))
    tokens = torch.cat([some_tokens(), some_tokens().flip(1)])
    assert difference(model(tokens)[1:], model(tokens[1:])) < CLOSE


@torch.no_grad()
def test_long_prompts_are_attended_in_chunks(tmp_path: Path):
    """More tokens than QUERIES_AT_ONCE: the borders between chunks must not show."""
    reference = tiny.save("gemma2", tmp_path)
    model = load_transformer(open_checkpoint(tmp_path))
    tokens = some_tokens(600)
    assert difference(model(tokens), reference(tokens).logits) < CLOSE


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_models(tmp_path_factory)


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_gguf_made_by_llama_cpp(converted: Path, name: str):
    model = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    assert difference(model(tokens), tiny.make(name)(tokens).logits) < CLOSE


@torch.no_grad()
def test_our_own_checkpoints_with_sinusoidal_positions(tmp_path: Path):
    """A model without a family is saved and loaded in Unspool's own format."""
    from unspool.model.config import ModelConfig

    config = ModelConfig(
        family="original-transformer",
        vocab_size=259,
        width=32,
        layers=2,
        heads=4,
        kv_heads=4,
        head_width=8,
        ff_width=64,
        context=64,
        norm="layer",
        positions="sinusoidal",
        activation="relu",
        gated=False,
        embedding_scale=32**0.5,
    )
    torch.manual_seed(0)
    model = Transformer(config).eval()
    save_checkpoint(model, tmp_path)
    again = load_transformer(open_checkpoint(tmp_path))
    assert again.config == config
    tokens = some_tokens(20)
    assert torch.equal(again(tokens), model(tokens))
    swapped = tokens.clone()
    swapped[0, [0, 1]] = tokens[0, [1, 0]]
    assert difference(model(tokens)[:, 5:], model(swapped)[:, 5:]) > 1e-3, "order must matter"
