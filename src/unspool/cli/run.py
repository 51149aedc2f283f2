"""`unspool run`: continue a prompt, or answer it, and show as much of each step as is wanted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import hints, interrupt
from unspool.cli import options as o
from unspool.cli.many import Many, json_lines, show_many
from unspool.errors import SettingsError, UnspoolError, count

if TYPE_CHECKING:
    from unspool.engine.generation import Generation
    from unspool.engine.results import Step, StepStream


_MANY, _FORM = "Several texts", "What the text must be"
_LONG = "Texts longer than the context"
_USUAL_LENGTH = 256  # tokens


@o.diffusion_options
@o.sampling_options
@o.model_options
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; - or nothing reads stdin.")
    ] = None,
    chat: o.Chat = None,
    system: o.System = None,
    max_tokens: o.RunMaxTokens = None,
    probs: o.Probs = False,
    top: Annotated[int, typer.Option(help="Show this many candidates of each step.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Steps as JSON lines.")] = False,
    samples: Annotated[int, typer.Option(help="Write this many texts.", rich_help_panel=_MANY)] = 1,
    best_of: Annotated[
        int, typer.Option(help="Write this many, keep the likeliest.", rich_help_panel=_MANY)
    ] = 1,
    beam: Annotated[
        int, typer.Option(help="Beam search with this many beams.", rich_help_panel=_MANY)
    ] = 1,
    json_schema: Annotated[
        str | None,
        typer.Option(help="JSON of this schema: a file, or the schema.", rich_help_panel=_FORM),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A match of this expression.", rich_help_panel=_FORM)
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="One of these; several times.", rich_help_panel=_FORM),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(help="A Lark or GBNF grammar: a file, or the text.", rich_help_panel=_FORM),
    ] = None,
    guard: Annotated[
        list[str] | None,
        typer.Option(
            help="Watch for: loop, ban=WORD|WORD, pattern=REGEX (RE2), surprise=NATS; "
            "rewinds, or stops with :stop. Several times.",
            rich_help_panel="Repair and speed",
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Guess ahead: lookup, model:PATH, head or head:FOLDER.",
            rich_help_panel="Repair and speed",
        ),
    ] = None,
    endless: Annotated[
        bool,
        typer.Option(
            "--endless",
            help="Go on beyond the context, forgetting the oldest tokens.",
            rich_help_panel=_LONG,
        ),
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            help="How many first tokens stay in view (--endless); by default the prompt, or 4.",
            rich_help_panel=_LONG,
        ),
    ] = None,
    think: o.Think = None,
    effort: o.Effort = None,
    think_budget: o.ThinkBudget = None,
    adapter: o.Adapter = None,
    trace: Annotated[Path | None, typer.Option(help="Save every step; see unspool replay.")] = None,
    quiet: o.Quiet = False,
    *,
    chosen: o.ModelChoice,
    sampling: dict[str, Any],
    diffusion: dict[str, Any],
) -> None:
    """Write on from a prompt.

    Models with a chat template answer; others (and --raw) continue the text.

    [b]Examples[/b]

      unspool "Why do leaves change color in fall?"
      unspool "Once upon a time" --raw --temperature 0.7 --seed 7 --probs
      unspool "The capital of Germany is" --raw -n 5 -t 0 --top 5
      cat notes.txt | unspool "Summarize in one sentence:"
      unspool "Invent a person." --json-schema person.json
      unspool "A haiku about leaves" --samples 3
      unspool "I love you. I love you." --raw -t 0 --guard loop
      unspool "A story without end" --endless -n 20000
      unspool "Hi" --json | jq -r 'select(.generation).generation.text'
      unspool "The sea" --adapter runs/poet/adapter
      unspool "Why is the sky blue?" -m GSAI-ML/LLaDA-8B-Instruct --diffuse
    """
    if mistaken := hints.model_hint(prompt or ""):
        raise UnspoolError(mistaken)
    text = read_prompt(prompt)
    if system is not None and chat is False:
        raise SettingsError("--system needs the chat template; leave --raw out")
    if trace is not None:
        _check_trace(trace)
        if adapter is not None:
            raise SettingsError("a trace holds no adapter; leave --trace or --adapter out")
    whole = as_json or trace is not None
    options: dict[str, Any] = {
        "max_tokens": _USUAL_LENGTH if max_tokens is None else max_tokens,
        "stop": (),
        **sampling,
        "top": max(top, 5) if whole and top >= 0 else top,
        "explain": whole,
        "json_schema": _schema(json_schema),
        "regex": regex,
        "choice": choice or None,
        "grammar": _grammar(grammar),
        "guard": guard or None,
        "speculate": speculate,
        "endless": _endless(endless, keep),
        "think_budget": think_budget,
    }
    wanted = o.thinking(think, effort)
    many = Many.of(options, trace is not None, samples=samples, best_of=best_of, beam=beam)
    if diffusion:
        from unspool.cli.diffuse import checked

        filling = checked(diffusion, options, many is not None or trace is not None)
    else:
        filling = None
        o.check(options)
    lm = o.with_adapter(chosen.load(), adapter)
    if chat or (chat is None and lm.is_instruct):
        template_options = lm.think_options(wanted, options)
        ids: str | list[int] = lm.chat_prompt(text, system=system, **template_options).ids
        options["stop"] += lm.chat_template.stops
    elif wanted is not None or think_budget is not None:
        raise SettingsError("thoughts come with the chat template; leave --raw out")
    else:
        ids = text
        if text.endswith("\n") and lm.tokenizer.missing_character("\n"):
            ids = text.rstrip("\n")  # a pipe's last line end is no part of a puzzle
    if filling is not None:
        from unspool.cli.diffuse import fill

        if max_tokens is None and lm.config.canvas_length:
            filling["max_tokens"] = lm.config.canvas_length
        fill(lm, ids, filling, as_json=as_json, probs=probs, top=top, quiet=quiet)
        return
    show = _bars if top else show_colours if probs else show_plain
    if many:
        texts = many.write(lm, ids, options)
        if as_json:
            json_lines(texts)
        else:
            show_many(texts, show, None if quiet else _close)
        return
    generation, steps = lm.begin(ids, **options)
    try:
        with interrupt.raised():
            (_json_lines if as_json else show)(_until_interrupted(generation, steps), generation)
    finally:
        if trace is not None:
            from unspool.lens.trace import save_trace, trace_of

            save_trace(trace_of(lm, generation), trace)
        if not quiet and not as_json:
            _close(generation)


def _endless(wanted: bool, keep: int | None) -> bool | int | None:
    if keep is not None and not wanted:
        raise SettingsError("--keep is for texts longer than the context; add --endless")
    return keep if keep is not None else wanted or None


def _close(generation: Generation) -> None:
    from unspool.cli.show import closing_line, say

    for note in generation.notes:
        say(note)
    if generation.request.thinking is not None:
        from unspool.cli.thoughts import unfinished

        if told := unfinished(generation):
            say(told)
    say(closing_line(generation))


def _check_trace(file: Path) -> None:
    """Before the text is written, not when all of it would be lost."""
    if file.is_dir():
        raise UnspoolError(f"--trace: {file} is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise UnspoolError(f"--trace: there is no folder {file.parent}; make it first")


def _schema(given: str | None) -> str | None:
    """A JSON schema, or the content of a file that holds one."""
    if given is None or given.lstrip().startswith(("{", "[")) or given in ("true", "false"):
        return given
    return _content(given, "--json-schema", "a schema begins with {")


def _grammar(given: str | None) -> str | None:
    """A grammar, or the content of a file that holds one; every rule has a colon in it."""
    if given is None or "\n" in given or (":" in given and not Path(given).is_file()):
        return given
    return _content(given, "--grammar", "a grammar has rules, such as start: /[a-z]+/")


def _content(name: str, option: str, otherwise: str) -> str:
    path = Path(name).expanduser()
    if not path.exists():
        raise UnspoolError(
            f"{option}: there is no file {name!r} in {Path.cwd()}; {otherwise}"
            if not path.is_absolute()
            else f"{option}: there is no file {name!r}; {otherwise}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnspoolError(f"{option}: {name} cannot be read: {error}") from error


def read_prompt(given: str | None) -> str:
    """The argument, standard input, or both: an instruction and the text it is about."""
    piped = ""
    if given in (None, "-") or not sys.stdin.isatty():
        piped = _stdin(wait=given in (None, "-"))
    text = "" if given in (None, "-") else str(given)
    if piped.strip() or not text:
        text = f"{text}\n\n{piped}" if text else piped
    if not text:
        raise UnspoolError('the prompt is empty; for example: unspool "Once upon a time"')
    return text


def _stdin(wait: bool) -> str:
    if not wait and not _has_input():
        return ""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnspoolError(
            f"standard input is not UTF-8 text (byte {error.start}); convert it first"
        ) from None


def _has_input() -> bool:
    """Whether something was piped in, without waiting for a writer that never writes."""
    import select
    import stat
    from os import fstat

    try:
        mode = fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISREG(mode):
            return True
        return stat.S_ISFIFO(mode) and bool(select.select([sys.stdin], [], [], 0.2)[0])
    except (OSError, ValueError):
        return False


def _until_interrupted(generation: Generation, steps: StepStream) -> Iterable[Step]:
    """Steps as they come, each recorded; Ctrl-C ends them where they are."""
    try:
        yield from generation.extend(steps)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def show_plain(steps: Iterable[Step], generation: Generation) -> None:
    """Text as it comes. What a guard may take back goes into a pipe only when it is final."""
    if (thinking := generation.request.thinking) is not None:
        from unspool.cli.thoughts import show_answer

        show_answer(steps, generation, thinking)
        return
    watched = sys.stdout.isatty()
    guarded = generation.request is not None and generation.request.guards is not None
    try:
        for step in steps:
            if step.retracts and watched:  # on a screen: say so, and show what is left
                sys.stdout.write(
                    f"\n⟲ {count(step.retracts, 'token')} taken back\n{generation.text}"
                )
            elif watched or not guarded:
                sys.stdout.write(step.text)
            sys.stdout.flush()
    finally:
        if guarded and not watched:
            sys.stdout.write(generation.text)
        if watched or not generation.text.endswith("\n"):
            sys.stdout.write("\n")


def show_colours(steps: Iterable[Step], generation: Generation) -> None:
    import math

    from rich.text import Text

    from unspool.cli.show import chance_style, err, legend, out

    console = out()
    try:
        for step in steps:
            shown = [step]
            if step.retracts:
                console.print(f"\n⟲ {count(step.retracts, 'token')} taken back", style="dim")
                shown = generation.steps
            for each in shown:
                console.print(Text(each.text, chance_style(math.exp(each.logprob))), end="")
    finally:
        console.print()
        err().print(legend())


def _bars(steps: Iterable[Step], generation: Generation) -> None:
    from unspool.cli.show import out, step_bars

    console = out()
    for step in steps:
        console.print(step_bars(step, step.candidates))


def _json_lines(steps: Iterable[Step], generation: Generation) -> None:
    for step in steps:
        print(json.dumps(step.to_dict(), ensure_ascii=False), flush=True)
    print(json.dumps({"generation": generation.to_dict()}, ensure_ascii=False), flush=True)
