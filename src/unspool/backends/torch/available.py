"""Whether torch is here, found out without a module that needs it."""

from __future__ import annotations

from unspool.errors import SettingsError, UnspoolError

INSTALL_TORCH = "pip install 'unspool[torch]'"


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
