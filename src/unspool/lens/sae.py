"""Sparse autoencoders: features of the residual stream, and interventions that set one.

    sae = load_sae("blocks.8.hook_resid_pre")          # a folder of SAELens
    found = features(lm, "The Golden Gate Bridge", sae)
    found.strongest(5)
    lm.generate("I am", interventions=sae.clamp(1234, 20.0))

Reads folders of SAELens (cfg.json and sae_weights.safetensors; standard, topk, jumprelu and gated)
and of Gemma Scope (params.npz). Nothing is unpickled.
"""

from __future__ import annotations

import heapq
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.backends.interventions import (
    ClampFeature,
    Intervention,
    Replace,
    check_layer,
    parse_hook_name,
    site_width,
)
from unspool.backends.step import Floats
from unspool.errors import ModelFileError, SettingsError, check_int, check_number
from unspool.lens.activation_cache import ActivationCache, activation_caches
from unspool.lens.activation_files import replace_file
from unspool.lens.activations import TextLike
from unspool.model.config import ModelConfig
from unspool.model.files.safetensors import SafetensorsFile
from unspool.notebook import escape_html, note_html, notebook_html, table_html
from unspool.session import Session

ARCHITECTURES = ("standard", "topk", "jumprelu", "gated")
SAE_CONFIG, SAE_WEIGHTS, _GEMMA_SCOPE = "cfg.json", "sae_weights.safetensors", "params.npz"
_EXAMPLES = "examples.json"
_LAYER_IN_PATH = re.compile(r"layer_(\d+)")
_READ_TEXTS = 64  # texts that are read together
_EXAMPLE_TOKENS = 12  # before and after the token of an example


@dataclass(frozen=True, slots=True, eq=False)
class SparseAutoencoder:
    """A sparse autoencoder of one site of a model."""

    architecture: str  # standard, topk, jumprelu or gated
    site: str  # whose values it reads
    layer: int  # from 0
    encoder: Floats  # [features, width]
    decoder: Floats  # [features, width]
    encoder_bias: Floats  # [features]; of gated ones that of the magnitude
    decoder_bias: Floats  # [width]
    threshold: Floats  # [features]: smaller values are zero
    k: int = 0  # topk: features that a token may have
    name: str = ""  # for people
    # Where the features are strongest in a corpus, by feature.
    examples: Mapping[int, Sequence[FeatureExample]] = field(default_factory=dict, repr=False)

    @property
    def num_features(self) -> int:
        """Number of features."""
        return len(self.encoder)

    @property
    def reading(self) -> int | None:
        """The layer to read and to change; None for a site without layers."""
        return None if self.site in ("embedding", "final_norm") else self.layer

    def __repr__(self) -> str:
        return (
            f"<SparseAutoencoder {self.name}: {self.architecture}, {self.num_features:,} features "
            f"of {self.site} in layer {self.layer}>"
        )

    def encode(self, vectors: Floats) -> Floats:
        """Return the strength of each feature: [..., width] to [..., features]."""
        values = vectors @ self.encoder.T + self.encoder_bias
        values = np.where(values > self.threshold, values, np.float32(0))
        if self.k and self.k < self.num_features:
            cut = np.partition(values, -self.k, axis=-1)[..., -self.k, None]
            values = np.where(values >= cut, values, np.float32(0))
        return np.asarray(values, np.float32)

    def decode(self, strengths: Floats) -> Floats:
        """Return the vectors that the features stand for: [..., features] to [..., width]."""
        return np.asarray(strengths @ self.decoder + self.decoder_bias, np.float32)

    def clamp(self, feature: int, value: float) -> Intervention:
        """Return an intervention that sets a feature to a value at all positions.

        Only the part of the vector that the feature stands for changes. Of a topk autoencoder the
        feature's own value counts, whether it is among the k or not.
        """
        number = check_int("feature", feature, 0, self.num_features - 1)
        op = ClampFeature(
            encoder=self.encoder[number],
            decoder=self.decoder[number],
            bias=float(self.encoder_bias[number]),
            threshold=float(self.threshold[number]),
            value=check_number("the value of a feature", value),
        )
        return Intervention(self.site, op, layers=self.reading)  # type: ignore[arg-type]


# -- files


