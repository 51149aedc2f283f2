"""Output of commands: remarks, tables, JSON, and generated text with its probabilities.

Rich is imported only by the functions that draw in colour.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from unspool.errors import count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    from unspool.engine.generation import Generation
    from unspool.engine.reasoning import ReasoningSpec
    from unspool.engine.results import Candidate, Step

_MIN_WRAP_COLUMNS = 30

# Background colours for black text, from probable to improbable, in the 256-colour palette, which
# most terminals show unchanged; terminals with 16 colours get their own.
_MIN_PROBABILITIES = (0.9, 0.6, 0.3, 0.1, 0.0)
_SCALE = ("#afffaf", "#d7ffaf", "#ffffaf", "#ffd787", "#ffafaf")
_SCALE_16 = ("bright_green", "green", "bright_yellow", "yellow", "bright_red")
_PIECES = ("#afd7ff", "#ffd7af", "#d7ffd7", "#ffd7ff", "#ffffaf")
_PIECES_16 = ("bright_cyan", "bright_yellow", "bright_green", "bright_magenta", "white")
_BAR_COLUMNS = 24
_SPACE = re.compile(" (?![0-9A-F ]+⟩)")
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


# -- remarks, tables, JSON -------------------------------------------------------------------------


def say(message: str) -> None:
    """Print a remark on stderr; dimmed on a terminal."""
    if sys.stderr.isatty():
        from rich.text import Text

        stderr_console().print(Text(message, style="dim"))
    else:
        print(message, file=sys.stderr)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_json_line(content: Any) -> None:
    print(json.dumps(content, ensure_ascii=False), flush=True)


def print_table(titles: str, rows: list[list[str]]) -> None:
    """Print columns below their titles."""
    print_columns([titles.split(), *rows])


def print_columns(rows: list[list[str]]) -> None:
    """Print aligned columns; on a terminal the last one is wrapped, never cut."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        print("  ".join((*cells, _wrap(row[-1], indent))).rstrip())


def _wrap(text: str, indent: int) -> str:
    """Wrap to the terminal at `indent`, or below the row where few columns remain."""
    import shutil
    import textwrap

    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or indent + len(text) <= columns:
        return text
    is_below = columns - indent < _MIN_WRAP_COLUMNS
    margin = " " * (4 if is_below else indent)
    width = columns - len(margin)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    if is_below:
        return "\n".join(["", *(margin + line for line in lines)])
    return f"\n{margin}".join(lines)


# -- colours ---------------------------------------------------------------------------------------


def stdout_console() -> Console:
    """Standard output; in colour only on a terminal."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@cache
def _has_16_colours() -> bool:
    from rich.console import Console

    return Console().color_system == "standard"


def probability_style(probability: float) -> Style:
    """Background colour of a token with this probability."""
    from rich.style import Style

    colours = _SCALE_16 if _has_16_colours() else _SCALE
    for minimum, colour in zip(_MIN_PROBABILITIES, colours, strict=True):
        if probability >= minimum:
            return Style(color="black", bgcolor=colour)
    return Style()


def piece_style(number: int) -> Style:
    """Background colour of the n-th token; neighbours differ."""
    from rich.style import Style

    colours = _PIECES_16 if _has_16_colours() else _PIECES
    return Style(color="black", bgcolor=colours[number % len(colours)])


def legend() -> Text:
    """The meaning of the colours."""
    from rich.text import Text

    line = Text().append("probability  ", "dim")
    for minimum in _MIN_PROBABILITIES:
        line.append(f" ≥{minimum:.0%} ", probability_style(minimum))
    return line


def visible(text: str) -> str:
    """A token's text with visible spaces and line ends; ⟨F0 9F⟩ (bytes) is not changed."""
    return _SPACE.sub("␣", repr(text)[1:-1].replace("\\'", "'")) if text else "∅"


def pad_cells(text: str, width: int) -> str:
    """Visible text cut or padded to `width` terminal columns; an emoji takes two."""
    from rich.cells import set_cell_size

    return set_cell_size(visible(text), width)


# -- steps -----------------------------------------------------------------------------------------


def step_bars(step: Step, candidates: Sequence[Candidate]) -> Text:
    """One step: the sampled token, and a bar for each candidate.

    The sampled token is always in the list; with its rank if it is not among `candidates`.
    """
    from rich.text import Text

    lines = Text()
    probability = math.exp(step.logprob)
    lines.append(f"{step.position:>5} ", "dim")
    lines.append(f" {visible(step.piece)} ", probability_style(probability))
    lines.append(f"  model probability {probability:.1%}", "dim")
    if step.rank is not None:
        lines.append(f", rank {step.rank + 1}, entropy {step.entropy:.2f} nats", "dim")
    if step.draw is not None:
        lines.append(f", random number {step.draw.u:.3f}", "dim")
    for candidate in candidates:
        lines.append_text(_candidate_bar(step, candidate))
    if all(candidate.token != step.token for candidate in candidates):
        from unspool.engine.results import Candidate

        sampled = step.probability if step.probability is not None else probability
        lines.append_text(
            _candidate_bar(step, Candidate(step.token, step.piece, step.logprob, sampled))
        )
        if step.rank is not None:
            lines.append(f"  rank {step.rank + 1}", "dim")
    return lines


def _candidate_bar(step: Step, candidate: Candidate) -> Text:
    """A line for one candidate: probability of the model → probability after sampling stages."""
    from rich.text import Text

    probability = math.exp(candidate.logprob)
    is_sampled = candidate.token == step.token
    line = Text(f"\n      {'▸' if is_sampled else ' '} {pad_cells(candidate.text, 16)} ")
    line.append("█" * round(probability * _BAR_COLUMNS) or "▏", "green" if is_sampled else "blue")
    line.append(f" {probability:.1%}")
    if step.draw is None:  # greedy: nothing was sampled
        return line
    if candidate.probability == 0:
        line.append("  removed", "dim")
    elif abs(candidate.probability - probability) > 0.0005:
        line.append(f"  → {candidate.probability:.1%}", "dim")
    return line


