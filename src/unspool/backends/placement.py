"""Placement of a model: the requested backend, device and precision, checked and resolved.

A backend is imported only after it is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unspool.errors import SettingsError, UnspoolError

INSTALL_TORCH = "pip install 'unspool[torch]'"


class TorchMissingError(UnspoolError):
    """Torch is needed but not installed."""


def check_torch(device: str = "cpu") -> None:
    """Raise an error that says what to do unless torch is installed and can use the device."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError(f"torch is not installed: {INSTALL_TORCH}") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"the device {device!r} cannot be used here: {reason}") from error


BACKENDS = ("auto", "native", "cuda", "torch")
DTYPES = ("float32", "bfloat16", "float16")

# Files of an NVIDIA driver: checked without importing torch, which takes seconds.
_NVIDIA_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


class PlacementChoice(NamedTuple):
    """Where a model will run, and a remark to show to the user."""

    backend: str
    device: str
    remark: str | None = None
    devices: tuple[str, ...] = ()  # all devices, if the model is spread over several


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Requested placement of a model; `chosen` resolves `auto`."""

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantize: int | None = None  # bits per weight, quantized while loading
    kv_bits: int | None = None  # bits per value in the KV cache; None: from `dtype`
    threads: int | None = None
    exact: bool = False  # batch-invariant results
    tensor_parallel: int | None = None  # number of processes that share the model
    devices: str | Sequence[str] | None = None  # for the layers in order, or one per process

    def __post_init__(self) -> None:
        self._check_multi_device()
        _check_allowed("backend", self.backend, BACKENDS)
        _check_allowed("dtype", self.dtype, ("auto", *DTYPES))
        _check_allowed("quantize", self.quantize, (None, 4, 8))
        _check_allowed("kv_bits", self.kv_bits, (None, 8, 16, 32))
        threads = self.threads
        if threads is not None and (type(threads) is not int or threads < 1):
            raise SettingsError(f"threads must be an integer >= 1, got {threads!r}")
        if type(self.exact) is not bool:
            raise SettingsError(f"exact must be True or False, got {self.exact!r}")
        if self.quantize is not None and self.dtype != "auto":
            raise SettingsError(
                f"quantize ({self.quantize}) and dtype ({self.dtype}) cannot be combined: both set "
                "the precision of the weights; give only one"
            )

    def _check_multi_device(self) -> None:
        """Check `tensor_parallel` and `devices`."""
        count = self.tensor_parallel
        if count is not None and (type(count) is not int or count < 1):
            raise SettingsError(f"tensor_parallel must be an integer >= 1, got {count!r}")
        options = {"tensor_parallel": count, "devices": self.devices}
        for name in (name for name, value in options.items() if value is not None):
            if self.backend not in ("auto", "torch"):
                raise SettingsError(
                    f"{name} needs the torch backend, got backend {self.backend}; leave out one of "
                    "them"
                )
        if self.devices is None:
            return
        if self.device != "auto":
            raise SettingsError("device and devices cannot be combined; give only one")
        names = self.named_devices
        if not names or not all(names):
            raise SettingsError(
                f"devices must be device names, like cuda:0,cuda:1, or auto; got {self.devices!r}"
            )
        if self.num_ranks > 1 and names != ["auto"] and len(names) != count:
            raise SettingsError(
                f"devices must name one device per process: tensor_parallel is {count}, got "
                f"{len(names)} names"
            )

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.tensor_parallel or 1

    @property
    def native_kv_bits(self) -> int:
        """Bits per value in the native backend's KV cache: 32 for float32, else 16."""
        return self.kv_bits or (32 if self.dtype == "float32" else 16)

    def activation_dtype(self, device: str) -> str:
        """Precision of activations and KV cache on the torch and cuda backends."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device.startswith("cuda") else "float32"

    @property
    def named_devices(self) -> list[str]:
        devices = self.devices or ()
        if isinstance(devices, str):
            return [name.strip() for name in devices.split(",")]
        return list(devices)

    def resolve(self) -> PlacementChoice:
        """Resolve backend and device, or raise an error that says what to change."""
        if self.num_ranks > 1 or self.devices is not None:
            return self._resolve_multi_device()
        device = self._resolve_device()
        if self.backend in ("cuda", "torch") or device != "cpu":
            return self._resolve_gpu_or_torch(device)
        from unspool.native import missing_reason

        reason = missing_reason()
        if reason is None:
            return PlacementChoice("native", "cpu")
        if self.backend == "native":
            raise UnspoolError(f"the native backend cannot be used here: {reason}")
        self._reject_native_options(
            f"that cannot be used here: {reason}", device, quantize=self.quantize is not None
        )
        try:
            check_torch(device)
        except TorchMissingError:
            raise TorchMissingError(
                f"no backend can run here: the native backend is missing ({reason}), and torch is "
                f"not installed; fix the first, or {INSTALL_TORCH}"
            ) from None
        return PlacementChoice(
            "torch", "cpu", f"running on torch, which is slower on a CPU: {reason}"
        )

    def _resolve_gpu_or_torch(self, device: str) -> PlacementChoice:
        """Use the Triton kernels where they can run, else plain torch."""
        check_torch(device)
        remark = None
        if self.backend != "torch":
            from unspool.backends.cuda.availability import why_unavailable

            reason = why_unavailable(device)
            if reason is None:
                self._reject_native_options(f"this would run on {device}: leave it out", device)
                return PlacementChoice("cuda", device)
            if self.backend == "cuda":
                raise UnspoolError(f"the cuda backend cannot be used here: {reason}")
            if device.startswith("cuda"):
                remark = f"running on plain torch, which is slower: {reason}"
        self._reject_native_options(
            f"this would run on torch ({device}): leave it out, or give backend native",
            device,
            quantize=self.quantize is not None,
        )
        self._reject_exact(f" ({remark})" if remark else "")
        return PlacementChoice("torch", device, remark)

    def _resolve_multi_device(self) -> PlacementChoice:
        """Only plain torch runs a model spread over several devices or processes."""
        devices = self.named_devices
        if devices == ["auto"]:
            check_torch("cuda")
            import torch

            devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        elif not devices:
            devices = [self._resolve_device()]
            if devices[0].startswith("cuda:"):
                raise SettingsError(
                    f"tensor_parallel {self.num_ranks} needs one GPU per process, got device "
                    f"{devices[0]}; leave device out, or name all GPUs with devices"
                )
        for device in dict.fromkeys(devices):
            check_torch(device)
        self._reject_native_options(
            "a model on several devices runs on torch: leave it out",
            devices[0],
            quantize=self.quantize is not None,
        )
        self._reject_exact()
        return PlacementChoice("torch", devices[0], devices=tuple(devices))

    def _reject_exact(self, remark: str = "") -> None:
        if self.exact:
            raise SettingsError(
                "exact is not possible on plain torch, whose sums depend on the batch; leave it "
                f"out{remark}"
            )

    def _resolve_device(self) -> str:
        if self.backend == "cuda" and self.device == "auto":
            return "cuda"
        if self.device != "auto":
            if self.backend == "native" and self.device != "cpu":
                raise SettingsError(
                    f"the native backend needs device cpu, got {self.device!r}; leave device out, "
                    "or give backend torch"
                )
            return self.device
        if self.backend != "native" and has_nvidia_driver():
            try:
                import torch
            except ImportError:  # a driver without torch: use the CPU
                return "cpu"
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cpu"

    def _reject_native_options(self, hint: str, device: str, *, quantize: bool = False) -> None:
        """Reject options that only the native backend has; `quantize`: reject that as well."""
        dtype = self.activation_dtype(device)
        bits = 32 if dtype == "float32" else 16
        if self.kv_bits not in (None, bits):
            raise SettingsError(
                f"kv_bits must be {bits} on {device}, got {self.kv_bits}: there the KV cache has "
                f"the precision of dtype ({dtype}), only the native CPU backend has others; {hint}"
            )
        options = {"quantize": quantize, "threads": self.threads is not None}
        for name in (name for name, is_set in options.items() if is_set):
            raise SettingsError(f"{name} is for the native CPU backend; {hint}")


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is installed; does not import torch."""
    return any(path.exists() for path in _NVIDIA_FILES)


def _check_allowed(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        choices = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise SettingsError(f"{name} must be one of {choices}, got {value!r}")
