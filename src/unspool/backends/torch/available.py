"""Checks whether torch is installed, without importing modules that need it."""

from __future__ import annotations

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
