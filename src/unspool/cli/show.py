"""Tokens on a terminal: coloured by how likely they were, with candidates as bars."""

from __future__ import annotations

import math
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from unspool.errors import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unspool.engine.generation import Generation
    from unspool.engine.results import Candidate, Step

# Background colours that black text can be read on, from probable to improbable. They are colours
# of the 256-colour palette, which most terminals show as they are; for 16 colours there are others.
_LEAST = (0.9, 0.6, 0.3, 0.1, 0.0)
_SCALE = ("#afffaf", "#d7ffaf", "#ffffaf", "#ffd787", "#ffafaf")
_SCALE_16 = ("bright_green", "green", "bright_yellow", "yellow", "bright_red")
_PIECES = ("#afd7ff", "#ffd7af", "#d7ffd7", "#ffd7ff", "#ffffaf")
_PIECES_16 = ("bright_cyan", "bright_yellow", "bright_green", "bright_magenta", "white")
_BAR = 24
_SPACE = re.compile(" (?![0-9A-F ]+⟩)")


def out() -> Console:
    """Standard output; colours only where somebody looks."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


@cache
def _has_16_colours() -> bool:
    return Console().color_system == "standard"


def chance_style(probability: float) -> Style:
    """The tint of a token by its probability."""
    colours = _SCALE_16 if _has_16_colours() else _SCALE
    for least, colour in zip(_LEAST, colours, strict=True):
        if probability >= least:
            return Style(color="black", bgcolor=colour)
    return Style()


def piece_style(number: int) -> Style:
    """Neighbouring tokens in different colours."""
    colours = _PIECES_16 if _has_16_colours() else _PIECES
    return Style(color="black", bgcolor=colours[number % len(colours)])


def legend() -> Text:
    """What the tints mean."""
    line = Text().append("probability  ", "dim")
    for least in _LEAST:
        line.append(f" ≥{least:.0%} ", chance_style(least))
    return line


def quoted(text: str) -> str:
    """A token's text so that spaces and line ends can be seen; ⟨F0 9F⟩ are bytes, as they are."""
    return _SPACE.sub("␣", repr(text)[1:-1].replace("\\'", "'")) if text else "∅"


def in_cells(text: str, width: int) -> str:
    """So many columns of the terminal, of which an emoji takes two."""
    return set_cell_size(quoted(text), width)


def step_bars(step: Step, candidates: Sequence[Candidate]) -> Text:
    """One step: the picked token, and what else the model weighed. The picked one is always there,
    with its rank where that is beyond the candidates asked for."""
    lines = Text()
    chance = math.exp(step.logprob)
    lines.append(f"{step.position:>5} ", "dim")
    lines.append(f" {quoted(step.piece)} ", chance_style(chance))
    lines.append(f"  {chance:.1%} of the model's own", "dim")
    if step.rank is not None:
        lines.append(f", rank {step.rank + 1}, entropy {step.entropy:.2f} nats", "dim")
    if step.draw is not None:
        lines.append(f", drew {step.draw.u:.3f}", "dim")
    for candidate in candidates:
        lines.append_text(_candidate_bar(step, candidate))
    if all(candidate.token != step.token for candidate in candidates):
        from unspool.engine.results import Candidate

        after = step.probability if step.probability is not None else chance
        lines.append_text(
            _candidate_bar(step, Candidate(step.token, step.piece, step.logprob, after))
        )
        if step.rank is not None:
            lines.append(f"  rank {step.rank + 1}", "dim")
    return lines


def _candidate_bar(step: Step, candidate: Candidate) -> Text:
    """A line for one candidate: its chance by the model, and what the sampling made of it."""
    probability = math.exp(candidate.logprob)
    chosen = candidate.token == step.token
    line = Text(f"\n      {'▸' if chosen else ' '} {in_cells(candidate.text, 16)} ")
    line.append("█" * round(probability * _BAR) or "▏", "green" if chosen else "blue")
    line.append(f" {probability:.1%}")
    if step.draw is None:  # greedy: nothing was drawn, the likeliest was taken
        return line
    if candidate.probability == 0:
        line.append("  removed", "dim")
    elif abs(candidate.probability - probability) > 0.0005:
        line.append(f"  → {candidate.probability:.1%}", "dim")
    return line


def closing_line(generation: Generation) -> str:
    """What it took, for stderr."""
    usage = generation.usage
    thought = f" ({usage.reasoning_tokens} of thought)" if usage.reasoning_tokens else ""
    return (
        f"{count(usage.completion_tokens, 'token')}{thought} after {usage.prompt_tokens:,} of "
        "prompt, "
        f"{usage.tokens_per_second:.1f} tokens/s, first token {usage.first_token_seconds:.2f} s, "
        f"finish: {generation.finish_reason}, seed {generation.seed}"
    )


def say(message: str) -> None:
    """A remark to the person, beside the output."""
    if sys.stderr.isatty():
        err().print(Text(message, style="dim"))
    else:
        print(message, file=sys.stderr)
