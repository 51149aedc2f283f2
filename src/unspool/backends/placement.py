"""How a model is to be kept and run: what a person asked for, made into something definite.

None of the backends is imported before it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unspool.backends.torch.available import INSTALL_TORCH, TorchMissingError, check_torch
from unspool.errors import SettingsError, UnspoolError

BACKENDS = ("auto", "native", "cuda", "torch")
DTYPES = ("float32", "bfloat16", "float16")

# What an NVIDIA driver shows: seen without importing torch, which takes seconds.
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Choice(NamedTuple):
    """Where a model will run, and what the person should know about it."""

    backend: str
    device: str
    remark: str | None = None
    devices: tuple[str, ...] = ()  # where it is to be in several places


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a model is to be kept; `chosen` makes `auto` into something definite."""

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantize: int | None = None  # bits that weights are packed into while loading
    kv_bits: int | None = None  # of a number in the KV cache; None: as `dtype` says
    threads: int | None = None
    exact: bool = False  # a text is the same in any batch
    tensor_parallel: int | None = None  # processes that hold the model together
    devices: str | Sequence[str] | None = None  # for its layers in order, or for each process

    def __post_init__(self) -> None:
        self._check_several()
        _one_of("backend", self.backend, BACKENDS)
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("quantize", self.quantize, (None, 4, 8))
        _one_of("kv_bits", self.kv_bits, (None, 8, 16, 32))
        threads = self.threads
        if threads is not None and (type(threads) is not int or threads < 1):
            raise SettingsError(f"threads is {threads!r}; it may be a whole number from 1 up")
        if type(self.exact) is not bool:
            raise SettingsError(f"exact is {self.exact!r}; it may be True or False")
        if self.quantize is not None and self.dtype != "auto":
            raise SettingsError(
                f"quantize is {self.quantize} and dtype is {self.dtype}: weights can be kept "
                "only one way; give one of them"
            )

    def _check_several(self) -> None:
        """Whether several processes or devices are asked for in a way that can be."""
        count = self.tensor_parallel
        if count is not None and (type(count) is not int or count < 1):
            raise SettingsError(f"tensor_parallel is {count!r}; it may be a number from 1 up")
        several = {"tensor_parallel": count, "devices": self.devices}
        for name in (name for name, value in several.items() if value is not None):
            if self.backend not in ("auto", "torch"):
                raise SettingsError(
                    f"{name} is for the torch backend, and backend is {self.backend}; leave one of "
                    "them out"
                )
        if self.devices is None:
            return
        if self.device != "auto":
            raise SettingsError("device and devices are given; only one of them may be")
        named = self.named_devices
        if not named or not all(named):
            raise SettingsError(
                f"devices is {self.devices!r}; it may be their names, like cuda:0,cuda:1, or auto"
            )
        if self.ranks > 1 and named != ["auto"] and len(named) != count:
            raise SettingsError(
                f"tensor_parallel is {count}, and {len(named)} devices are named; name one for "
                "each process"
            )

    @property
    def ranks(self) -> int:
        """How many processes hold the model together."""
        return self.tensor_parallel or 1

    @property
    def native_kv_bits(self) -> int:
        """Bits of a number in the native backend's KV cache: float32 means 32, else 16."""
        return self.kv_bits or (32 if self.dtype == "float32" else 16)

    def plain_dtype(self, device: str) -> str:
        """The precision of activations and of the KV cache on the torch and cuda backends."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device.startswith("cuda") else "float32"

    @property
    def named_devices(self) -> list[str]:
        given = self.devices or ()
        return [one.strip() for one in given.split(",")] if isinstance(given, str) else list(given)

    def chosen(self) -> Choice:
        if self.ranks > 1 or self.devices is not None:
            return self._on_several()
        device = self._device()
        if self.backend in ("cuda", "torch") or device != "cpu":
            return self._on_torch(device)
        from unspool.native import missing

        reason = missing()
        if reason is None:
            return Choice("native", "cpu")
        if self.backend == "native":
            raise UnspoolError(f"the native backend cannot be used here: {reason}")
        self._refuse_what_only_native_has(
            f"that cannot be used here: {reason}", device, quantize=self.quantize is not None
        )
        try:
            check_torch(device)
        except TorchMissingError:
            raise TorchMissingError(
                f"nothing here can run a model: the native backend is missing ({reason}), and "
                f"torch is not installed; put the first right, or {INSTALL_TORCH}"
            ) from None
        return Choice("torch", "cpu", f"running on torch, which is slower on a CPU: {reason}")

    def _on_torch(self, device: str) -> Choice:
        """On a GPU by our own kernels if they can run there, else by plain torch."""
        check_torch(device)
        remark = None
        if self.backend != "torch":
            from unspool.backends.cuda.available import missing

            reason = missing(device)
            if reason is None:
                self._refuse_what_only_native_has(
                    f"this would run on {device}: leave it out", device
                )
                return Choice("cuda", device)
            if self.backend == "cuda":
                raise UnspoolError(f"the kernels for GPUs cannot be used here: {reason}")
            if device.startswith("cuda"):
                remark = f"running on plain torch, which is slower: {reason}"
        self._refuse_what_only_native_has(
            f"this would run on torch ({device}): leave it out, or give backend native",
            device,
            quantize=self.quantize is not None,
        )
        if self.exact:
            raise SettingsError(
                "plain torch cannot be exact, as its sums depend on the batch; leave that out"
                + (f" ({remark})" if remark else "")
            )
        return Choice("torch", device, remark)

    def _on_several(self) -> Choice:
        """On plain torch, which alone can run a model that is not in one place."""
        named = self.named_devices
        if named == ["auto"]:
            check_torch("cuda")
            import torch

            named = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        elif not named:
            named = [self._device()]
            if named[0].startswith("cuda:"):
                raise SettingsError(
                    f"device is {named[0]}, and tensor_parallel {self.ranks}: a process each needs "
                    "a GPU; leave device out, or name them all (devices)"
                )
        for device in dict.fromkeys(named):
            check_torch(device)
        self._refuse_what_only_native_has(
            "a model in several places runs on torch: leave it out",
            named[0],
            quantize=self.quantize is not None,
        )
        if self.exact:
            raise SettingsError("plain torch cannot be exact, as its sums depend on the batch")
        return Choice("torch", named[0], devices=tuple(named))

    def _device(self) -> str:
        if self.backend == "cuda" and self.device == "auto":
            return "cuda"
        if self.device != "auto":
            if self.backend == "native" and self.device != "cpu":
                raise SettingsError(
                    f"the native backend runs on the cpu, not on {self.device!r}; leave the "
                    "device out, or give backend torch"
                )
            return self.device
        if self.backend != "native" and has_nvidia():
            try:
                import torch
            except ImportError:  # the driver is here, torch is not: the CPU will do
                return "cpu"
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cpu"

    def _refuse_what_only_native_has(
        self, why: str, device: str, *, quantize: bool = False
    ) -> None:
        """`quantize`: whether packing the weights cannot be done there either."""
        dtype = self.plain_dtype(device)
        bits = 32 if dtype == "float32" else 16
        if self.kv_bits not in (None, bits):
            raise SettingsError(
                f"kv_bits must be {bits} on {device}, got {self.kv_bits}: there the KV cache has "
                f"the precision of dtype ({dtype}), and only the native CPU backend has another; "
                f"{why}"
            )
        given = {"quantize": quantize, "threads": self.threads is not None}
        for name in (name for name, set_ in given.items() if set_):
            raise SettingsError(f"{name} is for the native CPU backend; {why}")


def has_nvidia() -> bool:
    """Whether there is an NVIDIA driver, found out without torch."""
    return any(path.exists() for path in _NVIDIA)


def _one_of(name: str, given: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(given, bool) or given not in allowed:
        words = ", ".join(str(value) for value in allowed if value is not None)
        raise SettingsError(f"{name} is {given!r}; it may be {words}")
