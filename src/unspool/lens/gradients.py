"""Gradients inside the model: which tokens and which activations a logit depends on.

    result = token_attribution(lm, "The capital of Italy is", token=" Rome")
    result.strongest(3)                       # tokens, by integrated gradients
    lm.patch(clean, corrupted, answer=" Rome", approximate=True)      # attribution patching

These need the model as a torch module: `unspool.load(backend="torch")`. They run the whole text
again, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from unspool.backends.interventions import place_of
from unspool.backends.step import Floats
from unspool.errors import SettingsError, check_int
from unspool.lens.activations import (
    TextLike,
    adapter_name,
    resolve_token,
    text_interventions,
    to_token_ids,
)
from unspool.notebook import bar_html, escape_html, note_html, notebook_html, table_html
from unspool.session import Session

if TYPE_CHECKING:
    from torch import Tensor

    from unspool.model.layers.transformer import Transformer

Method = Literal["integrated", "gradient_x_input"]
METHODS: tuple[str, ...] = get_args(Method)
# Sites whose values a gradient can be taken of.
GRADIENT_SITES = (
    "embedding", "resid_pre", "resid_mid", "resid_post", "attn_out", "head_out", "mlp_out",
    "recurrent_out",
)  # fmt: skip

_MAX_STEPS = 1024
_BATCH_TOKENS = 512  # of all points of the path that are computed together


# -- attribution of a logit to the tokens of a text


@dataclass(frozen=True, slots=True)
class TokenValue:
    """Share of a token of the text in a logit."""

    position: int  # in the text
    token: int  # its id
    text: str  # of the token
    value: float  # its share


@dataclass(frozen=True, slots=True, eq=False)
class TokenAttribution:
    """A token's logit, attributed to the tokens of the text before it."""

    method: Method  # integrated or gradient_x_input
    position: int  # of the input token whose prediction it is
    token: int  # its id
    text: str  # of that token
    against: int | None  # the token whose logit is subtracted
    logit: float  # of the token; with `against`, the difference
    baseline: float  # the same, with the embeddings of the baseline
    values: tuple[TokenValue, ...]  # one for each token of the text

    @property
    def gap(self) -> float:
        """Error of integrated gradients: logit - baseline - sum of the values (completeness)."""
        return self.logit - self.baseline - sum(item.value for item in self.values)

    def __repr__(self) -> str:
        best = self.strongest(1)[0]
        return (
            f"<TokenAttribution of {self.text!r}: logit {self.logit:.4g}, most from {best.text!r} "
            f"at {best.position} ({best.value:+.3g})>"
        )

    def _repr_html_(self) -> str:
        largest = max(abs(item.value) for item in self.values)
        rows = [
            (
                str(item.position),
                escape_html(repr(item.text)),
                f"{bar_html(item.value, largest)} {item.value:+.3f}",
            )
            for item in self.values
        ]
        note = f"logit of {self.text!r}: {self.logit:.4g}, baseline {self.baseline:.4g}"
        return notebook_html(
            note_html(note), table_html(("position", "token", self.method.replace("_", " ")), rows)
        )

    def strongest(self, count: int) -> list[TokenValue]:
        """Return the tokens with the largest values, positive or negative."""
        return sorted(self.values, key=lambda item: -abs(item.value))[:count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "gap": self.gap}


