"""Options of diffusion: the order of unmasking, the block size, the plan of denoising passes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from unspool.decoding.branches import check_int
from unspool.engine.canvas import CanvasKind
from unspool.engine.request import Request, SamplingOptions
from unspool.errors import ContextError, SettingsError
from unspool.sampling import GrammarSpec
from unspool.session import Prompt, Session

# -- Unmasking orders: which predictions of a denoising pass are kept
#
# After a pass each masked position has a prediction. An order decides which are set now; the
# others are predicted again in the next pass. It is a function of the predictions and of the
# minimum number to set, and returns their indices. A caller may pass a function: `order=lambda g,
# least: [0]`.
#
#     fixed       a fixed number per pass, most confident first (LLaDA, arXiv 2502.09992)
#     threshold   all above a probability threshold (Fast-dLLM, arXiv 2505.22618)
#     factor      as many as are confident enough together (the same paper's factor)
#     margin      a fixed number per pass, by the margin between the two likeliest tokens (Dream)
#     entropy     lowest entropies first, up to a total entropy (EB-Sampler, 2505.24857)
#     left        from left to right, while above a probability threshold
#     random      a fixed number per pass, at random
#
# Every order sets at least one position, so a canvas is always finished.

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of one pass for the masked positions, from left to right."""

    places: Sequence[int]
    tokens: Sequence[int]  # sampled for them
    probability: Floats  # of these tokens, before sampling transforms
    margin: Floats  # between the two likeliest tokens
    entropy: Floats  # in nats
    random_numbers: Floats  # a random number in [0, 1) per position, for a random order


Order = Callable[[Predictions, int], Sequence[int]]
"""Maps predictions and a minimum count to the indices of the kept predictions."""


def fixed(guesses: Predictions, least: int) -> list[int]:
    return _highest(guesses.probability, least)


def margin(guesses: Predictions, least: int) -> list[int]:
    return _highest(guesses.margin, least)


def random(guesses: Predictions, least: int) -> list[int]:
    return _highest(guesses.random_numbers, least)


@dataclass(frozen=True, slots=True)
class Threshold:
    """All with at least this probability; the likeliest if these are too few."""

    least: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        sure = int(np.count_nonzero(guesses.probability >= self.least))
        return _highest(guesses.probability, max(sure, least))


@dataclass(frozen=True, slots=True)
class Factor:
    """The n likeliest, for the largest n whose last probability is >= 1 - factor / (n + 1)."""

    factor: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        order = _highest(guesses.probability, len(guesses.places))
        sorted_down = guesses.probability[order]
        needed = 1 - self.factor / (np.arange(len(order)) + 2)
        return order[: max(least, _count_leading(sorted_down >= needed))]


@dataclass(frozen=True, slots=True)
class EntropyBound:
    """Lowest entropies first, while the entropies of all but the last sum to at most `bound`: this
    bounds the error of setting them independently."""

    bound: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        order = _highest(-guesses.entropy, len(guesses.places))
        entropies = guesses.entropy[order]
        others = np.cumsum(entropies) - entropies
        return order[: max(least, _count_leading(others <= self.bound))]


@dataclass(frozen=True, slots=True)
class LeftRun:
    """From the left, up to the first below this probability."""

    least: float

    def __call__(self, guesses: Predictions, least: int) -> list[int]:
        run = _count_leading(guesses.probability >= self.least)
        return list(range(min(len(guesses.places), max(least, run))))


def _highest(score: Floats, count: int) -> list[int]:
    """Indices of the highest scores, highest first; ties from the left."""
    indices: list[int] = np.argsort(-score, kind="stable")[:count].tolist()
    return indices


def _count_leading(holds: npt.NDArray[np.bool_]) -> int:
    """Number of True values before the first False."""
    return len(holds) if bool(holds.all()) else int(np.argmin(holds))


ORDERS = ("threshold", "factor", "entropy", "left", "fixed", "margin", "random")


def make_order(
    order: Any, *, threshold: float = 0.9, factor: float = 1.0, entropy_bound: float = 0.1
) -> Order:
    """Look up an order by name; a function is an order already."""
    if callable(order):
        return order  # type: ignore[no-any-return]
    orders: dict[str, Order] = {
        "threshold": Threshold(threshold),
        "factor": Factor(factor),
        "entropy": EntropyBound(entropy_bound),
        "left": LeftRun(threshold),
        "fixed": fixed,
        "margin": margin,
        "random": random,
    }
    if order not in orders:
        raise SettingsError(
            f"order must be one of {', '.join(ORDERS)}, or a function, got {order!r}"
        )
    return orders[order]


def spread(count: int, passes: int) -> list[int]:
    """Minimum positions per pass: `count` spread evenly over `passes`, earlier passes first."""
    base, remainder = divmod(count, passes)
    return [base + (number < remainder) for number in range(passes)]


# -- Options of diffusion, validated before anything runs


CACHES = ("none", "prefix", "dual")
_DEFAULT_LENGTH = 128
_DEFAULT_BLOCK = 8  # if the model does not specify one

