"""Direct attribution: which parts of the model pushed a token, and which held it back.

The vector at the end is a sum: the embedding, plus what attention and feed-forward of each layer
added. The head is linear, so a token's logit is a sum over the same parts, once the scale of the
final norm (which depends on the whole vector) is held at the value it had. Biases of norm and head
are parts of their own.

    found = attribution(lm, look(lm, generation, position))
    for part in found.strongest(5):
        print(part.name, part.layer, part.value)

This is the direct way only: a part that works through later layers is counted where it ends up.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from unspool.lens.logit_lens import followed
from unspool.lens.look import Look
from unspool.lens.subject import checked_token
from unspool.lens.weights import Doubles, final_norm, head_row
from unspool.notebook import bar, escape, note, picture, table
from unspool.session import Session

_SHOWN = 16  # parts that a notebook shows

PartName = Literal["embedding", "attention", "feed_forward", "norm_bias", "head_bias"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the model added to the logit."""

    name: PartName
    layer: int | None  # 1: the first layer; None for what belongs to no layer
    value: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """A token's logit as a sum of parts.

    Where a model bends its logits at the end (soft-capping), parts cannot sum to the bent value:
    `logit` is then the value before the cap, and `said` the one after it. Without a cap, both are
    the same. Relative to another token (or to the mean over all), both are differences.
    """

    position: int
    token: int
    text: str
    against: int | Literal["mean"] | None
    against_text: str
    logit: float  # what the parts sum to, up to `rest`
    said: float  # what the model said in the end
    softcap: float  # 0: there is none, and `said` is `logit`
    parts: tuple[Part, ...]  # in the order in which they were added

    def __repr__(self) -> str:
        most = self.strongest(1)[0]
        layer = "" if most.layer is None else f" of layer {most.layer}"
        return (
            f"<Attribution of {self.text!r}: logit {self.logit:.4g} from {len(self.parts)} parts, "
            f"most from {most.name}{layer} ({most.value:+.3g})>"
        )

    def _repr_html_(self) -> str:
        shown = self.strongest(_SHOWN)
        largest = max((abs(part.value) for part in shown), default=0.0)
        rows = [
            (
                escape(part.name.replace("_", " ")),
                "" if part.layer is None else str(part.layer),
                f"{bar(part.value, largest)} {part.value:+.3f}",
            )
            for part in shown
        ]
        over = f" over {self.against_text or self.against!r}" if self.against is not None else ""
        words = f"logit of {self.text!r}{over}: {self.logit:.4g}, the strongest of its parts"
        return picture(note(words), table(("part", "layer", "adds"), rows))

    @property
    def rest(self) -> float:
        """What rounding in the run has lost: tiny in 32 bits, more in 16."""
        return self.logit - math.fsum(part.value for part in self.parts)

    def strongest(self, count: int) -> list[Part]:
        """The parts that pushed most, in either direction."""
        return sorted(self.parts, key=lambda part: -abs(part.value))[:count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "rest": self.rest}


def attribution(
    lm: Session,
    seen: Look,
    *,
    token: int | str | None = None,
    against: int | str | None = None,
) -> Attribution:
    """Attribute a token's logit at the position looked at.

    `token`: by default the one that was picked, or, at the end of a text, the likeliest.
    `against`: attribute the lead over another token, or over the mean of all logits ("mean").
    Both take a token id, or text that is one token. Adding the same to every logit changes
    nothing, so a lead often says more than the logit itself.
    """
    token_id = followed(lm, seen, token)
    baseline: int | Literal["mean"] | None = None
    if against is not None:
        baseline = "mean" if against == "mean" else checked_token(lm, against)
    direction, head_bias = head_row(lm, token_id)
    if baseline is not None:
        other, other_bias = head_row(lm, baseline)
        direction = direction - other
        if head_bias is not None and other_bias is not None:
            head_bias -= other_bias
    parts, exact = _parts(lm, seen, direction, head_bias)
    said = _lead(seen, token_id, baseline)
    softcap = lm.config.logit_softcap
    return Attribution(
        position=seen.position,
        token=token_id,
        text=lm.readable(token_id),
        against=baseline,
        against_text=lm.readable(baseline) if isinstance(baseline, int) else "",
        logit=exact if softcap else said,
        said=said,
        softcap=softcap,
        parts=tuple(parts),
    )


def _parts(
    lm: Session, seen: Look, direction: Doubles, head_bias: float | None
) -> tuple[list[Part], float]:
    """The parts, and the logit (before any cap) that the whole vector has by the same rule."""
    norm = final_norm(lm)
    final = seen.residuals[-1].astype(np.float64)
    centred = final - final.mean() if norm.centred else final
    scale = 1 / math.sqrt(float((centred**2).mean()) + norm.eps)
    reading = norm.weight * scale * direction
    if norm.centred:  # centring the vector, or what reads it, is the same
        reading = reading - reading.mean()

    def push(vector: Any) -> float:
        return float(vector.astype(np.float64) @ reading)

    parts = [Part("embedding", None, push(seen.residuals[0]))]
    for number, (attended, fed) in enumerate(seen.parts, start=1):
        parts.append(Part("attention", number, push(attended)))
        parts.append(Part("feed_forward", number, push(fed)))
    fixed = []
    if norm.bias is not None:
        fixed.append(Part("norm_bias", None, float(norm.bias @ direction)))
    if head_bias is not None:
        fixed.append(Part("head_bias", None, head_bias))
    exact = push(seen.residuals[-1]) + math.fsum(part.value for part in fixed)
    return [*parts, *fixed], exact


def _lead(seen: Look, token: int, against: int | Literal["mean"] | None) -> float:
    """The model's own logit, relative to what was asked for."""
    own = float(seen.logits[token])
    if against is None:
        return own
    if against == "mean":
        return own - float(seen.logits.mean(dtype=np.float64))
    return own - float(seen.logits[against])
