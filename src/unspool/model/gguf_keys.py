"""Access to the architecture-specific metadata of a GGUF file (`llama.block_count`, ...)."""

from __future__ import annotations

from typing import Any

import numpy as np

from unspool.errors import ModelFileError
from unspool.model.gguf import GGUFFile


class ArchitectureMetadata:
    """Type-checked metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise ModelFileError(f"{file.path}: no general.architecture in its metadata")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):  # one number per layer: they must be equal
            if value.size == 0 or (value != value[0]).any():
                raise ModelFileError(
                    f"{self.file.path}: {key} differs between layers, which is not supported"
                )
            value = value[0].item()
        return value

    def first(self, key: str) -> Any:
        """The value of the first layer."""
        return self.per_layer(key, 1)[0]

    def per_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """The value of each layer; metadata may hold one value or a list."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return [self.number(key, default)] * layers
        if value.size < layers:
            raise ModelFileError(
                f"{self.file.path}: {key} has {value.size} values for {layers} layers"
            )
        return [item.item() for item in value[:layers]]

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            state = "is missing" if value is None else f"is {value!r}, not a number"
            raise ModelFileError(f"{self.file.path}: {self.architecture}.{key} {state}")
        return value
