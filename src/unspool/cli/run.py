"""`unspool run`: generate text from a prompt, one or several texts, or by diffusion."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import hints, interrupt
from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from rich.text import Text

    from unspool.decoding.diffusion.diffuse import DiffusionStream
    from unspool.decoding.diffusion.result import Diffusion, DiffusionPass
    from unspool.engine.generation import Generation
    from unspool.engine.results import Step, StepStream
    from unspool.lm import LanguageModel


_SEVERAL, _FORM, _REPAIR = "Several texts", "Constrained output", "Repair and speed"
_LONG = "Texts longer than the context"
_DEFAULT_MAX_TOKENS = 256


@o.diffusion_options
@o.sampling_options
@o.model_options
def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or none reads stdin.")] = None,
    chat: o.Chat = None,
    system: o.System = None,
    max_tokens: o.RunMaxTokens = None,
    probs: o.Probs = False,
    top: Annotated[int, typer.Option(help="Show this many candidates of each step.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print steps as JSON lines.")] = False,
    samples: Annotated[
        int, typer.Option(help="Generate this many texts.", rich_help_panel=_SEVERAL)
    ] = 1,
    best_of: Annotated[
        int,
        typer.Option(
            help="Generate this many texts, keep the most likely.", rich_help_panel=_SEVERAL
        ),
    ] = 1,
    beam: Annotated[
        int, typer.Option(help="Beam search with this many beams.", rich_help_panel=_SEVERAL)
    ] = 1,
    json_schema: Annotated[
        str | None,
        typer.Option(help="JSON that fits this schema (a file, or JSON).", rich_help_panel=_FORM),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(help="Text that matches this regular expression.", rich_help_panel=_FORM),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="One of these texts; repeatable.", rich_help_panel=_FORM),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(help="A Lark or GBNF grammar (a file, or text).", rich_help_panel=_FORM),
    ] = None,
    guard: Annotated[
        list[str] | None,
        typer.Option(
            help="Rewind on: loop, ban=WORD|WORD, pattern=REGEX (RE2), surprise=NATS; "
            "with :stop appended, stop instead. Repeatable.",
            rich_help_panel=_REPAIR,
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: lookup, mtp, model:PATH or eagle:FOLDER.",
            rich_help_panel=_REPAIR,
        ),
    ] = None,
    endless: Annotated[
        bool,
        typer.Option(
            "--endless",
            help="Continue beyond the context, dropping the oldest tokens.",
            rich_help_panel=_LONG,
        ),
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            help="First tokens that stay in context (--endless). Default: the prompt, or 4.",
            rich_help_panel=_LONG,
        ),
    ] = None,
    think: o.Think = None,
    effort: o.Effort = None,
    think_budget: o.ThinkBudget = None,
    adapter: o.Adapter = None,
    steer: o.Steer = None,
    trace: Annotated[
        Path | None, typer.Option(help="Save all steps to this file, for unspool replay.")
    ] = None,
    quiet: o.Quiet = False,
    *,
    model_choice: o.ModelChoice,
    sampling: dict[str, Any],
    diffusion: dict[str, Any],
) -> None:
    """Generate text from a prompt.

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
      unspool "Tell me about your day" --steer cheerful=1.5
      unspool "Why is the sky blue?" -m GSAI-ML/LLaDA-8B-Instruct --diffuse
    """
    if message := hints.model_hint(prompt or ""):
        raise UnspoolError(message)
    text = o.read_prompt(prompt)
    o.check_system(system, chat)
    if trace is not None:
        o.check_output_file(trace, "--trace")
        if adapter is not None:
            raise SettingsError("--trace cannot save an adapter; leave --trace or --adapter out")
    is_detailed = as_json or trace is not None
    options: dict[str, Any] = {
        "max_tokens": _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        "stop": (),
        **sampling,
        "top": max(top, 5) if is_detailed and top >= 0 else top,
        "explain": is_detailed,
        "json_schema": _read_schema(json_schema),
        "regex": regex,
        "choice": choice or None,
        "grammar": _read_grammar(grammar),
        "guard": guard or None,
        "speculate": speculate,
        "endless": _endless(endless, keep),
        "think_budget": think_budget,
    }
    thinking = o.thinking(think, effort)
    several = SeveralTexts.from_options(
        options, trace is not None, samples=samples, best_of=best_of, beam=beam
    )
    canvas_options = None
    if diffusion:
        canvas_options = _diffusion_options(
            diffusion, options, is_single=several is None and trace is None
        )
    else:
        o.check(options)
    lm = o.with_adapter(model_choice.load(), adapter)
    options["steer"] = o.parse_steer(lm, steer)
    if chat or (chat is None and lm.is_instruct):
        template_options = lm.think_options(thinking, options)
        ids: str | list[int] = lm.chat_prompt(text, system=system, **template_options).ids
        options["stop"] += lm.chat_template.stops
    elif thinking is not None or think_budget is not None:
        raise SettingsError("reasoning needs the chat template; leave --raw out")
    else:
        ids = text
        if text.endswith("\n") and lm.tokenizer.missing_character("\n"):
            ids = text.rstrip("\n")  # the last line end of a pipe is not part of a puzzle
    if canvas_options is not None:
        if max_tokens is None and lm.config.canvas_length:
            canvas_options["max_tokens"] = lm.config.canvas_length
        _run_diffusion(lm, ids, canvas_options, as_json=as_json, probs=probs, quiet=quiet)
        return
    show = out.print_bars if top else out.print_colours if probs else out.print_plain
    if several:
        texts = several.generate(lm, ids, options)
        if as_json:
            _print_sample_lines(texts)
            return
        for number, generation in enumerate(texts, 1):
            _print_separator(number, len(texts))
            show(generation.steps, generation)
            if not quiet:
                out.print_closing(generation)
        return
    generation, steps = lm.begin(ids, **options)
    show = out.print_step_lines if as_json else show
    try:
        with interrupt.raise_on_signal():
            show(_until_interrupted(generation, steps), generation)
    finally:
        if trace is not None:
            from unspool.lens.trace import save_trace, trace_of

            save_trace(trace_of(lm, generation), trace)
        if not quiet and not as_json:
            out.print_closing(generation)


def _until_interrupted(generation: Generation, steps: StepStream) -> Iterable[Step]:
    """Record and yield steps; Ctrl-C ends the command with exit code 130."""
    try:
        yield from generation.extend(steps)
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.INTERRUPTED) from None


def _endless(endless: bool, keep: int | None) -> bool | int | None:
    if keep is not None and not endless:
        raise SettingsError("--keep is for texts longer than the context; add --endless")
    return keep if keep is not None else endless or None


def _read_schema(schema: str | None) -> str | None:
    """A JSON schema, or the content of a file that contains one."""
    if schema is None or schema.lstrip().startswith(("{", "[")) or schema in ("true", "false"):
        return schema
    return _read_option_file(schema, "--json-schema", "a schema begins with {")


def _read_grammar(grammar: str | None) -> str | None:
    """A grammar, or the content of a file that contains one; every rule has a colon in it."""
    if grammar is None or "\n" in grammar or (":" in grammar and not Path(grammar).is_file()):
        return grammar
    return _read_option_file(grammar, "--grammar", "a grammar has rules, such as start: /[a-z]+/")


def _read_option_file(name: str, option: str, advice: str) -> str:
    path = Path(name).expanduser()
    if not path.exists():
        folder = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UnspoolError(f"{option}: there is no file {name!r}{folder}; {advice}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnspoolError(f"{option}: {name} cannot be read: {error}") from error


# -- several texts: --samples, --best-of, --beam ---------------------------------------------------

# On a terminal each text has a heading on stderr; in a pipe a separator line is between two texts,
# and with --json every line has the number of its sample.
SEPARATOR = "---"
# Options of beam search: it neither samples nor constrains.
_BEAM_OPTIONS = ("max_tokens", "stop", "top")


@dataclass(frozen=True, slots=True)
class SeveralTexts:
    """The method and number of texts: samples, best_of or beam."""

    kind: str
    count: int

    @property
    def option(self) -> str:
        return f"--{self.kind.replace('_', '-')}"

    @classmethod
    def from_options(
        cls, options: dict[str, Any], trace: bool, **counts: int
    ) -> SeveralTexts | None:
        """None for a single text; raises SettingsError for options that exclude each other."""
        methods = [cls(kind, count) for kind, count in counts.items() if count != 1]
        for method in methods:
            if method.count < 1:
                raise SettingsError(f"{method.option} must be >= 1, got {method.count}")
        if len(methods) > 1:
            raise SettingsError("--samples, --best-of and --beam exclude each other; give one")
        if not methods:
            return None
        if trace:
            raise SettingsError(f"--trace saves one text; leave {methods[0].option} out")
        if methods[0].kind == "beam":
            for name, value in options.items():
                if value is not None and name not in ("seed", "explain", *_BEAM_OPTIONS):
                    raise SettingsError(
                        f"--{name.replace('_', '-')} has no effect with --beam, which searches for "
                        "the most likely text; leave one of them out"
                    )
        return methods[0]

    def generate(
        self, lm: LanguageModel, ids: str | list[int], options: dict[str, Any]
    ) -> list[Generation]:
        """The texts to print; the prompt is computed once."""
        if self.kind == "beam":
            from unspool.decoding.search.beam import beam_search

            beam_options = {name: options[name] for name in _BEAM_OPTIONS if name in options}
            return list(beam_search(lm, ids, beams=self.count, **beam_options).generations[:1])
        from unspool.decoding.search.samples import best_of, samples

        if self.kind == "best_of":
            return list(best_of(lm, ids, self.count, **options).generations[:1])
        return samples(lm, ids, self.count, **options)


def _print_separator(number: int, total: int) -> None:
    if total > 1 and sys.stdout.isatty():
        out.say(f"— {number} of {total} —")
    elif number > 1:
        print(SEPARATOR, flush=True)


def _print_sample_lines(texts: Sequence[Generation]) -> None:
    """Print JSON lines as for one text, each with the number of its sample."""
    for generation in texts:
        sample = {"sample": generation.request.limits.sample}
        for step in generation.steps:
            out.print_json_line({**sample, **step.to_dict()})
        out.print_json_line({**sample, "generation": generation.to_dict()})


# -- diffusion: --diffuse --------------------------------------------------------------------------

# Options that `run` always sets.
_UNSET: dict[str, Any] = {"top": 0, "explain": False, "stop": ()}


def _diffusion_options(
    diffusion: dict[str, Any], options: dict[str, Any], *, is_single: bool
) -> dict[str, Any]:
    """Check and combine the options of `lm.diffuse`, before a model is loaded."""
    own_options = dict(diffusion)
    if not own_options.pop("diffuse", False):
        name = next(iter(own_options)).replace("_", "-")
        raise SettingsError(f"--{name} is an option of diffusion; add --diffuse")
    if not is_single:
        raise SettingsError(
            "--diffuse generates one text and no trace; leave --samples, --best-of, --beam and "
            "--trace out"
        )
    from unspool.decoding.diffusion.options import DIFFUSION_OPTION_NAMES, make_order

    make_order(own_options.get("order", "threshold"))
    settings = {n: v for n, v in options.items() if v is not None and v != _UNSET.get(n)}
    settings.pop("explain", None)
    for name in settings:
        if name not in DIFFUSION_OPTION_NAMES:
            raise SettingsError(
                f"--{name.replace('_', '-')} has no effect with --diffuse; leave one of them out"
            )
    mask = own_options.get("mask")
    if mask is not None and mask.isdecimal():
        own_options["mask"] = int(mask)
    return {**settings, **own_options}


def _run_diffusion(
    lm: LanguageModel,
    prompt: str | list[int],
    options: dict[str, Any],
    *,
    as_json: bool,
    probs: bool,
    quiet: bool,
) -> None:
    """Print the text: pass by pass on a terminal, at the end into a pipe, JSON line per pass."""
    if "twin" in options:
        lm.load_adapter("twin", options["twin"])
        options = {**options, "twin": "twin"}
    stream = lm.stream_diffusion(prompt, **options)
    try:
        with interrupt.raise_on_signal():
            if as_json:
                for item in stream:
                    out.print_json_line(item.to_dict())
                out.print_json_line({"diffusion": stream.result.to_dict()})
            elif sys.stdout.isatty():
                _print_passes(lm, stream, probs)
            else:
                _print_result(stream)
    except KeyboardInterrupt:
        raise typer.Exit(interrupt.INTERRUPTED) from None
    finally:
        stream.close()
        if not quiet and not as_json:
            _print_diffusion_closing(stream.result)


def _print_result(stream: DiffusionStream) -> None:
    try:
        for _ in stream:
            pass
    finally:
        text = stream.result.text
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def _print_passes(lm: LanguageModel, stream: DiffusionStream, probs: bool) -> None:
    """Redraw the text after each pass; at the end print the result."""
    from rich.live import Live
    from rich.text import Text

    console = out.stdout_console()
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for item in stream:
                live.update(draw_pass(lm, item), refresh=True)
    finally:
        text = Text()
        for step in stream.result.steps:
            style = out.probability_style(math.exp(step.logprob)) if probs else ""
            text.append(step.text, style)
        console.print(text)
        if probs:
            console.print(out.legend())


def draw_pass(lm: LanguageModel, item: DiffusionPass) -> Text:
    """The text after a pass: new tokens coloured by probability, remasked ones struck out."""
    from rich.text import Text

    from unspool.decoding.diffusion.result import MASK

    text, changes = Text(), {place.number: place for place in item.places}
    for number, token in enumerate(item.tokens):
        place = changes.get(number)
        if token is None:
            is_cleared = place is not None and place.change == "cleared"
            text.append(
                place.text if is_cleared and place else MASK, "red strike" if is_cleared else "dim"
            )
        else:
            is_new = place is not None and place.change is not None
            style = out.probability_style(place.probability) if is_new and place else ""
            text.append(lm.readable(token) or f"⟨{token}⟩", style)
    remasked = f", {item.taken_back} remasked" if item.taken_back else ""
    text.append(f"\npass {item.number + 1}: {item.set} set{remasked}, {item.masked} masked", "dim")
    return text


def _print_diffusion_closing(result: Diffusion) -> None:
    for note in result.notes:
        out.say(note)
    out.say(
        f"{len(result.steps)} tokens, prompt {len(result.prompt)}, {len(result.passes)} passes "
        f"({result.tokens_per_pass:.1f} tokens each), {result.seconds:.2f} s, "
        f"finish: {result.finish_reason}, seed {result.seed}"
    )
