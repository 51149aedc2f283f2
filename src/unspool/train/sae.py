"""Train a TopK sparse autoencoder on the activations of a model, streamed from text.

    report = train_sae(lm, "wiki.txt", "sae-15", SaeSettings(layer=15))
    sae = load_sae("sae-15")

The method is that of Gao et al. 2024 (arXiv:2406.04093): z = TopK(W_enc (x - b_dec) + b_enc),
reconstruction W_dec z + b_dec, decoder vectors of length one, an encoder that starts as the
transposed decoder, and an auxiliary loss: the features that have not been active for long model
what the others leave. The folder has SAELens' format. It also has the state of the optimizer, so
the same call resumes after it was stopped in any way.

The first position of a text and vectors that are much longer than the median (attention sinks) are
left out, as they would dominate the squared error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from unspool.backends.interventions import check_layer, check_readable, hook_name
from unspool.backends.step import Floats
from unspool.errors import DataError, SettingsError, StorageError, check_int
from unspool.lens.activation_cache import activation_caches
from unspool.lens.activation_files import replace_file, write_safetensors
from unspool.lens.sae import (
    SAE_CONFIG,
    SAE_WEIGHTS,
    SaeQuality,
    load_sae,
    measure_sae,
    ordinary_rows,
    save_examples,
    strongest_examples,
)
from unspool.model.files.safetensors import SafetensorsFile
from unspool.session import Session
from unspool.train.data.sources import Source, documents

_STATE, _PROGRESS = "state.safetensors", "training.json"
_VERSION = 1
_READ_TEXTS = 64  # computed together
_NUM_EXAMPLES = 5  # of each feature, from the held-out texts
_SAVE_S = 120.0  # between checkpoints
_MEDIAN_ROWS, _MEDIAN_STEPS = 8192, 32  # of the geometric median
_WARMUP, _DECAY = 0.02, 0.2  # shares of the training with a rising and a falling rate
_WEIGHTS = ("encoder", "encoder_bias", "decoder", "decoder_bias")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SaeSettings:
    """Settings of a training."""

    layer: int
    site: str = "resid_post"
    num_features: int = 4096
    k: int = 32  # active features of a token
    tokens: int = 1_000_000  # activations that are read
    reuse: float = 4.0  # how often each is used, on average
    batch: int = 1024
    rate: float | None = None  # None: 2e-4 * sqrt(2^14 / features), as in the paper's scaling
    length: int = 128  # tokens of a text
    pool: int = 1 << 16  # activations in memory, from which batches are drawn
    aux_k: int | None = None  # None: the power of two below half the width
    aux_weight: float = 1 / 32
    dead_after: int = 200_000  # activations without a feature until it counts as dead
    num_eval: int = 64  # texts at the start of the corpus that are held out
    seed: int = 0

    def check(self, lm: Session) -> None:
        """Raise SettingsError if a value is not allowed."""
        check_readable(self.site, lm.engine.backend.sites)
        check_layer(lm.config, self.site, self.layer)
        check_int("num_features", self.num_features, 1)
        check_int("k", self.k, 1, self.num_features)
        check_int("length", self.length, 2, lm.context)
        for name in ("tokens", "batch", "pool", "dead_after", "num_eval"):
            check_int(name, getattr(self, name), 1)
        if self.pool < self.batch:
            raise SettingsError(f"pool must be >= batch ({self.batch}), got {self.pool}")
        for name in ("reuse", "rate", "aux_weight"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise SettingsError(f"{name} must be >= 0, got {value}")


@dataclass(frozen=True, slots=True)
class SaeProgress:
    """Progress of a training."""

    tokens: int  # activations read
    steps: int
    fvu: float  # of the latest batches: share of the variance that is not explained
    dead: float  # share of the features


def train_sae(
    lm: Session,
    source: Source,
    folder: str | Path,
    settings: SaeSettings,
    *,
    field: str | None = None,
    device: str | None = None,
    report: Callable[[SaeProgress], object] = lambda progress: None,
) -> SaeQuality:
    """Train a sparse autoencoder, or resume its training; return what held-out texts show.

    Args:
        source: Files, folders or data sets, as for `unspool train`.
        folder: Gets the autoencoder in SAELens' format.
        field: The field or column with the text.
        device: Of the autoencoder; by default cuda if there is one.
        report: Called after each group of texts.
    """
    settings.check(lm)
    path = Path(folder)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = _ActivationStream(lm, source, field, settings)
    trainer = _Trainer(settings, path, device, lm.model.fingerprint(), str(source))
    try:
        for vectors in corpus.activations(trainer.texts_read, settings.tokens - trainer.tokens):
            trainer.add(vectors, corpus.num_texts)
            report(trainer.progress)
    finally:  # also after Ctrl-C
        if trainer.is_ready:
            trainer.save()
    if not trainer.is_ready:
        raise DataError(f"{source} has fewer than {settings.batch} tokens to train on")
    sae, texts = load_sae(path), corpus.held_out()
    save_examples(path, strongest_examples(lm, texts, sae, _NUM_EXAMPLES))
    return measure_sae(lm, sae, texts)


# -- activations


class _ActivationStream:
    """Texts of equal length from a source, again from the start when they end."""

    def __init__(
        self, lm: Session, source: Source, field: str | None, settings: SaeSettings
    ) -> None:
        self._lm, self._source, self._field, self._settings = lm, source, field, settings
        self.num_texts = 0  # read so far

    def _texts(self) -> Iterator[list[int]]:
        length = self._settings.length
        for document in documents(self._source, field=self._field):
            if document.text is None:
                raise DataError(f"{self._source} has conversations; give texts")
            ids = self._lm.prompt_ids(document.text, longer=True)
            for start in range(0, len(ids) - length + 1, length):
                yield ids[start : start + length]

    def held_out(self) -> list[list[int]]:
        """The first texts."""
        count = self._settings.num_eval
        texts = [ids for ids, _ in zip(self._texts(), range(count), strict=False)]
        if len(texts) < count:
            raise DataError(
                f"{self._source} has only {len(texts)} texts of {self._settings.length} tokens, "
                f"and {count} are held out"
            )
        return texts

    def _training_texts(self, skip: int) -> Iterator[list[int]]:
        number = 0
        while True:
            before = number
            for index, ids in enumerate(self._texts()):
                if index >= self._settings.num_eval:
                    number += 1
                    if number > skip:
                        yield ids
            if number == before:
                raise DataError(
                    f"{self._source} has no text of {self._settings.length} tokens beside the "
                    f"{self._settings.num_eval} that are held out"
                )

    def activations(self, skip: int, tokens: int) -> Iterator[Floats]:
        """Yield the vectors of groups of texts [rows, width], about `tokens` in all."""
        texts = self._training_texts(skip)
        self.num_texts = skip
        settings = self._settings
        while tokens > 0:
            group = [ids for ids, _ in zip(texts, range(_READ_TEXTS), strict=False)]
            caches = activation_caches(self._lm, group, sites=settings.site, layers=settings.layer)
            rows = []
            for cache in caches:
                array = cache[settings.site][0]
                vectors = array.reshape(len(array), -1)
                rows.append(vectors[ordinary_rows(vectors)])
            self.num_texts += len(group)
            vectors = np.concatenate(rows)
            tokens -= len(vectors)
            yield vectors


# -- the autoencoder


class _Trainer:
    """The autoencoder, its optimizer, and a pool of activations."""

    def __init__(
        self, settings: SaeSettings, folder: Path, device: str, model: str, source: str
    ) -> None:
        self._settings, self._folder, self._device = settings, folder, device
        self._facts = {"version": _VERSION, "model": model, "source": source}
        self._facts |= {"settings": asdict(settings)}
        self.tokens = self.steps = self.texts_read = 0
        self._scale = 1.0  # of the vectors: their mean length becomes sqrt(width)
        self._owed = 0.0  # steps
        self._fvu = math.nan
        self._pool: torch.Tensor | None = None
        self._filled = self._next_row = 0
        self._weights: Tensors = {}
        self._idle = torch.zeros(settings.num_features, dtype=torch.int64, device=device)
        self._saved_at = monotonic()
        self._generator = torch.Generator().manual_seed(settings.seed)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._resume()
        except OSError as error:
            raise _cannot_write(folder, error) from error

    @property
    def is_ready(self) -> bool:
        """Whether the autoencoder has weights."""
        return bool(self._weights)

    @property
    def progress(self) -> SaeProgress:
        dead = float((self._idle > self._settings.dead_after).float().mean())
        return SaeProgress(self.tokens, self.steps, self._fvu, dead)

    def add(self, vectors: Floats, texts_read: int) -> None:
        """Add activations to the pool, and train on as many batches as they pay for."""
        settings = self._settings
        rows = torch.from_numpy(np.ascontiguousarray(vectors, np.float32)).to(self._device)
        if self._pool is None:
            self._pool = torch.empty(settings.pool, rows.shape[1], device=self._device)
        for part in rows.split(settings.pool):
            places = (torch.arange(len(part)) + self._next_row) % settings.pool
            self._pool[places.to(self._device)] = part
            self._next_row = (self._next_row + len(part)) % settings.pool
            self._filled = min(settings.pool, self._filled + len(part))
        self.tokens += len(rows)
        self.texts_read = texts_read
        self._owed += len(rows) * settings.reuse / settings.batch
        if self._filled < settings.batch:
            return
        if not self._weights:
            self._start()
        while self._owed >= 1:
            self._owed -= 1
            chosen = torch.randint(self._filled, (settings.batch,), generator=self._generator)
            self._step(self._pool[chosen.to(self._device)] * self._scale)
        if monotonic() - self._saved_at > _SAVE_S:
            self.save()

    def _start(self) -> None:
        """Make the first weights from the activations in the pool."""
        assert self._pool is not None
        settings, rows = self._settings, self._pool[: self._filled]
        width = rows.shape[1]
        self._scale = math.sqrt(width) / float(rows.norm(dim=-1).mean())
        directions = torch.randn(settings.num_features, width, generator=self._generator)
        directions /= directions.norm(dim=-1, keepdim=True)
        decoder = directions.to(self._device)
        sample = rows[:_MEDIAN_ROWS] * self._scale
        self._set_weights(
            {
                "encoder": decoder.clone(),
                "encoder_bias": torch.zeros(settings.num_features, device=self._device),
                "decoder": decoder,
                "decoder_bias": geometric_median(sample),
            }
        )

    def _set_weights(self, weights: Tensors) -> None:
        self._weights = {name: weights[name].requires_grad_() for name in _WEIGHTS}
        self._optimizer = torch.optim.Adam(
            self._weights.values(), lr=0.0, betas=(0.9, 0.999), eps=6.25e-10
        )

    def _rate(self) -> float:
        settings = self._settings
        peak = settings.rate
        if peak is None:
            peak = 2e-4 * math.sqrt((1 << 14) / settings.num_features)
        done = min(1.0, self.tokens / settings.tokens)
        return peak * min(1.0, done / _WARMUP, (1 - done) / _DECAY + 1e-3)

    def _step(self, vectors: torch.Tensor) -> None:
        weights = self._weights
        total = (vectors - vectors.mean(0)).square().sum()
        strengths, active, rebuilt, values = topk_forward(vectors, weights, self._settings.k)
        missing = vectors - rebuilt
        fvu = missing.square().sum() / total
        loss = fvu + self._settings.aux_weight * self._dead_loss(values, missing.detach())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        decoder = weights["decoder"]
        with torch.no_grad():
            assert decoder.grad is not None
            # Only the direction is learned: the part of the gradient along it is removed.
            along = (decoder.grad * decoder).sum(-1, keepdim=True)
            decoder.grad -= along * decoder
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            self._optimizer.param_groups[0]["lr"] = self._rate()
            self._optimizer.step()
            decoder /= decoder.norm(dim=-1, keepdim=True)
            self._idle += len(vectors)
            self._idle[active[strengths > 0]] = 0
        self.steps += 1
        latest = float(fvu.detach())
        self._fvu = latest if math.isnan(self._fvu) else 0.98 * self._fvu + 0.02 * latest

    def _dead_loss(self, values: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        """How badly dead features alone model what the others leave; 0 without dead ones."""
        dead = (self._idle > self._settings.dead_after).nonzero()[:, 0]
        if not len(dead):
            return torch.zeros((), device=values.device)
        width = missing.shape[1]
        most = self._settings.aux_k or 1 << max(0, (width // 2).bit_length() - 1)
        strengths, order = values[:, dead].topk(min(most, len(dead)))
        rebuilt = _sum_rows(dead[order], self._weights["decoder"], strengths.relu())
        error = (missing - rebuilt).square().sum() / missing.square().sum()
        return error.nan_to_num(0.0)

    # -- files

    def save(self) -> None:
        """Write the autoencoder and the state; each file is complete or not there."""
        settings, arrays = self._settings, self._arrays()
        width = arrays["decoder_bias"].size
        weights = {
            # TopK scales with its input, so only the biases change with the scale of the vectors.
            "W_enc": np.ascontiguousarray(arrays["encoder"].T),
            "b_enc": arrays["encoder_bias"] / np.float32(self._scale),
            "W_dec": arrays["decoder"],
            "b_dec": arrays["decoder_bias"] / np.float32(self._scale),
        }
        hook = hook_name(settings.site, settings.layer)
        config = {
            "architecture": "topk",
            "d_in": width,
            "d_sae": settings.num_features,
            "k": settings.k,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "rescale_acts_by_decoder_norm": False,
            "metadata": {
                "hook_name": hook,
                "hook_head_index": None,
                "context_size": settings.length,
                "dataset_path": self._facts["source"],
                "model_fingerprint": self._facts["model"],
                "training_tokens": self.tokens,
            },
        }
        progress = {
            **self._facts,
            "tokens": self.tokens,
            "steps": self.steps,
            "texts_read": self.texts_read,
            "scale": self._scale,
        }
        for index, state in enumerate(self._optimizer.state.values()):
            arrays |= {
                f"{name}.{_WEIGHTS[index]}": state[name].detach().cpu().numpy()
                for name in ("exp_avg", "exp_avg_sq")
            }
        arrays["idle"] = self._idle.clamp(max=1 << 24).float().cpu().numpy()  # exact in float32
        try:
            replace_file(self._folder / SAE_WEIGHTS, lambda p: write_safetensors(p, weights))
            replace_file(self._folder / SAE_CONFIG, lambda p: _write_json(p, config))
            replace_file(self._folder / _STATE, lambda p: write_safetensors(p, arrays))
            replace_file(self._folder / _PROGRESS, lambda p: _write_json(p, progress))
        except OSError as error:
            raise _cannot_write(self._folder, error) from error
        self._saved_at = monotonic()

    def _arrays(self) -> dict[str, Any]:
        return {name: tensor.detach().cpu().numpy() for name, tensor in self._weights.items()}

    def _resume(self) -> None:
        path = self._folder / _PROGRESS
        if not path.exists():
            if any(self._folder.iterdir()):
                raise SettingsError(
                    f"{self._folder} has other files; give a new folder, or one of this command"
                )
            return
        try:
            progress = json.loads(path.read_text("utf-8"))
            settings = dict(progress["settings"])
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path} is damaged; give a new folder") from None
        changed = {**self._facts, **asdict(self._settings)}
        before = {**progress, **settings}
        for name, value in changed.items():
            if name not in ("settings", "tokens") and before.get(name) != value:
                raise SettingsError(
                    f"{self._folder} was trained with {name} {before.get(name)!r}, and now it is "
                    f"{value!r}; give a new folder"
                )
        self.tokens, self.steps = progress["tokens"], progress["steps"]
        self.texts_read, self._scale = progress["texts_read"], progress["scale"]
        self._generator.manual_seed(self._settings.seed + self.steps)
        file = SafetensorsFile(self._folder / _STATE)

        def read(name: str) -> torch.Tensor:
            return torch.from_numpy(file.stored(name).float32().copy()).to(self._device)

        self._set_weights({name: read(name) for name in _WEIGHTS})
        self._idle = read("idle").long()
        if "exp_avg.encoder" in file.tensors:
            for name, weight in self._weights.items():
                self._optimizer.state[weight] = {
                    "step": torch.tensor(float(self.steps)),
                    "exp_avg": read(f"exp_avg.{name}"),
                    "exp_avg_sq": read(f"exp_avg_sq.{name}"),
                }


def topk_forward(
    vectors: torch.Tensor, weights: Tensors, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return strengths [rows, k] and numbers of the active features, the reconstruction, and the
    values of all features before TopK."""
    values = (vectors - weights["decoder_bias"]) @ weights["encoder"].T + weights["encoder_bias"]
    strengths, active = values.topk(k)
    strengths = strengths.relu()
    rebuilt = _sum_rows(active, weights["decoder"], strengths) + weights["decoder_bias"]
    return strengths, active, rebuilt, values


def _sum_rows(rows: torch.Tensor, table: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(rows, table, per_sample_weights=factors, mode="sum")


def geometric_median(rows: torch.Tensor) -> torch.Tensor:
    """Return the point with the least sum of distances to the rows (Weiszfeld's iteration)."""
    point = rows.mean(0)
    for _ in range(_MEDIAN_STEPS):
        near = 1 / (rows - point).norm(dim=-1, keepdim=True).clamp_min(1e-6)
        point = (rows * near).sum(0) / near.sum()
    return point


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror or error}")
