"""A look inside the model at one position: where it attended, and the vector passing its layers.

    seen = look(lm, generation, position)
    seen.attention                     # [layers, heads, past]: nothing beyond the position
    seen.norms                         # how long the vector is after each layer

A position is that of the token being read; what the model then says is about the token after it.
So how the token at position 9 came to be picked shows at position 8. The prefix is in the engine's
tree already, and one token is run once more: looking costs one step, and only when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.backends.step import Floats
from unspool.errors import SettingsError, count
from unspool.lens.subject import Text, adapter_of, tokens_of
from unspool.lens.weights import host
from unspool.model.recurrence import STATELESS
from unspool.notebook import bar, escape, note, picture, table
from unspool.session import Session

_DIGITS = 6  # of an attention weight in JSON
_SHOWN = 24  # tokens with the most attention that a notebook shows


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What was seen at one position. The other lenses work on this, without another run."""

    position: int
    tokens: tuple[int, ...]  # up to this position, itself included
    texts: tuple[str, ...]  # the same, readable
    picked: int | None  # the token that follows in the text; None at its end
    attention: Floats  # [layers, heads, past]: each row sums to one; zeros in recurrent layers
    residuals: Floats  # [layers + 1, width]: before the first layer, and after each
    parts: Floats  # [layers, 2, width]: what attention and feed-forward added
    logits: Floats  # [vocabulary]: what the model said comes next
    mixers: tuple[str, ...] = ()  # of a model with recurrent layers: what each layer has
    # Of the same: [layers, 3, heads], gate, decay and norm of the state (see `Inside.recurrent`).
    recurrent: Floats | None = None

    def __repr__(self) -> str:
        layers, heads, past = self.attention.shape
        here = f"{self.texts[-1]!r} at {self.position}"
        size = f"{count(layers, 'layer')}, {count(heads, 'head')}"
        return f"<Look at {here}: {size}, {count(past, 'token')} attended to>"

    def _repr_html_(self) -> str:
        share = self.attention_mean
        most = np.argsort(-share, kind="stable")[:_SHOWN]
        rows = [
            (
                str(at),
                escape(repr(self.texts[at])),
                f"{bar(share[at], share.max())} {share[at]:.1%}",
            )
            for at in sorted(map(int, most))
        ]
        words = f"attention from {self.texts[-1]!r} at {self.position}, mean over layers and heads"
        seen = [note(words), table(("position", "token", "attention"), rows)]
        if states := self.states:
            cells = [tuple(_shown(value) for value in state.values()) for state in states]
            words = "recurrent layers look at no tokens: they carry a state (means over heads)"
            seen += [note(words), table(tuple(states[0]), cells)]
        return picture(*seen)

    @property
    def attending(self) -> list[int]:
        """The layers that have attention."""
        kinds = self.mixers or ("attention",) * len(self.attention)
        return [layer for layer, kind in enumerate(kinds) if kind == "attention"]

    @property
    def states(self) -> list[dict[str, Any]]:
        """What recurrent layers have instead of attention, each a mean over its heads: the gate
        (how much the token wrote, or let out), the decay of what was known, the state's norm."""
        if self.recurrent is None:
            return []
        found = []
        for layer, kind in enumerate(self.mixers):
            if kind not in STATELESS:
                gate, decay, norm = np.nanmean(self.recurrent[layer], axis=1).tolist()
                words = {"gate": gate, "decay": decay, "state_norm": norm}
                found.append({"layer": layer + 1, "mixer": kind, **words})
        return found

    @property
    def attention_by_layer(self) -> Floats:
        """The mean over the heads, [layers, past]."""
        return np.asarray(self.attention.mean(1, dtype=np.float64), np.float32)

    @property
    def attention_by_head(self) -> Floats:
        """The mean over the layers, [heads, past]."""
        return np.asarray(self.attention[self.attending].mean(0, dtype=np.float64), np.float32)

    @property
    def attention_mean(self) -> Floats:
        """The mean over layers and heads, [past]."""
        seen = self.attention[self.attending]
        return np.asarray(seen.mean((0, 1), dtype=np.float64), np.float32)

    @property
    def norms(self) -> Floats:
        """The length of the vector before the first layer and after each, [layers + 1]."""
        return np.asarray(np.linalg.norm(self.residuals, axis=-1), np.float32)

    @property
    def part_norms(self) -> Floats:
        """The length of what attention and feed-forward added, [layers, 2]."""
        return np.asarray(np.linalg.norm(self.parts, axis=-1), np.float32)

    @property
    def likeliest(self) -> int:
        """The token with the largest logit."""
        return int(self.logits.argmax())

    def to_dict(self, *, heads: bool = False) -> dict[str, Any]:
        """For JSON: small by default; `heads`: also each head's attention."""
        found: dict[str, Any] = {
            "position": self.position,
            "tokens": list(self.tokens),
            "texts": list(self.texts),
            "picked": self.picked,
            "likeliest": self.likeliest,
            "layers": self.attention.shape[0],
            "heads": self.attention.shape[1],
            "attention_mean": _rounded(self.attention_mean),
            "attention_by_layer": _rounded(self.attention_by_layer),
            "norms": _rounded(self.norms),
            "part_norms": _rounded(self.part_norms),
        }
        if self.states:
            found["states"] = self.states
        if heads:
            found["attention"] = _rounded(self.attention)
        return found


def look(lm: Session, text: Text, position: int = -1) -> Look:
    """Look inside at one position of a text; a negative one counts from the end."""
    lm.config.check_head()
    tokens = tokens_of(lm, text)
    if isinstance(position, bool) or not isinstance(position, int):
        raise SettingsError(f"position is {position!r}; it must be a whole number")
    if not -len(tokens) <= position < len(tokens):
        raise SettingsError(
            f"there is no position {position}: the text has {count(len(tokens), 'token')}, "
            f"from 0 to {len(tokens) - 1}"
        )
    position %= len(tokens)
    read = tokens[: position + 1]  # what comes later cannot change what is seen here
    with lm.opened(read, adapter_of(text)) as branch:
        seen = lm.engine.look(branch, at=frozenset({position}))
    (inside,) = seen.inside  # one position lies in one chunk
    assert inside.residuals is not None and inside.parts is not None
    return Look(
        position=position,
        tokens=tuple(read),
        texts=tuple(lm.readable_all(read)),
        picked=tokens[position + 1] if position + 1 < len(tokens) else None,
        attention=inside.attention[0],
        residuals=inside.residuals[:, 0],
        parts=inside.parts[:, :, 0],
        logits=host(seen.logits)[-1],
        mixers=lm.config.mixers,
        recurrent=inside.recurrent[0] if inside.recurrent else None,
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rounded(numbers: Floats) -> Any:
    return np.round(numbers.astype(np.float64), _DIGITS).tolist()