# Options that depend on the previous token, which a canvas may not have yet.
_NEED_PREVIOUS = ("no_repeat_ngram", "dry_multiplier", "mirostat_tau")


class DiffusionOptions(SamplingOptions, total=False):
    """Options of diffusion. Sampling options are those of `lm.generate`, but the default
    temperature is 0."""

    max_tokens: Annotated[int | None, "number of positions (default: the model's own, or 128)"]
    given: Annotated[Sequence[int | None] | None, "initial tokens of the canvas; None: masked"]
    block: Annotated[
        int | None,
        "block length: positions filled before the next block (default: the model's own)",
    ]
    steps: Annotated[int | None, "maximum passes per block; 1: the whole block in one pass"]
    k: Annotated[int | None, "minimum number of positions set per pass (1)"]
    order: Annotated[
        str | Order | None, "threshold, factor, entropy, left, fixed, margin, random, or a function"
    ]
    threshold: Annotated[float | None, "probability from which a token is set (0.9)"]
    factor: Annotated[float | None, "risk per pass, for order=factor (1)"]
    entropy_bound: Annotated[
        float | None, "total entropy per pass in nats, for order=entropy (0.1)"
    ]
    remask: Annotated[float | None, "remask a token whose probability falls below this"]
    edit: Annotated[float | None, "replace a token by another with a probability above this"]
    edit_passes: Annotated[int | None, "maximum editing passes of a full block (16)"]
    guidance: Annotated[float | None, "classifier-free guidance scale; 0: off (0)"]
    cache: Annotated[str | None, "none, or approximate: prefix, dual (bidirectional models)"]
    twin: Annotated[str | None, "a loaded adapter that fills the canvas after the model's text"]
    mask: Annotated[int | str | None, "the mask token, if the model does not define one"]
    shifted: Annotated[bool | None, "logits predict the next position (default: as the model)"]
    stop: Annotated[str | Sequence[str] | None, "strings that end the text; not included in it"]
    end: Annotated[bool | None, "False: continue after an end token (True)"]
    seed: Annotated[int | None, "same seed, same text; random by default"]
    sample: Annotated[int | None, "sample index (0)"]
    top: Annotated[int | None, "candidates reported per position (0)"]
    adapter: Annotated[str | None, "name of a loaded adapter"]
    json: Annotated[bool | None, "the text must be a JSON object (order left alone)"]
    json_schema: Annotated[Any, "... JSON of this schema"]
    regex: Annotated[str | None, "... a match of this regular expression"]
    choice: Annotated[Sequence[str] | None, "... one of these texts"]
    grammar: Annotated[str | GrammarSpec | None, "... of this Lark or GBNF grammar"]


