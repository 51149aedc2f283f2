"""`unspool "..." --diffuse`: a text that is filled in any order, shown pass by pass.

On a screen the masked places are there from the beginning, and fill up: what a pass has just set is
tinted by how likely it was, what it took back is struck out. Into a pipe goes the text alone, and
with `--json` a line for each pass.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from unspool.cli import interrupt
from unspool.errors import SettingsError

if TYPE_CHECKING:
    from rich.text import Text

    from unspool.decoding.diffusion.diffuse import DiffusionStream
    from unspool.decoding.diffusion.result import Diffusion, DiffusionPass
    from unspool.lm import LanguageModel

# What `unspool run` gives to every text, also where it was not asked for.
_UNASKED: dict[str, Any] = {"top": 0, "explain": False, "stop": ()}


def checked(diffusion: dict[str, Any], options: dict[str, Any], several: bool) -> dict[str, Any]:
    """The options of `lm.diffuse`, before a model is loaded."""
    given = dict(diffusion)
    if not given.pop("diffuse", False):
        name = next(iter(given)).replace("_", "-")
        raise SettingsError(f"--{name} is for texts that are filled in any order; add --diffuse")
    if several:
        raise SettingsError(
            "--diffuse writes one text, and no trace; leave --samples, --best-of, --beam and "
            "--trace out"
        )
    from unspool.decoding.diffusion.options import DIFFUSION_OPTION_NAMES, make_order

    make_order(given.get("order", "threshold"))
    wanted = {n: v for n, v in options.items() if v is not None and v != _UNASKED.get(n)}
    wanted.pop("explain", None)
    for name in wanted:
        if name not in DIFFUSION_OPTION_NAMES:
            raise SettingsError(
                f"--{name.replace('_', '-')} has no meaning for --diffuse; leave one of them out"
            )
    mask = given.get("mask")
    if mask is not None and mask.isdecimal():
        given["mask"] = int(mask)
    return {**wanted, **given}


def fill(
    lm: LanguageModel,
    prompt: str | list[int],
    options: dict[str, Any],
    *,
    as_json: bool,
    probs: bool,
    top: int,
    quiet: bool,
) -> None:
    """Fill a text, and show it."""
    if "twin" in options:
        lm.load_adapter("twin", options["twin"])
        options = {**options, "twin": "twin"}
    stream = lm.stream_diffusion(prompt, **options)
    try:
        with interrupt.raised():
            if as_json:
                _json_lines(stream)
            elif sys.stdout.isatty():
                _live(lm, stream, probs)
            else:
                _plain(stream)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        stream.close()
        if not quiet and not as_json:
            _close(stream.result)


def _plain(stream: DiffusionStream) -> None:
    try:
        for _ in stream:
            pass
    finally:
        text = stream.result.text
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def _json_lines(stream: DiffusionStream) -> None:
    for one in stream:
        print(json.dumps(one.to_dict(), ensure_ascii=False), flush=True)
    print(json.dumps({"diffusion": stream.result.to_dict()}, ensure_ascii=False), flush=True)


def _live(lm: LanguageModel, stream: DiffusionStream, probs: bool) -> None:
    """The whole text at once, drawn again after each pass; at the end it is left as it is read."""
    from rich.live import Live
    from rich.text import Text

    from unspool.cli.show import chance_style, legend, out

    console = out()
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for one in stream:
                live.update(picture(lm, one), refresh=True)
    finally:
        import math

        text = Text()
        for step in stream.result.steps:
            text.append(step.text, chance_style(math.exp(step.logprob)) if probs else "")
        console.print(text)
        if probs:
            console.print(legend())


def picture(lm: LanguageModel, one: DiffusionPass) -> Text:
    """The text as it stands after a pass."""
    from rich.text import Text

    from unspool.cli.show import chance_style
    from unspool.decoding.diffusion.result import MASK

    drawn, changes = Text(), {place.number: place for place in one.places}
    for number, token in enumerate(one.tokens):
        place = changes.get(number)
        if token is None:
            struck = place is not None and place.change == "cleared"
            drawn.append(
                place.text if struck and place else MASK, "red strike" if struck else "dim"
            )
        else:
            fresh = place is not None and place.change is not None
            style = chance_style(place.probability) if fresh and place else ""
            drawn.append(lm.readable(token) or f"⟨{token}⟩", style)
    back = f", {one.taken_back} taken back" if one.taken_back else ""
    drawn.append(f"\npass {one.number + 1}: {one.set} set{back}, {one.masked} left", "dim")
    return drawn


def _close(result: Diffusion) -> None:
    from unspool.cli.show import say

    for note in result.notes:
        say(note)
    say(
        f"{len(result.steps)} tokens after {len(result.prompt)} of prompt in {len(result.passes)} "
        f"passes ({result.tokens_per_pass:.1f} a pass), {result.seconds:.2f} s, "
        f"finish: {result.finish_reason}, seed {result.seed}"
    )
