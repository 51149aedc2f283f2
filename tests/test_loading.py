"""Which backend a model gets, with and without torch, with and without native kernels."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import unspool
from helpers import tiny
from unspool.backends import placement
from unspool.backends.placement import Placement, PlacementChoice, TorchMissingError
from unspool.errors import SettingsError, UnspoolError, UnspoolWarning
from unspool.loading import load_weights, make_drafter_for

WHY = "the kernels were not built"


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.native.missing_reason", lambda: None)


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.native.missing_reason", lambda: WHY)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises, as if it were not there


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_NVIDIA_FILES", ())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is seen, and a torch that can use it."""
    import torch

    monkeypatch.setattr(placement, "_NVIDIA_FILES", (Path(__file__),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)


@pytest.mark.usefixtures("native", "no_gpu", "no_torch")
def test_native_is_what_a_cpu_gets_and_torch_is_not_missed():
    assert Placement().resolve() == PlacementChoice("native", "cpu")
    assert Placement(backend="native", quantize=4, kv_bits=8, threads=2).resolve()[0] == "native"
    assert Placement(device="cpu", dtype="float32").resolve() == PlacementChoice("native", "cpu")


@pytest.mark.usefixtures("native", "no_torch")
def test_a_driver_without_torch_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "_NVIDIA_FILES", (Path(__file__),))
    assert Placement().resolve() == PlacementChoice("native", "cpu")


@pytest.mark.usefixtures("native", "gpu")
def test_a_gpu_is_used_unless_native_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unspool.backends.cuda.availability.why_unavailable", lambda device: None)
    assert Placement().resolve() == PlacementChoice("cuda", "cuda")
    assert Placement(quantize=4, backend="cuda").resolve() == PlacementChoice("cuda", "cuda")
    assert Placement(device="cuda:1").resolve() == PlacementChoice("cuda", "cuda:1")
    assert Placement(backend="torch").resolve() == PlacementChoice("torch", "cuda")
    assert Placement(backend="native").resolve() == PlacementChoice("native", "cpu")
    assert Placement(device="cpu").resolve() == PlacementChoice("native", "cpu")
    with pytest.raises(SettingsError, match="threads is for the native CPU backend"):
        Placement(threads=2).resolve()


@pytest.mark.usefixtures("native", "gpu")
def test_a_gpu_that_our_kernels_do_not_know(monkeypatch: pytest.MonkeyPatch):
    """Plain torch runs there, with a hint."""
    reason = "Triton is not installed"
    monkeypatch.setattr("unspool.backends.cuda.availability.why_unavailable", lambda device: reason)
    choice = Placement().resolve()
    assert choice[:2] == ("torch", "cuda") and reason in str(choice.remark)
    assert not Placement(backend="torch").resolve().remark, "asked for: no hint"
    with pytest.raises(UnspoolError, match=f"cannot be used here: {reason}"):
        Placement(backend="cuda").resolve()
    with pytest.raises(SettingsError, match="quantize is for the native CPU backend"):
        Placement(quantize=8).resolve()


