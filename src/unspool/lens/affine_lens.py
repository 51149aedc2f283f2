"""Affine lenses: the prediction of each layer, after an affine map to the last layer's coordinates.

    lens = lm.fit_lens(texts)                        # a tuned lens
    lm.logit_lens("The capital of Italy is", lens=lens)
    lens.save("tuned.safetensors")

The logit lens reads a residual vector h of a layer as if it were the last one. An affine lens reads
h + A h + b instead, with A and b of each layer:

tuned      from regression: the vector that predicts the final one best (Belrose et al. 2023). Here
           by least squares, in closed form; each token is weighted so that the error counts in
           units of its final vector, which is what the final norm sees.
jacobian   I + A is the Jacobian of the final vector by the layer's vector at the same position,
           averaged over positions and texts; b makes it exact for the mean vector.

A has a low rank, so that a lens is a small file. What it keeps are the directions of the final
vector in which A matters most for the texts of the fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from unspool.backends.step import Floats
from unspool.errors import ModelFileError, SettingsError, StorageError, check_int
from unspool.lens.activation_cache import activation_caches
from unspool.lens.activation_files import write_safetensors
from unspool.lens.activations import Doubles
from unspool.model.files.safetensors import SafetensorsFile
from unspool.progress import progress_bar
from unspool.session import Prompt, Session

LensKind = Literal["tuned", "jacobian"]
KINDS: tuple[str, ...] = get_args(LensKind)

_VERSION = "1"
_RIDGE = 30.0  # weight of A = 0 beside the tokens, in tokens
_READ_TEXTS = 8  # read together
_INT8 = 127


@dataclass(frozen=True, slots=True, eq=False)
class AffineLens:
    """An affine map for the residual stream before each layer of one model."""

    kind: LensKind  # tuned or jacobian
    up: Floats  # [layers, width, rank]
    down: Floats  # [layers, rank, width]; A = up @ down
    bias: Floats  # [layers, width]
    fingerprint: str = ""  # of the weights that it was fitted to
    num_tokens: int = 0  # of the texts that it was fitted to
    name: str = ""  # of its file

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return int(self.bias.shape[1])

    @property
    def rank(self) -> int:
        """Rank of the map of each layer."""
        return int(self.up.shape[2])

    def __repr__(self) -> str:
        return (
            f"<AffineLens {self.kind}: {len(self.bias)} layers, width {self.width}, rank "
            f"{self.rank}, fitted to {self.num_tokens:,} tokens>"
        )

    def translate(self, residuals: Floats) -> Floats:
        """Translate the vectors before each layer; those after the last layer stay as they are.

        Args:
            residuals: [layers + 1, ..., width], as in `Activations.residuals`.
        """
        translated = [
            vectors + (vectors @ down.T) @ up.T + bias
            for vectors, up, down, bias in zip(
                residuals, self.up, self.down, self.bias, strict=False
            )
        ]
        return np.stack([*translated, residuals[-1]]).astype(np.float32)

    def check_model(self, num_layers: int, width: int, fingerprint: str = "") -> None:
        """Raise if the lens is of another model."""
        label = f"the {self.kind} lens"
        if self.bias.shape != (num_layers, width):
            raise SettingsError(
                f"{label} is of a model with {len(self.bias)} layers of width {self.width}, and "
                f"this one has {num_layers} of width {width}; fit one with lm.fit_lens(texts)"
            )
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise SettingsError(
                f"{label} was fitted to other weights (fingerprint {self.fingerprint[:12]}, here "
                f"{fingerprint[:12]}); fit one with lm.fit_lens(texts)"
            )

    # -- files

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, with the factors of A in 8 bits."""
        target = Path(path).expanduser()
        part = target.with_name(f"{target.name}.part")
        up, up_scale = _quantize(self.up, axis=1)
        down, down_scale = _quantize(self.down, axis=2)
        arrays: dict[str, npt.NDArray[Any]] = {
            "up": up,
            "up_scale": up_scale,
            "down": down,
            "down_scale": down_scale,
            "bias": self.bias,
        }
        metadata = {
            "format": "unspool affine lens",
            "version": _VERSION,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "num_tokens": str(self.num_tokens),
        }
        try:
            write_safetensors(part, arrays, metadata)
            part.replace(target)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)