def token_attribution(
    lm: Session,
    text: TextLike,
    position: int = -1,
    *,
    token: int | str | None = None,
    against: int | str | None = None,
    method: Method = "integrated",
    baseline: TextLike | None = None,
    steps: int = 64,
) -> TokenAttribution:
    """Attribute a logit to the tokens of a text; see `LanguageModel.token_attribution`."""
    import torch

    from unspool.lens.differentiable import run_layers

    if method not in METHODS:
        raise SettingsError(f"method must be {' or '.join(METHODS)}, got {method!r}")
    check_int("steps", steps, 1, _MAX_STEPS)
    model = lm.transformer
    lm.config.require_head()
    check_plain(lm, text)
    ids = to_token_ids(lm, text)
    index = check_int("position", position, -len(ids), len(ids) - 1) % len(ids)
    following = ids[index + 1] if index + 1 < len(ids) else None
    ids = ids[: index + 1]
    rival = None if against is None else resolve_token(lm, against)
    start = _baseline_embeddings(lm, model, ids, baseline)
    plain = run_layers(model, ids, {("resid", 0)})
    end = plain.values["resid", 0].detach()
    if token is None:
        with torch.no_grad():
            most_likely = int(model.logits(plain.final[:, -1])[0].argmax())
        target = most_likely if following is None else following
    else:
        target = resolve_token(lm, token)
    goal = logit_goal(target, rival)

    def gradients(points: Tensor) -> tuple[Tensor, Tensor]:
        """The goal at each point between the embeddings, and its gradients."""
        mixed = (start + points[:, None, None] * (end - start)).requires_grad_()
        run = run_layers(model, ids, embeddings=mixed)
        goals = goal(model.logits(run.final[:, -1]))
        return goals.detach(), torch.autograd.grad(goals.sum(), mixed)[0]

    ends = gradients(torch.tensor([0.0, 1.0]).to(end))
    if method == "gradient_x_input":
        change = ends[1][1] * end[0]
    else:
        # Gauss-Legendre quadrature of the gradient along the straight path from the baseline.
        places, weights = np.polynomial.legendre.leggauss(steps)
        points, shares = (torch.from_numpy(a).to(end) for a in ((places + 1) / 2, weights / 2))
        group = max(1, _BATCH_TOKENS // len(ids))
        total = torch.zeros_like(end[0])
        for part in range(0, steps, group):
            chosen = slice(part, part + group)
            total += (shares[chosen, None, None] * gradients(points[chosen])[1]).sum(0)
        change = total * (end - start)[0]
    values = change.double().sum(-1).tolist()
    texts = lm.readable_all(ids)
    return TokenAttribution(
        method=method,
        position=index,
        token=target,
        text=lm.readable(target),
        against=rival,
        logit=float(ends[0][1]),
        baseline=float(ends[0][0]),
        values=tuple(
            TokenValue(n, *item) for n, item in enumerate(zip(ids, texts, values, strict=True))
        ),
    )


def check_plain(lm: Session, text: TextLike) -> None:
    """Raise for a text that was written under changes that these runs do not have."""
    if (adapter_name(text) or lm.adapter) is not None or text_interventions(text) is not None:
        raise SettingsError(
            "gradients are those of the model without adapters and interventions; give the text "
            "or its token ids"
        )


def _baseline_embeddings(
    lm: Session, model: Transformer, ids: Sequence[int], baseline: TextLike | None
) -> Tensor:
    """Embeddings [1, count, width] where the path starts: of a text, or the mean embedding.

    The first token stays as it is: many models give it most of their attention, and a path that
    changes it jumps (SmolLM2: the logit falls by 20 from one point of 40 to the next). Zeros are
    no better, as the norm of a layer hides the length of a vector until it is almost zero.
    """
    import torch

    from unspool.lens.differentiable import run_layers

    if baseline is None:
        with torch.no_grad():
            weight = model.embed.weight
            rows = model.embed(torch.tensor([list(ids)], device=weight.device))
            rows[:, 1 if len(ids) > 1 else 0 :] = weight.mean(0, dtype=torch.float32)
            return model.finish_embeddings(rows, np.arange(len(ids)))
    other = to_token_ids(lm, baseline)
    if len(other) < len(ids):
        raise SettingsError(
            f"the baseline must have as many tokens as the text, {len(ids)}, got {len(other)}"
        )
    run = run_layers(model, other[: len(ids)], {("resid", 0)})
    return run.values["resid", 0].detach()


def logit_goal(target: int, rival: int | None, is_logprob: bool = False) -> Callable[[Any], Any]:
    """Return a function of logits [batch, vocabulary]: the logit of a token, less that of another
    one, or its log-probability."""

    def goal(logits: Any) -> Any:
        scores = logits.float()
        if rival is not None:
            return scores[:, target] - scores[:, rival]
        return scores.log_softmax(-1)[:, target] if is_logprob else scores[:, target]

    return goal


# -- attribution patching


def attribution_effects(
    lm: Session,
    clean: Sequence[int],
    corrupted: Sequence[int],
    site: str,
    layers: Sequence[int],
    goal: Callable[[Any], Any],
) -> Floats:
    """Estimate the effect of patching each layer and position, [layers, positions, width].

    The effect of a small change is the change times the gradient (attribution patching): two runs
    and one backward pass, instead of a run for each cell. The sum over the width is the effect of
    the whole vector; over a part of it, that of a head.
    """
    import torch

    from unspool.lens.differentiable import run_layers

    if site not in GRADIENT_SITES:
        raise SettingsError(
            f"approximate patching has the sites {', '.join(GRADIENT_SITES)}, got {site}"
        )
    model = lm.transformer
    is_embedding = site == "embedding"
    places = [("resid", 0)] if is_embedding else [place_of(site, layer) for layer in layers]
    source = run_layers(model, clean, places)
    run = run_layers(model, corrupted, places)
    values = [run.values[place] for place in places]
    (score,) = goal(model.logits(run.final[:, -1]))
    gradients = torch.autograd.grad(score, values)
    effects = [
        (source.values[place] - value).detach().float() * gradient.float()
        for place, value, gradient in zip(places, values, gradients, strict=True)
    ]
    return np.asarray(torch.cat(effects).cpu().numpy())