def test_what_is_in_the_way_of_our_kernels(monkeypatch: pytest.MonkeyPatch):
    import torch

    from unspool.backends.cuda.availability import why_unavailable

    assert "got 'mps'" in str(why_unavailable("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert "Tesla T4 is too old" in str(why_unavailable("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_unavailable("cuda") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton is not installed" in str(why_unavailable("cuda"))


@pytest.mark.usefixtures("no_native", "no_gpu")
def test_torch_stands_in_with_one_warning(tiny_lm: Any):
    with pytest.warns(UnspoolWarning, match=WHY) as caught:
        assert unspool.load(tiny_lm.path, memory=8 << 20).transformer
    assert [warning.category for warning in caught].count(UnspoolWarning) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for: nothing to say
        assert unspool.load(tiny_lm.path, backend="torch", memory=8 << 20).transformer
    with pytest.raises(UnspoolError, match=f"native backend cannot be used here: {WHY}"):
        Placement(backend="native").resolve()
    with pytest.raises(SettingsError, match=f"quantize is for the native CPU backend.*{WHY}"):
        Placement(quantize=4).resolve()


@pytest.mark.usefixtures("no_native", "no_gpu", "no_torch")
def test_nothing_can_run():
    with pytest.raises(TorchMissingError, match=r"not built.*pip install 'unspool\[torch\]'"):
        Placement().resolve()


@pytest.mark.usefixtures("native", "no_gpu", "no_torch")
@pytest.mark.parametrize("options", [{"backend": "torch"}, {"device": "cuda"}, {"device": "mps"}])
def test_torch_that_is_not_there(options: dict[str, Any]):
    with pytest.raises(TorchMissingError, match=r"pip install 'unspool\[torch\]'"):
        Placement(**options).resolve()


@pytest.mark.usefixtures("native", "no_gpu")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "jax"}, "backend must be one of auto, native, cuda, torch, got 'jax'"),
        ({"dtype": "int4"}, "dtype must be .* got 'int4'"),
        ({"device": "tpu9"}, "device 'tpu9'"),
        ({"device": "cuda", "backend": "native"}, "needs device cpu, got 'cuda'"),
        ({"quantize": 5}, "quantize must be one of 4, 8, got 5"),
        ({"quantize": 4, "dtype": "float16"}, r"quantize \(4\) and dtype \(float16\)"),
        ({"kv_bits": 4}, "kv_bits must be one of 8, 16, 32, got 4"),
        ({"threads": 0}, "threads must be an integer >= 1, got 0"),
        ({"threads": True}, "threads must be .* got True"),
        ({"exact": 1}, "exact must be True or False, got 1"),
        ({"exact": True, "backend": "torch"}, "exact is not possible on plain torch"),
        ({"quantize": 4, "backend": "torch"}, "quantize is for the native CPU backend"),
        ({"kv_bits": 8, "backend": "torch"}, "kv_bits must be 32 on cpu, got 8"),
        ({"kv_bits": 16, "backend": "torch"}, r"the precision of dtype \(float32\)"),
        ({"kv_bits": 32, "backend": "torch", "dtype": "bfloat16"}, "must be 16 on cpu, got 32"),
        ({"threads": 2, "backend": "torch"}, "threads is for the native CPU backend"),
    ],
)
def test_impossible_wishes_are_told_before_anything_is_read(options: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words) as caught:
        unspool.load("/no/such/model", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "store"),
    [({}, None), ({"dtype": "bfloat16"}, "bfloat16"), ({"quantize": 8, "threads": 3}, "8"),
     ({"dtype": "float32"}, "float32"), ({"kv_bits": 32}, None),
     ({"dtype": "float32", "kv_bits": 16}, "float32")],
)  # fmt: skip
def test_what_the_native_backend_is_asked_for(
    options: dict[str, Any], store: str | None, monkeypatch: pytest.MonkeyPatch
):
    recorded = {}
    module = ModuleType("unspool.backends.cpu.model")
    module.load_cpu = lambda checkpoint, **options: recorded.update(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unspool.backends.cpu.model", module)
    load_weights(SimpleNamespace(), Placement(**options), PlacementChoice("native", "cpu"))  # type: ignore[arg-type]
    bits = options.get("kv_bits", 32 if store == "float32" else 16)
    assert recorded == {"store": store, "threads": options.get("threads"), "kv_bits": bits}


def test_a_native_model_has_no_transformer_but_can_be_saved(tiny_lm: Any, tmp_path: Path):
    native = unspool.LanguageModel(SimpleNamespace(config=tiny_lm.config), None, path=tiny_lm.path)
    with pytest.raises(UnspoolError, match="backend='torch'"):
        _ = native.transformer
    native.save(tmp_path)
    again = unspool.load(tmp_path, backend="torch", memory=8 << 20)
    assert again.model.fingerprint() == tiny_lm.model.fingerprint()
    with pytest.raises(UnspoolError, match="not loaded from a file"):
        unspool.LanguageModel(native.model, None).save(tmp_path)


@pytest.mark.usefixtures("no_torch")
def test_saving_a_native_model_needs_torch(tiny_lm: Any, tmp_path: Path):
    native = unspool.LanguageModel(SimpleNamespace(config=tiny_lm.config), None, path=tiny_lm.path)
    with pytest.raises(TorchMissingError, match="pip install"):
        native.save(tmp_path)


def test_another_model_comes_the_same_way(tiny_lm: Any, monkeypatch: pytest.MonkeyPatch):
    recorded: list[dict[str, Any]] = []
    monkeypatch.setattr("unspool.loading.load", lambda name, **options: recorded.append(options))
    monkeypatch.setattr(
        "unspool.decoding.speculative.drafters.make_drafter",
        lambda speculate, lm, load: load(speculate),
    )
    tiny_lm.drafter("x")
    fake = SimpleNamespace(config=tiny_lm.config, device="cpu")
    unspool.LanguageModel(fake, None, make_drafter=make_drafter_for).drafter("x")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="has no drafters"):
        unspool.LanguageModel(fake, None).drafter("x")  # type: ignore[arg-type]
    assert recorded == [
        {"backend": "torch", "device": "cpu"},
        {"backend": "native", "device": "cpu"},
    ]


