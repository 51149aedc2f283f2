"""`unspool replay`: write a saved generation again, and say whether it came out the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o

if TYPE_CHECKING:
    from unspool.lens.trace import Trace


@o.model_options
def replay(
    file: Annotated[str, typer.Argument(help="A trace, written by unspool run --trace FILE.")],
    *,
    chosen: o.ModelChoice,
) -> None:
    """Write a saved text again, and say whether it came out the same.

    Exit code 0: every token again. 1: it differs, and where.

    [b]Examples[/b]

      unspool "Once upon a time" --seed 7 --trace story.json
      unspool replay story.json
      unspool replay story.json --model ./another-model
    """
    import math

    from rich.text import Text

    from unspool.cli.show import chance_style, err, legend, out, say
    from unspool.lens.replay import replay as write_again
    from unspool.lens.trace import load_trace

    trace = load_trace(file)  # before the model: a broken file is told at once
    as_then = "auto" if chosen.options["quantize"] else _dtype(trace)
    lm = chosen.load(dtype=as_then, context=_context(trace))
    result = write_again(lm, trace)
    line = Text()
    for step in result.generation.steps:
        line.append(_shown(step.text), chance_style(math.exp(min(0.0, step.logprob))))
    out().print(line)
    err().print(legend())
    say(result.describe())
    if result.model_difference:
        say(f"the trace was written by {_shown(trace.model.name)}; --model says where it is")
    if not result.exact:
        raise typer.Exit(1)


def _dtype(trace: Trace) -> str:
    """Written in 16 bits, replayed in 16 bits: others round otherwise."""
    from unspool.backends.placement import DTYPES

    return trace.model.precision if trace.model.precision in DTYPES else "auto"


def _context(trace: Trace) -> int | None:
    """The context asked for then, where it was not the model's own."""
    context = trace.limits.context if trace.limits else None
    return None if context == trace.model.config.get("context") else context


def _shown(text: str) -> str:
    """A file may hold what steers a terminal; show it as a box instead."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
