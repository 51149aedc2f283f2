"""The logit lens: the prediction of each layer, if it were the last.

The residual vector after each layer goes through the final norm and the head. Early layers usually
predict nonsense; at some layer the answer appears and rises. The last layer gives the model's
distribution. A tuned or a Jacobian lens (`affine_lens.py`) translates the vectors first.

    lens = logit_lens(lm, look(lm, generation, position))
    for layer in lens.layers:
        print(layer.layer, layer.candidates[0].text, layer.probability, layer.rank)
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unspool.backends.step import Floats
from unspool.engine.results import Candidate
from unspool.errors import SettingsError
from unspool.lens.activations import Activations, resolve_token
from unspool.lens.affine_lens import AffineLens
from unspool.notebook import bar_html, notebook_html, percent, table_html, tinted_html
from unspool.sampling import log_softmax, score
from unspool.session import Session

_CHUNK_LAYERS = 8  # bounds the memory for logits


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """Prediction of one layer."""

    layer: int  # 0: the embedding, before the first layer; n: after the n-th
    probability: float  # of the target token
    logprob: float
    rank: int  # of that token; 0: most likely
    entropy: float  # nats
    candidates: tuple[Candidate, ...]  # most likely tokens

    def __repr__(self) -> str:
        candidates = f", predicts {self.candidates[0].text!r}" if self.candidates else ""
        return f"<layer {self.layer}: p {self.probability:.3g}, rank {self.rank}{candidates}>"


@dataclass(frozen=True, slots=True, eq=False)
class LogitLens:
    """Predictions of all layers at one position."""

    position: int  # of the input token, prompt included
    token: int  # the target token
    text: str  # of the target token
    layers: tuple[LayerPrediction, ...]  # before the first layer, and after each
    logprobs: Floats | None = None  # [layers + 1, vocabulary], if requested
    kind: str = "logit"  # or that of the affine lens: tuned, jacobian

    def __repr__(self) -> str:
        last = self.layers[-1]
        return (
            f"<LogitLens on {self.text!r} at {self.position}: {len(self.layers) - 1} layers, "
            f"final p {last.probability:.3g}, rank {last.rank}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                str(layer.layer),
                f"{bar_html(layer.probability, 1.0)} {percent(layer.probability)}, "
                f"rank {layer.rank + 1}",
                " ".join(
                    tinted_html(repr(token.text), math.exp(token.logprob))
                    for token in layer.candidates
                ),
            )
            for layer in self.layers
        ]
        head = ("after layer", f"probability of {self.text!r}", "prediction")
        return notebook_html(table_html(head, rows))

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the full vocabulary."""
        return {
            "kind": self.kind,
            "position": self.position,
            "token": self.token,
            "text": self.text,
            "layers": [asdict(layer) for layer in self.layers],
        }


def logit_lens(
    lm: Session,
    activations: Activations,
    *,
    top: int = 5,
    token: int | str | None = None,
    full_vocabulary: bool = False,
    lens: AffineLens | None = None,
) -> LogitLens:
    """Predictions of each layer at one position.

    Args:
        top: number of candidates per layer.
        token: target token, an id or text that is one token; default: the picked token, or the most
            likely one at the end of the text.
        full_vocabulary: also return log-probabilities of the full vocabulary.
        lens: translates the vectors before each layer.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise SettingsError(f"top must be an integer >= 0, got {top!r}")
    token_id, partial_utf8 = (
        target_token(lm, activations, token),
        lm.partial_utf8(activations.tokens),
    )
    layers: list[LayerPrediction] = []
    logprobs: list[Floats] = []
    vectors = activations.residuals if lens is None else lens.translate(activations.residuals)
    for start in range(0, len(vectors), _CHUNK_LAYERS):
        logits = lm.model.logits(vectors[start : start + _CHUNK_LAYERS])
        scores = score(logits, [token_id] * len(logits), top)
        if full_vocabulary:
            logprobs.append(np.asarray(log_softmax(logits), np.float32))
        for row in range(len(logits)):
            candidates = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
            logprob = float(scores.logprobs[row])
            layers.append(
                LayerPrediction(
                    layer=start + row,
                    probability=math.exp(logprob),
                    logprob=logprob,
                    rank=int(scores.ranks[row]),
                    entropy=max(0.0, float(scores.entropies[row])),
                    candidates=tuple(
                        _candidate(lm, int(t), float(p), partial_utf8) for t, p in candidates
                    ),
                )
            )
    return LogitLens(
        position=activations.position,
        token=token_id,
        text=lm.readable(token_id, partial_utf8),
        layers=tuple(layers),
        logprobs=np.concatenate(logprobs) if full_vocabulary else None,
        kind="logit" if lens is None else lens.kind,
    )


def target_token(lm: Session, activations: Activations, token: int | str | None) -> int:
    """Token that a lens is about: the requested one, the picked one, or the most likely."""
    if token is not None:
        return resolve_token(lm, token)
    return activations.most_likely if activations.picked is None else activations.picked


def _candidate(lm: Session, token: int, logprob: float, partial_utf8: bytes) -> Candidate:
    return Candidate(token, lm.readable(token, partial_utf8), logprob, math.exp(logprob))
