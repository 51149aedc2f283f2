"""What a GGUF file says under the name of its own architecture."""

from __future__ import annotations

from typing import Any

import numpy as np

from unspool.errors import ModelFileError
from unspool.model.gguf import GGUFFile


class Keys:
    """Metadata under the architecture's own name, with its types checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise ModelFileError(f"{file.path}: does not say its general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):  # one number for each layer: we need them all alike
            if value.size == 0 or (value != value[0]).any():
                raise ModelFileError(
                    f"{self.file.path}: {key} differs from layer to layer, which is not supported"
                )
            value = value[0].item()
        return value

    def first(self, key: str) -> Any:
        """The number of the first layer."""
        return self.per_layer(key, 1)[0]

    def per_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """What may be one value for all layers or one for each."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return [self.number(key, default)] * layers
        if value.size < layers:
            raise ModelFileError(
                f"{self.file.path}: {key} has {value.size} values for {layers} layers"
            )
        return [one.item() for one in value[:layers]]

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            state = "is missing" if value is None else f"is {value!r}, not a number"
            raise ModelFileError(f"{self.file.path}: {self.architecture}.{key} {state}")
        return value
