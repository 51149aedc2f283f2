"""The drafter of a trained head: one instance per text.

    lm.generate(prompt, speculate="head")               # the head shipped for this model
    lm.generate(prompt, speculate="head:FOLDER")        # your own head, or an EAGLE-3 head

The engine passes the drafter the model's hidden states of every computed position; the drafter
collects them and gives them to the head when a draft is needed.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from unspool.backends.step import Floats, LoadedModel
from unspool.decoding.speculative.arrays import concat
from unspool.decoding.speculative.controller import FixedShape, RoundCosts, ShapeController
from unspool.decoding.speculative.head import (
    SHIPPED,
    DraftingHead,
    build_draft,
    head_folder,
    parse_config,
    read_head,
    read_json,
)
from unspool.engine.request import DraftMaker, DraftTree, Request
from unspool.errors import SettingsError
from unspool.session import Session

SHARED_TEXTS = 8  # recent texts whose prefixes new ones may share
RECOMPUTED = 64  # last cached positions that are computed again to get their hidden states
MAX_READ = 512  # positions read after a gap or of a long prompt
_GREEDY_TEMPERATURE = 0.6  # for draft probabilities when the text is greedy


class HeadDrafter:
    """Drafts with a head for one text."""

    def __init__(
        self,
        head: DraftingHead,
        request: Request,
        controller: ShapeController | FixedShape,
        others: deque[HeadDrafter] | None = None,
    ) -> None:
        self._head, self._controller = head, controller
        self._recent = others  # drafters of recent texts
        self._tokens: Sequence[int] = ()  # of the text at the last draft
        self._temperature = request.settings.temperature or _GREEDY_TEMPERATURE
        self._context = head.context()
        self._positions: list[int] = []  # positions that the context has read
        self._unread: list[tuple[int, Floats]] = []
        self._excluded_s = 0.0  # seconds of this round not caused by drafting

    @property
    def reads(self) -> tuple[int, ...]:
        return self._head.layers if self._controller.reading else ()

    def see(self, first: int, vectors: Floats) -> None:
        while self._unread and self._unread[-1][0] >= first:
            self._unread.pop()
        if self._unread:
            start, vectors_before = self._unread[-1]
            self._unread[-1] = start, vectors_before[:, : first - start]
        self._truncate(first)
        self._unread.append((first, vectors))

    def needs(self, tokens: Sequence[int]) -> int:
        if not self._controller.reading:
            return len(tokens)
        if self._recent is not None:
            self._share_prefix(tokens)
            self._recent.append(self)
            self._recent = None
        num_known = self._positions[-1] + 1 if self._positions else 0
        if self._unread:
            first, vectors = self._unread[-1]
            num_known = first + vectors.shape[1]
        return max(num_known, len(tokens) - RECOMPUTED)

    def _share_prefix(self, tokens: Sequence[int]) -> None:
        """Fork the context of the recent text with the longest common prefix."""
        best: HeadDrafter | None = None
        longest = 0
        for other in self._recent or ():
            pairs = enumerate(zip(tokens, other._tokens, strict=False))
            shortest = min(len(tokens), len(other._tokens))
            shared_length = next(
                (at for at, (token, other_token) in pairs if token != other_token), shortest
            )
            count = bisect_left(other._positions, shared_length - 1)
            if count > longest:
                best, longest = other, count
        if best is not None:
            self._context = best._context.fork(longest)
            self._positions = best._positions[:longest]

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        self._excluded_s = 0.0
        shape = self._controller.choose()
        if shape is None:
            return []
        if most < 1 or not self._catch_up(tokens):
            self._controller.skip()
            return []
        return build_draft(
            self._context, tokens, self._head.ids, shape.within(most), self._temperature
        )

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return self._controller.learn(accepted, seconds - self._excluded_s)

    def _truncate(self, position: int) -> None:
        """Drop everything read from a position on."""
        num_kept = bisect_left(self._positions, position)
        if num_kept < len(self._positions):
            del self._positions[num_kept:]
            self._context.truncate(num_kept)

    def _catch_up(self, tokens: Sequence[int]) -> bool:
        """Read the collected hidden states; True if they reach the token before the last."""
        last = len(tokens) - 1
        self._truncate(last)
        self._tokens = tokens
        if self._unread:
            began = perf_counter()
            places = [np.arange(first, first + v.shape[1]) for first, v in self._unread]
            positions = np.concatenate(places)
            num_before = bisect_left(positions.tolist(), last)
            selected = slice(max(0, num_before - MAX_READ), num_before)
            vectors = concat([v for _, v in self._unread], 1)[:, selected]
            positions = positions[selected]
            self._unread.clear()
            if len(positions):
                following = [int(tokens[position + 1]) for position in positions.tolist()]
                self._context.read(positions, vectors, following)
                self._positions += positions.tolist()
            if len(positions) > 32:  # a prompt, or text written during a pause
                self._excluded_s = perf_counter() - began
        return bool(self._positions) and self._positions[-1] == last - 1


def head_maker(where: str, lm: Session, most: int | None) -> DraftMaker:
    """Build the drafter factory for the head in a folder, or the shipped one if none is named."""
    head = load_head(head_folder(where) if where else shipped_head(lm.model), lm)
    costs = RoundCosts(observing_is_free=lm.model.device == "cpu")
    texts = deque[HeadDrafter](maxlen=SHARED_TEXTS)
    longest = {} if most is None else {"most": most}
    return lambda request: HeadDrafter(head, request, ShapeController(costs, **longest), texts)


def shipped_head(model: LoadedModel) -> Path:
    """Return the folder of the head for a model; the wheel contains none, the repository does."""
    fingerprint = model.fingerprint()
    for folder in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else []:
        if (folder / "config.json").exists() and read_json(folder)["fingerprint"] == fingerprint:
            return folder
    raise SettingsError(
        "speculate='head': no drafting head for this model is installed; name the folder of one: "
        "speculate='head:FOLDER' (how to train or get one: docs/beyond.md)"
    )


def load_head(folder: Path, lm: Session) -> DraftingHead:
    """Load the head in a folder; raises `SettingsError` if it is for another model."""
    config, model = read_json(folder), lm.model
    device = None if model.device == "cpu" else model.device
    if config.get("speculators_model_type") == "eagle3":
        from unspool.decoding.speculative.eagle import EagleHead

        return EagleHead(folder, config, model, device)
    check_base(folder, config, model)
    files = read_head(folder)
    from unspool.backends.cpu.model import CpuModel

    if isinstance(model, CpuModel):
        from unspool.decoding.speculative.head_cpu import CpuHead

        return CpuHead(files, model, lm.context)
    if importlib.util.find_spec("triton") is not None:  # else there is no CudaModel
        from unspool.backends.cuda.model import CudaModel

        if isinstance(model, CudaModel):
            from unspool.decoding.speculative.head_cuda import CudaHead

            return CudaHead(files, model, lm.context)
    from unspool.decoding.speculative.head import UnspoolHead

    return UnspoolHead(files, model, device)


def check_base(folder: Path, fields: dict[str, object], model: LoadedModel) -> None:
    """Check that the head was trained for this model."""
    config = parse_config(fields, folder)
    fits = config.width == model.config.width and max(config.layers) <= model.config.layers
    if not fits or config.fingerprint != model.fingerprint():
        raise SettingsError(
            f"{folder} is a drafting head for {config.base}, and this is another model (or other "
            "weights of it); use it with that model, or leave speculate out"
        )
