"""`unspool fill` and `unspool edit`: fill the gaps of a text, or correct it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli.output import print_json, probability_style, say, stdout_console, visible
from unspool.errors import SettingsError, UnspoolError, count

if TYPE_CHECKING:
    from unspool.decoding.edit.edit import Edit
    from unspool.decoding.infill.result import Filling, Gap

_PLACE = re.compile(r"(\d+)(?::(\d+))?(?:-(?:(\d+):)?(\d+))?")
_CONTEXT_CHARACTERS = 60  # of a file, shown on each side of the gap


# -- fill ------------------------------------------------------------------------------------------


@o.model_options
def fill(
    text: Annotated[
        str, typer.Argument(help="A text with ___ in it, or a file; - reads stdin.", metavar="TEXT")
    ],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="LINE[:COLUMN[-[LINE:]COLUMN]]",
            help="The gap in a file: a line, a position, or a range to replace.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N|N-M", help="Tokens in the gap. Default: 1-16.")
    ] = None,
    candidates: Annotated[int, typer.Option(help="Number of candidates to rank.")] = 20,
    show: Annotated[int, typer.Option(help="Number of candidates to show.")] = 8,
    choice: Annotated[
        list[str] | None, typer.Option(help="Rank only these texts; repeatable.")
    ] = None,
    by: Annotated[str, typer.Option(help="Method: masked, fim, ranking, or auto.")] = "auto",
    reach: Annotated[int, typer.Option(help="Tokens after the gap that are scored.")] = 64,
    twin: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A masked model that also proposes.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Temperature of the drafts.")
    ] = 0,
    seed: Annotated[int | None, typer.Option(help="Random seed of the drafts.")] = None,
    as_json: o.Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the filled text.")
    ] = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Fill the gap of a text (infilling); shows candidates with their probabilities.

    A file is never changed: the filled text goes to standard output.

    [b]Examples[/b]

      unspool fill "The ___ sat on the mat"
      unspool fill "Water boils at ___ degrees." --tokens 1-3
      unspool fill "She ___ the book." --choice read --choice ate
      unspool fill poem.txt --at 3:10-14
    """
    parts, default_gap = _text_parts(text, at), _parse_length(tokens)
    lm = model_choice.load()
    from unspool.decoding.infill.fill import fill as fill_gaps

    filling = fill_gaps(
        lm,
        [default_gap if part is None else part for part in parts],
        by=by,
        candidates=candidates,
        reach=reach,
        choices=choice or None,
        twin=o.load_helper(twin),
        usual=default_gap,
        temperature=temperature,
        seed=seed,
    )
    if as_json:
        print_json(filling.to_dict())
    elif quiet:
        print(filling.text)
    else:
        _print_filling(filling, show, None if at is None else _CONTEXT_CHARACTERS)


def _text_parts(argument: str, at: str | None) -> list[str | None]:
    """The texts before and after the gap with None between, or one text that marks its gaps."""
    if at is not None:
        return list(split_at(o.read_text_file(argument), at))
    if argument == "-":
        return [o.read_prompt(None)]
    if "___" not in argument and _is_file(argument):
        return [o.read_text_file(argument)]
    return [argument]


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # not a file name, too long for example
        return False


def split_at(text: str, at: str) -> tuple[str, None, str]:
    """The text before and after a position or range; lines and columns count from 1."""
    match = _PLACE.fullmatch(at)
    if match is None:
        raise SettingsError(f"--at must be like 3, 3:10, 3:10-14 or 3:10-5:1, got {at!r}")
    line, column, last_line, last = (int(n) if n else None for n in match.groups())
    assert line is not None
    if column is None:
        if last is not None:
            raise SettingsError(f"--at {at!r} needs columns: {line}:1-{last}:1")
        start = _offset(text, line, 1, at)
        end = start + len(_lines(text)[line - 1].rstrip("\r\n"))
    else:
        start = _offset(text, line, column, at)
        end = start if last is None else _offset(text, last_line or line, last, at)
    if end < start:
        raise SettingsError(f"--at {at!r} ends before it begins")
    return text[:start], None, text[end:]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) or [""]


def _offset(text: str, line: int, column: int, at: str) -> int:
    lines = _lines(text)
    if not 1 <= line <= len(lines):
        raise SettingsError(f"--at {at!r}: the file has lines 1 to {len(lines)}")
    length = len(lines[line - 1].rstrip("\r\n"))
    if not 1 <= column <= length + 1:
        raise SettingsError(f"--at {at!r}: line {line} has columns 1 to {length + 1}")
    return sum(map(len, lines[: line - 1])) + column - 1


def _parse_length(tokens: str | None) -> Gap:
    from unspool.decoding.infill.result import gap

    if tokens is None:
        return gap
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", tokens)
    if match is None:
        raise SettingsError(f"--tokens must be a number or a range, like 2 or 1-8, got {tokens!r}")
    return gap(int(match[1]), int(match[2] or match[1]))