def _quantize(array: Floats, axis: int) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantize to 8 bits, with one scale for each vector along the axis."""
    scale = np.abs(array).max(axis, keepdims=True) / _INT8
    steps = np.round(array / np.where(scale > 0, scale, 1))
    return steps.astype(np.int8), np.asarray(scale, np.float32)


def load_lens(path: str | Path) -> AffineLens:
    """Read what `AffineLens.save` has written."""
    source = Path(path).expanduser()
    file = SafetensorsFile(source)
    metadata = file.metadata
    if metadata.get("format") != "unspool affine lens" or metadata.get("kind") not in KINDS:
        raise ModelFileError(f"{source}: not an affine lens; write one with `unspool lens`")
    if metadata.get("version") != _VERSION:
        raise ModelFileError(
            f"{source}: version {metadata.get('version')!r} of the format is unknown; this is "
            f"version {_VERSION}"
        )
    names = ("up", "down", "up_scale", "down_scale", "bias")
    if missing := [name for name in names if name not in file.tensors]:
        raise ModelFileError(f"{source}: tensor {missing[0]} is missing")
    shape = file.tensors["up"].shape
    layers, width, rank = shape if len(shape) == 3 else (0, 0, 0)
    shapes = {
        "up": (layers, width, rank),
        "up_scale": (layers, 1, rank),
        "down": (layers, rank, width),
        "down_scale": (layers, rank, 1),
        "bias": (layers, width),
    }
    for name, expected in shapes.items():
        if not layers or file.tensors[name].shape != expected:
            raise ModelFileError(
                f"{source}: tensor {name} has shape {list(file.tensors[name].shape)}, and up "
                f"{list(shape)}"
            )
    up, down = (
        file.integers(name) * file.stored(f"{name}_scale").float32() for name in ("up", "down")
    )
    bias = file.stored("bias").float32().copy()
    if not all(np.isfinite(array).all() for array in (up, down, bias)):
        raise ModelFileError(f"{source}: has numbers that are not finite")
    count = metadata.get("num_tokens", "")
    return AffineLens(
        kind="tuned" if metadata["kind"] == "tuned" else "jacobian",
        up=np.asarray(up, np.float32),
        down=np.asarray(down, np.float32),
        bias=bias,
        fingerprint=metadata.get("fingerprint", ""),
        num_tokens=int(count) if count.isdecimal() else 0,
        name=source.stem,
    )


# -- lenses shipped with Unspool, for the default model

_SHIPPED = Path(__file__).parent / "lenses"


def shipped_lenses(shape: tuple[int, int]) -> dict[str, AffineLens]:
    """Read the lenses of the default model, by name; `shape`: its layers and width."""
    lenses = map(load_lens, sorted(_SHIPPED.glob("*.safetensors"), reverse=True))
    return {lens.name: lens for lens in lenses if lens.bias.shape == shape}


# -- fitting


def fit_lens(
    lm: Session,
    texts: Sequence[Prompt],
    *,
    kind: LensKind = "tuned",
    rank: int = 64,
    max_tokens: int = 256,
    probes: int = 1,
    progress: bool = True,
) -> AffineLens:
    """Fit an affine lens; see `LanguageModel.fit_lens`."""
    lm.config.require_head()
    if kind not in KINDS:
        raise SettingsError(f"kind must be {' or '.join(KINDS)}, got {kind!r}")
    check_int("rank", rank, 1)
    check_int("max_tokens", max_tokens, 1)
    check_int("probes", probes, 0)
    if isinstance(texts, str) or not len(texts):
        raise SettingsError(f"texts must be a list of at least one text, got {str(texts)[:80]!r}")
    prompts = [lm.prompt_ids(text, longer=True)[: min(max_tokens, lm.context)] for text in texts]
    fit = _TunedFit(lm) if kind == "tuned" else _JacobianFit(lm, probes)
    with progress_bar(f"fitting a {kind} lens", len(prompts), show=progress) as report:
        for start in range(0, len(prompts), _READ_TEXTS):
            fit.add(prompts[start : start + _READ_TEXTS])
            report(min(start + _READ_TEXTS, len(prompts)))
    rank = min(rank, lm.config.width)
    up, down, bias = [], [], []
    for layer in range(lm.config.layers):
        change, shift = fit.solve(layer)
        covariance, mean, _ = fit.means(layer)
        # Keep the directions in which A varies most over the tokens; its mean goes to b.
        directions = np.linalg.eigh(change @ covariance @ change.T)[1][:, : -rank - 1 : -1]
        reduced = directions.T @ change
        up.append(directions)
        down.append(reduced)
        bias.append(shift + (change - directions @ reduced) @ mean)
    return AffineLens(
        kind,
        up=np.stack(up).astype(np.float32),
        down=np.stack(down).astype(np.float32),
        bias=np.stack(bias).astype(np.float32),
        fingerprint=lm.model.fingerprint(),
        num_tokens=sum(map(len, prompts)),
        name=kind,
    )


class _TunedFit:
    """Sums of a weighted least-squares regression of the final vector on those before a layer."""

    def __init__(self, lm: Session) -> None:
        self._lm = lm
        layers, width = lm.config.layers, lm.config.width
        self._moments = np.zeros((layers, width + 1, width + 1))  # of the vectors, and of 1
        self._targets = np.zeros((layers, width + 1, width))  # of these with final - vector
        self._total, self._num_tokens = 0.0, 0  # of the weights

    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        """Add the tokens of some texts."""
        last = self._lm.config.layers - 1
        sites = ("resid_pre", f"resid_post.{last}")
        for cache in activation_caches(self._lm, prompts, sites=sites):
            self._add_vectors(np.concatenate((cache["resid_pre"], cache["resid_post", last][None])))

    def _add_vectors(self, residuals: Floats) -> None:
        """Add the residual stream of a text, [layers + 1, tokens, width]."""
        final = residuals[-1]
        # The final norm divides by the length: errors count relative to it.
        weights = 1 / np.sqrt((final**2).mean(-1, keepdims=True) + self._lm.config.norm_eps)
        self._total += float((weights**2).sum())
        self._num_tokens += len(final)
        for layer, vectors in enumerate(residuals[:-1]):
            inputs = np.concatenate((vectors, np.ones_like(weights)), 1) * weights
            self._moments[layer] += inputs.T @ inputs
            self._targets[layer] += inputs.T @ ((final - vectors) * weights)

    def solve(self, layer: int) -> tuple[Doubles, Doubles]:
        """Return A and b of a layer."""
        moments = self._moments[layer]
        ridge = np.full(len(moments), _RIDGE * np.median(np.diag(moments)) / self._num_tokens)
        solution = np.linalg.solve(moments + np.diag(ridge), self._targets[layer])
        return solution[:-1].T, solution[-1]

    def means(self, layer: int) -> tuple[Doubles, Doubles, Doubles]:
        """Return the covariance and mean of a layer's vectors, and the mean of final - vector."""
        moments = self._moments[layer] / self._total
        mean = moments[-1, :-1]
        covariance = moments[:-1, :-1] - np.outer(mean, mean)
        return covariance, mean, self._targets[layer, -1] / self._total


