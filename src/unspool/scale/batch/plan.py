"""What a worker needs to know to begin, wherever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unspool.errors import UnspoolError
from unspool.loading import check_load_options, load
from unspool.model.names import display_name
from unspool.scale.batch.settings import BatchSettings
from unspool.scale.batch.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A model, how it is loaded, and how it is to write."""

    model: str | None
    options: dict[str, Any]  # of `unspool.load`
    settings: BatchSettings
    adapter: str | None = None

    def worker(self, cpus: int | None = None) -> Worker:
        """The worker with its model loaded here; on so many cores, or all."""
        placement = {name: value for name, value in self.options.items() if name != "offline"}
        backend = check_load_options(**placement).chosen().backend
        options = dict(self.options)
        if backend == "native" and options.get("threads") is None:
            options["threads"] = cpus
        try:  # a text shall not depend on what else is written with it
            lm = load(self.model, **{**options, "exact": options["exact"] or backend == "cuda"})
        except UnspoolError:
            if options["exact"] or backend != "cuda":
                raise
            lm = load(self.model, **options)  # our kernels do not know it, and plain torch is not
        name = display_name(self.model or "", lm.path) if lm.path is not None else "model"
        if self.adapter is not None:
            lm.load_adapter("adapter", self.adapter)
            lm = lm.adapted("adapter")
        return Worker(lm, self.settings, name)
