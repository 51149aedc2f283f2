"""Every family gives the logits of transformers: prefill, decode, saved, and from GGUF.

Families with recurrent layers also give those of llama.cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers import ask_llama_cpp, tiny, tiny_recurrent
from helpers.gguf_converted import CAUSAL, RECURRENT, converted_models
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.hub.inspect import summarize_model
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count, weight_shapes

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLOSE = 1e-4
CLOSE_RECURRENT = 5e-4  # of logits around 10: processors add up 32-bit numbers in other orders
_ATTENTION = [*tiny.FAMILIES, *tiny.TODAY]


def some_tokens(count: int = 30) -> torch.Tensor:
    return torch.randint(3, 259, (1, count), generator=torch.Generator().manual_seed(1))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def close(model: Transformer) -> float:
    return CLOSE_RECURRENT if model.config.state_bytes else CLOSE


@pytest.fixture(scope="module", params=[*_ATTENTION, *tiny_recurrent.FAMILIES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A family's logits of 80 tokens in transformers, and its model in Unspool."""
    folder = tmp_path_factory.mktemp(request.param)
    with torch.no_grad():
        expected = tiny.save(request.param, folder)(some_tokens(80)).logits
    return expected, load_transformer(open_checkpoint(folder))


@torch.no_grad()
def test_prompt_at_once(pair):
    expected, model = pair
    assert expected.std() > 0.1, "logits of a constant model would prove nothing"
    # transformers reads prompts in chunks, whose sums lose more than those of single tokens.
    allowed = close(model) * (2 if model.config.state_bytes else 1)
    assert difference(model(some_tokens(80)), expected) < allowed


@torch.no_grad()
def test_token_by_token(pair):
    expected, model = pair
    tokens, cache = some_tokens(80)[:, :30], model.new_cache(80)
    steps = [model(part, cache) for part in tokens.split([5, *[1] * 9, 10, *[1] * 6], 1)]
    assert difference(torch.cat(steps, 1), expected[:, :30]) < close(model)


@torch.no_grad()
@pytest.mark.parametrize("pair", _ATTENTION, indirect=True, scope="module")
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
@pytest.mark.parametrize("pair", _ATTENTION, indirect=True, scope="module")
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
    expected, model = pair
    save_checkpoint(model, tmp_path, largest_file=40_000)
    assert (tmp_path / "model.safetensors.index.json").exists(), "small enough to need shards"
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = some_tokens(80)
    assert difference(again(tokens).logits, expected) < close(model)
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
@pytest.mark.parametrize("name", [*CAUSAL, *RECURRENT])
def test_gguf_made_by_llama_cpp(converted: Path, name: str, tmp_path: Path):
    model = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    result = model(tokens)
    assert difference(result, tiny.make(name)(tokens).logits) < close(model)
    if name in RECURRENT:  # heads in the order of GGUF: Unspool's own format
        save_checkpoint(model, tmp_path)
        assert difference(load_transformer(open_checkpoint(tmp_path))(tokens), result) == 0


# llama.cpp does not support a DeltaNet with keys and values of different width, as here.
@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in RECURRENT if "qwen" not in name])
def test_llama_cpp_says_the_same(converted: Path, name: str):
    model = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    answer = ask_llama_cpp.ask(converted / f"{name}.gguf", prompts=tokens.tolist())
    reference = torch.tensor(answer["logprobs"][0])
    assert difference(model(tokens)[0, -1].log_softmax(-1), reference) < 2 * CLOSE_RECURRENT


@pytest.mark.parametrize("name", ["granite-hybrid-moe", "nemotron-h", "nemotron-h-moe", "qwen3.5"])
def test_memory_follows_from_the_kind_of_each_layer(converted: Path, name: str):
    from_gguf, from_folder = (summarize_model(converted / file) for file in (f"{name}.gguf", name))
    assert not from_gguf.problem and from_gguf.state_bytes > 0
    assert from_gguf.state_bytes == from_folder.state_bytes
    assert from_gguf.kv_bytes == from_folder.kv_bytes


@torch.no_grad()
def test_our_own_checkpoints_with_sinusoidal_positions(tmp_path: Path):
    """A model without a family is saved and loaded in Unspool's own format."""
    from unspool.model.config import ModelConfig

    config = ModelConfig(
        family="original-transformer", vocab_size=259, width=32, layers=2, heads=4, kv_heads=4,
        head_width=8, ff_width=64, context=64, norm="layer", positions="sinusoidal",
        activation="relu", gated=False, embedding_scale=32**0.5,
    )  # fmt: skip
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
