"""gpt-oss with its experts in MXFP4, as it is published: safetensors and GGUF, torch and native."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers import tiny
from helpers.gguf_converted import convert
from helpers.paged_texts import Library, read
from unspool import native
from unspool.backends.cpu.model import CpuModel, load_cpu
from unspool.backends.step import Backend
from unspool.backends.torch.backend import TorchModel
from unspool.model.files.checkpoint import Checkpoint, load_transformer, open_checkpoint
from unspool.model.files.stored import FileTensor

transformers.logging.disable_progress_bar()
needs_native = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)
CLOSE = 1e-4
LONGEST = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with packed experts; `plain` in it is the same with their numbers worked out."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    root = tmp_path_factory.mktemp("gpt-oss")
    shape = {"hidden_size": 64, "intermediate_size": 96, "sliding_window": 7}
    config = transformers.GptOssConfig(**{**tiny._SHAPE, **tiny._GPT_OSS, **shape})
    torch.manual_seed(0)
    tiny.filled(transformers.GptOssForCausalLM(config)).save_pretrained(root / "plain")
    plain = load_file(root / "plain" / "model.safetensors")
    packed = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if not name.endswith("_proj"):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        size = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, size, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(plain, root / "plain" / "model.safetensors", {"format": "pt"})
    save_file(packed, root / "model.safetensors", {"format": "pt"})
    settings = json.loads((root / "plain" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (root / "config.json").write_text(json.dumps(settings))
    return root


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    target = folder / "model.gguf"
    convert([(folder, target)])
    return target


@pytest.fixture(scope="module")
def logits(folder: Path) -> tuple[torch.Tensor, Any]:
    """Some tokens, and what transformers says to them."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 259, (1, LONGEST), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return tokens, reference(tokens).logits[0].numpy()


def experts_of(checkpoint: Checkpoint) -> dict[str, FileTensor]:
    """The experts' matrices."""
    every = checkpoint.weights()
    return {name: part for name, part in every if len(part.shape) == 3 and ".feed." in name}


@pytest.mark.parametrize("form", ["safetensors", pytest.param("gguf", marks=pytest.mark.slow)])
@torch.no_grad()
def test_torch_gives_what_transformers_gives(
    form: str, folder: Path, logits: tuple[Any, Any], request: pytest.FixtureRequest
):
    path = folder if form == "safetensors" else request.getfixturevalue("converted")
    checkpoint = open_checkpoint(path)
    assert {part.type for part in experts_of(checkpoint).values()} == {"MXFP4"}
    model = load_transformer(checkpoint)
    tokens, expected = logits
    assert np.abs(model(tokens)[0].numpy() - expected).max() < CLOSE
    cache = model.new_cache(LONGEST)
    steps = [model(tokens[:, at : at + 1], cache)[0] for at in range(LONGEST)]
    assert np.abs(torch.cat(steps).numpy() - expected).max() < CLOSE


def written(model: Any) -> Any:
    """Logits of two texts, by prefill and token by token, one row per token."""
    backend: Backend = model.backend(memory=1 << 22, context=128)
    library = Library(16, 259)
    text, other = library.text(LONGEST), library.text(30)
    some = [*read(backend, [(text, 23), (other, 9)])]
    some += [row for _ in range(8) for row in read(backend, [(text, 1), (other, 1)])]
    return np.concatenate(some)


@needs_native
def test_native_gives_what_torch_gives(folder: Path):
    checkpoint = open_checkpoint(folder)
    reference = written(TorchModel(load_transformer(checkpoint)))
    exact = written(load_cpu(checkpoint, store="float32", threads=2, kv_bits=32))
    assert np.abs(exact - reference).max() < CLOSE
    model = written(load_cpu(checkpoint, threads=2, kv_bits=32))
    # Activations are rounded to bytes; where a router then chooses another expert, more differs.
    error = np.sqrt(((model - reference) ** 2).mean(-1) / (reference**2).mean(-1))
    assert 0 < np.median(error) < 0.05


@needs_native
def test_experts_keep_their_bits(folder: Path):
    model: CpuModel = load_cpu(open_checkpoint(folder), threads=1).wait()
    for name, stored in experts_of(open_checkpoint(folder)).items():
        for number, part in enumerate(stored.slices()):
            packed = model.packed[f"{name}[{number}]"]
            np.testing.assert_array_equal(packed.float32(), part.float32())
            assert packed.packing.format == "codes"
    assert model.quantization_error is None


@pytest.mark.slow
def test_the_yarn_of_gguf_files_keeps_its_borders(converted: Path):
    rotary = open_checkpoint(converted).config.rotary
    assert rotary is not None and rotary.scaling == "yarn" and not rotary.whole_dimensions
