"""Progress displays of training runs.

On a terminal a bar, the loss curve and the newest sample; otherwise a line now and then.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unspool.cli.output import say, stderr_console
from unspool.cli.train.options import describe_epochs
from unspool.train.running.events import (
    Evaluated,
    Event,
    RunEnded,
    RunPaused,
    SampleWritten,
    StepLogged,
    StepsReplanned,
)
from unspool.train.running.runs import Run

_NUM_LINES = 20  # printed over a run if stderr is not a terminal


class TrainingDisplay:
    """Event listener and context manager that shows a training run."""

    def __init__(self, run: Run, *, quiet: bool = False) -> None:
        self.run, self.quiet = run, quiet
        self.steps = run.steps
        earlier = run.log()
        self.losses: list[float] = [line["loss"] for line in earlier if "loss" in line]
        self.logged: StepLogged | None = None
        self.evaluated: Evaluated | None = None  # the newest evaluation
        self.best: Evaluated | None = None  # the evaluation with the lowest loss
        self.sample: SampleWritten | None = None
        self.paused = False
        self.start, self.first_step = time.monotonic(), 0
        self._console = stderr_console()
        self._live: Live | None = None
        self._next_line = 0

    def __enter__(self) -> TrainingDisplay:
        if self.quiet:
            return self
        facts = self.run.facts
        data, size = facts["data"], facts["parameters"]
        self._console.print(
            f"{self.run.folder}: {_short(size)} weights, {self.steps:,} steps, "
            f"{_short(facts['settings']['tokens'])} tokens, "
            f"{describe_epochs(facts['settings']['tokens'] / max(1, data['tokens']))} of "
            f"{', '.join(data['source'])}",
            highlight=False,
        )
        if sys.stderr.isatty():
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            if self.losses:
                self._console.print(
                    "\n".join(plot_curve(self.losses)), style="cyan", highlight=False
                )

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            if self.logged is None:
                self.first_step = event.step - 1
            self.logged, self.paused = event, False
            self.losses.append(event.loss)
        elif isinstance(event, Evaluated):
            self.evaluated = event
            if self.best is None or event.held_out_loss < self.best.held_out_loss:
                self.best = event
        elif isinstance(event, StepsReplanned):
            self.steps = event.steps
        elif isinstance(event, SampleWritten):
            self.sample = event
        elif isinstance(event, RunPaused):
            self.paused = True
        if self.quiet:
            return
        if self._live is not None:
            self._live.update(self._view())
        else:
            self._line(event)

    # -- on a terminal ------------------------------------------------------------------------

    def _view(self) -> Group:
        parts: list[Any] = [self._bar()]
        if len(self.losses) > 1:
            parts.append(Text("\n".join(plot_curve(self.losses)), "cyan"))
        if self.sample is not None:
            text = Text(self.sample.prompt, "bold").append(self.sample.text, "not bold")
            parts.append(Panel(text, title=f"step {self.sample.step:,}", title_align="left"))
        return Group(*parts)

    def _bar(self) -> Table:
        done = self.logged.step if self.logged else 0
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(self.steps, done, width=16)
        line.add_row(bar, f"{done:,}/{self.steps:,}", *self._figures())
        return line

    def _figures(self) -> list[str]:
        if self.logged is None:
            return ["starting"]
        figures = [
            f"loss {self._recent():.3f}",
            f"lr {self.logged.lr:.1e}",
            f"{self.logged.tokens_per_second:,.0f} tokens/s",
            "paused" if self.paused else f"{_clock(self._remaining_s())} left",
        ]
        if "mfu" in self.logged.extra:
            figures.insert(3, f"{self.logged.extra['mfu']:.0%} MFU")
        if self.evaluated is not None and self.evaluated.bits_per_byte is not None:
            held_out = f"held out {self.evaluated.bits_per_byte:.3f} bits/byte"
            if self.best is not None and self.best.step != self.evaluated.step:
                held_out += f" (best {self.best.bits_per_byte:.3f} at step {self.best.step:,})"
            figures.insert(1, held_out)
        return figures

    def _recent(self) -> float:
        """Mean loss of the last steps; a single one is noisy."""
        last = self.losses[-max(1, min(20, len(self.losses) // 10)) :]
        return sum(last) / len(last)

    def _remaining_s(self) -> float:
        assert self.logged is not None
        done = self.logged.step - self.first_step
        return (time.monotonic() - self.start) / done * (self.steps - self.logged.step)

    # -- in a pipe or file --------------------------------------------------------------------

    def _line(self, event: Event) -> None:
        if isinstance(event, SampleWritten):
            words = " ".join((event.prompt + event.text).split())
            self._console.print(f"  step {event.step}: {words}", highlight=False, markup=False)
        if isinstance(event, StepLogged) and event.step >= self._next_line:
            self._next_line = event.step + max(1, self.steps // _NUM_LINES)
            figures = " · ".join(self._figures())
            self._console.print(f"{event.step}/{self.steps} · {figures}", highlight=False)

    def close(self, ended: RunEnded) -> None:
        """Print the result and what to do with it."""
        say = self._console.print
        if ended.state == "stopped":
            say(
                f"stopped after step {ended.step:,}; resume with: "
                f"unspool train --resume {self.run.folder}",
                highlight=False,
            )
            return
        if self.sample is not None:
            text = Text(self.sample.prompt, "bold").append(self.sample.text, "not bold")
            say(text)
        summary = f"done: loss {self._recent():.3f}" if self.losses else "done"
        if self.evaluated is not None and self.evaluated.bits_per_byte is not None:
            summary += f", {self.evaluated.bits_per_byte:.3f} bits per byte on held-out text"
        if self.logged is not None:
            summary += f", {_clock(self.logged.seconds)} of training"
        say(summary, highlight=False)
        if ended.early:
            say(
                f"stopped early at step {ended.step:,} of {self.steps:,}: the held-out loss no "
                "longer improved (--patience 0 trains to the end)",
                highlight=False,
            )
        best = self.best
        if best is not None and best.step != ended.step and best.bits_per_byte is not None:
            say(
                f"best checkpoint: step {best.step:,}, {best.bits_per_byte:.3f} bits per byte; "
                "the commands below use it",
                highlight=False,
            )
        prompt = self.sample.prompt if self.sample else "Once"
        say(f'generate:       unspool run --model {self.run.folder} "{prompt}"', highlight=False)
        say(f"open the page:  unspool page --run {self.run.folder}", highlight=False)


def _clock(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{minutes:02}:{whole_seconds:02}"
    return f"{hours}:{clock}" if hours else f"{minutes}:{whole_seconds:02}"


def _short(number: float) -> str:
    """A number in short form: 3.7M, 12k."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(round(number))