def test_a_long_text_is_scored_in_pieces_and_not_from_what_is_stored(tmp_path: Path):
    """Over several pieces of 256 tokens, and again when its beginning was computed before."""
    import torch

    tiny.save("llama", tmp_path)
    lm = unspool.load(tmp_path, backend="torch", context=700, memory=8 << 20)
    ids = torch.randint(3, 259, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logprobs = lm.transformer(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [float(logprobs[place, ids[place + 1]]) for place in range(len(ids) - 1)]
    for _ in range(2):
        score = lm.score(ids)
        assert score.tokens == ids and score.logprobs[0] is None
        assert score.logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert lm.score(ids[:1]).logprobs == [None]


WITHOUT_TORCH = """
import importlib, pathlib, re, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'safetensors'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Refuse())
import numpy as np, unspool
root = pathlib.Path(unspool.__file__).parent
for file in root.rglob('*.py'):
    name = '.'.join(('unspool', *file.relative_to(root).with_suffix('').parts))
    torches = ('unspool.backends.torch.', 'unspool.backends.cuda.', 'unspool.model.layers.',
               'unspool.decoding.speculative.head', 'unspool.decoding.speculative.eagle',
               'unspool.decoding.speculative.mtp', 'unspool.lens.differentiable', 'unspool.train.')
    # The server and the page read runs, whatever can train them.
    without = ('unspool.train.data.', 'unspool.train.running.runs', 'unspool.train.puzzle_routes',
               'unspool.train.evaluation.bits_per_byte', 'unspool.train.evaluation.sample_sheet')
    # Importing Ray takes longer than all others; what these import besides is imported here.
    rays = ('unspool.scale.replicas.application', 'unspool.scale.replicas.request_router')
    if name in rays:
        assert not re.search(r'^ *(import|from) torch', file.read_text(), re.MULTILINE), name
    elif not name.startswith(torches) or name.startswith(without):
        if not name.endswith(('__init__', '__main__')):
            importlib.import_module(name)
assert 'unspool.cli.run' in sys.modules and 'unspool.lens.attribution' in sys.modules
from helpers.fake_backend import FakeBackend
from unspool.decoding.search.samples import samples
from unspool.decoding.speculative.drafters import ModelDrafter
from unspool.model.config import ModelConfig

config = ModelConfig(family='own', vocab_size=12, width=8, layers=1, heads=1, kv_heads=1,
                     head_width=8, ff_width=8, context=64, positions='sinusoidal')
table = np.random.default_rng(0).dirichlet(np.ones(12), (12, 12))

class Model:
    precision, device = 'float32', 'cpu'
    def __init__(self): self.config = config
    def backend(self, *, memory, context): return FakeBackend(table, context=context)

lm = unspool.LanguageModel(Model(), None, make_drafter=unspool.loading.make_drafter_for)
made = lm.generate([1, 2], max_tokens=9, seed=3)
assert len(made.tokens) == 9
scored = lm.score([1, 2, *made.tokens])
for step, known in zip(made.steps, scored.logprobs[2:]):
    assert abs(step.logprob - known) < 1e-5
assert len(samples(lm, [1, 2], 3, max_tokens=4, seed=1)) == 3
assert lm.generate([1, 2], max_tokens=9, seed=3, speculate='lookup').tokens == made.tokens
drafted = lm.generate([1, 2], max_tokens=9, seed=3, speculate=lambda r: ModelDrafter(lm, r))
assert drafted.tokens == made.tokens and drafted.steps[1].draft == 'accepted', drafted.steps[1]
assert 'torch' not in sys.modules
"""


def test_everything_but_torch_works_without_torch():
    """Every module is imported, and texts are written, judged and drafted, with torch refused."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=Path(__file__).parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
