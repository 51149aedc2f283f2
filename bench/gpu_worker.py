"""Process of bench/gpu.py that measures parts and writes a JSON object per line.

{"part": ..., "begin": true}, then {"part": ..., "result": ...} or {"part": ..., "error": ...}.
Names are parts ("8b"), parts measured with transformers ("8b@static"), or "limits".
"""

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu import PARTS, Part
from lib.arguments import add_options, make_parser
from lib.limits import ModelCosts, Phase, measure_limits
from lib.models import random_transformer
from lib.shapes import SHAPES, RandomCheckpoint, RandomMtp, tiny_shape

NUM_ALONE = 8  # texts of a batch that are written again, alone


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how parts are measured."""

    device: str
    backend: str  # cuda: our kernels; torch: the reference path
    rounds: int
    tiny: bool
    scratch: Path

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    def shape(self, part: Part) -> dict[str, Any]:
        return dict(tiny_shape(part.shape) if self.tiny else SHAPES[part.shape])


def throughput(seconds: float, tokens: int, first_s: float, *phases: Phase) -> dict[str, Any]:
    figures = {"seconds": seconds, "tokens": tokens, "tokens_s": tokens / seconds}
    return {**figures, "first_s": first_s, "floor": list(phases)}


class KnownText:
    """Drafts three tokens of a text that is known, each of them right with a probability."""

    def __init__(self, tokens: list[int], acceptance: float, vocab_size: int) -> None:
        self._tokens, self._acceptance, self._vocab_size = tokens, acceptance, vocab_size
        self._random = np.random.default_rng(len(tokens))
        self.drafted = self.accepted = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        draft = np.array(self._tokens[len(tokens) : len(tokens) + min(most, 3)], np.int64)
        is_wrong = self._random.random(len(draft)) >= self._acceptance
        return list(((draft + is_wrong) % self._vocab_size).tolist())

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        self.drafted += proposed
        self.accepted += accepted
        return None


class UnspoolRunner:
    """A model with which parts are measured, one after the other."""

    def __init__(self, part: Part, setup: Setup, context: int) -> None:
        import unspool
        from unspool.loading import make_drafter_for

        self.setup, self.random = setup, np.random.default_rng(7)
        number_bytes = 4 if setup.dtype == "float32" else 2
        start = time.perf_counter()
        model, bits = load_random(part, setup)
        self.lm: Any = unspool.LanguageModel(
            model, None, context=context, make_drafter=make_drafter_for
        )
        self.costs = ModelCosts(self.lm.config, bits, kv_bytes=number_bytes)
        self.load_s = time.perf_counter() - start
        self.texts: list[list[int]] = []  # of `measure_drafts`
        self.draft_rows, self.plain_s = 0, 0.0
        self.mtp: Any = None  # head of `measure_mtp`

    def close(self) -> None:
        self.lm.close()
        del self.lm

    def measure(self, part: Part) -> dict[str, Any]:
        """Figures of a part, and the least it must read and compute."""
        part = part.tiny() if self.setup.tiny else part
        work: Callable[[Part], dict[str, Any]] = getattr(self, f"measure_{part.work}")
        start = time.perf_counter()
        work(part)  # compiles, captures graphs, fills caches
        warm = time.perf_counter() - start
        freeze_objects()
        rounds = sorted((work(part) for _ in range(self.setup.rounds)), key=lambda r: r["seconds"])
        result = {**rounds[len(rounds) // 2], "warm_s": warm, "load_s": self.load_s}
        result["spread"] = [figures["seconds"] for figures in rounds]
        if part.work == "many":
            result["same_alone"] = self._compare_alone(part)
        if self.setup.device.startswith("cuda"):
            import torch

            result["memory_bytes"] = torch.cuda.max_memory_allocated(self.setup.device)
        return result

    def measure_one(self, part: Part) -> dict[str, Any]:
        times = [time.perf_counter()]
        for _ in self._stream(part, self._prompt(part.prompt), 0):
            times.append(time.perf_counter())
        count = len(times) - 2
        decode = self.costs.decode(1, part.prompt + 1, count)
        return throughput(times[-1] - times[1], count, times[1] - times[0], decode)

    def measure_many(self, part: Part) -> dict[str, Any]:
        self.prompts = [self._prompt(part.prompt) for _ in range(part.rows)]
        start = time.perf_counter()
        streams = [self._stream(part, ids, seed) for seed, ids in enumerate(self.prompts)]
        first = next(streams[0])
        first_s = time.perf_counter() - start
        steps = [list(stream) for stream in streams]
        elapsed = time.perf_counter() - start
        steps[0].insert(0, first)
        self.written = [[step.token for step in row] for row in steps]
        count = sum(map(len, self.written))
        assert count == part.rows * part.new, f"{count} tokens were written"
        assert all(np.isfinite(step.logprob) for step in steps[-1])
        prefill = self.costs.prompt(part.rows, part.prompt)
        decode = self.costs.decode(part.rows, part.prompt + 1, part.new - 1)
        return throughput(elapsed, count, first_s, prefill, decode)

    def measure_drafts(self, part: Part) -> dict[str, Any]:
        """Texts with drafts against the same without.

        Several rows of a text round differently from one. So the known texts are those that are
        written with drafts that are all wrong.
        """
        if self.draft_rows != part.rows:
            prompts = [self._prompt(part.prompt) for _ in range(part.rows)]
            self.texts, self.draft_rows = prompts, part.rows
            for acceptance in (None, 0.0):
                texts = self._write_known(part, acceptance)[0]
                self.texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
            times = [self._write_known(part, None)[1] for _ in range(1 + self.setup.rounds)]
            self.plain_s = statistics.median(times[1:])
        texts, elapsed, drafters = self._write_known(part, part.acceptance)
        count = sum(map(len, texts))
        drafted = max(1, sum(drafter.drafted for drafter in drafters))
        accepted = sum(drafter.accepted for drafter in drafters) / drafted
        result = throughput(elapsed, count, 0.0)
        return {**result, "speedup": self.plain_s / elapsed, "accepted": accepted}

    def _write_known(
        self, part: Part, acceptance: float | None
    ) -> tuple[list[list[int]], float, list[KnownText]]:
        """Write the known texts, with drafts unless `acceptance` is None."""
        drafters = [
            KnownText(tokens, acceptance or 0.0, self.lm.vocab_size) for tokens in self.texts
        ]
        start = time.perf_counter()
        streams = [
            self._stream(
                part, tokens[: part.prompt], seed,
                speculate=None if acceptance is None else drafters[seed],
            )
            for seed, tokens in enumerate(self.texts)
        ]  # fmt: skip
        texts = [[step.token for step in stream] for stream in streams]
        return texts, time.perf_counter() - start, drafters

    def measure_mtp(self, part: Part) -> dict[str, Any]:
        """A text with drafts of a random MTP layer against the same without, after the first
        token.

        Its drafts are wrong. With an acceptance, tokens of the text replace them, of which each is
        right with this probability.
        """
        from unspool.decoding.speculative.controller import DraftShape, FixedShape
        from unspool.decoding.speculative.head_drafter import HeadDrafter
        from unspool.decoding.speculative.mtp import MtpHead

        if self.mtp is None:
            tensors: Any = RandomMtp(self.lm.config.mtp_layer_config())
            self.mtp = MtpHead(Path("random"), tensors, self.lm.model, self.lm.context)
        prompt, texts = self._prompt(part.prompt), list[KnownText]()

        class Drafter(HeadDrafter):
            def propose(self, tokens: Sequence[int], most: int) -> Any:
                draft = super().propose(tokens, most)
                return texts[0].propose(tokens, len(draft)) if texts else draft

        def make(request: Any) -> Drafter:
            return Drafter(self.mtp, request, FixedShape(DraftShape(part.drafted)))

        def write(drafter: Any) -> tuple[list[Any], float]:
            stream = self._stream(part, prompt, 0, speculate=drafter)
            first = next(stream)
            start = time.perf_counter()
            return [first, *stream], time.perf_counter() - start

        if part.acceptance:
            text = prompt + [step.token for step in write(make)[0]]
            texts.append(KnownText(text, part.acceptance, self.lm.vocab_size))
        plain_s, (steps, elapsed) = write(None)[1], write(make)
        outcomes = [step.draft for step in steps]  # a rejected token ends a draft
        accepted, rejected = outcomes.count("accepted"), outcomes.count("rejected")
        assert accepted or rejected, "nothing was drafted"
        result = throughput(elapsed, len(steps) - 1, 0.0)
        fraction = accepted / (accepted + rejected)
        return {**result, "speedup": plain_s / elapsed, "accepted": fraction}

    def measure_first(self, part: Part) -> dict[str, Any]:
        start = time.perf_counter()
        next(iter(self._stream(part, self._prompt(part.prompt), 0)))
        elapsed = time.perf_counter() - start
        return throughput(elapsed, part.prompt, elapsed, self.costs.prompt(1, part.prompt))

    def _compare_alone(self, part: Part) -> str:
        """How many of the last batch's texts are the same when written alone."""
        equal, count = 0, min(NUM_ALONE, part.rows)
        for seed in range(count):
            alone = [step.token for step in self._stream(part, self.prompts[seed], seed)]
            equal += alone == self.written[seed]
        return f"{equal} of {count}"

    def _prompt(self, length: int) -> list[int]:
        """A new prompt each time."""
        return list(self.random.integers(3, self.lm.vocab_size, length).tolist())

    def _stream(self, part: Part, ids: list[int], seed: int, **options: Any) -> Any:
        options = {"max_tokens": part.new, "end": False, "seed": seed, **part.options, **options}
        return self.lm.stream(ids, **options)


