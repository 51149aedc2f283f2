"""Families with recurrent layers give the logits of transformers and of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers import ask_llama_cpp, tiny, tiny_recurrent
from helpers.gguf_converted import RECURRENT, converted_models
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.hub.inspect import summarize_model
from unspool.model.weights import parameter_count, weight_shapes

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
    reference = tiny.save(request.param, folder)
    return reference, load_transformer(open_checkpoint(folder))


@torch.no_grad()
def test_prompt_at_once(pair):
    reference, model = pair
    tokens = some_tokens(80)  # more than a chunk of theirs
    expected = reference(tokens).logits
    assert expected.std() > 0.1, "logits of a constant model would prove nothing"
    # transformers reads prompts in chunks, whose sums lose more than those of single tokens.
    assert difference(model(tokens), expected) < 2 * CLOSE


@torch.no_grad()
def test_token_by_token(pair):
    reference, model = pair
    tokens = some_tokens()
    cache = model.new_cache(tokens.shape[1])
    steps = [model(tokens[:, :5], cache)]
    steps += [model(tokens[:, i : i + 1], cache) for i in range(5, tokens.shape[1])]
    assert difference(torch.cat(steps, 1), reference(tokens).logits) < CLOSE


@torch.no_grad()
def test_saved_checkpoint_loads_in_transformers(pair, tmp_path: Path):
    reference, model = pair
    save_checkpoint(model, tmp_path)
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


# llama.cpp does not support a DeltaNet with keys and values of different width, as here.
RUN_BY_LLAMA_CPP = [name for name in RECURRENT if "qwen" not in name]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_models(tmp_path_factory)


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
def test_gguf_made_by_llama_cpp(converted: Path, name: str, tmp_path: Path):
    model = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    result = model(tokens)
    assert difference(result, tiny.make(name)(tokens).logits) < CLOSE
    save_checkpoint(model, tmp_path)  # heads in the order of GGUF: Unspool's own format
    assert difference(load_transformer(open_checkpoint(tmp_path))(tokens), result) == 0


@torch.no_grad()
@pytest.mark.parametrize("name", RUN_BY_LLAMA_CPP)
def test_llama_cpp_says_the_same(converted: Path, name: str):
    model = load_transformer(open_checkpoint(converted / f"{name}.gguf"))
    tokens = some_tokens()
    (reference,) = ask_llama_cpp.ask(converted / f"{name}.gguf", prompts=tokens.tolist())[
        "logprobs"
    ]
    assert difference(model(tokens)[0, -1].log_softmax(-1), torch.tensor(reference)) < 2 * CLOSE


@pytest.mark.parametrize("name", ["granite-hybrid-moe", "nemotron-h", "nemotron-h-moe"])
def test_memory_is_told_from_what_each_layer_is(converted: Path, name: str):
    observed, complete = (summarize_model(converted / file) for file in (f"{name}.gguf", name))
    assert not observed.problem and observed.state_bytes > 0
    assert (observed.state_bytes, observed.kv_bytes) == (complete.state_bytes, complete.kv_bytes)
