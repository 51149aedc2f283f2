"""`unspool fill`: what could stand in the gap of a text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.errors import SettingsError, UnspoolError, count

if TYPE_CHECKING:
    from unspool.decoding.infill.result import Filling, Gap

_PLACE = re.compile(r"(\d+)(?::(\d+))?(?:-(?:(\d+):)?(\d+))?")
_AROUND = 60  # characters of the text on each side that a table's rows do not repeat


@o.model_options
def fill(
    text: Annotated[
        str, typer.Argument(help="A text with ___ in it, or a file; - reads stdin.", metavar="TEXT")
    ],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="LINE[:COLUMN[-[LINE:]COLUMN]]",
            help="Where the gap is in a file: a line, a place in it, or a part that is replaced.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N|N-M", help="How long the gap is. Default: 1-16.")
    ] = None,
    candidates: Annotated[int, typer.Option(help="How many candidates are ranked.")] = 20,
    show: Annotated[int, typer.Option(help="How many of them the table has.")] = 8,
    choice: Annotated[
        list[str] | None, typer.Option(help="Rank only these; several times.")
    ] = None,
    by: Annotated[str, typer.Option(help="masked, fim, ranking, or auto.")] = "auto",
    reach: Annotated[int, typer.Option(help="Tokens behind the gap that are weighed.")] = 64,
    twin: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A masked model that proposes too.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the drafts.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same drafts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the filled text.")] = False,
    *,
    chosen: o.ModelChoice,
) -> None:
    """Fill the gap of a text; candidates with their probabilities.

    A file is never changed: the filled text goes to standard output.

    [b]Examples[/b]

      unspool fill "The ___ sat on the mat"
      unspool fill "Water boils at ___ degrees." --tokens 1-3
      unspool fill "She ___ the book." --choice read --choice ate
      unspool fill poem.txt --at 3:10-14
    """
    parts, usual = _parts(text, at), _length(tokens)
    lm = chosen.load()
    from unspool.decoding.infill.fill import fill as fill_gaps

    helper = None
    if twin is not None:
        from unspool.loading import load

        helper = load(twin)
    found = fill_gaps(
        lm,
        [usual if part is None else part for part in parts],
        by=by,
        candidates=candidates,
        reach=reach,
        choices=choice or None,
        twin=helper,
        usual=usual,
        temperature=temperature,
        seed=seed,
    )
    if as_json:
        from unspool.cli.table import print_json

        print_json(found.to_dict())
    elif quiet:
        print(found.text)
    else:
        _show(found, show, whole=at is None)


def _parts(given: str, at: str | None) -> list[str | None]:
    """The texts around the gap, None for the gap; or one text, which says itself where gaps are."""
    if at is not None:
        return list(around(content(given), at))
    if given == "-":
        from unspool.cli.run import read_prompt

        return [read_prompt(None)]
    if "___" not in given and _is_file(given):
        return [content(given)]
    return [given]


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # no name at all: too long, say
        return False


def content(name: str) -> str:
    """What is in a file of text, its line ends as they are."""
    try:
        return Path(name).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UnspoolError(f"there is no file {name!r} in {Path.cwd()}") from None
    except UnicodeDecodeError as error:
        raise UnspoolError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    except OSError as error:
        raise UnspoolError(f"{name} cannot be read: {error.strerror or error}") from error


def around(text: str, at: str) -> tuple[str, None, str]:
    """The text before a place and behind it; lines and columns count from 1."""
    match = _PLACE.fullmatch(at)
    if match is None:
        raise SettingsError(f"--at is {at!r}; it may be 3, 3:10, 3:10-14 or 3:10-5:1")
    line, column, last_line, last = (int(n) if n else None for n in match.groups())
    assert line is not None
    if column is None:
        if last is not None:
            raise SettingsError(f"--at is {at!r}; name columns too: {line}:1-{last}:1")
        start = _offset(text, line, 1, at)
        end = start + len(_lines(text)[line - 1].rstrip("\r\n"))
    else:
        start = _offset(text, line, column, at)
        end = start if last is None else _offset(text, last_line or line, last, at)
    if end < start:
        raise SettingsError(f"--at is {at!r}; it ends before it begins")
    return text[:start], None, text[end:]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) or [""]


def _offset(text: str, line: int, column: int, at: str) -> int:
    lines = _lines(text)
    if not 1 <= line <= len(lines):
        raise SettingsError(f"--at is {at!r}, and the file has {len(lines)} lines")
    length = len(lines[line - 1].rstrip("\r\n"))
    if not 1 <= column <= length + 1:
        raise SettingsError(f"--at is {at!r}, and line {line} has columns 1 to {length + 1}")
    return sum(map(len, lines[: line - 1])) + column - 1


def _length(tokens: str | None) -> Gap:
    from unspool.decoding.infill.result import gap

    if tokens is None:
        return gap
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", tokens)
    if match is None:
        raise SettingsError(f"--tokens is {tokens!r}; it may be 2, or 1-8")
    return gap(int(match[1]), int(match[2] or match[1]))


def _show(found: Filling, shown: int, *, whole: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from unspool.cli.show import chance_style, out, quoted

    console = out()
    console.print(_marked(found, None if whole else _AROUND))
    table = Table("", "in the gap", "probability", "score", "tokens", box=None)
    for number, one in enumerate(found.candidates[:shown]):
        inside: Any = Text(" … ").join(
            Text(quoted(text), chance_style(one.probability)) for text in one.texts
        )
        sizes = ", ".join(str(len(steps)) for steps in one.gap_steps)
        if one.is_cut:
            sizes += ", cut"
        row = (str(number), inside, f"{one.probability:.1%}", f"{one.score:.2f}", sizes)
        table.add_row(*row)
    console.print(table)
    more = len(found.candidates) - shown
    told = f"filled by {found.by}, {count(len(found.candidates), 'candidate')}"
    console.print(f"{told}, {more} not shown" if more > 0 else told, style="dim")
    if any(candidate.is_cut for candidate in found.candidates[:shown]):
        console.print("cut: ended by the longest length of the gap; see --tokens", style="dim")


def _marked(found: Filling, around: int | None) -> Any:
    """The text with what was filled in set off; of a long one, what stands around the gap."""
    from rich.text import Text

    line, last = Text(), len(found.texts)
    for number, text in enumerate(found.around):
        shown = text
        if around is not None and len(text) > around:
            shown = text[:around] + "…" if number == last else "…" + text[-around:]
        line.append(shown)
        if number < last:
            line.append(found.texts[number], "bold underline")
    return line
