"""Activations of one position: attention weights, residual vectors; weights of the lenses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unspool.backends.interventions import BranchInterventions
from unspool.backends.step import Floats
from unspool.engine.generation import Generation
from unspool.errors import SettingsError, count
from unspool.model.config import STATELESS
from unspool.notebook import bar_html, escape_html, note_html, notebook_html, table_html
from unspool.session import Session

# -- Weights that the lenses read, as numpy arrays

Doubles = npt.NDArray[np.float64]

_CHUNK_ROWS = 4096  # bounds the memory for any vocabulary


def to_numpy(array: Any) -> Floats:
    """Convert an array or tensor to a float32 numpy array."""
    if isinstance(array, np.ndarray):
        return np.asarray(array, np.float32)
    return np.asarray(array.detach().float().cpu().numpy())


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The final norm: (x - mean or x) / rms * weight + bias."""

    weight: Doubles
    bias: Doubles | None
    eps: float
    centred: bool  # LayerNorm subtracts the mean, RMSNorm does not


def final_norm(lm: Session) -> FinalNorm:
    weight, bias = lm.model.vector("norm.weight"), lm.model.vector("norm.bias")
    assert weight is not None, "every norm has a weight"
    return FinalNorm(
        weight=weight.astype(np.float64),
        bias=None if bias is None else bias.astype(np.float64),
        eps=lm.config.norm_eps,
        centred=lm.config.norm == "layer",
    )


def head_row(lm: Session, token: int | Literal["mean"]) -> tuple[Doubles, float | None]:
    """Row of the head and bias of a token, or their means over all tokens."""
    bias, scale = lm.model.vector("head.bias"), lm.config.logit_scale
    if token == "mean":
        total = np.zeros(lm.config.width)
        for rows in _table_chunks(lm, "head.weight"):
            total += rows.sum(0, dtype=np.float64)
        mean = None if bias is None else float(bias.mean(dtype=np.float64)) * scale
        return total / lm.config.vocab_size * scale, mean
    row = lm.model.rows("head.weight", token, token + 1)[0]
    return row.astype(np.float64) * scale, None if bias is None else float(bias[token]) * scale


def embedding_rows(lm: Session) -> Iterator[Floats]:
    """Yield the embedding table in chunks [rows, width]."""
    return _table_chunks(lm, "embed.weight")


def token_embedding(lm: Session, token: int) -> Floats:
    return np.asarray(lm.model.rows("embed.weight", token, token + 1)[0])


def _table_chunks(lm: Session, table: str) -> Iterator[Floats]:
    size = lm.config.vocab_size
    for start in range(0, size, _CHUNK_ROWS):
        yield lm.model.rows(table, start, min(start + _CHUNK_ROWS, size))


TextLike = str | Sequence[int] | Generation
"""A text, its token ids, or a generation (prompt and new tokens)."""


def to_token_ids(lm: Session, text: TextLike) -> list[int]:
    if isinstance(text, Generation):
        return lm.prompt_ids([*text.prompt, *text.tokens])
    return lm.prompt_ids(text)


def adapter_name(text: TextLike) -> str | None:
    """Adapter of a generation."""
    return text.request.adapter if isinstance(text, Generation) else None


def text_interventions(text: TextLike) -> BranchInterventions | None:
    """Interventions of a generation."""
    return text.request.branch_interventions() if isinstance(text, Generation) else None


def resolve_token(lm: Session, token: int | str) -> int:
    """Token id from an id, or from text that is exactly one token."""
    if isinstance(token, str):
        return lm.single_token(token)
    size = lm.config.vocab_size
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
        raise SettingsError(f"token {token!r} is not in the vocabulary (0 to {size - 1})")
    return token


