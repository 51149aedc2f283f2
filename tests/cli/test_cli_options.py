"""The model options: the same in every command, and all of them reach `load`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unspool.cli.main import _exit_code
from unspool.cli.options import ModelChoice
from unspool.errors import UnspoolError, UnspoolWarning

DEFAULTS = {
    "context": None, "backend": "auto", "device": "auto", "dtype": "auto", "quantize": None,
    "kv_bits": None, "threads": None, "exact": False, "tensor_parallel": None, "devices": None,
    "offline": False,
}  # fmt: skip


@pytest.fixture
def load_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `load`; nothing is loaded, the command ends there."""
    arguments: dict[str, Any] = {}

    def load(model: str | None, **options: Any) -> None:
        arguments.update(model=model, **options)
        raise UnspoolError("asked")

    monkeypatch.setattr("unspool.loading.load", load)
    return arguments


@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"], ["score", "Hi"]])
def test_every_option_reaches_the_model(
    command: list[str], load_arguments: dict[str, Any], capfd: Any
):
    assert _exit_code(command) == 2
    assert load_arguments == {"model": None, **DEFAULTS}
    options = [
        "-m", "a/b", "--context", "99", "--backend", "native", "--device", "cpu",
        "--dtype", "float16", "--quantize", "4", "--kv-bits", "8", "--threads", "3",
        "--exact", "--tensor-parallel", "2", "--devices", "cuda:0,cuda:1", "--offline",
    ]  # fmt: skip
    assert _exit_code([*command, *options]) == 2
    assert load_arguments == {
        "model": "a/b", "context": 99, "backend": "native", "device": "cpu", "dtype": "float16",
        "quantize": 4, "kv_bits": 8, "threads": 3, "exact": True, "offline": True,
        "tensor_parallel": 2, "devices": "cuda:0,cuda:1",
    }  # fmt: skip
    assert "asked" in capfd.readouterr().err


def test_defaults_replace_open_options(load_arguments: dict[str, Any]):
    choice = ModelChoice("x", {**DEFAULTS, "dtype": "float16"})
    with pytest.raises(UnspoolError):
        choice.load(dtype="float32", context=7)
    assert (load_arguments["dtype"], load_arguments["context"]) == ("float16", 7)


def test_warnings_of_loading_are_lines_on_stderr(monkeypatch: pytest.MonkeyPatch, capfd: Any):
    model = SimpleNamespace(quantization_error="4 bits changed the weights by 7%")

    def load(name: str | None, **options: Any) -> Any:
        warnings.warn("running on torch", UnspoolWarning, stacklevel=2)
        return SimpleNamespace(model=model)

    monkeypatch.setattr("unspool.loading.load", load)
    assert ModelChoice(None, dict(DEFAULTS)).load().model is model
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["running on torch", "4 bits changed the weights by 7%"]
    model.quantization_error = None
    ModelChoice(None, dict(DEFAULTS)).load()
    assert capfd.readouterr().err.splitlines() == ["running on torch"], "also the second time"


def test_models_plan_shows_the_native_plan(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, words_folder: Path
):
    module = ModuleType("unspool.backends.cpu.plan")
    module.format_plan = lambda checkpoint: f"plan of {checkpoint.path.name}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unspool.backends.cpu.plan", module)
    assert _exit_code(["models", "plan", str(words_folder)]) == 0
    assert capfd.readouterr().out.strip() == f"plan of {words_folder.name}"
