"""Steering vectors: directions that are added to the residual stream to change what is written.

    happy = fit_steering_vector(lm, ["I love this."], ["I hate this."], layers=[14])
    lm.generate("My day was", steer=[(happy, 1.5)])
    happy.save("happy.gguf")                        # llama.cpp: --control-vector happy.gguf

A vector has one direction for each of some layers; direction N is added to the output of layer N,
counted from 0, as llama.cpp and repeng do. Their files are GGUF files with the architecture
`controlvector` and tensors `direction.N`, N from 1: llama.cpp cannot steer the first layer.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unspool.backends.interventions import Add, Intervention
from unspool.backends.step import Floats
from unspool.errors import (
    ModelFileError,
    SettingsError,
    StorageError,
    UnspoolWarning,
    check_number,
)
from unspool.lens.activation_cache import Layers, activation_caches, check_layers
from unspool.lens.activations import TextLike
from unspool.model.families.registry import FAMILIES
from unspool.model.files.gguf import GGUFFile
from unspool.session import Session

ARCHITECTURE = "controlvector"
_HINT, _COUNT = f"{ARCHITECTURE}.model_hint", f"{ARCHITECTURE}.layer_count"
_FINGERPRINT, _NAME = "unspool.model_fingerprint", "general.name"
_DIRECTION = re.compile(r"direction\.(\d+)")
_MAX_LAYERS = 4096

Method = Literal["mean", "pca"]
Pool = Literal["last", "mean"]


@dataclass(frozen=True, slots=True, eq=False)
class SteeringVector:
    """Directions of one model's residual stream, by layer. Add, subtract and scale them freely."""

    directions: Mapping[int, Floats]  # [width] by layer from 0; added to the layer's output
    name: str = ""  # for people
    model_hint: str = ""  # architecture that it was made for: llama, qwen2
    fingerprint: str = ""  # of the weights that it was made with; empty: unknown

    def __post_init__(self) -> None:
        if not self.directions:
            raise SettingsError("a steering vector needs at least one direction")
        checked: dict[int, Floats] = {}
        for layer, values in sorted(self.directions.items()):
            direction = np.asarray(values, np.float32)
            if direction.ndim != 1 or not np.isfinite(direction).all():
                raise SettingsError(
                    f"the direction of layer {layer} must be finite numbers [width], got shape "
                    f"{list(direction.shape)}"
                )
            checked[int(layer)] = direction
        if len({len(direction) for direction in checked.values()}) > 1:
            raise SettingsError("the directions of a steering vector must have the same width")
        object.__setattr__(self, "directions", checked)

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return len(next(iter(self.directions.values())))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that it steers, from 0."""
        return tuple(self.directions)

    @property
    def norms(self) -> dict[int, float]:
        """Length of each direction, by layer."""
        return {n: float(np.linalg.norm(values)) for n, values in self.directions.items()}

    def __repr__(self) -> str:
        ends = f"{self.layers[0]} to {self.layers[-1]}" if len(self.layers) > 1 else self.layers[0]
        label = f" {self.name}" if self.name else ""
        return f"<SteeringVector{label}: layers {ends}, width {self.width}>"

    def __mul__(self, factor: float) -> SteeringVector:
        number = check_number("factor", factor)
        scaled = {n: values * np.float32(number) for n, values in self.directions.items()}
        return replace(self, directions=scaled)

    __rmul__ = __mul__

    def __truediv__(self, factor: float) -> SteeringVector:
        return self * (1 / check_number("factor", factor))

    def __neg__(self) -> SteeringVector:
        return self * -1.0

    def __add__(self, other: SteeringVector) -> SteeringVector:
        if not isinstance(other, SteeringVector):
            return NotImplemented
        if other.width != self.width:
            raise SettingsError(
                f"steering vectors of widths {self.width} and {other.width} cannot be added: they "
                "are of different models"
            )
        total = dict(self.directions)
        for layer, values in other.directions.items():
            total[layer] = total[layer] + values if layer in total else values
        is_same = self.fingerprint == other.fingerprint
        return SteeringVector(
            total,
            name="+".join(filter(None, (self.name, other.name))),
            model_hint=self.model_hint if self.model_hint == other.model_hint else "",
            fingerprint=self.fingerprint if is_same else "",
        )

    def __sub__(self, other: SteeringVector) -> SteeringVector:
        return self + -other

    def at(self, layers: int | Sequence[int]) -> SteeringVector:
        """Return the directions of some layers only."""
        selected = [layers] if isinstance(layers, int) else list(layers)
        missing = [layer for layer in selected if layer not in self.directions]
        if missing:
            raise SettingsError(f"there is no direction for layer {missing[0]}: {self!r}")
        return replace(self, directions={layer: self.directions[layer] for layer in selected})

    def check_model(self, num_layers: int, width: int, fingerprint: str = "") -> None:
        """Raise if the vector cannot be added to this model; warn if it is of another one."""
        label = f"steering vector {self.name!r}" if self.name else "the steering vector"
        if self.width != width:
            raise SettingsError(
                f"{label} has width {self.width} and the model {width}: it is of another model"
            )
        if self.layers[-1] >= num_layers or self.layers[0] < 0:
            raise SettingsError(
                f"{label} steers layer {self.layers[-1]}, and the model has layers 0 to "
                f"{num_layers - 1}: it is of another model"
            )
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            warnings.warn(
                f"{label} was made with other weights (fingerprint {self.fingerprint[:12]}, here "
                f"{fingerprint[:12]}); it may have another effect",
                UnspoolWarning,
                stacklevel=3,
            )

    def interventions(self, scale: float = 1.0) -> tuple[Intervention, ...]:
        """Return what steers a request: the directions times `scale`, at all positions."""
        vectors = np.stack(list(self.directions.values()))
        op = Add(vectors, scale=check_number("the strength of a steering vector", scale))
        return (Intervention("resid_post", op, layers=self.layers),)

    # -- files

    def save(self, path: str | Path) -> None:
        """Write a GGUF control vector, for llama.cpp, repeng and `load_steering_vector`."""
        from gguf import GGUFWriter

        if self.layers[0] < 1:
            raise SettingsError(
                "a control vector cannot steer layer 0 (llama.cpp has no direction.0); leave it "
                f"out: vector.at({list(self.layers[1:])})"
            )
        target = Path(path).expanduser()
        part = target.with_name(f"{target.name}.part")
        try:
            writer = GGUFWriter(part, ARCHITECTURE)
            writer.add_string(_HINT, self.model_hint)
            writer.add_uint32(_COUNT, len(self.directions))
            if self.name:
                writer.add_string(_NAME, self.name)
            if self.fingerprint:
                writer.add_string(_FINGERPRINT, self.fingerprint)
            for layer, values in self.directions.items():
                writer.add_tensor(f"direction.{layer}", values)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            part.replace(target)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)


def load_steering_vector(path: str | Path) -> SteeringVector:
    """Read a GGUF control vector, as Unspool, llama.cpp and repeng write it."""
    source = Path(path).expanduser()
    file = GGUFFile(source)
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelFileError(
            f"{source}: not a control vector: its architecture is {architecture!r} instead of "
            f"{ARCHITECTURE!r}"
        )
    directions: dict[int, Floats] = {}
    for name, tensor in file.tensors.items():
        match = _DIRECTION.fullmatch(name)
        if match is None:
            continue
        layer = int(match[1])
        if not 0 < layer < _MAX_LAYERS or len(tensor.shape) != 1:
            raise ModelFileError(
                f"{source}: tensor {name} must be one direction [width] of a layer from 1 on, got "
                f"shape {list(tensor.shape)}"
            )
        directions[layer] = file.float32(name).copy()  # not a view into the file
    if not directions:
        raise ModelFileError(f"{source}: has no tensor direction.N")
    try:
        return SteeringVector(
            directions,
            name=_text(file, _NAME) or source.stem,
            model_hint=_text(file, _HINT),
            fingerprint=_text(file, _FINGERPRINT),
        )
    except SettingsError as error:
        raise ModelFileError(f"{source}: {error}") from None


def _text(file: GGUFFile, key: str) -> str:
    value = file.metadata.get(key, "")
    return value if isinstance(value, str) else ""


# -- the option `steer`

Steer = Mapping[str, float] | Sequence[tuple[Any, float]] | SteeringVector | str


def parse_steer(value: Any, named: Mapping[str, SteeringVector]) -> list[SteeringVector]:
    """Return the vectors of an option `steer`, scaled.

    Args:
        value: {"name": strength}, a list of (vector or name, strength), or a vector or a name.
        named: The vectors that names refer to.
    """
    if value is None:
        return []
    if isinstance(value, SteeringVector | str):
        value = [(value, 1.0)]
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    vectors = []
    for pair in pairs if is_list else [None]:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise SettingsError(
                "steer must be {'name': strength} or a list of (vector, strength), got "
                f"{str(value)[:80]}"
            )
        vector, strength = pair
        if isinstance(vector, str):
            if vector not in named:
                names = ", ".join(sorted(named)) or "none"
                raise SettingsError(
                    f"there is no steering vector {vector[:100]!r} (loaded: {names}); load one "
                    "with lm.load_steering_vector(path)"
                )
            vector = named[vector]
        if not isinstance(vector, SteeringVector):
            raise SettingsError(
                f"steer must have steering vectors or their names, got {str(vector)[:80]!r}"
            )
        vectors.append(vector * check_number("the strength of a steering vector", strength))
    return vectors


# -- fitting


def principal_direction(differences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the direction along which rows are longest, of length one; its sign is arbitrary.

    Rows are not centred: their common part is what distinguishes positive from negative texts.
    """
    return np.asarray(np.linalg.svd(differences, full_matrices=False)[2][0])