class _JacobianFit(_TunedFit):
    """Sums that give the mean Jacobian.

    With a random vector v at every position, the gradient g of v · final by the layer's vector at a
    position has the mean J'v: products of later positions with this one cancel on average. So J is
    the regression of g on v. With probes = 0, v runs through all unit vectors, and J is exact.
    """

    def __init__(self, lm: Session, probes: int) -> None:
        self._model = lm.transformer  # raises if there is none
        super().__init__(lm)
        self._probes, self._rng = probes, np.random.default_rng(0)
        layers, width = lm.config.layers, lm.config.width
        self._probe_moments = np.zeros((width, width))
        self._gradients = np.zeros((layers, width, width))  # sums of v g'

    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        import torch

        from unspool.lens.differentiable import run_layers

        layers = self._lm.config.layers
        for prompt in prompts:
            run = run_layers(self._model, prompt, {("resid", n) for n in range(layers)})
            inputs = [run.values["resid", n] for n in range(layers)]
            stream = torch.stack([*inputs, run.final]).detach()[:, 0]
            self._add_vectors(stream.float().cpu().numpy())
            for vectors in self._probe_vectors(len(prompt)):
                output = torch.from_numpy(vectors)[None].to(run.final)
                gradients = torch.autograd.grad(run.final, inputs, output, retain_graph=True)
                self._probe_moments += vectors.T @ vectors
                for layer, gradient in enumerate(gradients):
                    self._gradients[layer] += vectors.T @ gradient[0].float().cpu().numpy()

    def _probe_vectors(self, length: int) -> Iterator[Floats]:
        """Yield vectors [length, width] for one backward pass each."""
        shape = (length, self._lm.config.width)
        if self._probes:
            for _ in range(self._probes):
                yield self._rng.choice(np.array([-1, 1], np.float32), shape)
            return
        for index in np.ndindex(shape):
            vectors = np.zeros(shape, np.float32)
            vectors[index] = 1
            yield vectors

    def solve(self, layer: int) -> tuple[Doubles, Doubles]:
        width = self._lm.config.width
        if self._probes and self._num_tokens * self._probes < width:
            raise SettingsError(
                f"a Jacobian lens of width {width} needs at least {width} probes in all, got "
                f"{self._probes} at each of {self._num_tokens} tokens; give more texts"
            )
        change = np.linalg.solve(self._probe_moments, self._gradients[layer])
        change -= np.eye(len(change))
        _, mean, mean_change = self.means(layer)
        return change, mean_change - change @ mean
