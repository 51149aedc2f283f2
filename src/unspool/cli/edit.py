"""`unspool edit`: a text gone over once more, with its changes tracked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli.fill import content
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.decoding.edit.edit import Edit

_MARKS = {"removed": "[-{}-]", "added": "{{+{}+}}", "same": "{}"}
_STYLES = {"removed": "red strike", "added": "green bold", "same": ""}


@o.model_options
def edit(
    file: Annotated[str, typer.Argument(help="The file to go over; - reads stdin.")],
    threshold: Annotated[
        float, typer.Option(help="Make changes that are at least so probable.")
    ] = 0.99,
    trust: Annotated[
        float, typer.Option(help="Nats by which another word must beat the one that stands there.")
    ] = 10.0,
    budget: Annotated[
        int | None, typer.Option(help="Tokens to weigh at most; as many as it takes by default.")
    ] = None,
    passes: Annotated[int, typer.Option(help="Passes over the text at most.")] = 3,
    places: Annotated[int, typer.Option(help="Words to look at in a pass.")] = 24,
    doubt: Annotated[str, typer.Option(help="Who doubts: causal, masked, both, or auto.")] = "auto",
    twin: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A masked model: doubts and proposes too.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the changes to the file.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print a unified diff.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
    *,
    chosen: o.ModelChoice,
) -> None:
    """Go over a text: doubtful words, and what would fit better; tracked changes.

    The file stays as it is unless --apply is given.

    [b]Examples[/b]

      unspool edit letter.txt
      unspool edit letter.txt --threshold 0.9 --diff | patch letter.txt
      unspool edit letter.txt --apply
      echo "The cat sat at teh mat." | unspool edit -
    """
    if apply and file == "-":
        raise SettingsError("--apply writes to the file, and standard input is none; leave it out")
    if diff and as_json:
        raise SettingsError("give --diff or --json, not both")
    text = _text(file)
    lm = chosen.load()
    helper = None
    if twin is not None:
        from unspool.loading import load

        helper = load(twin)
    from unspool.decoding.edit.edit import edit as revise

    with interrupt.raised():
        made = revise(
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
        print(made.diff(file), end="")
    elif as_json:
        from unspool.cli.table import print_json

        print_json(made.to_dict())
    else:
        _show(made)
    if apply:
        _write(Path(file), made)
        o.say(f"{file}: {len(made.applied)} changes written")
    elif made.applied and not diff and not as_json and file != "-":
        o.say(f"{file} is as it was; --apply writes the changes")


def _text(file: str) -> str:
    if file == "-":
        from unspool.cli.run import read_prompt

        return read_prompt(None)
    return content(file)


def _write(path: Path, made: Edit) -> None:
    """Put the revised text in the file's place, whole or not at all."""
    if not made.applied:
        return
    if content(str(path)) != made.original:
        raise UnspoolError(f"{path} was changed meanwhile; nothing was written")
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(made.text.encode())
        part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error


def _show(made: Edit) -> None:
    from rich.table import Table
    from rich.text import Text

    from unspool.cli.show import chance_style, out, quoted

    console = out()
    is_coloured = console.is_terminal and not console.no_color
    line: Any = Text()
    for kind, piece in made.tracked():
        line.append(piece if is_coloured else _MARKS[kind].format(piece), _STYLES[kind])
    console.print(line, end="" if made.text.endswith("\n") else "\n")
    if made.changes:
        table = Table("", "instead of", "better", "probability", "gain (nats)", "", box=None)
        for change in made.changes:
            chance = Text(f"{change.probability:.1%}", chance_style(change.probability))
            state = "made" if change.applied else "proposed"
            words = (quoted(change.old), quoted(change.new), chance, f"{change.gain:.2f}", state)
            table.add_row(str(change.number), *words)
        console.print(table)
    told = f"{len(made.applied)} of {len(made.changes)} changes made in {made.passes} passes"
    scores = f"perplexity {made.before.perplexity:.4g} → {made.after.perplexity:.4g}"
    console.print(f"{told}, {made.weighed:,} tokens weighed, {scores}", style="dim")
