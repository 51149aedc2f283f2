"""The plan of a worker: all it needs to start, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unspool.errors import UnspoolError
from unspool.loading import check_load_options, load
from unspool.model.names import display_name
from unspool.scale.batch.settings import BatchSettings
from unspool.scale.batch.worker import BatchWorker


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A model, its load options and its generation settings."""

    model: str | None
    options: dict[str, Any]  # of `unspool.load`
    settings: BatchSettings
    adapter: str | None = None

    def worker(self, cpus: int | None = None) -> BatchWorker:
        """Load the model in this process and return the worker; on `cpus` cores, or all."""
        placement = {name: value for name, value in self.options.items() if name != "offline"}
        backend = check_load_options(**placement).resolve().backend
        options = dict(self.options)
        if backend == "native" and options.get("threads") is None:
            options["threads"] = cpus
        try:  # texts must not depend on the batch composition
            lm = load(self.model, **{**options, "exact": options["exact"] or backend == "cuda"})
        except UnspoolError:
            if options["exact"] or backend != "cuda":
                raise
            lm = load(self.model, **options)  # no CUDA kernels for it, and plain torch is not exact
        name = display_name(self.model or "", lm.path) if lm.path is not None else "model"
        if self.adapter is not None:
            lm.load_adapter("adapter", self.adapter)
            lm = lm.adapted("adapter")
        return BatchWorker(lm, self.settings, name)