def load_sae(
    folder: str | Path, *, site: str | None = None, layer: int | None = None
) -> SparseAutoencoder:
    """Read a folder of SAELens or Gemma Scope.

    Args:
        folder: Has cfg.json and sae_weights.safetensors, or params.npz.
        site: Where it was trained, if the folder does not say; Gemma Scope: resid_post.
        layer: Its layer, if the folder does not say.
    """
    path = Path(folder).expanduser()
    if (path / SAE_CONFIG).is_file():
        weights, config = _read_saelens(path)
    elif (path / _GEMMA_SCOPE).is_file():
        weights, config = _read_gemma_scope(path)
    else:
        raise ModelFileError(
            f"{path}: no sparse autoencoder: it needs {SAE_CONFIG} and {SAE_WEIGHTS} (SAELens) or "
            f"{_GEMMA_SCOPE} (Gemma Scope)"
        )
    hook = config.get("hook_name")
    hook_site, hook_layer = parse_hook_name(hook) if isinstance(hook, str) else (None, None)
    named_site = site or hook_site
    named_layer = hook_layer if layer is None else layer
    if named_site is None or named_layer is None:
        raise SettingsError(f"{path} does not say its site and layer; give site= and layer=")
    return _build(path, weights, config, named_site, named_layer)


def _read_saelens(path: Path) -> tuple[dict[str, Floats], dict[str, Any]]:
    try:
        config = json.loads((path / SAE_CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path / SAE_CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelFileError(f"{path / SAE_CONFIG}: must be a JSON object")
    metadata = config.get("metadata")
    config = {**(metadata if isinstance(metadata, dict) else {}), **config}
    file = SafetensorsFile(path / SAE_WEIGHTS)
    return {name: file.stored(name).float32() for name in file.tensors}, config


def _read_gemma_scope(path: Path) -> tuple[dict[str, Floats], dict[str, Any]]:
    try:
        with np.load(path / _GEMMA_SCOPE, allow_pickle=False) as arrays:
            weights = {name: np.asarray(arrays[name], np.float32) for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{path / _GEMMA_SCOPE} cannot be read: {error}") from None
    numbers = _LAYER_IN_PATH.findall(path.resolve().as_posix())
    hook = {"hook_name": f"blocks.{numbers[-1]}.hook_resid_post"} if numbers else {}
    return weights, {"architecture": "jumprelu", "apply_b_dec_to_input": False, **hook}


def _build(
    path: Path, weights: Mapping[str, Floats], config: Mapping[str, Any], site: str, layer: int
) -> SparseAutoencoder:
    architecture = config.get("architecture", "standard")
    kind = str(config.get("activation_fn_str") or config.get("activation_fn") or "")
    if architecture == "standard" and kind == "topk":
        architecture = "topk"
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: architecture {architecture!r} is not supported, only "
            f"{', '.join(ARCHITECTURES)}"
        )
    if (normalize := config.get("normalize_activations", "none")) not in ("none", None):
        raise ModelFileError(
            f"{path}: normalize_activations {normalize!r} is not supported; fold it into the "
            "weights first (SAELens: fold_activation_norm_scaling_factor)"
        )
    bias_name = "b_mag" if architecture == "gated" else "b_enc"
    needed = {"W_enc", "W_dec", "b_dec", bias_name}
    needed |= {"threshold"} if architecture == "jumprelu" else set()
    needed |= {"b_gate", "r_mag"} if architecture == "gated" else set()
    if missing := sorted(needed - weights.keys()):
        raise ModelFileError(f"{path}: tensor {missing[0]} is missing")
    width, size = weights["W_enc"].shape if weights["W_enc"].ndim == 2 else (0, 0)
    shapes = {"W_dec": (size, width), "b_dec": (width,)}
    for name in sorted(needed - {"W_enc"}):
        if not width or weights[name].shape != shapes.get(name, (size,)):
            raise ModelFileError(
                f"{path}: tensor {name} has shape {list(weights[name].shape)}, and W_enc "
                f"{list(weights['W_enc'].shape)}"
            )
    encoder = np.ascontiguousarray(weights["W_enc"].T)
    decoder, decoder_bias = weights["W_dec"], weights["b_dec"]
    # The decoder's bias may be taken from the input: that is another bias of the encoder.
    is_shifted = bool(config.get("apply_b_dec_to_input", True))
    shift = encoder @ decoder_bias if is_shifted else np.zeros(size, np.float32)
    bias, threshold = weights[bias_name] - shift, np.zeros(size, np.float32)
    if architecture == "jumprelu":
        threshold = np.maximum(weights["threshold"], 0)
    elif architecture == "gated":
        # The gate x·w + b_gate > 0, in terms of the magnitude exp(r)·x·w + b_mag.
        factor = np.exp(weights["r_mag"])
        gate_bias = weights["b_gate"] - shift
        bias = weights["b_mag"] - factor * shift
        encoder = encoder * factor[:, None]
        threshold = np.maximum(bias - factor * gate_bias, 0)
    k = 0
    if architecture == "topk":
        settings = config.get("activation_fn_kwargs")
        k = config.get("k") or (settings.get("k") if isinstance(settings, dict) else None) or 0
        check_int(f"{path}: k", k, 1)
        if config.get("rescale_acts_by_decoder_norm"):
            norms = np.linalg.norm(decoder, axis=-1)
            encoder, bias = encoder * norms[:, None], bias * norms
            decoder = decoder / np.where(norms > 0, norms, 1).astype(np.float32)[:, None]
    return SparseAutoencoder(
        architecture=architecture,
        site=site,
        layer=layer,
        encoder=np.asarray(encoder, np.float32),
        decoder=np.asarray(decoder, np.float32),
        encoder_bias=np.asarray(bias, np.float32),
        decoder_bias=decoder_bias,
        threshold=np.asarray(threshold, np.float32),
        k=int(k),
        name=path.resolve().name,
        examples=_read_examples(path / _EXAMPLES),
    )


# -- features of texts


@dataclass(frozen=True, slots=True)
class ActiveFeature:
    """A feature at a token."""

    feature: int  # its number
    strength: float  # its activation
    position: int  # of the token
    text: str  # of the token

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class TokenFeatures:
    """The active features of each token of a text."""

    tokens: tuple[int, ...]  # of the text
    texts: tuple[str, ...]  # of each token
    active: tuple[tuple[ActiveFeature, ...], ...]  # of each token, strongest first
    reconstruction_error: Floats  # [tokens]: share of the vector that the features do not explain

    def __repr__(self) -> str:
        mean = np.mean([len(features) for features in self.active])
        return f"<TokenFeatures of {len(self.tokens)} tokens, {mean:.1f} active features each>"

    def strongest(self, n: int = 5) -> list[ActiveFeature]:
        """Return the n strongest features of the text, each where it is strongest."""
        best: dict[int, ActiveFeature] = {}
        for features in self.active:
            for item in features:
                if item.feature not in best or item.strength > best[item.feature].strength:
                    best[item.feature] = item
        return heapq.nlargest(n, best.values(), key=lambda item: item.strength)

    def strengths(self, feature: int) -> Floats:
        """Return the strength of one feature at each token."""
        return np.array(
            [
                next((item.strength for item in features if item.feature == feature), 0.0)
                for features in self.active
            ],
            np.float32,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": list(self.tokens),
            "texts": list(self.texts),
            "active": [[item.to_dict() for item in features] for features in self.active],
        }

    def _repr_html_(self) -> str:
        rows = [
            (
                escape_html(repr(text)),
                ", ".join(f"{item.feature} ({item.strength:.2f})" for item in features[:8]),
            )
            for text, features in zip(self.texts, self.active, strict=True)
        ]
        return notebook_html(note_html(repr(self)), table_html(("token", "features"), rows))


def features(
    lm: Session, text: TextLike, sae: SparseAutoencoder, *, top: int | None = None
) -> TokenFeatures:
    """Read the active features of each token of a text; `top`: at most this many a token."""
    (cache,) = _read(lm, [text], sae)
    active, errors = active_features(sae, cache, top)
    return TokenFeatures(cache.tokens, cache.texts, active, np.asarray(errors, np.float32))


def active_features(
    sae: SparseAutoencoder, cache: ActivationCache, top: int | None
) -> tuple[tuple[tuple[ActiveFeature, ...], ...], list[float]]:
    """Return the active features at each position of a cache, strongest first, and the share of
    each vector that the features do not explain."""
    vectors = _vectors(cache, sae)
    strengths = sae.encode(vectors)
    active = []
    for position, row in zip(cache.positions, strengths, strict=True):
        order = np.argsort(-row, kind="stable")[: int((row > 0).sum())]
        active.append(
            tuple(
                ActiveFeature(int(n), float(row[n]), position, cache.texts[position])
                for n in order[:top]
            )
        )
    missing = ((vectors - sae.decode(strengths)) ** 2).sum(-1)
    total = (vectors**2).sum(-1)
    return tuple(active), np.divide(missing, total, where=total > 0, out=missing * 0).tolist()


@dataclass(frozen=True, slots=True)
class FeatureExample:
    """A place of a corpus where a feature is strong."""

    text_index: int  # of the text in the corpus
    position: int  # of the token
    strength: float  # of the feature there
    before: str  # the text before the token
    token: str  # its text
    after: str  # the text after it

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def feature_examples(
    lm: Session, texts: Iterable[TextLike], sae: SparseAutoencoder, feature: int, n: int = 10
) -> list[FeatureExample]:
    """Return the places of a corpus where a feature is strongest, one for each text."""
    number = check_int("feature", feature, 0, sae.num_features - 1)
    return strongest_examples(lm, texts, sae, n, [number]).get(number, [])


def strongest_examples(
    lm: Session,
    texts: Iterable[TextLike],
    sae: SparseAutoencoder,
    n: int,
    features: Sequence[int] | None = None,
) -> dict[int, list[FeatureExample]]:
    """Return the places of a corpus where features are strongest, one for each text.

    Args:
        n: Places of a feature.
        features: Their numbers; None: all.
    """
    check_int("n", n, 1)
    numbers = np.arange(sae.num_features) if features is None else np.array(features)
    best: dict[int, list[tuple[float, int, FeatureExample]]] = {}
    batch: list[TextLike] = []
    start = 0

    def read_batch() -> None:
        nonlocal start
        for index, cache in enumerate(_read(lm, batch, sae), start):
            strengths = sae.encode(_vectors(cache, sae))[:, numbers]
            places = strengths.argmax(0)
            for column in np.flatnonzero(strengths.max(0) > 0).tolist():
                at = int(places[column])
                example = FeatureExample(
                    index,
                    at,
                    float(strengths[at, column]),
                    "".join(cache.texts[max(0, at - _EXAMPLE_TOKENS) : at]),
                    cache.texts[at],
                    "".join(cache.texts[at + 1 : at + 1 + _EXAMPLE_TOKENS]),
                )
                heap = best.setdefault(int(numbers[column]), [])
                heapq.heappush(heap, (example.strength, -index, example))
                if len(heap) > n:
                    heapq.heappop(heap)
        start += len(batch)
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == _READ_TEXTS:
            read_batch()
    if batch:
        read_batch()
    return {
        number: [example for _, _, example in sorted(heap, key=lambda item: item[:2], reverse=True)]
        for number, heap in sorted(best.items())
    }


def save_examples(folder: str | Path, examples: Mapping[int, Sequence[FeatureExample]]) -> None:
    """Write examples to the folder of an autoencoder; `load_sae` reads them."""
    content = {str(n): [item.to_dict() for item in items] for n, items in examples.items()}
    text = json.dumps(content, ensure_ascii=False, indent=0)
    replace_file(Path(folder) / _EXAMPLES, lambda part: part.write_text(text, encoding="utf-8"))


def _read_examples(path: Path) -> dict[int, list[FeatureExample]]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        return {
            int(number): [
                FeatureExample(
                    int(item["text_index"]),
                    int(item["position"]),
                    float(item["strength"]),
                    str(item["before"]),
                    str(item["token"]),
                    str(item["after"]),
                )
                for item in items
            ]
            for number, items in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelFileError(f"{path} is damaged; delete it, or write it again") from None


# -- quality


@dataclass(frozen=True, slots=True)
class SaeQuality:
    """How well a sparse autoencoder stands for the vectors of a model, on some texts.

    The loss recovered is (zero - reconstructed) / (zero - clean): 1 if the model predicts the
    texts as well with the reconstruction as without it, 0 if as badly as with zeros.
    """

    tokens: int
    fvu: float  # share of the variance that the reconstruction does not explain
    l0: float  # active features of a token
    dead: float  # share of the features that are active nowhere in these texts
    loss: float  # mean cross-entropy of the texts in nats
    loss_reconstructed: float  # with the reconstruction in place of the vectors
    loss_zero: float  # with zeros in place of the vectors

    @property
    def loss_recovered(self) -> float:
        gap = self.loss_zero - self.loss
        return (self.loss_zero - self.loss_reconstructed) / gap if gap else math.nan

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "loss_recovered": self.loss_recovered}


_LONGEST = 10.0  # times the median length: longer vectors are attention sinks


def ordinary_rows(vectors: Floats) -> npt.NDArray[np.bool_]:
    """Which vectors of a text to train on and to measure: not the first, nor very long ones."""
    lengths = np.linalg.norm(vectors, axis=-1)
    ordinary: npt.NDArray[np.bool_] = lengths <= _LONGEST * np.median(lengths)
    ordinary[0] = False
    return ordinary


def measure_sae(lm: Session, sae: SparseAutoencoder, texts: Iterable[TextLike]) -> SaeQuality:
    """Measure a sparse autoencoder on texts; each is run three times.

    The first position of a text and attention sinks are neither counted nor replaced.
    """
    losses: list[Floats] = []
    errors = active = squares = 0.0
    count = 0
    total = np.zeros(sae.encoder.shape[1])
    used = np.zeros(sae.num_features, bool)
    batch: list[TextLike] = list(texts)
    for cache in _read(lm, batch, sae):
        vectors = _vectors(cache, sae)
        rows = ordinary_rows(vectors)
        strengths = sae.encode(vectors)
        rebuilt = np.where(rows[:, None], sae.decode(strengths), vectors)
        zeros = np.where(rows[:, None], np.float32(0), vectors)
        counted = vectors[rows].astype(np.float64)
        errors += ((rebuilt - vectors) ** 2).sum(dtype=np.float64)
        squares, total = squares + (counted**2).sum(), total + counted.sum(0)
        count += len(counted)
        active += (strengths[rows] > 0).sum()
        used |= (strengths[rows] > 0).any(0)
        if len(cache.tokens) > 1:
            tokens = list(cache.tokens)
            runs: list[tuple[Intervention, ...]] = [()]
            for values in (rebuilt, zeros):
                shape = (1, len(values), *cache[sae.site].shape[2:])
                op = Replace(values.reshape(*shape[:2], -1))
                layers = None if sae.reading is None else (sae.reading,)
                runs.append((Intervention(sae.site, op, layers, range(len(values))),))
            scores = [lm.score(tokens, interventions=run).positions for run in runs]
            losses.append(
                np.array([[-p.logprob for p in score if p.logprob is not None] for score in scores])
            )
    if not count or not losses:
        raise SettingsError("the texts have no tokens to measure; give longer texts")
    loss, rebuilt_loss, zero_loss = np.concatenate(losses, axis=1).mean(1).tolist()
    return SaeQuality(
        tokens=count,
        fvu=float(errors / (squares - (total**2).sum() / count)),
        l0=float(active / count),
        dead=1 - float(used.mean()),
        loss=loss,
        loss_reconstructed=rebuilt_loss,
        loss_zero=zero_loss,
    )


def check_model(sae: SparseAutoencoder, config: ModelConfig) -> None:
    """Raise SettingsError if an autoencoder is of another model."""
    layer = check_layer(config, sae.site, sae.layer) if sae.reading is not None else 0
    width = site_width(config, sae.site, layer)
    if sae.encoder.shape[1] != width:
        raise SettingsError(
            f"the autoencoder reads vectors of width {sae.encoder.shape[1]}, and {sae.site} of the "
            f"model has {width}: it is of another model"
        )


def _read(
    lm: Session, texts: Sequence[TextLike], sae: SparseAutoencoder
) -> Iterator[ActivationCache]:
    check_model(sae, lm.config)
    return activation_caches(lm, list(texts), sites=sae.site, layers=sae.reading)


def _vectors(cache: ActivationCache, sae: SparseAutoencoder) -> Floats:
    array = cache[sae.site]
    rows = array[0] if sae.site in cache.layers else array
    return np.asarray(rows.reshape(len(rows), -1))