def fit_direction(
    positive: npt.NDArray[np.float64], negative: npt.NDArray[np.float64], method: str
) -> Floats:
    """Fit the direction from negative to positive vectors [texts, width].

    `mean` is the difference of the means. `pca` is the first principal component of the paired
    differences (llama.cpp's method, and repeng's `pca_center`), with the sign under which most
    positive texts have the larger projection (repeng's rule), and as long as the mean difference
    along it, so that a strength of 1 is comparable between the methods.
    """
    if method == "mean":
        return np.asarray(positive.mean(0) - negative.mean(0), np.float32)
    direction = principal_direction(positive - negative)
    projected = (positive - negative) @ direction
    sign = -1.0 if (projected < 0).sum() > (projected > 0).sum() else 1.0
    return np.asarray(direction * sign * abs(projected.mean()), np.float32)


def fit_steering_vector(
    lm: Session,
    positive: Sequence[TextLike],
    negative: Sequence[TextLike],
    *,
    layers: Layers = None,
    method: Method = "mean",
    pool: Pool = "last",
    name: str = "",
) -> SteeringVector:
    """Fit a steering vector; see `LanguageModel.steering_vector`."""
    if method not in ("mean", "pca"):
        raise SettingsError(f"method must be mean or pca, got {method!r}")
    if pool not in ("last", "mean"):
        raise SettingsError(f"pool must be last or mean, got {pool!r}")
    for side, texts in (("positive", positive), ("negative", negative)):
        if isinstance(texts, str) or not len(texts):
            raise SettingsError(f"{side} must be a list of at least one text, got {texts!r}")
    num_positive, num_negative = len(positive), len(negative)
    if method == "pca" and (num_positive != num_negative or num_positive < 2):
        raise SettingsError(
            "pca needs pairs: as many positive as negative texts, at least 2, got "
            f"{num_positive} and {num_negative}"
        )
    if layers is None:
        layers = range(1, lm.config.layers)  # all that a control vector can have
    texts = [*positive, *negative]
    caches = activation_caches(
        lm,
        texts,
        sites="resid_post",
        layers=layers,
        positions="last" if pool == "last" else "all",
    )
    means = [cache["resid_post"].mean(1, dtype=np.float64) for cache in caches]
    vectors = np.stack(means, 1)  # [layers, texts, width]
    selected = check_layers(lm.config.layers, layers)
    # What is added to one layer's output stays in the stream: the share of each layer is such that
    # a strength of 1 adds one difference in all.
    directions = {
        layer: fit_direction(rows[:num_positive], rows[num_positive:], method)
        / np.float32(len(selected))
        for layer, rows in zip(selected, vectors, strict=True)
    }
    return SteeringVector(
        directions,
        name=name,
        model_hint=FAMILIES[lm.config.family].gguf or lm.config.family,
        fingerprint=lm.model.fingerprint(),
    )


# -- vectors shipped with Unspool, for the default model

_SHIPPED = Path(__file__).parent / "vectors"


def shipped_vectors() -> dict[str, SteeringVector]:
    """Read the steering vectors of the default model, by name."""
    return {path.stem: load_steering_vector(path) for path in sorted(_SHIPPED.glob("*.gguf"))}


def read_vector_folder(folder: Path) -> dict[str, SteeringVector]:
    """Read every control vector (`.gguf`) of a folder, by its file name; skips links out of it."""
    if not folder.is_dir():
        raise SettingsError(f"{folder}: no such folder of steering vectors")
    inside = folder.resolve()
    return {
        path.stem: load_steering_vector(path)
        for path in sorted(folder.glob("*.gguf"))
        if path.resolve().parent == inside
    }


def combine(vectors: Sequence[SteeringVector]) -> tuple[Intervention, ...]:
    """Return the interventions of several vectors: one addition at each layer."""
    if not vectors:
        return ()
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total.interventions()
