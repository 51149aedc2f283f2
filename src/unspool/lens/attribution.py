"""Direct logit attribution: which parts of the model raised or lowered a token's logit.

The final residual vector is a sum: the embedding plus the outputs of attention and feed-forward of
each layer. The head is linear, so a token's logit is a sum over the same parts, if the scale of the
final norm (which depends on the whole vector) is fixed. Biases of norm and head are separate parts.

    result = attribution(lm, look(lm, generation, position))
    for part in result.strongest(5):
        print(part.name, part.layer, part.value)

Only direct effects are counted: an effect through a later layer is attributed to that layer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from unspool.lens.activations import Activations, Doubles, final_norm, head_row, resolve_token
from unspool.lens.logit_lens import target_token
from unspool.notebook import bar_html, escape_html, note_html, notebook_html, table_html
from unspool.session import Session

_NOTEBOOK_PARTS = 16  # parts shown in a notebook

PartName = Literal["embedding", "attention", "feed_forward", "norm_bias", "head_bias"]


@dataclass(frozen=True, slots=True)
class Part:
    """Contribution of one part of the model to the logit."""

    name: PartName
    layer: int | None  # 1: the first layer; None: not in a layer
    value: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """A token's logit as a sum of parts.

    With logit soft-capping, parts cannot sum to the capped value: `logit` is the value before the
    cap, and `said` the one after it. Without a cap both are the same. With `against`, both are
    differences to that token or to the mean over all tokens.
    """

    position: int  # of the input token, prompt included
    token: int  # the target token
    text: str  # of the target token
    against: int | Literal["mean"] | None  # the token, or the mean, that is subtracted
    against_text: str  # of that token
    logit: float  # sum of the parts plus `rest`
    said: float  # the model's logit
    softcap: float  # 0: none, `said` is `logit`
    parts: tuple[Part, ...]  # in the order of computation

    def __repr__(self) -> str:
        strongest_part = self.strongest(1)[0]
        layer = "" if strongest_part.layer is None else f" of layer {strongest_part.layer}"
        return (
            f"<Attribution of {self.text!r}: logit {self.logit:.4g} from {len(self.parts)} parts, "
            f"most from {strongest_part.name}{layer} ({strongest_part.value:+.3g})>"
        )

    def _repr_html_(self) -> str:
        parts_shown = self.strongest(_NOTEBOOK_PARTS)
        largest = max((abs(part.value) for part in parts_shown), default=0.0)
        rows = [
            (
                escape_html(part.name.replace("_", " ")),
                "" if part.layer is None else str(part.layer),
                f"{bar_html(part.value, largest)} {part.value:+.3f}",
            )
            for part in parts_shown
        ]
        difference = (
            f" over {self.against_text or self.against!r}" if self.against is not None else ""
        )
        caption = (
            f"logit of {self.text!r}{difference}: {self.logit:.4g}, the strongest of its parts"
        )
        return notebook_html(note_html(caption), table_html(("part", "layer", "adds"), rows))

    @property
    def rest(self) -> float:
        """Rounding error of the run: tiny in 32 bits, larger in 16."""
        return self.logit - math.fsum(part.value for part in self.parts)

    def strongest(self, count: int) -> list[Part]:
        """Parts with the largest contributions, positive or negative."""
        return sorted(self.parts, key=lambda part: -abs(part.value))[:count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "rest": self.rest}


def attribution(
    lm: Session,
    activations: Activations,
    *,
    token: int | str | None = None,
    against: int | str | None = None,
) -> Attribution:
    """Attribute a token's logit at one position.

    Adding a constant to all logits changes nothing, so a difference is often more informative than
    the logit itself.

    Args:
        token: id, or text that is one token; default: the picked token, or the most likely one at
            the end of the text.
        against: attribute the difference to this token, or to the mean of all logits ("mean").
    """
    token_id = target_token(lm, activations, token)
    baseline: int | Literal["mean"] | None = None
    if against is not None:
        baseline = "mean" if against == "mean" else resolve_token(lm, against)
    direction, head_bias = head_row(lm, token_id)
    if baseline is not None:
        other, other_bias = head_row(lm, baseline)
        direction = direction - other
        if head_bias is not None and other_bias is not None:
            head_bias -= other_bias
    parts, exact = _parts(lm, activations, direction, head_bias)
    model_logit = _relative_logit(activations, token_id, baseline)
    softcap = lm.config.logit_softcap
    return Attribution(
        position=activations.position,
        token=token_id,
        text=lm.readable(token_id),
        against=baseline,
        against_text=lm.readable(baseline) if isinstance(baseline, int) else "",
        logit=exact if softcap else model_logit,
        said=model_logit,
        softcap=softcap,
        parts=tuple(parts),
    )


def _parts(
    lm: Session, activations: Activations, direction: Doubles, head_bias: float | None
) -> tuple[list[Part], float]:
    """Parts, and the logit (before any cap) of the whole vector computed the same way."""
    norm = final_norm(lm)
    final = activations.residuals[-1].astype(np.float64)
    centred = final - final.mean() if norm.centred else final
    scale = 1 / math.sqrt(float((centred**2).mean()) + norm.eps)
    read_direction = norm.weight * scale * direction
    if norm.centred:  # centring the vector or the direction is the same
        read_direction = read_direction - read_direction.mean()

    def contribution(vector: Any) -> float:
        return float(vector.astype(np.float64) @ read_direction)

    parts = [Part("embedding", None, contribution(activations.residuals[0]))]
    for number, (attn_out, ffn_out) in enumerate(activations.parts, start=1):
        parts.append(Part("attention", number, contribution(attn_out)))
        parts.append(Part("feed_forward", number, contribution(ffn_out)))
    biases = []
    if norm.bias is not None:
        biases.append(Part("norm_bias", None, float(norm.bias @ direction)))
    if head_bias is not None:
        biases.append(Part("head_bias", None, head_bias))
    exact = contribution(activations.residuals[-1]) + math.fsum(part.value for part in biases)
    return [*parts, *biases], exact


def _relative_logit(
    activations: Activations, token: int, against: int | Literal["mean"] | None
) -> float:
    """The model's logit, relative to `against`."""
    logit = float(activations.logits[token])
    if against is None:
        return logit
    if against == "mean":
        return logit - float(activations.logits.mean(dtype=np.float64))
    return logit - float(activations.logits[against])
