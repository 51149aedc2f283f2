"""A model whose weights lie on a GPU, as the rest of Unspool sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda.backend import CudaBackend
from unspool.backends.cuda.looks import normed
from unspool.backends.cuda.memory import make_pages
from unspool.backends.cuda.warming import warm_up
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import Floats
from unspool.model.config import ModelConfig


class CudaModel:
    """Weights on a GPU, and backends that run them."""

    def __init__(
        self, weights: Weights, fingerprint: Callable[[], str], *, exact: bool = False
    ) -> None:
        """`fingerprint` is that of the file: here matrices are joined, and may be rounded."""
        self.weights, self.exact = weights, exact
        self.fingerprint = cache(fingerprint)

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def precision(self) -> str:
        return self.weights.precision or str(self.weights.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.weights.device)

    def backend(self, *, memory: int | None, context: int) -> CudaBackend:
        weights = self.weights
        pages = make_pages(weights, memory, context)
        backend = CudaBackend(weights, pages=pages, context=context, exact=self.exact)
        if weights.device.type == "cuda":  # the interpreter has nothing to compile
            warm_up(backend)
        return backend

    @torch.inference_mode()
    def logits(self, vectors: Floats) -> Floats:
        weights, cap = self.weights, self.config.logit_softcap
        x = self._normed(vectors)
        out = torch.empty(len(x), weights.head.rows, dtype=x.dtype, device=x.device)
        weights.head.times_many(x, out)
        return _host(torch.tanh(out / cap) * cap if cap else out)

    @torch.inference_mode()
    def normed(self, vectors: Floats) -> Floats:
        return _host(self._normed(vectors))

    def vector(self, name: str) -> Floats | None:
        norm, head = self.weights.norm, self.weights.head
        found = {"norm.weight": norm.gain, "norm.bias": norm.bias, "head.bias": head.bias}[name]
        return None if found is None else _host(found)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        table = self.weights.head if name == "head.weight" else self.weights.embed
        return _host(table.part(start, min(stop, table.rows)))

    def _normed(self, vectors: Floats) -> Tensor:
        x = torch.from_numpy(np.array(vectors)).to(self.weights.device, self.weights.dtype)
        return normed(x, self.weights.norm, self.config.norm_eps)


def _host(tensor: Tensor) -> Floats:
    return np.asarray(tensor.float().cpu().numpy())