_JSON_DECIMALS = 6  # decimals of an attention weight in JSON
_NOTEBOOK_TOKENS = 24  # tokens with the most attention shown in a notebook


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Activations at one position; the input of the other lenses, which need no further run."""

    position: int  # of the input token, prompt included
    tokens: tuple[int, ...]  # up to and including this position
    texts: tuple[str, ...]  # text of each token
    picked: int | None  # the next token of the text; None at its end
    attention: Floats  # [layers, heads, past]: each row sums to one; zeros in recurrent layers
    residuals: Floats  # [layers + 1, width]: before the first layer and after each
    parts: Floats  # [layers, 2, width]: outputs of attention and feed-forward
    logits: Floats  # [vocabulary]: for the next token
    mixers: tuple[str, ...] = ()  # kind of each layer, if the model has recurrent layers
    # For these: [layers, 3, heads], gate, decay and norm of the state (see `Inside.recurrent`).
    recurrent: Floats | None = None

    def __repr__(self) -> str:
        layers, heads, past = self.attention.shape
        where = f"{self.texts[-1]!r} at {self.position}"
        size = f"{count(layers, 'layer')}, {count(heads, 'head')}"
        return f"<Look at {where}: {size}, {count(past, 'token')} attended to>"

    def _repr_html_(self) -> str:
        mean_attention = self.attention_mean
        top_positions = np.argsort(-mean_attention, kind="stable")[:_NOTEBOOK_TOKENS]
        rows = [
            (
                str(at),
                escape_html(repr(self.texts[at])),
                f"{bar_html(mean_attention[at], mean_attention.max())} {mean_attention[at]:.1%}",
            )
            for at in sorted(map(int, top_positions))
        ]
        caption = f"attention of {self.texts[-1]!r} at {self.position}, mean over layers and heads"
        blocks = [note_html(caption), table_html(("position", "token", "attention"), rows)]
        if states := self.states:
            cells = [tuple(_format_cell(value) for value in state.values()) for state in states]
            caption = "recurrent layers have a state instead of attention (means over heads)"
            blocks += [note_html(caption), table_html(tuple(states[0]), cells)]
        return notebook_html(*blocks)

    @property
    def attention_layers(self) -> list[int]:
        """Layers that have attention."""
        kinds = self.mixers or ("attention",) * len(self.attention)
        return [layer for layer, kind in enumerate(kinds) if kind == "attention"]

    @property
    def states(self) -> list[dict[str, Any]]:
        """Gate, decay and state norm of each recurrent layer, means over its heads."""
        if self.recurrent is None:
            return []
        states = []
        for layer, kind in enumerate(self.mixers):
            if kind not in STATELESS:
                gate, decay, norm = np.nanmean(self.recurrent[layer], axis=1).tolist()
                values = {"gate": gate, "decay": decay, "state_norm": norm}
                states.append({"layer": layer + 1, "mixer": kind, **values})
        return states

    @property
    def attention_by_layer(self) -> Floats:
        """Mean over the heads, [layers, past]."""
        return np.asarray(self.attention.mean(1, dtype=np.float64), np.float32)

    @property
    def attention_mean(self) -> Floats:
        """Mean over layers and heads, [past]."""
        weights = self.attention[self.attention_layers]
        return np.asarray(weights.mean((0, 1), dtype=np.float64), np.float32)

    @property
    def norms(self) -> Floats:
        """Norm of the residual vector before the first layer and after each, [layers + 1]."""
        return np.asarray(np.linalg.norm(self.residuals, axis=-1), np.float32)

    @property
    def part_norms(self) -> Floats:
        """Norms of the outputs of attention and feed-forward, [layers, 2]."""
        return np.asarray(np.linalg.norm(self.parts, axis=-1), np.float32)

    @property
    def most_likely(self) -> int:
        """The token with the largest logit."""
        return int(self.logits.argmax())

    def to_dict(self, *, heads: bool = False) -> dict[str, Any]:
        """For JSON; `heads`: also the attention of each head."""
        result: dict[str, Any] = {
            "position": self.position,
            "tokens": list(self.tokens),
            "texts": list(self.texts),
            "picked": self.picked,
            "likeliest": self.most_likely,
            "layers": self.attention.shape[0],
            "heads": self.attention.shape[1],
            "attention_mean": _round(self.attention_mean),
            "attention_by_layer": _round(self.attention_by_layer),
            "norms": _round(self.norms),
            "part_norms": _round(self.part_norms),
        }
        if self.states:
            result["states"] = self.states
        if heads:
            result["attention"] = _round(self.attention)
        return result


def get_activations(lm: Session, text: TextLike, position: int = -1) -> Activations:
    """Get the activations at one position of a text; negative positions count from the end."""
    lm.config.require_head()
    tokens = to_token_ids(lm, text)
    if isinstance(position, bool) or not isinstance(position, int):
        raise SettingsError(f"position must be an integer, got {position!r}")
    if not -len(tokens) <= position < len(tokens):
        raise SettingsError(
            f"position {position} is out of range: the text has {count(len(tokens), 'token')}, "
            f"0 to {len(tokens) - 1}"
        )
    position %= len(tokens)
    prefix = tokens[: position + 1]  # later tokens cannot change the activations here
    with lm.open_branch(prefix, adapter_name(text), text_interventions(text)) as branch:
        observed = lm.engine.look(branch, at=frozenset({position}))
    (inside,) = observed.inside  # one position is in one chunk
    assert inside.residuals is not None and inside.parts is not None
    return Activations(
        position=position,
        tokens=tuple(prefix),
        texts=tuple(lm.readable_all(prefix)),
        picked=tokens[position + 1] if position + 1 < len(tokens) else None,
        attention=inside.attention[0],
        residuals=inside.residuals[:, 0],
        parts=inside.parts[:, :, 0],
        logits=to_numpy(observed.logits)[-1],
        mixers=lm.config.mixers,
        recurrent=inside.recurrent[0] if inside.recurrent else None,
    )


def _format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _round(numbers: Floats) -> Any:
    return np.round(numbers.astype(np.float64), _JSON_DECIMALS).tolist()