class TuningDisplay:
    """Event listener and context manager: a bar on a terminal, else a line now and then."""

    def __init__(self, run: Run, quiet: bool) -> None:
        self._run, self._quiet = run, quiet
        self._bar: Any = None
        self._task: Any = None
        self._next = self._steps = 0

    def __enter__(self) -> TuningDisplay:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=stderr_console(), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("loading the model", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        if self._quiet:
            return
        if not self._steps or isinstance(event, StepsReplanned):
            self._steps = self._run.steps
            if epochs := self._run.facts.get("epochs"):
                say(f"{self._steps:,} steps, {describe_epochs(epochs)}")
        steps = self._steps
        if isinstance(event, Evaluated):
            say(f"step {event.step}: held-out loss {event.held_out_loss:.3f}")
        if not isinstance(event, StepLogged):
            return
        extra = "".join(f" · {name} {value:.3g}" for name, value in event.extra.items())
        line = (
            f"{event.step}/{steps} · loss {event.loss:.3f}{extra} · "
            f"{event.tokens_per_second:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, total=steps, completed=event.step, description=line)
        elif event.step >= self._next:
            self._next = event.step + max(1, steps // 20)
            say(line)


# -- loss curve in braille characters, two by four dots each ---------------------------------------


_EMPTY = 0x2800
# Bit of each dot, by column and by row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def plot_curve(values: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """Lines of `width` characters, with the range labelled at the left."""
    means = _means(values, width * 2)
    if not means:
        return []
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    rows = height * 4
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, mean in enumerate(means):
        row = round((high - mean) / span * (rows - 1))
        for dot in _between(before, row):  # so that a steep curve has no gaps
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = row
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    characters = (
        "".join(chr(_EMPTY | cell) for cell in line).rstrip(chr(_EMPTY)) for line in cells
    )
    return [f"{labels.get(number, ''):>6} {line}" for number, line in enumerate(characters)]


def _means(values: Sequence[float], count: int) -> list[float]:
    """Reduce to at most `count` values by averaging."""
    if len(values) <= count:
        return list(values)
    share = len(values) / count
    parts = (values[math.floor(n * share) : math.floor((n + 1) * share)] for n in range(count))
    return [sum(part) / len(part) for part in parts]


def _between(before: int | None, row: int) -> range:
    if before is None or abs(row - before) < 2:
        return range(row, row + 1)
    return range(before + 1, row + 1) if row > before else range(row, before)
