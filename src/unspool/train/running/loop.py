"""The training loop: batches in, a trained model in a run folder out.

    trainer = Trainer(model, batches, next_token, make_optimizers(model, rates), settings, run)
    trainer.run(print)                     # events: StepLogged, Evaluated, ..., RunEnded

Each step accumulates the gradients of some batches, clips them and updates the weights. Progress is
published as events; the terminal, the log and the web page are listeners. A run with a resumable
checkpoint continues from it.
"""

from __future__ import annotations

import errno
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from unspool.backends.torch.backend import TorchModel
from unspool.errors import DataError, UnspoolError
from unspool.lm import LanguageModel
from unspool.model.layers.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import PackedBatches, TrainingBatch
from unspool.train.data.prepared import PackedDocuments
from unspool.train.learning.forward import recompute_activations
from unspool.train.learning.model_size import device_peak, mfu
from unspool.train.learning.objectives import Objective
from unspool.train.learning.optimizers import Schedule, set_rates
from unspool.train.running.checkpoints import (
    Checkpoints,
    SaveModel,
    newest_checkpoint,
    restore,
    training_state,
)
from unspool.train.running.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunPaused,
    SampleWritten,
    StepLogged,
    StepsReplanned,
)
from unspool.train.running.parallel import Parallel, full_tensor, is_process_lost, process_lost
from unspool.train.running.runs import Run, milestone_steps

# -- Errors of a training run, with the checkpoint to resume from


class TrainingError(UnspoolError):
    """Training cannot continue; the last checkpoint is intact."""


def explain_error(error: BaseException, run: Run | None, step: int) -> UnspoolError | None:
    """Turn an error that a user can fix into a message; None: a bug, to be raised as it is."""
    message = None
    if isinstance(error, torch.OutOfMemoryError):
        message = (
            "out of GPU memory: use a smaller --batch (the tokens per step stay the same), "
            "or --recompute"
        )
    elif isinstance(error, RuntimeError) and "CUDA error" in str(error):
        message = f"the GPU failed at step {step + 1} ({str(error).splitlines()[0]})"
    elif is_process_lost(error):
        message = str(process_lost(error))
    elif is_disk_full(error):
        message = "the disk is full: free some space"
    elif isinstance(error, OSError):
        message = f"the run's folder cannot be used ({error.strerror or error})"
    elif isinstance(error, UnspoolError):
        message = str(error)
    return None if message is None else TrainingError(f"{message}; {_resume_hint(run)}")


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk is full; safetensors reports that in its message only."""
    has_errno = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return has_errno or "os error 28" in str(error)


def _resume_hint(run: Run | None) -> str:
    checkpoint = run.resumable_checkpoint() if run is not None else None
    if run is None or checkpoint is None:
        return "there is no checkpoint to resume from"
    return (
        f"the checkpoint of step {checkpoint.step} is intact, resume from it with: "
        f"unspool train --resume {run.folder}"
    )


# -- Prefetch training batches to the device, one batch ahead


class BatchSource(Protocol):
    """Yields the same batch for the same step number, with its tokens in `ids`."""

    def batch(self, step: int) -> Any: ...


class BatchPrefetcher:
    """Checked batches on the device, by number."""

    def __init__(self, batches: BatchSource, vocab_size: int, device: torch.device) -> None:
        self._batches, self._vocab_size, self._device = batches, vocab_size, device
        self._on_policy = bool(getattr(batches, "on_policy", False))
        self._prefetched: tuple[int, Any] | None = None

    def get(self, index: int) -> Any:
        """Return batch `index`, prefetched or not."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == index:
            return prefetched[1]
        return self._load(index)

    def prefetch(self, index: int) -> None:
        """Start copying batch `index` to the GPU; does nothing on a CPU."""
        if self._device.type == "cuda" and not self._on_policy:
            self._prefetched = index, self._load(index)

    def _load(self, index: int) -> Any:
        batch = self._batches.batch(index)
        # An id outside of the embedding table would fail on a GPU with an obscure assertion.
        largest = int(batch.ids.max())
        if largest >= self._vocab_size or int(batch.ids.min()) < 0:
            raise TrainingError(
                f"batch {index} has token {largest}, but the model has {self._vocab_size:,} tokens:"
                " the data was prepared with another tokenizer"
            )
        moved = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in vars(batch).items()
        }
        return type(batch)(**moved)