DIFFUSION_OPTION_NAMES = tuple(DiffusionOptions.__annotations__) + tuple(
    SamplingOptions.__annotations__
)
_REQUEST_OPTIONS = {
    *SamplingOptions.__annotations__, "stop", "end", "seed", "sample", "adapter",
    "json", "json_schema", "regex", "choice", "grammar",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiffusionPlan:
    """The validated settings of one diffusion."""

    request: Request  # prompt, sampling settings, stop conditions
    kind: CanvasKind
    length: int
    given: tuple[int | None, ...]  # initial token per position; None: masked
    block: int  # positions per block
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
        """Whether tokens that are set may change."""
        return self.remask is not None or self.edit is not None


def make_plan(lm: Session, prompt: Prompt, options: dict[str, Any]) -> DiffusionPlan:
    """Validate the caller's options; None means not given."""
    _check_names(options)
    values = {name: value for name, value in options.items() if value is not None}
    steps, block, cache = values.get("steps"), values.get("block"), values.get("cache", "none")
    for name, value in (("steps", steps), ("block", block)):
        if value is not None:
            check_int(name, value)
    threshold = _probability("threshold", values.get("threshold", 0.9))
    order_options = {name: values[name] for name in ("factor", "entropy_bound") if name in values}
    for name, value in order_options.items():
        _non_negative(name, value)
    order = make_order(values.get("order", "threshold"), threshold=threshold, **order_options)
    kind = canvas_kind(lm, values)
    request = lm.request(prompt, {"temperature": 0, **_request_options(values)})
    start = _start(lm, kind, values.get("given", ()))
    own_length = len(start) or lm.config.canvas_length or None
    length = _length(lm, request, values.get("max_tokens", own_length))
    if len(start) > length:
        raise SettingsError(f"given has {len(start)} positions, but max_tokens is {length}")
    plan = DiffusionPlan(
        request=request,
        kind=kind,
        length=length,
        given=(*start, *[None] * (length - len(start))),
        block=kind.block if kind.sight == "block" else min(_block(lm, kind, block, length), length),
        steps=steps,
        least=check_int("k", values.get("k", 1)),
        order=order,
        threshold=threshold,
        remask=_probability("remask", values["remask"]) if "remask" in values else None,
        edit=_probability("edit", values["edit"]) if "edit" in values else None,
        edit_passes=check_int("edit_passes", values.get("edit_passes", 16), least=0),
        guidance=_non_negative("guidance", values.get("guidance", 0.0)),
        cache=cast(Any, cache),
        top=check_int("top", values.get("top", 0), least=0),
    )
    _check_combinations(plan, values)
    return plan


def canvas_kind(lm: Session, values: dict[str, Any]) -> CanvasKind:
    """How this model reads a canvas: mask token, attention, block length."""
    config, twin = lm.config, lm.engine.adapters.canvas_settings(values.get("twin"))
    mask = values.get("mask", config.mask_id if twin is None else twin.mask_id)
    if isinstance(mask, str):
        mask = lm.single_token(mask)
    if mask is None:
        raise SettingsError(
            "this model has no mask token, so it cannot fill a canvas; use lm.generate, load a "
            "diffusion model (LLaDA, Dream, SDAR, ...), train a twin (unspool train twin), or give "
            "its mask token: mask=ID, --mask ID"
        )
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < lm.vocab_size:
        raise SettingsError(
            f"mask must be a token id from 0 to {lm.vocab_size - 1}, or its text, got {mask!r}"
        )
    block = values.get("block") or config.block or _DEFAULT_BLOCK
    return CanvasKind(
        mask_id=mask,
        sight=config.sight,
        block=check_int("block", block) if config.sight == "block" else 0,
        shifted=bool(values.get("shifted", config.shifted if twin is None else twin.shifted)),
        adapter=values.get("adapter", lm.adapter),
        canvas_adapter=values.get("twin"),
    )


def _block(lm: Session, kind: CanvasKind, requested: int | None, length: int) -> int:
    """Block length; a bidirectional model has one block by default."""
    if requested is not None:
        return requested
    if kind.sight == "whole":
        return length
    twin = lm.engine.adapters.canvas_settings(kind.canvas_adapter)
    return (lm.config.block if twin is None else twin.block) or _DEFAULT_BLOCK


def _length(lm: Session, request: Request, requested: Any) -> int:
    if requested is None:  # the default adapts to the context
        return max(1, min(_DEFAULT_LENGTH, lm.context - len(request.prompt)))
    if len(request.prompt) + check_int("max_tokens", requested) > lm.context:
        raise ContextError(
            f"{len(request.prompt):,} tokens of prompt and {requested:,} new positions do not fit: "
            f"the model's context holds {lm.context:,}; lower max_tokens"
        )
    return int(requested)


def _start(lm: Session, kind: CanvasKind, tokens: Any) -> tuple[int | None, ...]:
    """Validate the initial tokens; the mask token counts as masked."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise SettingsError(f"given must be a list of token ids, None where masked, got {tokens!r}")
    for token in tokens:
        is_token = isinstance(token, int) and not isinstance(token, bool)
        if token is not None and not (is_token and 0 <= token < lm.vocab_size):
            raise SettingsError(
                f"given holds {token!r}; allowed are token ids from 0 to {lm.vocab_size - 1}, and "
                "None for a masked position"
            )
    return tuple(None if token == kind.mask_id else token for token in tokens)


def _request_options(values: dict[str, Any]) -> dict[str, Any]:
    for name in _NEED_PREVIOUS:
        if values.get(name):
            raise SettingsError(
                f"{name} depends on the previous token, which a canvas may not have yet; leave it "
                "out, or use lm.generate"
            )
    return {name: value for name, value in values.items() if name in _REQUEST_OPTIONS}


def _check_combinations(plan: DiffusionPlan, values: dict[str, Any]) -> None:
    """Raise `SettingsError` for combinations that do not work."""
    sight = plan.kind.sight
    if plan.cache not in CACHES:
        raise SettingsError(f"cache must be one of {', '.join(CACHES)}, got {plan.cache!r}")
    if plan.cache != "none" and sight != "whole":
        raise SettingsError(
            f"cache={plan.cache!r} is for bidirectional models; this model's finished blocks are "
            "always cached, exactly"
        )
    if plan.guidance and sight != "whole":
        raise SettingsError(
            "guidance needs a run with a masked prompt, which only bidirectional models support; "
            "leave it out"
        )
    if plan.request.grammar is not None:
        if values.get("order") != "left":
            raise SettingsError(
                "a grammar needs the canvas to be filled from left to right; give order='left', or "
                "leave out the grammar"
            )
        if any(token is not None for token in plan.given):
            raise SettingsError("a grammar cannot be combined with given tokens; leave one out")
        if plan.revises:
            raise SettingsError("a grammar cannot be combined with remask or edit; leave out "
                                "one of them")  # fmt: skip
    if plan.steps is not None and "k" in values:
        raise SettingsError(
            "steps and k both set the number of positions per pass; give one of them"
        )


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name not in DIFFUSION_OPTION_NAMES:
            close = difflib.get_close_matches(name, DIFFUSION_OPTION_NAMES, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "see help(lm.diffuse)"
            raise SettingsError(f"diffusion has no option {name!r}; {hint}")


def _non_negative(name: str, value: Any) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    if not fits:
        raise SettingsError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)


def _probability(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise SettingsError(f"{name} must be a probability from 0 to 1, got {value!r}")
    return float(value)
