"""Every family gives the logits that transformers gives, whichever way the tokens arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
import transformers

from gguf_converted import convert_each
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.transformer import Transformer
from unspool.model.weights import parameter_count, shapes

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
    theirs = tiny.save(request.param, folder)
    return theirs, load_transformer(open_checkpoint(folder))


@torch.no_grad()
def test_prompt_at_once(pair):
    theirs, ours = pair
    tokens = some_tokens()
    expected = theirs(tokens).logits
    assert expected.std() > 0.1, "a model that says nothing would prove nothing"
    assert difference(ours(tokens), expected) < CLOSE


@torch.no_grad()
def test_token_by_token(pair):
    theirs, ours = pair
    tokens = some_tokens()
    cache = ours.new_cache(tokens.shape[1])
    steps = [ours(tokens[:, :5], cache)]
    steps += [ours(tokens[:, i : i + 1], cache) for i in range(5, tokens.shape[1])]
    assert difference(torch.cat(steps, 1), theirs(tokens).logits) < CLOSE


@torch.no_grad()
def test_the_mask_hides_the_future(pair):
    _, ours = pair
    tokens = some_tokens(12)
    changed = tokens.clone()
    changed[0, 6] = (tokens[0, 6] + 1) % 250
    before, after = ours(tokens), ours(changed)
    # Experts compute their tokens together, so who else is there may change a last digit.
    rounding = 1e-5 if ours.config.experts else 0
    assert difference(before[:, :6], after[:, :6]) <= rounding
    assert difference(before[:, 6], after[:, 6]) > 1e-3


@torch.no_grad()
def test_rewinding_the_cache_gives_what_a_fresh_run_gives(pair):
    _, ours = pair
    tokens = some_tokens()
    cache = ours.new_cache(tokens.shape[1])
    ours(tokens.flip(1), cache)
    cache.rewind(0)
    ours(tokens[:, :20], cache)
    cache.rewind(11)
    again = ours(tokens[:, 11:20], cache)
    assert difference(again, ours(tokens[:, :20])[:, 11:]) < CLOSE


@torch.no_grad()
def test_saved_checkpoint_loads_in_transformers(pair, tmp_path: Path):
    theirs, ours = pair
    save_checkpoint(ours, tmp_path, largest_file=40_000)
    assert (tmp_path / "model.safetensors.index.json").exists(), "small enough to need shards"
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = some_tokens()
    assert difference(again(tokens).logits, theirs(tokens).logits) < CLOSE
    assert difference(load_transformer(open_checkpoint(tmp_path))(tokens), ours(tokens)) == 0


def test_names_and_shapes_are_those_of_the_module(pair):
    _, ours = pair
    listed = shapes(ours.config)
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == listed
    assert parameter_count(ours.config) == sum(p.numel() for p in ours.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_scalings_that_depend_on_the_length(name: str, tmp_path: Path):
    """Beyond the original context these turn differently; the planned length decides."""
    theirs = tiny.save(name, tmp_path)
    ours = load_transformer(open_checkpoint(tmp_path))
    tokens = some_tokens(150)
    expected = theirs(tokens).logits
    assert difference(ours(tokens), expected) < CLOSE
    cache = ours.new_cache(150)
    stepped = torch.cat([ours(tokens[:, :70], cache), ours(tokens[:, 70:], cache)], 1)
    assert difference(stepped, expected) < CLOSE


@torch.no_grad()
def test_a_batch_gives_what_its_rows_give_alone(tmp_path: Path):
    tiny.save("qwen3-moe", tmp_path)
    ours = load_transformer(open_checkpoint(tmp_path))
    tokens = torch.cat([some_tokens(), some_tokens().flip(1)])
    assert difference(ours(tokens)[1:], ours(tokens[1:])) < CLOSE


@torch.no_grad()
def test_long_prompts_are_attended_in_chunks(tmp_path: Path):
    """More tokens than QUERIES_AT_ONCE: the borders between chunks must not show."""
    theirs = tiny.save("gemma2", tmp_path)
    ours = load_transformer(open_checkpoint(tmp_path))
    tokens = some_tokens(600)
    assert difference(ours(tokens), theirs(tokens).logits) < CLOSE


# What a GGUF file can say of each family; windows of Mistral and Qwen2 are not among it. Of
# Qwen3-VL the converter takes experts only as their makers' files have them. Two of Gemma 4 have
# nothing that a third has not.
NOT_IN_GGUF = (
    "mistral", "qwen2-window", "gemma2", "qwen3-moe", "llama-dynamic", "qwen3-vl-moe",
    "gemma4-dense", "gemma4-experts", "gpt-oss",
)  # fmt: skip
IN_GGUF = [name for name in (*tiny.FAMILIES, *tiny.TODAY) if name not in NOT_IN_GGUF]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family as a GGUF file, made by llama.cpp's converter."""
    return convert_each(IN_GGUF, tiny.save, tmp_path_factory.mktemp("gguf"))


@torch.no_grad()
@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_made_by_llama_cpp(converted: Path, name: str):
    ours = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    assert difference(ours(tokens), tiny.make(name)(tokens).logits) < CLOSE


@torch.no_grad()
def test_our_own_checkpoints_with_sinusoidal_positions(tmp_path: Path):
    """A model that no family describes is saved and loaded in our own words."""
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
