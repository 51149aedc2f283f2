"""What may be asked of a diffusion, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from unspool.decoding.orders import Order, order_of
from unspool.decoding.written import whole
from unspool.engine.canvas import CanvasKind
from unspool.engine.options import SamplingOptions
from unspool.engine.request import Request
from unspool.errors import ContextError, SettingsError
from unspool.sampling import GrammarSpec
from unspool.session import Prompt, Session

CACHES = ("none", "prefix", "dual")
_USUAL_LENGTH = 128
_USUAL_BLOCK = 8  # of a model that does not say

# What looks at the token that stands directly before, which a canvas need not have yet.
_SEQUENTIAL = ("no_repeat_ngram", "dry_multiplier", "mirostat_tau")


class DiffusionOptions(SamplingOptions, total=False):
    """Everything that can be asked of a diffusion; how a token is picked is as in `lm.generate`,
    but for the temperature, which is 0 unless it is given."""

    max_tokens: Annotated[int | None, "how many places there are (the model's own number, or 128)"]
    given: Annotated[
        Sequence[int | None] | None, "tokens that stand on the canvas from the start; None: masked"
    ]
    block: Annotated[int | None, "how many places are filled before the next (the model's own)"]
    steps: Annotated[int | None, "the most passes a block may take; 1: all of it at once"]
    k: Annotated[int | None, "how many places a pass sets at least (1)"]
    order: Annotated[
        str | Order | None, "threshold, factor, entropy, left, fixed, margin, random, or your own"
    ]
    threshold: Annotated[float | None, "how likely a token must be to be set (0.9)"]
    factor: Annotated[float | None, "how much a pass may risk, where order is factor (1)"]
    entropy_bound: Annotated[float | None, "... in nats, where order is entropy (0.1)"]
    remask: Annotated[float | None, "clear a token that has become less likely than this"]
    edit: Annotated[float | None, "replace one by another that is likelier than this"]
    edit_passes: Annotated[int | None, "how many passes a full block may be edited in (16)"]
    guidance: Annotated[float | None, "how much more to go by the prompt; 0: off (0)"]
    cache: Annotated[str | None, "none, or approximate: prefix, dual (whole-text models)"]
    twin: Annotated[str | None, "a loaded adapter that fills the canvas behind the model's text"]
    mask: Annotated[int | str | None, "the mask token, where the model does not say"]
    shifted: Annotated[bool | None, "a vector guesses the token behind it (the model's own)"]
    stop: Annotated[str | Sequence[str] | None, "strings that end the text, and are no part of it"]
    end: Annotated[bool | None, "False: go on when there is an end token (True)"]
    seed: Annotated[int | None, "same seed, same text; without one it is another each time"]
    sample: Annotated[int | None, "the number of the sample (0)"]
    top: Annotated[int | None, "how many candidates each place tells (5)"]
    adapter: Annotated[str | None, "the name of a loaded adapter to write with"]
    json: Annotated[bool | None, "the text must be a JSON object (order left alone)"]
    json_schema: Annotated[Any, "... JSON of this schema"]
    regex: Annotated[str | None, "... a match of this regular expression"]
    choice: Annotated[Sequence[str] | None, "... one of these texts"]
    grammar: Annotated[str | GrammarSpec | None, "... of this Lark or GBNF grammar"]


NAMES = tuple(DiffusionOptions.__annotations__) + tuple(SamplingOptions.__annotations__)
_OF_TEXTS = {
    *SamplingOptions.__annotations__, "stop", "end", "seed", "sample", "adapter",
    "json", "json_schema", "regex", "choice", "grammar",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiffusionPlan:
    """One diffusion as it is to be run."""

    request: Request  # the prompt, how tokens are picked, when the text ends
    kind: CanvasKind
    length: int
    given: tuple[int | None, ...]  # what stands there from the start, of every place
    block: int  # places that are filled before the next ones
    steps: int | None
    least: int
    order: Order
    threshold: float
    remask: float | None
    edit: float | None
    edit_passes: int
    guidance: float
    cache: Literal["none", "prefix", "dual"]
    top: int

    @property
    def revises(self) -> bool:
        """Whether a token that is set may change."""
        return self.remask is not None or self.edit is not None


def plan_of(lm: Session, prompt: Prompt, options: dict[str, Any]) -> DiffusionPlan:
    """A caller's options, checked; None is as good as not given."""
    _check_names(options)
    given = {name: value for name, value in options.items() if value is not None}
    steps, block, cache = given.get("steps"), given.get("block"), given.get("cache", "none")
    for name, value in (("steps", steps), ("block", block)):
        if value is not None:
            whole(name, value)
    threshold = _share("threshold", given.get("threshold", 0.9))
    own = {name: given[name] for name in ("factor", "entropy_bound") if name in given}
    for name, value in own.items():
        _number(name, value)
    order = order_of(given.get("order", "threshold"), threshold=threshold, **own)
    kind = canvas_kind(lm, given)
    request = lm.request(prompt, {"temperature": 0, **_of_a_text(given)})
    start = _start(lm, kind, given.get("given", ()))
    own_length = len(start) or lm.config.canvas_length or None
    length = _length(lm, request, given.get("max_tokens", own_length))
    if len(start) > length:
        raise SettingsError(f"given names {len(start)} places, and there are {length}")
    plan = DiffusionPlan(
        request=request,
        kind=kind,
        length=length,
        given=(*start, *[None] * (length - len(start))),
        block=kind.block if kind.sight == "block" else min(_block(lm, kind, block, length), length),
        steps=steps,
        least=whole("k", given.get("k", 1)),
        order=order,
        threshold=threshold,
        remask=_share("remask", given["remask"]) if "remask" in given else None,
        edit=_share("edit", given["edit"]) if "edit" in given else None,
        edit_passes=whole("edit_passes", given.get("edit_passes", 16), least=0),
        guidance=_number("guidance", given.get("guidance", 0.0)),
        cache=cast(Any, cache),
        top=whole("top", given.get("top", 5), least=0),
    )
    _check_together(plan, given)
    return plan


