"""The loop: batches in, a trained model in a run folder out.

    trainer = Trainer(model, batches, next_token, make_optimizers(model, rates), settings, run)
    trainer.run(print)                     # events: Logged, Judged, Sampled, Saved, Ended

Each step adds up the gradients of some batches, clips them, and moves the weights. What happens is
told as events; the terminal, the log and the page are listeners. A run that has a checkpoint with
its state goes on from there.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unspool.model.transformer import Transformer
from unspool.train.learning.flops import device_peak, mfu
from unspool.train.learning.forward import recompute_activations
from unspool.train.learning.objectives import Objective
from unspool.train.learning.optimizers import Schedule, set_rates
from unspool.train.running.ahead import Ahead, Batches
from unspool.train.running.checkpoints import Checkpoints, SaveModel, newest, restore
from unspool.train.running.events import (
    Ended,
    Event,
    Judged,
    Logged,
    Paused,
    Replanned,
    Sampled,
    Saved,
)
from unspool.train.running.faults import TrainingError, in_words
from unspool.train.running.parallel import Parallel, whole
from unspool.train.running.runs import Run, film_steps
from unspool.train.running.state import training_state

_ADVICE = "no number to learn from: try a lower learning rate, and look at the data"
_AGAIN = 1.0  # seconds after which a second signal is a second wish
_PACE_STEPS = 10  # steps from which the pace of a run is estimated
_PAUSE = 0.2  # seconds between two looks at whether a paused run may go on


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How long, how carefully, and what to tell on the way."""

    steps: int
    warmup: int = 0  # steps
    decay: float = 0.4  # share of the steps
    accumulate: int = 1  # batches in a step
    clip: float = 1.0  # longest gradient; 0: any
    seed: int = 0
    log_every: int = 1
    judge_every: int = 0  # 0: at the end only; the same for samples
    sample_every: int = 0
    save_every: int = 0  # beside the film's frames
    keep: int = 2  # checkpoints beside the film's frames
    patience: int = 0  # evaluations in a row without a new best that end the run; 0: any number
    seconds: float | None = None  # time budget: steps that do not fit are left out
    bf16: bool = False
    compile: bool = False
    recompute: bool = False  # activations, to save memory


Judge = Callable[[Transformer], tuple[float, float | None]]  # held-out loss, bits per byte
Sampler = Callable[[Transformer], Sequence[tuple[str, int, str]]]  # prompt, seed, text
MakeOptimizers = Callable[[Transformer], Sequence[Optimizer]]