def load_random(part: Part, setup: Setup) -> tuple[Any, float]:
    """A model with random weights, and the bits of each."""
    from unspool.backends.cuda.load import load_weights
    from unspool.backends.cuda.model import CudaModel
    from unspool.backends.torch.backend import TorchModel
    from unspool.model.files.config_json import config_from_hf

    if setup.backend == "torch":
        model = random_transformer(setup.shape(part), setup.dtype, setup.device)
        return TorchModel(model), 32.0 if setup.dtype == "float32" else 16.0
    import torch

    checkpoint = RandomCheckpoint(config_from_hf(setup.shape(part)), part.packed)
    weights = load_weights(
        checkpoint, dtype=getattr(torch, setup.dtype), device=torch.device(setup.device)
    )
    return CudaModel(weights, lambda: "random", exact=part.exact), checkpoint.bits_per_weight()


class TransformersRunner:
    """The same shape with random weights in transformers."""

    def __init__(self, part: Part, setup: Setup) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self.torch, self.transformers, self.setup = torch, transformers, setup
        shape = setup.shape(part)
        config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
        torch.manual_seed(0)
        dtype = getattr(torch, setup.dtype)
        with torch.device(setup.device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        torch.set_float32_matmul_precision("high")
        self.random, self.vocab_size = np.random.default_rng(7), config.vocab_size

    def measure(self, part: Part, mode: str) -> dict[str, Any]:
        part = part.tiny() if self.setup.tiny else part
        start = time.perf_counter()
        work = self._static if mode == "static" else self._continuous
        work(part)
        warm = time.perf_counter() - start
        freeze_objects()
        elapsed = min(work(part) for _ in range(self.setup.rounds))
        tokens = part.rows * part.new
        if part.work == "one":  # count after the first token
            elapsed -= min(self._static(part, 1) for _ in range(2))
            tokens -= part.rows
        figures = {"seconds": elapsed, "tokens": tokens, "tokens_s": tokens / elapsed}
        return {**figures, "warm_s": warm}

    def _static(self, part: Part, new: int | None = None) -> float:
        """One batch: a static cache, and compiled decoding if there is a GPU."""
        torch = self.torch
        ids = torch.tensor(self._prompts(part), device=self.setup.device)
        start = time.perf_counter()
        with torch.inference_mode():
            tokens = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new or part.new,
                do_sample=False, eos_token_id=-1, pad_token_id=0, cache_implementation="static",
            )  # fmt: skip
        rows = tokens[:, ids.shape[1] :].tolist()  # synchronizes
        assert all(len(row) == (new or part.new) for row in rows)
        return time.perf_counter() - start

    def _continuous(self, part: Part) -> float:
        prompts = self._prompts(part)
        settings = self.transformers.GenerationConfig(
            max_new_tokens=part.new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = time.perf_counter()
        texts = self.model.generate_batch(
            inputs=prompts, generation_config=settings, progress_bar=False,
            persistent_manager=True,  # graphs are captured once, while warming up
        )  # fmt: skip
        elapsed = time.perf_counter() - start
        count = sum(len(text.generated_tokens) for text in texts.values())
        assert count == part.rows * part.new, f"{count} tokens were written"
        return elapsed

    def _prompts(self, part: Part) -> list[list[int]]:
        return list(self.random.integers(3, self.vocab_size, (part.rows, part.prompt)).tolist())


def measure_load(part: Part, setup: Setup) -> dict[str, Any]:
    """Seconds of `unspool.load` and to the first token, and of only reading the files."""
    import unspool
    from unspool.model.files.checkpoint import save_checkpoint

    with scratch_folder(setup.scratch, in_memory=False) as folder:
        save_checkpoint(random_transformer(setup.shape(part), setup.dtype, setup.device), folder)
        free_memory()
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        drop_file_cache(files)
        start = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.read(1 << 24):
                    pass
        disk_s = time.perf_counter() - start
        drop_file_cache(files)
        options: dict[str, Any] = {"device": setup.device, "context": 256, "progress": False}
        start = time.perf_counter()
        with unspool.load(folder, **options) as lm:
            loaded = time.perf_counter() - start
            next(iter(lm.stream([5, 6, 7], max_tokens=1, end=False)))
            first_s = time.perf_counter() - start
        start = time.perf_counter()
        unspool.load(folder, **options).close()
        cached_s = time.perf_counter() - start
    figures = {"seconds": loaded, "first_s": first_s, "cached_s": cached_s, "disk_s": disk_s}
    return {**figures, "bytes": size, "bytes_s": size / loaded}


def drop_file_cache(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_server(part: Part, setup: Setup) -> dict[str, Any]:
    """Tokens/s that reach streaming clients; see bench/serve.py."""
    script = Path(__file__).with_name("serve.py")
    with scratch_folder(setup.scratch) as folder:
        subprocess.run(
            [sys.executable, script, "--device", setup.device, "--clients", str(part.rows),
             "--tokens", str(part.new), "--out", folder],
            check=True, stdout=sys.stderr, timeout=part.seconds,
        )  # fmt: skip
        figures = json.loads((folder / "streams.json").read_text())[str(part.rows)]
    tokens = part.rows * part.new
    result = throughput(tokens / figures["tokens_s"], tokens, figures["first_s_p50"])
    return {**result, "figures": figures}


@contextmanager
def scratch_folder(folder: Path, *, in_memory: bool = True) -> Iterator[Path]:
    """Temporary folder for large files, in shared memory unless the disk is measured."""
    memory = Path("/dev/shm")
    where = memory if in_memory and memory.is_dir() else folder
    with tempfile.TemporaryDirectory(dir=where, prefix="unspool-bench-") as path:
        yield Path(path)


def freeze_objects() -> None:
    """Let Python's garbage collector skip what exists now, as `unspool serve` does: visiting all
    objects of torch takes 0.1 s."""
    gc.collect()
    gc.freeze()


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*")
    add_options(
        parser, ("--device", "cuda"), ("--backend", "cuda"), ("--rounds", 3), ("--tiny", False),
        ("--scratch", Path(tempfile.gettempdir())),
    )  # fmt: skip
    args = parser.parse_args()
    setup = Setup(args.device, args.backend, args.rounds, args.tiny, args.scratch)
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    context = max((PARTS[name].context for name in args.parts if name in PARTS), default=0)
    loaded: dict[Any, Any] = {}  # at most one model, which the next part may need too

    def load(key: Any, make: Callable[[], Any]) -> Any:
        if key not in loaded:
            for old in loaded.values():
                with suppress(AttributeError):  # transformers' model has no `close`
                    old.close()
            loaded.clear()
            gc.unfreeze()
            free_memory()
            loaded[key] = make()
        return loaded[key]

    def measure(name: str) -> dict[str, Any]:
        if name == "limits":
            return dict(measure_limits(setup.device, setup.tiny))
        key, _, mode = name.partition("@")
        part = PARTS[key]
        if mode:
            peer = load(("transformers", part.shape), lambda: TransformersRunner(part, setup))
            return dict(peer.measure(part, mode))
        if part.work in ("load", "server"):
            load(None, lambda: None)
            return (measure_load if part.work == "load" else measure_server)(part, setup)
        runner = load(part.model, lambda: UnspoolRunner(part, setup, context))
        return dict(runner.measure(part))

    def send(**message: Any) -> None:
        os.write(output, (json.dumps(message) + "\n").encode())

    for name in args.parts:
        send(part=name, begin=True)
        try:
            send(part=name, result=measure(name))
        except Exception as error:
            traceback.print_exc()
            send(part=name, error=f"{type(error).__name__}: {error}"[:500])
            if "CUDA error" in str(error):  # nothing runs in this process any longer
                os._exit(3)
    sys.stderr.flush()
    os._exit(0)  # graphs and pools need no cleanup


if __name__ == "__main__":
    main()