_ADVICE = "not a finite number: try a lower learning rate, and check the data"
_SECOND_SIGNAL_S = 1.0  # a signal within this time of the first is a duplicate
_PACE_STEPS = 10  # steps from which the pace of a run is estimated
_POLL_S = 0.2  # how often a paused run reads its control file


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Length, precision, logging and checkpointing of a training run."""

    steps: int
    warmup: int = 0  # steps
    decay: float = 0.4  # share of the steps
    accumulate: int = 1  # batches per step
    clip: float = 1.0  # maximum gradient norm; 0: no clipping
    seed: int = 0
    log_every: int = 1
    judge_every: int = 0  # steps between evaluations; 0: at the end only
    sample_every: int = 0  # steps between samples; 0: at the end only
    save_every: int = 0  # steps between checkpoints, besides the milestones
    keep: int = 2  # checkpoints to keep, besides the milestones
    patience: int = 0  # evaluations in a row without a new best that end the run; 0: any number
    seconds: float | None = None  # time budget: steps that do not fit are dropped
    bf16: bool = False
    compile: bool = False
    recompute: bool = False  # activation checkpointing


Evaluate = Callable[[Transformer], tuple[float, float | None]]  # held-out loss, bits per byte
Sampler = Callable[[Transformer], Sequence[tuple[str, int, str]]]  # (prompt, seed, text)
MakeOptimizers = Callable[[Transformer], Sequence[Optimizer]]


class Trainer:
    """One training run, from its first step or its last checkpoint to the end.

    Args:
        optimizers: The optimizers, or a function that makes them once the weights are on their
            device (FSDP needs that).
        run: Run folder; None: write nothing.
        save_model: Writes the weights of a checkpoint; None: no checkpoints.
        judge: Evaluates on held-out data.
        sampler: Generates sample texts.
    """

    def __init__(
        self,
        model: Transformer,
        batches: BatchSource,
        objective: Objective,
        optimizers: Sequence[Optimizer] | MakeOptimizers,
        settings: TrainSettings,
        run: Run | None = None,
        *,
        save_model: SaveModel | None = None,
        evaluate: Evaluate | None = None,
        sampler: Sampler | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self.model, self.batches, self.settings, self.folder = model, batches, settings, run
        self.parallel = parallel or Parallel(next(model.parameters()).device)
        self._judge, self._sampler = evaluate, sampler
        if settings.recompute:
            recompute_activations(model)
        if settings.compile:
            from torch._dynamo import config as limits  # takes two seconds

            # One graph per kind of layer, with and without gradients, and per batch shape. After
            # eight, torch would fall back to eager execution.
            limits.recompile_limit = max(limits.recompile_limit, 64)
            for layer in model.layers:
                layer.compile(dynamic=False)
        self._scheduled: Any = objective if hasattr(objective, "progress") else None
        self._computation = self.parallel.wrap(model, objective)
        self.optimizers = list(optimizers(model) if callable(optimizers) else optimizers)
        self.schedule = Schedule(settings.steps, settings.warmup, settings.decay)
        vocab_size = model.config.vocab_size
        self._prefetcher = BatchPrefetcher(batches, vocab_size, self.parallel.device)
        self._checkpoints: Checkpoints | None = None
        if run is not None and save_model is not None:
            self._checkpoints = Checkpoints(run, save_model, settings.keep, self.parallel)
        self.step = self.tokens = 0
        self._length = 0  # tokens per row of the last batch
        self._seconds = 0.0
        self._stop = False
        self._signal: int | None = None
        self._evaluated_step = -1  # the step of the last evaluation on held-out text
        self._held_out_loss: float | None = None
        self._best_loss = math.inf  # of the evaluations so far
        self._num_worse = 0  # evaluations since the best one
        self._planned_steps = settings.steps
        # Seconds since the start at the end of each of the last steps: a tenth of the run, so that
        # evaluations and checkpoints are included in proportion.
        self._step_ends: deque[float] = deque(maxlen=max(2 * _PACE_STEPS, settings.steps // 10))
        self._saved_step = -1  # the step of the newest checkpoint

    def stop(self) -> None:
        """End after the current step, with a checkpoint. Callable from any thread."""
        self._stop = True

    # -- the run ------------------------------------------------------------------------------

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> RunEnded:
        """Train to the end, or until it is stopped."""
        self._on_event = on_event
        try:
            with self._stopping_on_signals():
                return self._run()
        except (Exception, KeyboardInterrupt) as error:
            explained = explain_error(error, self.folder, self.step)
            if self.folder is not None and self.parallel.is_first:
                with suppress(OSError):  # the disk may be the problem
                    self.folder.update(state="failed", error=str(explained or error) or repr(error))
            if explained is not None:
                raise explained from error
            raise

    def _run(self) -> RunEnded:
        settings = self.settings
        checkpoint = None
        if self.folder is not None:
            checkpoint = newest_checkpoint(self.folder, self.parallel)
        if checkpoint is not None and self.folder is not None:
            facts = restore(checkpoint, self.model, self.optimizers)
            self.step, self.tokens = facts["step"], facts["tokens"]
            self._saved_step = self.step
            self._seconds = facts["seconds"]
            self._best_loss = facts.get("best_loss") or math.inf
            self._num_worse = facts.get("num_worse", 0)
            if self.parallel.is_first:
                self.folder.truncate_logs(self.step)
        else:
            self._run_periodic_work(first=True)
        self.model.train()
        run_start = time.monotonic() - self._seconds
        while self.step < self.settings.steps:
            command = self._requested_command()
            if command == "stop":
                return self._end("stopped")
            if command == "pause":
                run_start += self._wait_while_paused()
                continue
            step_start = time.monotonic()
            stats = self.train_step()
            self.step += 1
            now = time.monotonic()
            self._seconds = now - run_start
            if self.step % settings.log_every == 0 or self.step == self.settings.steps:
                self._log(stats, now - step_start)
            self._run_periodic_work()
            if settings.patience and self._num_worse >= settings.patience:
                return self._end("done")
            self._fit_time_budget(time.monotonic() - run_start)
        return self._end("done")

    def _run_periodic_work(self, *, first: bool = False) -> None:
        """Evaluate, sample and save if this step is due for it."""
        settings, last = self.settings, self.step == self.settings.steps

        def due(every: int) -> bool:
            return last or (not first and every > 0 and self.step % every == 0)

        milestone = self.step in milestone_steps(settings.steps)
        # Before the first step FSDP has not set up the shards that an evaluation gathers.
        at_start = first and settings.judge_every > 0 and not self.parallel.shard
        if at_start or due(settings.judge_every):
            self._evaluate()
        if self._sampler is not None and (milestone or due(settings.sample_every)):
            self._write_samples()
        if milestone or due(settings.save_every):
            self._save()

    def _fit_time_budget(self, elapsed_s: float) -> None:
        """Reduce the number of steps to what fits into the time budget at the recent pace.

        With fewer steps the learning rate decays earlier. The first process decides for all.
        """
        budget_s = self.settings.seconds
        if budget_s is None or self.step >= self.settings.steps:
            return
        self._step_ends.append(elapsed_s)
        if len(self._step_ends) < _PACE_STEPS:
            return  # the first steps are slower
        step_s = (elapsed_s - self._step_ends[0]) / (len(self._step_ends) - 1)
        fitting = self.step + max(1, int((budget_s - elapsed_s) / max(step_s, 1e-9)))
        steps = min(fitting, self._planned_steps)
        if self.parallel.world_size > 1:
            proposal = torch.tensor([float(steps if self.parallel.is_first else 0)])
            steps = int(self.parallel.sum(proposal.to(self.parallel.device)).item())
        if abs(steps - self.settings.steps) <= 0.03 * self.settings.steps:
            return  # noise
        self.settings = replace(self.settings, steps=steps)
        self.schedule = Schedule(steps, self.settings.warmup, self.settings.decay)
        if self.folder is not None and self.parallel.is_first:
            self.folder.update(steps=steps)
        self._emit(StepsReplanned(self.step, steps))

    def _end(self, state: str) -> RunEnded:
        self._save()
        if self.folder is not None and self.parallel.is_first:
            if self._checkpoints is not None and state == "done":
                self._checkpoints.finish(self.step)
            self.folder.update(state=state, signal=self._signal if state == "stopped" else None)
        self.parallel.wait()
        early = state == "done" and self.step < self.settings.steps
        ended = RunEnded(state, self.step, early)
        self._emit(ended)
        return ended

    # -- one step -----------------------------------------------------------------------------

    def train_step(self) -> tuple[float, float, int, dict[str, float]]:
        """Do one optimizer step; returns loss, gradient norm, tokens, and other statistics."""
        settings, parallel = self.settings, self.parallel
        set_rates(self.optimizers, self.schedule(self.step))
        if self._scheduled is not None:
            self._scheduled.progress = self.step / settings.steps
        exact = torch.float32 if parallel.device.type == "mps" else torch.float64
        # Summed loss, tokens in the loss, tokens read.
        counts = torch.zeros(3, dtype=exact, device=parallel.device)
        extra: dict[str, float] = {}
        for number in range(settings.accumulate):
            last = number == settings.accumulate - 1
            index = self.step * settings.accumulate + number
            batch = self._prefetcher.get(index)
            counts[2] += batch.ids[:, 1:].numel()
            self._length = batch.ids.shape[1] - 1
            with parallel.gradient_sync(self._computation, last):
                with self._precision():
                    summed, tokens, statistics = self._computation(batch, self._rng(index))
                summed.backward()
            extra.update(statistics)
            counts[:2] += torch.stack((summed.detach(), tokens))
            if not last:
                self._prefetcher.prefetch(index + 1)
        if self.step + 1 < settings.steps:
            self._prefetcher.prefetch((self.step + 1) * settings.accumulate)
        # Over all processes, with a single GPU synchronization for all values.
        gradients = self._gradients()
        norm_of_sum = full_tensor(torch.nn.utils.get_total_norm(gradients)).to(counts)
        loss_sum, num_targets, num_tokens, norm_sum = torch.cat(
            (parallel.sum(counts), norm_of_sum.view(1))
        ).tolist()
        total, num_tokens = max(1.0, num_targets), int(num_tokens)
        loss, norm = loss_sum / total, norm_sum * parallel.world_size / total
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of step {self.step + 1} is {loss}, {_ADVICE}")
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {self.step + 1} is {norm}, {_ADVICE}")
        # From the gradient of the sum to that of the mean, clipped.
        clip_factor = settings.clip / norm if 0 < settings.clip < norm else 1.0
        torch._foreach_mul_(gradients, parallel.world_size / total * clip_factor)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens += num_tokens
        return loss, norm, num_tokens, self._mean_over_processes(extra)

    def _mean_over_processes(self, extra: dict[str, float]) -> dict[str, float]:
        """Average the statistics of an objective over the processes that report them.

        All processes take part in the exchange, also those without statistics.
        """
        if self.parallel.world_size == 1:
            return extra
        sums: dict[str, list[float]] = {}
        for figures in self.parallel.gather(extra):
            for name, value in figures.items():
                sums.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in sums.items()}

    def _gradients(self) -> list[Tensor]:
        return [
            parameter.grad
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _rng(self, index: int) -> torch.Generator:
        """Random generator of one batch: a function of the seed, the batch index and the rank."""
        mixed = (self.settings.seed * 1_000_003 + index) * 1_009 + self.parallel.rank
        return torch.Generator().manual_seed(mixed % (1 << 63))

    def _precision(self) -> Any:
        if not self.settings.bf16:
            return nullcontext()
        return torch.autocast(self.parallel.device.type, torch.bfloat16)

    # -- logging, evaluation, checkpoints -------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if self.parallel.is_first:
            self._on_event(event)

    def _log(self, stats: tuple[float, float, int, dict[str, float]], step_s: float) -> None:
        loss, norm, tokens, extra = stats
        cuda = self.parallel.device.type == "cuda"
        logged = StepLogged(
            self.step,
            self.tokens,
            loss,
            self.optimizers[-1].param_groups[0]["lr"],
            norm,
            tokens / step_s,
            self._seconds,
            torch.cuda.max_memory_allocated(self.parallel.device) if cuda else None,
            {**extra, **self._mfu(tokens / step_s)},
        )
        if self.folder is not None and self.parallel.is_first:
            line = {key: value for key, value in asdict(logged).items() if value is not None}
            self.folder.write_log(line | line.pop("extra"))
        self._emit(logged)

    def _mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOPs utilization, if the peak of the device is known."""
        peak = device_peak(self.parallel.device)
        if peak is None:
            return {}
        peak *= self.parallel.world_size
        return {"mfu": mfu(self.model.config, self._length, tokens_per_second, peak)}

    def _evaluate(self) -> None:
        if self._judge is None:
            return
        self.model.eval()
        if self.parallel.shard:  # evaluation calls the model directly, not the FSDP module
            self._computation.unshard()  # type: ignore[operator]
        with torch.no_grad(), self._precision():
            self._held_out_loss, bits_per_byte = self._judge(self.model)
        if self.parallel.shard:
            self._computation.reshard()  # type: ignore[operator]
        self.model.train()
        if self.parallel.world_size > 1:  # all processes use the first one's value
            shared = torch.tensor([self._held_out_loss if self.parallel.is_first else 0.0])
            self._held_out_loss = float(self.parallel.sum(shared.to(self.parallel.device)).item())
        self._evaluated_step = self.step
        if self._held_out_loss < self._best_loss:
            self._best_loss, self._num_worse = self._held_out_loss, 0
        else:
            self._num_worse += 1
        evaluated = Evaluated(self.step, self._held_out_loss, bits_per_byte)
        if self.folder is not None and self.parallel.is_first:
            line = {key: value for key, value in asdict(evaluated).items() if value is not None}
            self.folder.write_log(line)
        self._emit(evaluated)

    def _write_samples(self) -> None:
        if self._sampler is None or self.parallel.shard or not self.parallel.is_first:
            return
        self.model.eval()
        # Eager: a compiled layer would be recompiled for every length of the growing text.
        compiled = self.settings.compile
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            for prompt, seed, text in self._sampler(self.model):
                sample = SampleWritten(self.step, prompt, seed, text)
                if self.folder is not None:
                    self.folder.write_sample(asdict(sample))
                self._emit(sample)
        self.model.train()

    def _save(self) -> None:
        if self._checkpoints is None or self._saved_step == self.step:
            return
        self._saved_step = self.step
        is_evaluated = self._evaluated_step == self.step
        facts = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self._seconds,
            "held_out_loss": self._held_out_loss if is_evaluated else None,
            "best_loss": self._best_loss if math.isfinite(self._best_loss) else None,
            "num_worse": self._num_worse,
        }
        state = training_state(self.model, self.optimizers)
        folder = self._checkpoints.save(facts, self._weights(), state)
        self._emit(CheckpointSaved(self.step, folder))

    def _weights(self) -> dict[str, Tensor]:
        """All weights, in the first process only; every process must call it."""
        weights = {}
        for name, value in self.model.state_dict().items():
            gathered = full_tensor(value)
            if self.parallel.is_first:
                weights[name] = gathered.cpu() if self.parallel.shard else gathered
        return weights

    # -- control ------------------------------------------------------------------------------

    def _requested_command(self) -> str:
        """`go`, `pause` or `stop`, as any process was asked to; the same in all processes."""
        command = 0
        if self._stop:
            command = 2
        elif self.folder is not None and self.parallel.is_first:
            command = ("go", "pause", "stop").index(self.folder.requested_command())
        if self.parallel.world_size > 1:
            votes = torch.tensor([float(command == 1), float(command == 2)])
            pausing, stopping = self.parallel.sum(votes.to(self.parallel.device)).tolist()
            command = 2 if stopping else 1 if pausing else 0
        return ("go", "pause", "stop")[command]

    def _wait_while_paused(self) -> float:
        """Sleep until the run may continue; returns the seconds slept."""
        pause_start = time.monotonic()
        if self.folder is not None and self.parallel.is_first:
            self.folder.update(state="paused")
            self._emit(RunPaused(self.step))
        while self._requested_command() == "pause":
            time.sleep(_POLL_S)
        if self.folder is not None and self.parallel.is_first:
            self.folder.update(state="running")
        return time.monotonic() - pause_start

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """Stop after the current step on Ctrl-C or SIGTERM; a second signal interrupts it.

        Signals within a second count as one: torchrun forwards the signal that the terminal has
        already sent to its processes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        first_signal = math.inf

        def on_signal(number: int, frame: Any) -> None:
            nonlocal first_signal
            if self._stop and time.monotonic() > first_signal + _SECOND_SIGNAL_S:
                raise KeyboardInterrupt
            first_signal = min(first_signal, time.monotonic())
            self._stop, self._signal = True, number

        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        handlers = [signal.signal(number, on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)


# -- Evaluate on held-out text during training: loss and bits per byte


class HeldOutEvaluation:
    """Evaluates an objective on the first rows of the held-out text, always the same ones."""

    def __init__(
        self,
        packed: PackedDocuments,
        tokenizer: Tokenizer,
        objective: Objective,
        length: int,
        rows: int,
    ) -> None:
        self.objective = objective
        self.batches: list[TrainingBatch] = []
        try:
            source = PackedBatches(packed, 4, length)
        except DataError:  # the held-out text is shorter than one row
            return
        self.batches = [source.batch(n) for n in range(-(-min(rows, source.rows) // 4))]
        lengths = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        specials = list(tokenizer.special_ids)
        sizes = np.array(lengths)
        sizes[specials] = 0  # special tokens are not text
        self.bytes = sum(_bytes(batch, sizes) for batch in self.batches)

    def __call__(self, model: Transformer) -> tuple[float, float | None]:
        """Loss in nats per token, and bits per byte."""
        nats = tokens = 0.0
        device = model.embed.weight.device
        for number, batch in enumerate(self.batches):
            rng = torch.Generator().manual_seed(number)
            loss = self.objective(model, on_device(batch, device), rng)
            nats += float(loss.mean) * float(loss.tokens)
            tokens += float(loss.tokens)
        return nats / max(1.0, tokens), nats / math.log(2) / max(1, self.bytes)


def _bytes(batch: TrainingBatch, sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    token_bytes = sizes[batch.targets.numpy()]
    mask = batch.loss_mask
    return int((token_bytes if mask is None else token_bytes * mask.numpy()).sum())


def on_device(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return TrainingBatch(batch.ids.to(device), move(batch.loss_mask), move(batch.document_ids))


_KV_CACHE_BYTES = 256 << 20  # enough for a few hundred tokens


class SampleGenerator:
    """Generates from the same prompts and seeds at every step, so that only the model differs."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[str], length: int = 80) -> None:
        self.tokenizer, self.prompts, self.length = tokenizer, prompts, length

    def __call__(self, model: Transformer) -> list[tuple[str, int, str]]:
        """(prompt, seed, text) of each sample."""
        lm = LanguageModel(TorchModel(model), self.tokenizer, memory=_KV_CACHE_BYTES)
        try:
            return [
                (prompt, seed, self._generate(lm, prompt, seed))
                for seed, prompt in enumerate(self.prompts)
            ]
        finally:
            lm.close()

    def _generate(self, lm: LanguageModel, prompt: str, seed: int) -> str:
        room = lm.context - len(self.tokenizer.encode_prompt(prompt)) - 1
        max_tokens = max(1, min(self.length, room))
        result = lm.generate(prompt, max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=seed)
        return result.text


def first_words(packed: PackedDocuments, tokenizer: Tokenizer, tokens: int = 8) -> str:
    """The first words of a held-out document, as a prompt in the style of the text."""
    for begin, end in zip(packed.offsets[:-1].tolist(), packed.offsets[1:].tolist(), strict=True):
        ids = packed.ids[begin : min(end, begin + tokens)].tolist()
        line = (tokenizer.decode(ids, specials=False).strip().splitlines() or [""])[0]
        words, _, _ = line.rpartition(" ")  # the last word may be incomplete
        if words and "�" not in words:
            return words
    return "The"