class Trainer:
    """One training, from its first step or from its last checkpoint to the end.

    `optimizers` may be a function that makes them: it is called when the weights lie where they
    are trained, which FSDP needs. Without `run` nothing is written.
    """

    def __init__(
        self,
        model: Transformer,
        batches: Batches,
        objective: Objective,
        optimizers: Sequence[Optimizer] | MakeOptimizers,
        settings: TrainSettings,
        run: Run | None = None,
        *,
        save_model: SaveModel | None = None,
        judge: Judge | None = None,
        sampler: Sampler | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self.model, self.batches, self.settings, self.folder = model, batches, settings, run
        self.parallel = parallel or Parallel(next(model.parameters()).device)
        self._judge, self._sampler = judge, sampler
        if settings.recompute:
            recompute_activations(model)
        if settings.compile:
            from torch._dynamo import config as limits  # takes two seconds

            # One graph for each kind of layer, with and without gradients, and for each shape of
            # a batch: torch would give up behind the eighth, and leave the rest slow.
            limits.recompile_limit = max(limits.recompile_limit, 64)
            for layer in model.layers:
                layer.compile(dynamic=False)
        self._scheduled: Any = objective if hasattr(objective, "progress") else None
        self._computation = self.parallel.wrap(model, objective)
        self.optimizers = list(optimizers(model) if callable(optimizers) else optimizers)
        self.schedule = Schedule(settings.steps, settings.warmup, settings.decay)
        self._ahead = Ahead(batches, model.config.vocab_size, self.parallel.device)
        self._checkpoints: Checkpoints | None = None
        if run is not None and save_model is not None:
            self._checkpoints = Checkpoints(run, save_model, settings.keep, self.parallel)
        self.step = self.tokens = 0
        self._length = 0  # tokens in a row of the last batch
        self._seconds = 0.0
        self._stop = False
        self._signal: int | None = None
        self._judged_step = -1  # the step of the last evaluation on held-out text
        self._held_out: float | None = None
        self._best_loss = math.inf  # of the evaluations so far
        self._num_worse = 0  # evaluations since the best one
        self._planned_steps = settings.steps
        # Seconds since the start at the end of each of the last steps: a tenth of the run, which
        # has its share of evaluations and checkpoints.
        self._step_ends: deque[float] = deque(maxlen=max(2 * _PACE_STEPS, settings.steps // 10))
        self._saved = -1  # the step whose checkpoint is on the disk

    def stop(self) -> None:
        """End after the step at hand, with a checkpoint; from any thread."""
        self._stop = True

    # -- the whole of it ----------------------------------------------------------------------

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> Ended:
        """Train to the end, or until somebody stops it."""
        self._tell = on_event
        try:
            with self._stopping_on_signals():
                return self._run()
        except (Exception, KeyboardInterrupt) as error:
            known = in_words(error, self.folder, self.step)
            if self.folder is not None and self.parallel.first:
                with suppress(OSError):  # where nothing can be written, words must do
                    self.folder.update(state="failed", error=str(known or error) or repr(error))
            if known is not None:
                raise known from error
            raise

    def _run(self) -> Ended:
        settings = self.settings
        saved = newest(self.folder, self.parallel) if self.folder is not None else None
        if saved is not None and self.folder is not None:
            facts = restore(saved, self.model, self.optimizers)
            self.step, self.tokens = facts["step"], facts["tokens"]
            self._saved = self.step
            self._seconds = facts["seconds"]
            self._best_loss = facts.get("best_loss") or math.inf
            self._num_worse = facts.get("num_worse", 0)
            if self.parallel.first:
                self.folder.forget_after(self.step)
        else:
            self._look_back(first=True)
        self.model.train()
        began = time.monotonic() - self._seconds
        while self.step < self.settings.steps:
            wanted = self._wanted()
            if wanted == "stop":
                return self._end("stopped")
            if wanted == "pause":
                began += self._wait()
                continue
            since = time.monotonic()
            measured = self.one_step()
            self.step += 1
            now = time.monotonic()
            self._seconds = now - began
            if self.step % settings.log_every == 0 or self.step == self.settings.steps:
                self._log(measured, now - since)
            self._look_back()
            if settings.patience and self._num_worse >= settings.patience:
                return self._end("done")
            self._fit_time_budget(time.monotonic() - began)
        return self._end("done")

    def _look_back(self, *, first: bool = False) -> None:
        """Judge, sample and save where it is time for that."""
        settings, last = self.settings, self.step == self.settings.steps

        def due(every: int) -> bool:
            return last or (not first and every > 0 and self.step % every == 0)

        frame = self.step in film_steps(settings.steps)
        # Before the first step FSDP has not set up the shards that an evaluation would gather.
        at_start = first and settings.judge_every > 0 and not self.parallel.shard
        if at_start or due(settings.judge_every):
            self._judge_now()
        if self._sampler is not None and (frame or due(settings.sample_every)):
            self._sample_now()
        if frame or due(settings.save_every):
            self._save()

    def _fit_time_budget(self, elapsed_s: float) -> None:
        """Plan as many of the steps as fit into the time budget, at the pace of late.

        With fewer steps the learning rate decays earlier. The first process decides for all.
        """
        budget_s = self.settings.seconds
        if budget_s is None or self.step >= self.settings.steps:
            return
        self._step_ends.append(elapsed_s)
        if len(self._step_ends) < _PACE_STEPS:
            return  # the first steps are slow
        step_s = (elapsed_s - self._step_ends[0]) / (len(self._step_ends) - 1)
        fitting = self.step + max(1, int((budget_s - elapsed_s) / max(step_s, 1e-9)))
        steps = min(fitting, self._planned_steps)
        if self.parallel.world > 1:
            proposal = torch.tensor([float(steps if self.parallel.first else 0)])
            steps = int(self.parallel.sum(proposal.to(self.parallel.device)).item())
        if abs(steps - self.settings.steps) <= 0.03 * self.settings.steps:
            return  # noise
        self.settings = replace(self.settings, steps=steps)
        self.schedule = Schedule(steps, self.settings.warmup, self.settings.decay)
        if self.folder is not None and self.parallel.first:
            self.folder.update(steps=steps)
        self._say(Replanned(self.step, steps))

    def _end(self, state: str) -> Ended:
        self._save()
        if self.folder is not None and self.parallel.first:
            if self._checkpoints is not None and state == "done":
                self._checkpoints.finish(self.step)
            self.folder.update(state=state, signal=self._signal if state == "stopped" else None)
        self.parallel.wait()
        early = state == "done" and self.step < self.settings.steps
        ended = Ended(state, self.step, early)
        self._say(ended)
        return ended

    # -- one step -----------------------------------------------------------------------------

    def one_step(self) -> tuple[float, float, int, dict[str, float]]:
        """Move the weights once; gives loss, length of the gradient, tokens, and what else."""
        settings, parallel = self.settings, self.parallel
        set_rates(self.optimizers, self.schedule(self.step))
        if self._scheduled is not None:
            self._scheduled.progress = self.step / settings.steps
        exact = torch.float32 if parallel.device.type == "mps" else torch.float64
        # The summed loss, the tokens that count, and all that were read.
        counts = torch.zeros(3, dtype=exact, device=parallel.device)
        extra: dict[str, float] = {}
        for number in range(settings.accumulate):
            last = number == settings.accumulate - 1
            index = self.step * settings.accumulate + number
            batch = self._ahead.take(index)
            counts[2] += batch.ids[:, 1:].numel()
            self._length = batch.ids.shape[1] - 1
            with parallel.joined(self._computation, last):
                with self._precision():
                    summed, tokens, more = self._computation(batch, self._rng(index))
                summed.backward()
            extra.update(more)
            counts[:2] += torch.stack((summed.detach(), tokens))
            if not last:
                self._ahead.prepare(index + 1)
        if self.step + 1 < settings.steps:
            self._ahead.prepare((self.step + 1) * settings.accumulate)
        # Over all processes; a GPU is waited for here, once, and not for each of the numbers.
        gradients = self._gradients()
        norm_of_sum = whole(torch.nn.utils.get_total_norm(gradients)).to(counts)
        told = torch.cat((parallel.sum(counts), norm_of_sum.view(1))).tolist()
        total, seen = max(1.0, told[1]), int(told[2])
        loss, norm = told[0] / total, told[3] * parallel.world / total
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of step {self.step + 1} is {loss}, {_ADVICE}")
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {self.step + 1} is {norm}, {_ADVICE}")
        # From the gradient of a sum to that of the mean, no longer than allowed.
        shorter = settings.clip / norm if 0 < settings.clip < norm else 1.0
        torch._foreach_mul_(gradients, parallel.world / total * shorter)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens += seen
        return loss, norm, seen, self._mean_over_processes(extra)

    def _mean_over_processes(self, extra: dict[str, float]) -> dict[str, float]:
        """Average what an objective reports besides the loss.

        Processes may report different figures, or none; each takes part in the same exchange, and a
        figure is averaged over those that have it.
        """
        if self.parallel.world == 1:
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
        """Random numbers of one batch: a function of the seed, the batch's number and the rank."""
        mixed = (self.settings.seed * 1_000_003 + index) * 1_009 + self.parallel.rank
        return torch.Generator().manual_seed(mixed % (1 << 63))

    def _precision(self) -> Any:
        if not self.settings.bf16:
            return nullcontext()
        return torch.autocast(self.parallel.device.type, torch.bfloat16)

    # -- what is told -------------------------------------------------------------------------

    def _say(self, event: Event) -> None:
        if self.parallel.first:
            self._tell(event)

    def _log(self, measured: tuple[float, float, int, dict[str, float]], took: float) -> None:
        loss, norm, tokens, extra = measured
        cuda = self.parallel.device.type == "cuda"
        logged = Logged(
            self.step,
            self.tokens,
            loss,
            self.optimizers[-1].param_groups[0]["lr"],
            norm,
            tokens / took,
            self._seconds,
            torch.cuda.max_memory_allocated(self.parallel.device) if cuda else None,
            {**extra, **self._used(tokens / took)},
        )
        if self.folder is not None and self.parallel.first:
            line = {key: value for key, value in asdict(logged).items() if value is not None}
            self.folder.write_log(line | line.pop("extra"))
        self._say(logged)

    def _used(self, tokens_per_second: float) -> dict[str, float]:
        """The share of the devices' best that the model's arithmetic takes, where that is known."""
        peak = device_peak(self.parallel.device)
        if peak is None:
            return {}
        whole = peak * self.parallel.world
        return {"mfu": mfu(self.model.config, self._length, tokens_per_second, whole)}

    def _judge_now(self) -> None:
        if self._judge is None:
            return
        self.model.eval()
        if self.parallel.shard:  # the judge does not go through the computation, which would do it
            self._computation.unshard()  # type: ignore[operator]
        with torch.no_grad(), self._precision():
            self._held_out, bits_per_byte = self._judge(self.model)
        if self.parallel.shard:
            self._computation.reshard()  # type: ignore[operator]
        self.model.train()
        if self.parallel.world > 1:  # all processes go by the first one's figure
            shared = torch.tensor([self._held_out if self.parallel.first else 0.0])
            self._held_out = float(self.parallel.sum(shared.to(self.parallel.device)).item())
        self._judged_step = self.step
        if self._held_out < self._best_loss:
            self._best_loss, self._num_worse = self._held_out, 0
        else:
            self._num_worse += 1
        judged = Judged(self.step, self._held_out, bits_per_byte)
        if self.folder is not None and self.parallel.first:
            line = {key: value for key, value in asdict(judged).items() if value is not None}
            self.folder.write_log(line)
        self._say(judged)

    def _sample_now(self) -> None:
        if self._sampler is None or self.parallel.shard or not self.parallel.first:
            return
        self.model.eval()
        # A text grows, and a compiled layer would be compiled again for every length it has.
        compiled = self.settings.compile
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            for prompt, seed, text in self._sampler(self.model):
                sampled = Sampled(self.step, prompt, seed, text)
                if self.folder is not None:
                    self.folder.write_sample(asdict(sampled))
                self._say(sampled)
        self.model.train()

    def _save(self) -> None:
        if self._checkpoints is None or self._saved == self.step:
            return
        self._saved = self.step
        judged = self._judged_step == self.step
        facts = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self._seconds,
            "held_out_loss": self._held_out if judged else None,
            "best_loss": self._best_loss if math.isfinite(self._best_loss) else None,
            "num_worse": self._num_worse,
        }
        state = training_state(self.model, self.optimizers)
        self._say(Saved(self.step, self._checkpoints.save(facts, self._weights(), state)))

    def _weights(self) -> dict[str, Tensor]:
        """All of them, for the first process; every process takes part."""
        found = {}
        for name, value in self.model.state_dict().items():
            gathered = whole(value)
            if self.parallel.first:
                found[name] = gathered.cpu() if self.parallel.shard else gathered
        return found

    # -- what others want, and what goes wrong ------------------------------------------------

    def _wanted(self) -> str:
        """Pause, stop or go: what this or any other process was told, the same for all."""
        wanted = 0
        if self._stop:
            wanted = 2
        elif self.folder is not None and self.parallel.first:
            wanted = ("go", "pause", "stop").index(self.folder.wanted())
        if self.parallel.world > 1:
            told = torch.tensor([float(wanted == 1), float(wanted == 2)])
            pausing, stopping = self.parallel.sum(told.to(self.parallel.device)).tolist()
            wanted = 2 if stopping else 1 if pausing else 0
        return ("go", "pause", "stop")[wanted]

    def _wait(self) -> float:
        """Sleep until the run may go on; gives the seconds that took."""
        since = time.monotonic()
        if self.folder is not None and self.parallel.first:
            self.folder.update(state="paused")
            self._say(Paused(self.step))
        while self._wanted() == "pause":
            time.sleep(_PAUSE)
        if self.folder is not None and self.parallel.first:
            self.folder.update(state="running")
        return time.monotonic() - since

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the training after the step at hand; the second one at once, but
        not within a second: torchrun passes on what the terminal has told its processes too."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        since = math.inf

        def on_signal(number: int, frame: Any) -> None:
            nonlocal since
            if self._stop and time.monotonic() > since + _AGAIN:
                raise KeyboardInterrupt
            self._stop, self._signal, since = True, number, min(since, time.monotonic())

        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        before = [signal.signal(number, on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
