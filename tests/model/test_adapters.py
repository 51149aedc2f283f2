"""LoRA adapters in PEFT's format: theirs here and ours there, with the same logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import tiny
from helpers.adapter_support import all_logits, with_adapters
from helpers.cuda_support import torch_model
from helpers.paged_texts import RandomCheckpoint, config
from unspool.backends.cpu.model import load_cpu
from unspool.errors import UnspoolError
from unspool.model.adapters import adaptable_shapes, read_adapter, write_adapter
from unspool.model.files.checkpoint import open_checkpoint
from unspool.native import missing_reason

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]
FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt-neox"]
_NATIVE = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
BACKENDS = ["torch", pytest.param("native", marks=_NATIVE)]


def peft_model(folder: Path, family: str, **changes: Any) -> Any:
    """A tiny model with a random adapter over all its matrices, both saved; PEFT's own model."""
    import peft

    base = tiny.save(family, folder / "base")
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **changes}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "adapter")
    return model.eval()


def logits_of(model: Any, tokens: list[int] = TOKENS) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def our_logits(lm: Any, adapter: str | None = None, tokens: list[int] = TOKENS) -> Any:
    with lm.open_branch(tokens, adapter) as branch:
        return np.asarray(lm.engine.extend(branch, num_logits=len(tokens)))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A family's folder with `base` and `adapter`, and PEFT's logits; each is made once."""

    @cache
    def make(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        return folder, logits_of(peft_model(folder, family))

    return make


@pytest.fixture
def lm(adapted: Any) -> Iterator[Any]:
    """A Llama on torch with the adapter "a"."""
    folder, _ = adapted("llama")
    with unspool.load(folder / "base", backend="torch", memory=8 << 20) as lm:
        lm.load_adapter("a", folder / "adapter")
        yield lm


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_pefts_gives_its_logits(adapted: Any, family: str, backend: str) -> None:
    folder, expected = adapted(family)
    with unspool.load(folder / "base", backend=backend, memory=8 << 20) as lm:
        plain = our_logits(lm)
        lm.load_adapter("a", folder / "adapter")
        assert np.abs(expected - plain).max() > 0.05
        # Keys and values have 16 bits in the native backend.
        allowed = 1e-4 if backend == "torch" else 0.02 * np.abs(expected).max()
        assert np.abs(our_logits(lm, "a") - expected).max() < allowed
        np.testing.assert_array_equal(our_logits(lm), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_here_loads_in_peft(adapted: Any, family: str, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    folder, expected = adapted(family)
    config = open_checkpoint(folder / "base").config
    write_adapter(read_adapter(folder / "adapter", config), tmp_path, config)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    result = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert np.abs(logits_of(result) - expected).max() < 1e-4
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 6)


def test_patterns_and_rslora(tmp_path: Path) -> None:
    model = peft_model(
        tmp_path,
        "llama",
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
    )
    lm = unspool.load(tmp_path / "base", backend="torch")
    lm.load_adapter("a", tmp_path / "adapter")
    assert np.abs(our_logits(lm, "a") - logits_of(model)).max() < 1e-4


def test_a_head_of_its_own_is_adapted_too(tmp_path: Path) -> None:
    model = peft_model(tmp_path, "llama", target_modules=["lm_head", "v_proj"])
    for backend in ("torch", "native") if missing_reason() is None else ("torch",):
        lm = unspool.load(tmp_path / "base", backend=backend, dtype="float32")
        lm.load_adapter("a", tmp_path / "adapter")
        assert np.abs(our_logits(lm, "a") - logits_of(model)).max() < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_different_adapters_in_one_step(adapted: Any, tmp_path: Path, backend: str) -> None:
    """Each text is the same as alone, with any adapters in the batch; equal prompts are computed
    once per adapter."""
    folder, _ = adapted("llama")
    peft_model(tmp_path, "llama", target_modules=["v_proj", "down_proj"], r=7)
    lm = unspool.load(folder / "base", backend=backend)
    lm.load_adapter("one", folder / "adapter")
    lm.load_adapter("two", tmp_path / "adapter")
    names = [None, "one", "two", "one", None]
    engine = lm.engine
    alone = [our_logits(lm, name) for name in names]
    branches = [engine.open(TOKENS, name) for name in names]
    assert [branch.num_reused > 0 for branch in branches] == [True] * 5  # each its own adapter's
    together = engine.extend_all([(branch, [7, 8]) for branch in branches], num_logits=2)
    for name, branch, result in zip(names, branches, together, strict=True):
        with lm.open_branch([*TOKENS, 7, 8], name) as fresh:
            expected = np.asarray(engine.extend(fresh, num_logits=len(TOKENS) + 2))
        np.testing.assert_allclose(np.asarray(result), expected[-2:], atol=2e-5, rtol=1e-4)
        branch.release()
    assert np.abs(alone[0] - alone[1]).max() > 0.05 < np.abs(alone[1] - alone[2]).max()


def test_no_page_passes_from_one_adapter_to_another(lm: Any, adapted: Any) -> None:
    prompt = list(range(3, 60))
    lm.generate(prompt, max_tokens=1)
    assert lm.generate(prompt, max_tokens=1, adapter="a").reused == 0
    assert lm.generate(prompt, max_tokens=1, adapter="a").reused > 0
    lm.load_adapter("a", adapted("llama")[0] / "adapter")  # perhaps another of the same name
    assert lm.generate(prompt, max_tokens=1, adapter="a").reused == 0


def test_an_adapter_can_go_while_a_text_is_written_with_it(lm: Any) -> None:
    complete = lm.generate(TOKENS, max_tokens=30, temperature=0, adapter="a", end=False)
    steps = lm.stream(TOKENS, max_tokens=30, temperature=0, adapter="a", end=False)
    first = next(steps)
    lm.unload_adapter("a")
    assert [first.token, *(step.token for step in steps)] == complete.tokens
    assert lm.adapters == []
    with pytest.raises(UnspoolError, match="no adapter 'a'"):
        lm.generate(TOKENS, adapter="a")


def test_a_view_writes_with_its_adapter(lm: Any, tmp_path: Path) -> None:
    named = lm.generate(TOKENS, max_tokens=12, temperature=0, adapter="a", end=False)
    view = lm.adapted("a")
    assert view.generate(TOKENS, max_tokens=12, temperature=0, end=False).tokens == named.tokens
    assert named.alternatives(0, 1)[0].token == named.tokens[0]
    assert named.rewind(3).resume().tokens == named.tokens
    assert view.look(TOKENS).residuals.tolist() == lm.adapted("a").look(TOKENS).residuals.tolist()
    assert not np.array_equal(view.look(TOKENS).residuals, lm.look(TOKENS).residuals)
    with pytest.raises(UnspoolError, match="merge"):
        view.save(tmp_path / "saved")
    with pytest.raises(UnspoolError, match="trace"):
        lm.trace(named)
    assert view.score(TOKENS).logprobs == lm.score(TOKENS, adapter="a").logprobs
    view.close()  # it is the same model
    with pytest.raises(UnspoolError, match="closed"):
        lm.generate(TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_alpha": "much"}, "lora_alpha"),
    ],
)
def test_what_cannot_be_is_refused(
    adapted: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(adapted("llama")[0], tmp_path, dirs_exist_ok=True)
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UnspoolError, match=message):
        read_adapter(folder / "adapter", open_checkpoint(folder / "base").config)


def test_an_adapter_of_another_model_is_refused(adapted: Any) -> None:
    folder, _ = adapted("llama")
    for family, message in (("qwen3", "another model"), ("gpt2", "not supported")):
        config = open_checkpoint(adapted(family)[0] / "base").config
        with pytest.raises(UnspoolError, match=message):
            read_adapter(folder / "adapter", config)
    with pytest.raises(UnspoolError, match="no adapter"):
        read_adapter(folder / "base", config)
    assert "embed.weight" not in adaptable_shapes(config)


@_NATIVE
def test_over_packed_weights_an_adapter_does_what_it_does_over_floats() -> None:
    """In the native backend weights stay packed; their products round what goes in to bytes."""
    checkpoint = RandomCheckpoint(config(width=64, ff_width=64, context=128), "Q8_0")
    models = load_cpu(checkpoint, kv_bits=32), torch_model(checkpoint)
    packed, plain = (all_logits(with_adapters(model)).reshape(-1, 67) for model in models)
    assert np.corrcoef(packed.ravel(), plain.ravel())[0, 1] > 0.98
    without, adapted = plain[:3], plain[3:6]
    assert np.corrcoef(without.ravel(), adapted.ravel())[0, 1] < 0.9