def _print_filling(filling: Filling, num_shown: int, context: int | None) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    console.print(_filled_text(filling, context))
    table = Table("", "in the gap", "probability", "score", "tokens", box=None)
    top = filling.candidates[:num_shown]
    for number, candidate in enumerate(top):
        style = probability_style(candidate.probability)
        texts: Any = Text(" … ").join(Text(visible(text), style) for text in candidate.texts)
        sizes = ", ".join(str(len(steps)) for steps in candidate.gap_steps)
        if candidate.is_cut:
            sizes += ", cut"
        figures = (f"{candidate.probability:.1%}", f"{candidate.score:.2f}", sizes)
        table.add_row(str(number), texts, *figures)
    console.print(table)
    summary = f"filled by {filling.by}, {count(len(filling.candidates), 'candidate')}"
    if len(filling.candidates) > num_shown:
        summary += f", {len(filling.candidates) - num_shown} not shown"
    console.print(summary, style="dim")
    if any(candidate.is_cut for candidate in top):
        console.print("cut: reached the maximum length of the gap; see --tokens", style="dim")


def _filled_text(filling: Filling, context: int | None) -> Any:
    """The text with the filled gaps marked; `context` characters around them, or all."""
    from rich.text import Text

    line, last = Text(), len(filling.texts)
    for number, text in enumerate(filling.around):
        if context is not None and len(text) > context:
            text = text[:context] + "…" if number == last else "…" + text[-context:]
        line.append(text)
        if number < last:
            line.append(filling.texts[number], "bold underline")
    return line


# -- edit ------------------------------------------------------------------------------------------

_MARKS = {"removed": "[-{}-]", "added": "{{+{}+}}", "same": "{}"}
_STYLES = {"removed": "red strike", "added": "green bold", "same": ""}


@o.model_options
def edit(
    file: Annotated[str, typer.Argument(help="The file to edit; - reads stdin.")],
    threshold: Annotated[
        float, typer.Option(help="Minimum probability of a change that is made.")
    ] = 0.99,
    trust: Annotated[
        float, typer.Option(help="Nats by which a replacement must beat the original word.")
    ] = 10.0,
    budget: Annotated[
        int | None, typer.Option(help="Maximum tokens to score. Default: no limit.")
    ] = None,
    passes: Annotated[int, typer.Option(help="Maximum passes over the text.")] = 3,
    places: Annotated[int, typer.Option(help="Words to check per pass.")] = 24,
    doubt: Annotated[
        str, typer.Option(help="Model that finds doubtful words: causal, masked, both, or auto.")
    ] = "auto",
    twin: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A masked model that also doubts and proposes."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the changes to the file.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print a unified diff.")] = False,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Correct a text: find doubtful words, and show better ones as tracked changes.

    The file is not changed unless --apply is given.

    [b]Examples[/b]

      unspool edit letter.txt
      unspool edit letter.txt --threshold 0.9 --diff | patch letter.txt
      unspool edit letter.txt --apply
      echo "The cat sat at teh mat." | unspool edit -
    """
    if apply and file == "-":
        raise SettingsError("--apply needs a file, got standard input; leave --apply out")
    if diff and as_json:
        raise SettingsError("give --diff or --json, not both")
    text = o.read_prompt(None) if file == "-" else o.read_text_file(file)
    lm = model_choice.load()
    helper = o.load_helper(twin)
    from unspool.decoding.edit.edit import edit as edit_text

    with interrupt.raise_on_signal():
        result = edit_text(
            lm,
            text,
            twin=helper,
            doubt=doubt,
            threshold=threshold,
            trust=trust,
            passes=passes,
            budget=budget,
            places=places,
        )
    if diff:
        print(result.diff(file), end="")
    elif as_json:
        print_json(result.to_dict())
    else:
        _print_edit(result)
    if apply:
        _write_edit(Path(file), result)
        say(f"{file}: {len(result.applied)} changes written")
    elif result.applied and not diff and not as_json and file != "-":
        say(f"{file} is not changed; --apply writes the changes")


def _write_edit(path: Path, result: Edit) -> None:
    """Replace the file atomically by the edited text."""
    if not result.applied:
        return
    if o.read_text_file(str(path)) != result.original:
        raise UnspoolError(f"{path} has changed in the meantime; nothing was written")
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(result.text.encode())
        part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error


def _print_edit(result: Edit) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    is_coloured = console.is_terminal and not console.no_color
    line: Any = Text()
    for kind, piece in result.tracked():
        line.append(piece if is_coloured else _MARKS[kind].format(piece), _STYLES[kind])
    console.print(line, end="" if result.text.endswith("\n") else "\n")
    if result.changes:
        table = Table("", "old", "new", "probability", "gain (nats)", "", box=None)
        for change in result.changes:
            probability = Text(f"{change.probability:.1%}", probability_style(change.probability))
            state = "made" if change.applied else "proposed"
            words = (visible(change.old), visible(change.new), probability, f"{change.gain:.2f}")
            table.add_row(str(change.number), *words, state)
        console.print(table)
    console.print(
        f"{len(result.applied)} of {len(result.changes)} changes made in {result.passes} passes, "
        f"{result.weighed:,} tokens scored, "
        f"perplexity {result.before.perplexity:.4g} → {result.after.perplexity:.4g}",
        style="dim",
    )
