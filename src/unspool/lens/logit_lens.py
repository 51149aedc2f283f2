"""The logit lens: what each layer would have said, had it been the last.

The vector that passes the layers is put through the final norm and the head after each of them.
Early layers usually say nonsense; at some layer the answer appears and climbs. After the last one
it is the model's own distribution.

    lens = logit_lens(lm, look(lm, generation, position))
    for said in lens.layers:
        print(said.layer, said.candidates[0].text, said.probability, said.rank)
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unspool.backends.step import Floats
from unspool.engine.steps import Candidate
from unspool.errors import SettingsError
from unspool.lens.look import Look
from unspool.lens.subject import checked_token
from unspool.notebook import bar, percent, picture, table, tinted
from unspool.sampling import log_softmax, score
from unspool.session import Session

_LAYERS_AT_ONCE = 8  # whose logits over the whole vocabulary are in memory together


@dataclass(frozen=True, slots=True)
class LayerSaid:
    """What one layer would have said comes next."""

    layer: int  # 0: the embedding, before the first layer; n: after the n-th
    probability: float  # of the token asked about
    logprob: float
    rank: int  # of that token; 0: the likeliest
    entropy: float  # nats: how unsure
    candidates: tuple[Candidate, ...]  # the likeliest here

    def __repr__(self) -> str:
        said = f", says {self.candidates[0].text!r}" if self.candidates else ""
        return f"<layer {self.layer}: p {self.probability:.3g}, rank {self.rank}{said}>"


@dataclass(frozen=True, slots=True, eq=False)
class LogitLens:
    """What every layer would have said at one position."""

    position: int
    token: int  # the one whose way through the layers is followed
    text: str
    layers: tuple[LayerSaid, ...]
    logprobs: Floats | None = None  # [layers + 1, vocabulary], if asked for

    def __repr__(self) -> str:
        last = self.layers[-1]
        return (
            f"<LogitLens on {self.text!r} at {self.position}: {len(self.layers) - 1} layers, in "
            f"the end p {last.probability:.3g}, rank {last.rank}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                str(said.layer),
                f"{bar(said.probability, 1.0)} {percent(said.probability)}, rank {said.rank + 1}",
                " ".join(tinted(repr(one.text), math.exp(one.logprob)) for one in said.candidates),
            )
            for said in self.layers
        ]
        head = ("after layer", f"how likely {self.text!r} would have been", "what it would say")
        return picture(table(head, rows))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: without the whole vocabulary."""
        return {
            "position": self.position,
            "token": self.token,
            "text": self.text,
            "layers": [asdict(layer) for layer in self.layers],
        }


def logit_lens(
    lm: Session, seen: Look, *, top: int = 5, token: int | str | None = None, whole: bool = False
) -> LogitLens:
    """What each layer would have said at the position looked at.

    `token` is the one to follow, an id or text that is one token: by default the one that was
    picked, or, at the end of a text, the likeliest. `top` candidates are told of each layer;
    `whole`: the whole vocabulary too.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise SettingsError(f"top is {top!r}; it may be a whole number from 0 up")
    token_id, begun = followed(lm, seen, token), lm.begun(seen.tokens)
    layers: list[LayerSaid] = []
    logprobs: list[Floats] = []
    for start in range(0, len(seen.residuals), _LAYERS_AT_ONCE):
        logits = lm.model.logits(seen.residuals[start : start + _LAYERS_AT_ONCE])
        found = score(logits, [token_id] * len(logits), top)
        if whole:
            logprobs.append(np.asarray(log_softmax(logits), np.float32))
        for row in range(len(logits)):
            best = zip(found.top_tokens[row], found.top_logprobs[row], strict=True)
            logprob = float(found.logprobs[row])
            layers.append(
                LayerSaid(
                    layer=start + row,
                    probability=math.exp(logprob),
                    logprob=logprob,
                    rank=int(found.ranks[row]),
                    entropy=max(0.0, float(found.entropies[row])),
                    candidates=tuple(_candidate(lm, int(t), float(p), begun) for t, p in best),
                )
            )
    return LogitLens(
        position=seen.position,
        token=token_id,
        text=lm.readable(token_id, begun),
        layers=tuple(layers),
        logprobs=np.concatenate(logprobs) if whole else None,
    )


def followed(lm: Session, seen: Look, token: int | str | None) -> int:
    """The token that a lens is about: the one asked for, the one picked, or the likeliest."""
    if token is not None:
        return checked_token(lm, token)
    return seen.likeliest if seen.picked is None else seen.picked


def _candidate(lm: Session, token: int, logprob: float, begun: bytes) -> Candidate:
    return Candidate(token, lm.readable(token, begun), logprob, math.exp(logprob))