def canvas_kind(lm: Session, given: dict[str, Any]) -> CanvasKind:
    """How this model sees a canvas."""
    config, twin = lm.config, lm.engine.adapters.twin(given.get("twin"))
    mask = given.get("mask", config.mask_id if twin is None else twin.mask_id)
    if isinstance(mask, str):
        mask = lm.single_token(mask)
    if mask is None:
        raise SettingsError(
            "this model has no mask token, so it cannot fill a canvas; write from left to right, "
            "load a diffusion model (LLaDA, Dream, SDAR, ...), train a twin (unspool train twin), "
            "or name its mask token: mask=ID, --mask ID"
        )
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < lm.vocab_size:
        raise SettingsError(
            f"mask is {mask!r}; it may be a token, from 0 to {lm.vocab_size - 1}, or its text"
        )
    block = given.get("block") or config.block or _USUAL_BLOCK
    return CanvasKind(
        mask_id=mask,
        sight=config.sight,
        block=whole("block", block) if config.sight == "block" else 0,
        shifted=bool(given.get("shifted", config.shifted if twin is None else twin.shifted)),
        adapter=given.get("adapter", lm.adapter),
        twin=given.get("twin"),
    )


def _block(lm: Session, kind: CanvasKind, given: int | None, length: int) -> int:
    """A model that sees everything has one block, unless it is told otherwise."""
    if given is not None:
        return given
    if kind.sight == "whole":
        return length
    twin = lm.engine.adapters.twin(kind.twin)
    return (lm.config.block if twin is None else twin.block) or _USUAL_BLOCK


def _length(lm: Session, request: Request, given: Any) -> int:
    if given is None:  # nobody asked for more than there is room for
        return max(1, min(_USUAL_LENGTH, lm.context - len(request.prompt)))
    if len(request.prompt) + whole("max_tokens", given) > lm.context:
        raise ContextError(
            f"the prompt has {len(request.prompt):,} tokens, {given:,} places behind it were asked "
            f"for, and the model's context holds {lm.context:,}; ask for fewer"
        )
    return int(given)


def _start(lm: Session, kind: CanvasKind, tokens: Any) -> tuple[int | None, ...]:
    """What a caller put on the canvas; the mask itself is as good as nothing."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise SettingsError(f"given is {tokens!r}; it may be a list of tokens, None where masked")
    for token in tokens:
        is_token = isinstance(token, int) and not isinstance(token, bool)
        if token is not None and not (is_token and 0 <= token < lm.vocab_size):
            raise SettingsError(
                f"given holds {token!r}; each may be a token, from 0 to {lm.vocab_size - 1}, or "
                "None for a masked place"
            )
    return tuple(None if token == kind.mask_id else token for token in tokens)


def _of_a_text(given: dict[str, Any]) -> dict[str, Any]:
    for name in _SEQUENTIAL:
        if given.get(name):
            raise SettingsError(
                f"{name} goes by the token before, which a canvas need not have yet; leave it out, "
                "or write from left to right with lm.generate"
            )
    return {name: value for name, value in given.items() if name in _OF_TEXTS}


def _check_together(plan: DiffusionPlan, given: dict[str, Any]) -> None:
    """Refuse what makes no sense together."""
    sight = plan.kind.sight
    if plan.cache not in CACHES:
        raise SettingsError(f"cache is {plan.cache!r}; it may be {', '.join(CACHES)}")
    if plan.cache != "none" and sight != "whole":
        raise SettingsError(
            f"cache={plan.cache!r} is for models that see the whole text; this one keeps what is "
            "finished exactly, without being told"
        )
    if plan.guidance and sight != "whole":
        raise SettingsError(
            "guidance compares with a prompt that is masked, which only a model that sees the "
            "whole text knows; leave it out"
        )
    if plan.request.grammar is not None:
        if given.get("order") != "left":
            raise SettingsError(
                "a grammar says what may come next, and on a canvas nothing comes next; give "
                "order='left', which fills it from left to right, or leave the grammar out"
            )
        if any(token is not None for token in plan.given):
            raise SettingsError("a grammar cannot be kept beside given tokens; leave one out")
        if plan.revises:
            raise SettingsError("a grammar cannot be kept while tokens are taken back; leave out "
                                "remask and edit, or the grammar")  # fmt: skip
    if plan.steps is not None and "k" in given:
        raise SettingsError("steps and k both say how many places a pass sets; give one of them")


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "see help(lm.diffuse)"
            raise SettingsError(f"a diffusion has no option {name!r}; {hint}")


def _number(name: str, value: Any) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    if not fits:
        raise SettingsError(f"{name} is {value!r}; it may be a number from 0 up")
    return float(value)


def _share(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise SettingsError(f"{name} is {value!r}; it may be a probability, from 0 to 1")
    return float(value)