def print_bars(steps: Iterable[Step], generation: Generation) -> None:
    """Print each step with its candidates."""
    console = stdout_console()
    for step in steps:
        console.print(step_bars(step, step.candidates))


def print_colours(steps: Iterable[Step], generation: Generation) -> None:
    """Print tokens coloured by probability, as they are generated."""
    from rich.text import Text

    console = stdout_console()
    try:
        for step in steps:
            printed = [step]
            if step.retracts:
                console.print(f"\n⟲ {count(step.retracts, 'token')} removed", style="dim")
                printed = generation.steps
            for item in printed:
                console.print(Text(item.text, probability_style(math.exp(item.logprob))), end="")
    finally:
        console.print()
        stderr_console().print(legend())


def print_step_lines(steps: Iterable[Step], generation: Generation) -> None:
    """Print a JSON line per step, and one for the generation."""
    for step in steps:
        print_json_line(step.to_dict())
    print_json_line({"generation": generation.to_dict()})


def print_plain(steps: Iterable[Step], generation: Generation) -> None:
    """Print text as it is generated; into a pipe only what a guard can no longer rewind."""
    if (spec := generation.request.thinking) is not None:
        print_reasoning(steps, generation, spec)
        return
    is_terminal = sys.stdout.isatty()
    has_guard = generation.request is not None and generation.request.guards is not None
    try:
        for step in steps:
            if step.retracts and is_terminal:
                sys.stdout.write(f"\n⟲ {count(step.retracts, 'token')} removed\n{generation.text}")
            elif is_terminal or not has_guard:
                sys.stdout.write(step.text)
            sys.stdout.flush()
    finally:
        if has_guard and not is_terminal:
            sys.stdout.write(generation.text)
        if is_terminal or not generation.text.endswith("\n"):
            sys.stdout.write("\n")


# -- reasoning -------------------------------------------------------------------------------------


def print_reasoning(steps: Iterable[Step], generation: Generation, spec: ReasoningSpec) -> None:
    """Like `print_plain` for a reasoning model: dimmed on a terminal, left out of a pipe."""
    is_terminal, has_guard = sys.stdout.isatty(), generation.request.guards is not None
    writer = _ReasoningWriter(generation, spec, is_silent=has_guard and not is_terminal)
    try:
        for step in steps:
            if step.retracts and is_terminal:
                sys.stdout.write(f"\n⟲ {count(step.retracts, 'token')} removed\n")
                writer = _ReasoningWriter(generation, spec, is_silent=False)
                for earlier in generation.steps[:-1]:
                    writer.push(earlier)
            writer.push(step)
    finally:
        writer.finish()
        if has_guard and not is_terminal:
            sys.stdout.write(generation.answer)
        if is_terminal or not generation.answer.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


class _ReasoningWriter:
    """Writes reasoning dimmed (on a terminal only) and the answer plainly."""

    def __init__(self, generation: Generation, spec: ReasoningSpec, *, is_silent: bool) -> None:
        from unspool.text.reasoning import make_output_parser

        self._parser = make_output_parser(spec.format, spec.start, None)
        self._generation, self._is_silent, self._is_dim = generation, is_silent, False

    def push(self, step: Step) -> None:
        assert self._parser is not None
        self._write(self._parser.push(step.token, step.text))

    def finish(self) -> None:
        assert self._parser is not None
        self._write(self._parser.finish())
        if self._is_dim:
            sys.stdout.write(_NORMAL)

    def _write(self, pieces: Iterable[object]) -> None:
        from unspool.text.reasoning import ReasoningPiece
        from unspool.text.tools.parser import TextPiece

        if self._is_silent:
            return
        for piece in pieces:
            if isinstance(piece, ReasoningPiece) and sys.stdout.isatty():
                sys.stdout.write(piece.text if self._is_dim else f"{_DIM}{piece.text}")
                self._is_dim = True
            elif isinstance(piece, TextPiece):
                if self._is_dim:
                    usage = self._generation.usage
                    sys.stdout.write(
                        f"\n[thought: {usage.reasoning_tokens} tokens, "
                        f"{usage.reasoning_seconds:.1f} s]{_NORMAL}\n\n"
                    )
                    self._is_dim = False
                sys.stdout.write(piece.text)
        sys.stdout.flush()


# -- statistics ------------------------------------------------------------------------------------


def closing_line(generation: Generation) -> str:
    """Token counts, speed, finish reason and seed."""
    usage = generation.usage
    reasoning = f" ({usage.reasoning_tokens} reasoning)" if usage.reasoning_tokens else ""
    return (
        f"{count(usage.completion_tokens, 'token')}{reasoning}, prompt {usage.prompt_tokens:,}, "
        f"{usage.tokens_per_second:.1f} tokens/s, first token {usage.first_token_seconds:.2f} s, "
        f"finish: {generation.finish_reason}, seed {generation.seed}"
    )


def print_closing(generation: Generation) -> None:
    """Print the notes and statistics of a generation on stderr."""
    for note in generation.notes:
        say(note)
    is_unfinished = generation.reasoning and not generation.answer.strip()
    if generation.request.thinking is not None and is_unfinished:
        say(
            f"generation ended ({generation.finish_reason}) before the answer; allow more tokens "
            "(-n), or limit reasoning (--think-budget, --no-think)"
        )
    say(closing_line(generation))
