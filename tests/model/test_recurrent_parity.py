"""Families with recurrent layers give the logits that transformers gives, however tokens arrive."""

from __future__ import annotations

from pathlib import Path

import ask_llama_cpp
import pytest
import tiny
import torch
import transformers

import tiny_recurrent
from gguf_converted import convert_each
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.glance import glance
from unspool.model.weights import parameter_count, shapes

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLOSE = 5e-4  # of logits around 10: processors add up 32-bit numbers in other orders


def some_tokens(count: int = 30) -> torch.Tensor:
    return torch.randint(3, 259, (1, count), generator=torch.Generator().manual_seed(1))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module", params=tiny_recurrent.FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A family's model in transformers and in Unspool, from the same files."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = tiny.save(request.param, folder)
    return theirs, load_transformer(open_checkpoint(folder))


@torch.no_grad()
def test_prompt_at_once(pair):
    theirs, ours = pair
    tokens = some_tokens(80)  # more than a chunk of theirs
    expected = theirs(tokens).logits
    assert expected.std() > 0.1, "a model that says nothing would prove nothing"
    # transformers reads prompts in chunks, whose sums lose more than those of single tokens.
    assert difference(ours(tokens), expected) < 2 * CLOSE


@torch.no_grad()
def test_token_by_token(pair):
    theirs, ours = pair
    tokens = some_tokens()
    cache = ours.new_cache(tokens.shape[1])
    steps = [ours(tokens[:, :5], cache)]
    steps += [ours(tokens[:, i : i + 1], cache) for i in range(5, tokens.shape[1])]
    assert difference(torch.cat(steps, 1), theirs(tokens).logits) < CLOSE


@torch.no_grad()
def test_saved_checkpoint_loads_in_transformers(pair, tmp_path: Path):
    theirs, ours = pair
    save_checkpoint(ours, tmp_path)
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


# What a GGUF file cannot say: that weights are not normalized, that a layer has no experts, that
# positions are turned.
NOT_IN_GGUF = {
    "lfm2-moe-no-bias", "qwen3-next-dense", "granite-hybrid-turned", "nemotron-h-both",
}  # fmt: skip
IN_GGUF = tiny_recurrent.FAMILIES.keys() - NOT_IN_GGUF
# llama.cpp itself takes no DeltaNet whose keys and values differ in their width, as ours do here.
RUN_BY_LLAMA_CPP = sorted(name for name in IN_GGUF if "qwen" not in name)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family as a GGUF file, made by llama.cpp's converter."""
    return convert_each(IN_GGUF, tiny.save, tmp_path_factory.mktemp("gguf"), vocabulary=True)


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(IN_GGUF))
def test_gguf_made_by_llama_cpp(converted: Path, name: str, tmp_path: Path):
    ours = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    found = ours(tokens)
    assert difference(found, tiny.make(name)(tokens).logits) < CLOSE
    save_checkpoint(ours, tmp_path)  # heads in another order than transformers has: in our words
    assert difference(load_transformer(open_checkpoint(tmp_path))(tokens), found) == 0


@torch.no_grad()
@pytest.mark.parametrize("name", RUN_BY_LLAMA_CPP)
def test_llama_cpp_says_the_same(converted: Path, name: str):
    ours = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    (theirs,) = ask_llama_cpp.ask(converted / f"{name}.gguf", prompts=tokens.tolist())["logprobs"]
    assert difference(ours(tokens)[0, -1].log_softmax(-1), torch.tensor(theirs)) < 2 * CLOSE


@pytest.mark.parametrize("name", ["granite-hybrid-moe", "nemotron-h", "nemotron-h-moe"])
def test_memory_is_told_from_what_each_layer_is(converted: Path, name: str):
    seen, whole = (glance(converted / file) for file in (f"{name}.gguf", name))
    assert not seen.problem and seen.state_bytes > 0
    assert (seen.state_bytes, seen.kv_bytes) == (whole.state_bytes, whole.kv_bytes)
