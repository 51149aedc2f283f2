"""Which backend keeps a model's weights, and where: from what was asked for and what is here.

On a CPU the native backend runs the model; torch is needed for GPUs, and where the native library
is missing. Neither is imported before it is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unspool.backends.base import Loaded
from unspool.errors import SettingsError, UnspoolError
from unspool.model.checkpoint import Checkpoint, GGUFCheckpoint, load_transformer
from unspool.text.tokenizer.tokenizer import Tokenizer

BACKENDS = ("auto", "native", "torch")
DTYPES = ("float32", "bfloat16", "float16")
INSTALL_TORCH = "pip install 'unspool[torch]'"

# What an NVIDIA driver shows: seen without importing torch, which takes seconds.
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Choice(NamedTuple):
    """Where a model will run, and what the person should know about it."""

    backend: str
    device: str
    remark: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a model is to be kept; `chosen` makes `auto` into something definite."""

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantize: int | None = None  # bits that weights are packed into while loading
    kv_bits: int = 16  # of a number in keys and values
    threads: int | None = None

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("quantize", self.quantize, (None, 4, 8))
        _one_of("kv_bits", self.kv_bits, (8, 16))
        threads = self.threads
        if threads is not None and (type(threads) is not int or threads < 1):
            raise SettingsError(f"threads is {threads!r}; it may be a whole number from 1 up")
        if self.quantize is not None and self.dtype != "auto":
            raise SettingsError(
                f"quantize is {self.quantize} and dtype is {self.dtype}: weights can be kept "
                "only one way; give one of them"
            )

    def chosen(self) -> Choice:
        device = self._device()
        if self.backend == "torch" or device != "cpu":
            self._refuse_what_only_native_has(
                f"this would run on torch ({device}): leave it out, or give backend native"
            )
            check_torch(device)
            return Choice("torch", device)
        from unspool.native import missing

        reason = missing()
        if reason is None:
            return Choice("native", "cpu")
        if self.backend == "native":
            raise UnspoolError(f"the native backend cannot be used here: {reason}")
        self._refuse_what_only_native_has(f"that cannot be used here: {reason}")
        try:
            check_torch(device)
        except TorchMissingError:
            raise TorchMissingError(
                f"nothing here can run a model: the native backend is missing ({reason}), and "
                f"torch is not installed; put the first right, or {INSTALL_TORCH}"
            ) from None
        return Choice("torch", "cpu", f"running on torch, which is slower on a CPU: {reason}")

    def _device(self) -> str:
        if self.device != "auto":
            if self.backend == "native" and self.device != "cpu":
                raise SettingsError(
                    f"the native backend runs on the cpu, not on {self.device!r}; leave the "
                    "device out, or give backend torch"
                )
            return self.device
        if self.backend != "native" and any(path.exists() for path in _NVIDIA):
            try:
                import torch
            except ImportError:  # the driver is here, torch is not: the CPU will do
                return "cpu"
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cpu"

    def _refuse_what_only_native_has(self, why: str) -> None:
        given = {
            "quantize": self.quantize is not None,
            "kv_bits": self.kv_bits != 16,
            "threads": self.threads is not None,
        }
        for name in (name for name, set_ in given.items() if set_):
            raise SettingsError(f"{name} is for the native CPU backend; {why}")


class TorchMissingError(UnspoolError):
    """Torch would be needed, and is not installed."""


def check_torch(device: str = "cpu") -> None:
    """Torch is here and can use the device; otherwise an error that says what to do."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError(f"this needs torch, which is not here: {INSTALL_TORCH}") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"the device {device!r} cannot be used here: {reason}") from error


def load_weights(checkpoint: Checkpoint, wanted: Placement, choice: Choice) -> Loaded:
    """The checkpoint's weights in memory, on the backend and device that were chosen."""
    if choice.backend == "native":
        from unspool.backends.cpu.loaded import load_cpu

        store = None if wanted.dtype == "auto" else wanted.dtype
        if wanted.quantize is not None:
            store = str(wanted.quantize)
        return load_cpu(checkpoint, store=store, threads=wanted.threads, kv_bits=wanted.kv_bits)
    from unspool.backends.torch.loaded import TorchModel

    dtype = wanted.dtype
    if dtype == "auto":
        dtype = "bfloat16" if choice.device.startswith("cuda") else "float32"
    return TorchModel(load_transformer(checkpoint, dtype=dtype, device=choice.device))


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The vocabulary that came with a checkpoint; None if there is none (token ids still work)."""
    if isinstance(checkpoint, GGUFCheckpoint):
        if "tokenizer.ggml.model" not in checkpoint.file.metadata:
            return None
        return Tokenizer.from_gguf(checkpoint.file.metadata)
    if not (checkpoint.path / "tokenizer.json").exists():
        return None
    return Tokenizer.from_file(checkpoint.path)


def _one_of(name: str, given: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(given, bool) or given not in allowed:
        words = ", ".join(str(value) for value in allowed if value is not None)
        raise SettingsError(f"{name} is {given!r}; it may be {words}")
