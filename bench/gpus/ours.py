"""Unspool at work: each part through the public API, streaming, with seeds."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpus import models
from gpus.limits import Costs
from gpus.parts import Part, shape_of, tiny

ALONE = 8  # texts of a batch that are written once more, alone


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how it is measured."""

    device: str
    backend: str  # cuda: our kernels; torch: the plain path
    rounds: int
    small: bool
    scratch: Path

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device.startswith("cuda") else "float32"


class Ours:
    """A model that parts are measured with, one after the other."""

    def __init__(self, part: Part, place: Place, context: int) -> None:
        import unspool

        self.place, self.chance = place, np.random.default_rng(7)
        shape = shape_of(part, place.small)
        began = time.perf_counter()
        if part.packed:
            with _scratch(place.scratch) as folder:
                read = models.write_gguf(shape, part.packed, folder / "model.gguf")
                began = time.perf_counter()
                self.lm: Any = unspool.load(
                    folder / "model.gguf", device=place.device, context=context, progress=False
                )
        else:
            read = 0.0
            model = models.loaded(shape, place.dtype, place.device, place.backend, part.exact)
            self.lm = _language_model(model, context)
        each = 4 if place.dtype == "float32" else 2
        self.costs = Costs(
            self.lm.config, read or models.weight_bytes(self.lm.config, each), kv_bytes=each
        )
        self.loaded_s = time.perf_counter() - began

    def close(self) -> None:
        """Give the memory back."""
        self.lm.close()
        del self.lm
        empty()

    def measure(self, part: Part) -> dict[str, Any]:
        """What came of a part: figures, and the least it must read and compute."""
        part = tiny(part) if self.place.small else part
        began = time.perf_counter()
        work: Callable[[Part], dict[str, Any]] = getattr(self, f"_{part.work}")
        work(part)  # compiles, captures, fills caches
        warm = time.perf_counter() - began
        found = [work(part) for _ in range(self.place.rounds)]
        middle = sorted(found, key=lambda one: one["seconds"])[len(found) // 2]
        result = {**middle, "warm_s": warm, "load_s": self.loaded_s, "rounds": len(found)}
        result["spread"] = [one["seconds"] for one in found]
        if part.work == "many":
            result["same_alone"] = self._same_alone(part)
        return {**result, **self._memory()}

    # -- the kinds of work -------------------------------------------------------------------

    def _one(self, part: Part) -> dict[str, Any]:
        """Tokens a second behind the first."""
        times, began = [], time.perf_counter()
        for _ in self._stream(part, self._prompt(part.prompt), 0):
            times.append(time.perf_counter())
        taken = times[-1] - times[0]
        return {
            "seconds": taken,
            "tokens": len(times) - 1,
            "tokens_s": (len(times) - 1) / taken,
            "first_s": times[0] - began,
            "floor": [self.costs.decode(1, part.prompt + 1, len(times) - 1)],
        }

    def _many(self, part: Part) -> dict[str, Any]:
        """New tokens a second of all texts, with the reading of the prompts in the time."""
        self.prompts = [self._prompt(part.prompt) for _ in range(part.rows)]
        began = time.perf_counter()
        streams = [self._stream(part, ids, seed) for seed, ids in enumerate(self.prompts)]
        first = next(streams[0])
        first_s = time.perf_counter() - began
        steps = [[step for step in stream] for stream in streams]
        taken = time.perf_counter() - began
        steps[0].insert(0, first)
        self.written = [[step.token for step in row] for row in steps]
        count = sum(map(len, self.written))
        assert count == part.rows * part.new, f"{count} tokens were written"
        assert all(np.isfinite(step.logprob) for step in steps[-1])
        return {
            "seconds": taken,
            "tokens": count,
            "tokens_s": count / taken,
            "first_s": first_s,
            "floor": [
                self.costs.prompt(part.rows, part.prompt),
                self.costs.decode(part.rows, part.prompt + 1, part.new - 1),
            ],
        }

    def _first(self, part: Part) -> dict[str, Any]:
        """Seconds from the request to its first token."""
        began = time.perf_counter()
        next(iter(self._stream(part, self._prompt(part.prompt), 0)))
        taken = time.perf_counter() - began
        return {
            "seconds": taken,
            "tokens": part.prompt,
            "tokens_s": part.prompt / taken,
            "first_s": taken,
            "floor": [self.costs.prompt(1, part.prompt)],
        }

    def _same_alone(self, part: Part) -> str:
        """How many of the last batch's texts are the same when written alone."""
        same = 0
        for seed in range(min(ALONE, part.rows)):
            alone = [step.token for step in self._stream(part, self.prompts[seed], seed)]
            same += alone == self.written[seed]
        return f"{same} of {min(ALONE, part.rows)}"

    # ------------------------------------------------------------------------------------------

    def _prompt(self, length: int) -> list[int]:
        """Never one that was read before."""
        found: list[int] = self.chance.integers(3, self.lm.vocab_size, length).tolist()
        return found

    def _stream(self, part: Part, ids: list[int], seed: int) -> Any:
        return self.lm.stream(ids, max_tokens=part.new, end=False, seed=seed, **part.options)

    def _memory(self) -> dict[str, Any]:
        backend = self.lm.engine.backend
        found = {"pages_bytes": backend.page_count * backend.page_bytes}
        if self.place.device.startswith("cuda"):
            import torch

            found["memory_bytes"] = torch.cuda.max_memory_allocated(self.place.device)
        return found


def load_from_disk(part: Part, place: Place) -> dict[str, Any]:
    """Seconds from `unspool.load` to the first token, beside plainly reading the files."""
    import unspool
    from unspool.model.files.checkpoint import save_checkpoint

    plain = models.transformer(shape_of(part, place.small), place.dtype, place.device)
    with _scratch(place.scratch, shared_memory=False) as folder:
        save_checkpoint(plain, folder)
        del plain
        empty()
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        reading = _read(files)
        _forget(files)
        began = time.perf_counter()
        with unspool.load(folder, device=place.device, context=256, progress=False) as lm:
            loaded = time.perf_counter() - began
            next(iter(lm.stream([5, 6, 7], max_tokens=1, end=False)))
            taken = time.perf_counter() - began
        began = time.perf_counter()
        unspool.load(folder, device=place.device, context=256, progress=False).close()
        cached = time.perf_counter() - began
    return {
        "seconds": loaded,
        "first_s": taken,
        "cached_s": cached,
        "bytes": size,
        "bytes_s": size / loaded,
        "disk_s": reading,
    }


def served(part: Part, place: Place) -> dict[str, Any]:
    """Tokens a second that reach streaming clients; see bench/serve.py."""
    script = Path(__file__).parents[1] / "serve.py"
    with _scratch(place.scratch) as folder:
        subprocess.run(
            [sys.executable, script, "--device", place.device, "--clients", str(part.rows),
             "--tokens", str(part.new), "--out", folder],
            check=True, stdout=sys.stderr, timeout=part.seconds,
        )  # fmt: skip
        found = json.loads((folder / "streams.json").read_text())[str(part.rows)]
    rate = found["tokens_s"]
    return {
        "seconds": part.rows * part.new / rate,
        "tokens": part.rows * part.new,
        "tokens_s": rate,
        "first_s": found["first_s_p50"],
        "figures": found,
    }


def _read(files: list[Path]) -> float:
    """Seconds to read the files into nowhere, which the system has forgotten before."""
    _forget(files)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass
    return time.perf_counter() - began


def _forget(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _scratch(folder: Path, *, shared_memory: bool = True) -> Iterator[Path]:
    """A folder for large files: in memory where that is meant to be quick."""
    memory = Path("/dev/shm")
    where = memory if shared_memory and memory.is_dir() else folder
    with tempfile.TemporaryDirectory(dir=where, prefix="unspool-bench-") as made:
        yield Path(made)


def empty() -> None:
    """What is not used any more is given back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _language_model(model: Any, context: int) -> Any:
    from unspool.lm import LanguageModel

    return LanguageModel(model, None, context=context)
