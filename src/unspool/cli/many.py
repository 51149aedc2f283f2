"""Several texts of one prompt on the command line: `--samples`, `--best-of`, `--beam`.

On a screen a heading on stderr stands before each; into a pipe goes a line `---` between two, and
with `--json` every line says of which sample it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unspool.errors import SettingsError

if TYPE_CHECKING:
    from unspool.engine.generation import Generation
    from unspool.lm import LanguageModel

SEPARATOR = "---"
# What beam search weighs by itself: it neither draws nor forbids.
_FOR_BEAMS = ("max_tokens", "stop", "top")


@dataclass(frozen=True, slots=True)
class Many:
    """Which of the ways to write several texts was asked for."""

    kind: str
    count: int

    @property
    def option(self) -> str:
        return f"--{self.kind.replace('_', '-')}"

    @classmethod
    def of(cls, options: dict[str, Any], trace: bool, **counts: int) -> Many | None:
        """None if one text is wanted; SettingsError where the rest cannot be had with several."""
        given = [cls(kind, count) for kind, count in counts.items() if count != 1]
        for one in given:
            if one.count < 1:
                raise SettingsError(f"{one.option} is {one.count}; it may be 1 or more")
        if len(given) > 1:
            raise SettingsError("--samples, --best-of and --beam exclude each other; give one")
        if not given:
            return None
        if trace:
            raise SettingsError(f"--trace saves one text; leave {given[0].option} out")
        if given[0].kind == "beam":
            _check_beam(options)
        return given[0]

    def write(
        self, lm: LanguageModel, ids: str | list[int], options: dict[str, Any]
    ) -> list[Generation]:
        """The texts to be shown; the prompt is computed once."""
        if self.kind == "beam":
            from unspool.decoding.search.beam import beam_search

            wanted = {name: options[name] for name in _FOR_BEAMS if name in options}
            return list(beam_search(lm, ids, beams=self.count, **wanted).generations[:1])
        from unspool.decoding.search.samples import best_of, samples

        if self.kind == "best_of":
            return list(best_of(lm, ids, self.count, **options).generations[:1])
        return samples(lm, ids, self.count, **options)


def _check_beam(options: dict[str, Any]) -> None:
    usual = ("seed", "explain", *_FOR_BEAMS)
    for name in (name for name, value in options.items() if value is not None):
        if name not in usual:
            raise SettingsError(
                f"--{name.replace('_', '-')} has no meaning for --beam, which looks for the "
                "likeliest text; leave one of them out"
            )


def show_many(
    texts: Sequence[Generation],
    show: Callable[[Sequence[Any], Generation], None],
    close: Callable[[Generation], None] | None,
) -> None:
    """Each text as `show` shows one, told apart."""
    from unspool.cli.show import say

    for number, generation in enumerate(texts, 1):
        if len(texts) > 1:
            if sys.stdout.isatty():
                say(f"— {number} of {len(texts)} —")
            elif number > 1:
                print(SEPARATOR, flush=True)
        show(generation.steps, generation)
        if close is not None:
            close(generation)


def json_lines(texts: Sequence[Generation]) -> None:
    """As for one text, a line a step and one for the whole, each with the sample's number."""
    for generation in texts:
        sample = {"sample": generation.request.limits.sample}
        for step in generation.steps:
            print(json.dumps({**sample, **step.to_dict()}, ensure_ascii=False))
        told = {**sample, "generation": generation.to_dict()}
        print(json.dumps(told, ensure_ascii=False), flush=True)
