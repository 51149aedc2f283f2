"""The options of loading a model: the same in every command, and all of them reach `load`."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unspool.cli.main import _exit_code
from unspool.cli.options import ModelChoice
from unspool.errors import UnspoolError, UnspoolWarning

USUAL = {
    "context": None, "backend": "auto", "device": "auto", "dtype": "auto", "quantize": None,
    "kv_bits": None, "threads": None, "exact": False, "tensor_parallel": None, "devices": None,
    "offline": False,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command asked `load` for; nothing is loaded, the command ends there."""
    found: dict[str, Any] = {}

    def load(model: str | None, **options: Any) -> None:
        found.update(model=model, **options)
        raise UnspoolError("asked")

    monkeypatch.setattr("unspool.loading.load", load)
    return found


@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"], ["score", "Hi"]])
def test_every_option_reaches_the_model(command: list[str], asked: dict[str, Any], capfd: Any):
    assert _exit_code(command) == 2
    assert asked == {"model": None, **USUAL}
    given = [
        "-m", "a/b", "--context", "99", "--backend", "native", "--device", "cpu",
        "--dtype", "float16", "--quantize", "4", "--kv-bits", "8", "--threads", "3",
        "--exact", "--tensor-parallel", "2", "--devices", "cuda:0,cuda:1", "--offline",
    ]  # fmt: skip
    assert _exit_code([*command, *given]) == 2
    assert asked == {
        "model": "a/b", "context": 99, "backend": "native", "device": "cpu", "dtype": "float16",
        "quantize": 4, "kv_bits": 8, "threads": 3, "exact": True, "offline": True,
        "tensor_parallel": 2, "devices": "cuda:0,cuda:1",
    }  # fmt: skip
    assert "asked" in capfd.readouterr().err


def test_what_is_left_open_may_be_filled_in(asked: dict[str, Any]):
    choice = ModelChoice("x", {**USUAL, "dtype": "float16"})
    with pytest.raises(UnspoolError):
        choice.load(dtype="float32", context=7)
    assert (asked["dtype"], asked["context"]) == ("float16", 7)


def test_remarks_of_loading_are_lines_on_stderr(monkeypatch: pytest.MonkeyPatch, capfd: Any):
    model = SimpleNamespace(quantization_error="4 bits changed the weights by 7%")

    def load(name: str | None, **options: Any) -> Any:
        warnings.warn("running on torch", UnspoolWarning, stacklevel=2)
        return SimpleNamespace(model=model)

    monkeypatch.setattr("unspool.loading.load", load)
    assert ModelChoice(None, dict(USUAL)).load().model is model
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["running on torch", "4 bits changed the weights by 7%"]
    model.quantization_error = None
    ModelChoice(None, dict(USUAL)).load()
    assert capfd.readouterr().err.splitlines() == ["running on torch"], "also the second time"


@pytest.mark.real
def test_models_plan_shows_the_native_plan(monkeypatch: pytest.MonkeyPatch, capfd: Any):
    module = ModuleType("unspool.backends.cpu.plan")
    module.format_plan = lambda checkpoint: f"plan of {checkpoint.path.name}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unspool.backends.cpu.plan", module)
    assert _exit_code(["models", "plan"]) == 0
    assert capfd.readouterr().out.strip() == "plan of SmolLM2-135M-Instruct.Q4_1.gguf"
