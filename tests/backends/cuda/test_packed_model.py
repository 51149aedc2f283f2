"""Whole models with packed weights: the same texts as the plain transformer over their numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from test_load import float8_checkpoint, write_quantized  # noqa: E402

from unspool import LanguageModel  # noqa: E402
from unspool.backends.cuda.model import CudaModel  # noqa: E402
from unspool.backends.cuda.weights import load_weights  # noqa: E402
from unspool.backends.torch.backend import TorchModel  # noqa: E402
from unspool.model.files.checkpoint import (  # noqa: E402
    fingerprint,
    load_transformer,
    open_checkpoint,
)


@pytest.fixture(params=["gguf", pytest.param("fp8", marks=pytest.mark.slow)])
def path(request, tmp_path):
    if request.param == "fp8":
        float8_checkpoint(tmp_path, "block")
        return tmp_path
    path_ = tmp_path / "m.gguf"
    write_quantized(path_, {"token_embd": "Q8_0", "blk.0.ffn_down": "Q6_K", "output": "Q4_0"})
    return path_


def test_the_same_texts(path):
    checkpoint = open_checkpoint(path)
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    packed = LanguageModel(
        CudaModel(weights, lambda: fingerprint(checkpoint)), None, memory=1 << 22
    )
    plain = LanguageModel(TorchModel(load_transformer(checkpoint)), None, memory=1 << 22)
    prompts = [[3, 1, 4, 1, 5], [5, 3]]
    options = {"max_tokens": 2, "temperature": 0}
    expected = [result.tokens for result in plain.generate(prompts, **options)]
    assert [result.tokens for result in packed.generate(prompts, **options)] == expected
    assert packed.model.rows("embed.weight", 3, 5).shape == (2, weights.config.width)
    assert packed.model.fingerprint() == plain.model.fingerprint()
