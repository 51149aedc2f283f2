"""`unspool.costs(lm)`: which parts there are, and measuring them one after the other.

    report = unspool.costs(lm, quick=True)
    print(report)                                      # for a terminal
    Path("costs.html").write_text(report.html())       # with plots
    report.to_dict()                                   # for JSON

A part is a file in `parts/` with `measure(lm, plan) -> Part`; the table below names them in the
order in which they are measured and shown. They are imported when they are measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING

from unspool.costing.machine import machine_facts, model_name
from unspool.costing.part import Part
from unspool.costing.plan import Plan
from unspool.costing.report import Report
from unspool.costing.sample_texts import SampleTexts, sample_texts
from unspool.decoding.progress import progress_bar
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.language_model import LanguageModel

# Each part, and about how many parts of the whole its measuring takes: the bar goes by it.
PARTS: dict[str, int] = {
    "waiting": 4,
    "snowball": 3,
    "exposure": 3,
    "loops": 5,
    "whole": 3,
    "fading": 6,
    "confidence": 2,
    "remedies": 4,
}
# Hears of each part how much of it is done (0 to 1), and in the end the part itself. What it raises
# ends the measuring.
Watch = Callable[[str, float, Part | None], object]
_PACKAGE = "unspool.costing.parts"
_STEPS = 100  # of the bar for one of them


def costs(
    lm: LanguageModel,
    *,
    quick: bool = False,
    parts: Sequence[str] | None = None,
    texts: SampleTexts | Sequence[str] | None = None,
    seed: int = 0,
    twin: object | None = None,
    progress: bool = True,
    watch: Watch | None = None,
) -> Report:
    """What writing one token at a time costs with this model: one report of all parts.

    quick   under a minute, with wide intervals.
    parts   only these, of `PARTS`.
    texts   texts that people wrote, to measure on; by default addresses of presidents.
    twin    a masked model (`unspool.load`), to be asked about whole texts as well.
    watch   a function that hears of each part how much is done, and the part when it is.
    """
    names = chosen_parts(parts)
    lm.config.check_left_to_right()
    sample = texts if isinstance(texts, SampleTexts) else sample_texts(texts)
    plan = Plan(quick, seed, sample.texts, twin=twin)
    started = perf_counter()
    found: list[Part] = []
    total = sum(PARTS[name] for name in names)
    with progress_bar("measuring", _STEPS * total, show=progress) as told:
        done = 0
        for name in names:
            tell = _teller(told, done, name, watch)
            tell(0.0)
            found.append(measured(lm, name, replace(plan, tell=tell)))
            done += PARTS[name]
            told(_STEPS * done)
            if watch is not None:
                watch(name, 1.0, found[-1])
    if not any(part.figures for part in found):
        raise UnspoolError(f"no part could be measured; {found[0].name}: {found[0].notes[0]}")
    return Report(
        model=model_name(lm),
        machine={**machine_facts(lm), "texts": sample.source},
        parts=tuple(found),
        seconds=perf_counter() - started,
        quick=quick,
        seed=seed,
    )


def chosen_parts(given: Sequence[str] | None) -> list[str]:
    """The parts asked for, in the table's order; all where none are."""
    if given is None:
        return list(PARTS)
    for name in given:
        if name not in PARTS:
            near = difflib.get_close_matches(name, PARTS, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingsError(
                f"there is no part {name!r} of the costs; {hint}there are {', '.join(PARTS)}"
            )
    if not given:
        raise SettingsError(f"no part was named; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in given]


def measured(lm: LanguageModel, name: str, plan: Plan) -> Part:
    """One part, with the seconds it took.

    What cannot be measured with this model is said in the part's place: minutes of measuring the
    others are not lost for it.
    """
    started = perf_counter()
    try:
        part: Part = import_module(f"{_PACKAGE}.{name}").measure(lm, plan)
    except UnspoolError as error:
        part = Part(name, name.capitalize(), "", notes=[f"Could not be measured: {error}."])
    return replace(part, seconds=perf_counter() - started)


def _teller(
    told: Callable[[int], object], done: int, name: str, watch: Watch | None
) -> Callable[[float], object]:
    """Hears how much of a part is done, for the bar and for whoever watches."""

    def tell(share: float) -> None:
        share = min(1.0, share)
        told(_STEPS * done + round(_STEPS * PARTS[name] * share))
        if watch is not None:
            watch(name, share, None)

    return tell
