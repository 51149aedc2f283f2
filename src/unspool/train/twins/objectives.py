"""Objectives of twins: block diffusion and fill-in, with their masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unspool.model.config import ModelConfig
from unspool.model.layers.transformer import Attention, Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.forward import (
    AttentionMask,
    MaskFunction,
    build_mask,
    hidden_states,
    layer_states,
)
from unspool.train.learning.objectives import Loss, summed_loss
from unspool.train.tuning.dpo import reference_model

# -- Random masks for training twins: blocks, spans, and uniform masks
#
# All random numbers come from the batch's generator, so that a resumed run draws the same masks.

SIZES = (4, 8, 16, 32)  # tokens per block
CHANCES = (0.2, 0.35, 0.3, 0.15)  # probability of each block size
FULLY_MASKED = 0.2  # share of fully masked blocks, as at the start of generating one
MAX_SPAN = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """Block size of each row of a batch, and by how much its first block is shorter."""

    sizes: Tensor  # [rows, 1]
    offsets: Tensor  # [rows, 1]


def draw_grid(
    rows: int, rng: torch.Generator, sizes: tuple[int, ...] = SIZES,
    chances: tuple[float, ...] = CHANCES,
) -> Grid:  # fmt: skip
    picked = torch.multinomial(torch.tensor(chances), rows, True, generator=rng)
    row_sizes = torch.tensor(sizes)[picked][:, None]
    return Grid(row_sizes, (torch.rand(rows, 1, generator=rng) * row_sizes).long())


def mask_blocks(
    blocks: Tensor, rng: torch.Generator, all_hidden: float = FULLY_MASKED
) -> tuple[Tensor, Tensor]:
    """Draw a mask and the mask ratio of each token's block, both [rows, length].

    `blocks` has the start of each token's block. The first token of a block is never masked,
    because the causal model predicts it.
    """
    positions = torch.arange(blocks.shape[1], device=blocks.device)[None]
    ratio = _at_block_start(torch.rand(blocks.shape, generator=rng), blocks)
    is_full = _at_block_start(torch.rand(blocks.shape, generator=rng), blocks) < all_hidden
    ratio = torch.where(is_full, 1.0, ratio)
    mask = torch.rand(blocks.shape, generator=rng).to(blocks.device) < ratio
    return mask & (positions != blocks), ratio


def _at_block_start(values: Tensor, blocks: Tensor) -> Tensor:
    """The value at the start of each token's block."""
    return values.to(blocks.device).gather(1, blocks.long())


def mask_spans(rows: int, length: int, rng: torch.Generator) -> Tensor:
    """Mask spans of one length (1 to 16) per row, together 5 to 55 % of it."""
    share = 0.05 + 0.5 * torch.rand(rows, 1, generator=rng)
    span = torch.randint(1, MAX_SPAN + 1, (rows, 1), generator=rng)
    positions = torch.arange(length)[None]
    starts = torch.rand(rows, length, generator=rng) < share / span
    last_start = torch.where(starts, positions, -MAX_SPAN - 1).cummax(1).values
    return positions - last_start < span


def mask_uniformly(rows: int, length: int, rng: torch.Generator, most: float = 1.0) -> Tensor:
    """Mask a share of each row, uniform from 0 to `most`."""
    share = torch.rand(rows, 1, generator=rng) * most
    return torch.rand(rows, length, generator=rng) < share


def document_starts(documents: Tensor) -> Tensor:
    """Start of each token's document, from document indices [rows, length]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(new, places, 0).cummax(1).values


def block_starts(starts: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """Start of each token's block.

    Blocks have the size of their row [rows, 1] and are counted from the document's start; the first
    one is shorter by the row's offset.
    """
    places = torch.arange(starts.shape[1], device=starts.device)[None]
    grid = (places - starts + offsets) // sizes * sizes - offsets + starts
    return torch.maximum(starts, grid)


class RecordingAttention:
    """Attention that stores its keys and values."""

    def __init__(self, sight: AttentionMask) -> None:
        self.sight = sight
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key, self.value = key, value
        return self.sight(attention, query, key, value)


class NoisyAttention:
    """Attention to the clean keys and values, followed by its own."""

    def __init__(self, sight: AttentionMask, clean: RecordingAttention, copies: int) -> None:
        assert clean.key is not None and clean.value is not None
        self.sight = sight
        self.key = clean.key.repeat(copies, 1, 1, 1)
        self.value = clean.value.repeat(copies, 1, 1, 1)

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        return self.sight(attention, query, keys, values)


class CleanNoisyPasses:
    """The clean and the noisy pass over batches of one shape."""

    def __init__(
        self, config: ModelConfig, rows: int, length: int, device: torch.device, copies: int = 2
    ) -> None:
        self.config, self.rows, self.length, self.copies = config, rows, length, copies
        self.documents = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self.blocks = torch.zeros_like(self.documents)
        self._clean_rule, self._noisy_rule, self._full_rule = self._mask_rules()
        self._recorded: list[RecordingAttention] = []

    def set_starts(self, documents: Tensor, blocks: Tensor | None = None) -> None:
        """Set the starts of documents and blocks of the next batch."""
        self.documents.copy_(documents)
        if blocks is not None:
            self.blocks.copy_(blocks)

    def clean_pass(self, model: Transformer, tokens: Tensor) -> Tensor:
        """Hidden states of the causal model, without gradients."""
        mask = self._attention_mask(self._clean_rule, self.rows, self.length)
        self._recorded = [RecordingAttention(mask) for _ in range(self.config.layers)]
        with torch.no_grad():
            return hidden_states(model, tokens, self._recorded)

    def layer_inputs(
        self, model: Transformer, tokens: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Inputs of some layers of the causal model [rows, length, layers, width], and the output
        of the last layer."""
        mask = self._attention_mask(self._clean_rule, self.rows, self.length)
        inputs = []
        for number, x in enumerate(layer_states(model, tokens, mask)):
            if number in layers:
                inputs.append(x)
        return torch.stack(inputs, 2), x

    def noisy_pass(self, model: Transformer, noisy: Tensor) -> Tensor:
        """Hidden states of the twin for noisy copies [copies * rows, length] of the last `read`."""
        mask = self._attention_mask(self._noisy_rule, self.copies * self.rows, 2 * self.length)
        layers = [NoisyAttention(mask, clean, self.copies) for clean in self._recorded]
        return hidden_states(model, noisy, layers)

    def bidirectional_pass(self, model: Transformer, noisy: Tensor) -> Tensor:
        """Hidden states of noisy copies with full attention within documents."""
        mask = self._attention_mask(self._full_rule, self.copies * self.rows, self.length)
        return hidden_states(model, noisy, mask)

    def _attention_mask(
        self, rule: Callable[[int], MaskFunction], rows: int, keys: int
    ) -> AttentionMask:
        windows = {self.config.window(layer) for layer in range(self.config.layers)}
        device = self.documents.device
        return AttentionMask(
            {w: build_mask(rule(w), rows, self.length, keys, device, self.config) for w in windows}
        )

    def _mask_rules(self) -> tuple[Callable[[int], MaskFunction], ...]:
        """Mask functions by sliding window (0: none), for the clean, noisy and full pass.

        Each is cached, because torch compiles every new function object again.
        """
        documents, blocks, rows, length = self.documents, self.blocks, self.rows, self.length

        def near(window: int, query: Any, place: Any) -> Any:
            return (place > query - window) if window else (place >= 0)

        @cache
        def clean(window: int) -> MaskFunction:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                inside = (key <= query) & (key >= documents[row % rows, query])
                return inside & near(window, query, key)

            return allowed

        @cache
        def noisy(window: int) -> MaskFunction:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                row = row % rows
                is_noisy, place = key >= length, key % length
                block = blocks[row, query]
                before = ~is_noisy & (place < block) & (place >= documents[row, query])
                visible = before | (is_noisy & (blocks[row, place] == block))
                return visible & near(window, query, place)

            return allowed

        @cache
        def full(window: int) -> MaskFunction:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                row = row % rows
                same_document = documents[row, query] == documents[row, key]
                return same_document & near(window, query, key) & near(window, key, query)

            return allowed

        return clean, noisy, full


@dataclass(eq=False)
class BlockTwinObjective:
    """Predict masked tokens of blocks of several sizes from the rest and the text before."""

    mask_id: int
    clean: Transformer | None = field(default=None, repr=False)  # None: the model without LoRA
    sizes: tuple[int, ...] = SIZES
    chances: tuple[float, ...] = CHANCES
    all_hidden: float = FULLY_MASKED
    _halves: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens, documents = batch.inputs, document_ids(batch)
        halves = cached_halves(self._halves, model, tokens)
        starts = document_starts(documents)
        grid = draw_grid(len(tokens), rng, self.sizes, self.chances)
        sizes, offsets = grid.sizes.to(tokens.device), grid.offsets.to(tokens.device)
        blocks = block_starts(starts, sizes, offsets)
        halves.set_starts(starts, blocks)
        with reference_model(model, self.clean) as clean:
            halves.clean_pass(clean, tokens)
        hide, _ = mask_blocks(blocks, rng, self.all_hidden)
        first = torch.arange(tokens.shape[1], device=tokens.device)[None] == blocks
        x = halves.noisy_pass(
            model, complementary_copies(tokens, hide, ~first & ~hide, self.mask_id)
        )
        loss_mask = (~first & (documents >= 0))[:, 1:]
        summed = summed_loss(model, predicting_states(x, hide), tokens[:, 1:], loss_mask.float())
        count = loss_mask.sum().clamp(min=1)
        return Loss(summed / count, count)


def document_ids(batch: TrainingBatch) -> Tensor:
    """Document index of each token; one document per row by default. Negative: padding."""
    if batch.document_ids is not None:
        return batch.document_ids
    return torch.zeros_like(batch.inputs, dtype=torch.int32)


def cached_halves(
    cache: dict[tuple[int, int], CleanNoisyPasses], model: Transformer, tokens: Tensor
) -> CleanNoisyPasses:
    """The `Halves` of this batch shape, created once."""
    shape = (tokens.shape[0], tokens.shape[1])
    if shape not in cache:
        cache[shape] = CleanNoisyPasses(model.config, *shape, tokens.device)
    return cache[shape]


def complementary_copies(tokens: Tensor, hide: Tensor, others: Tensor, mask_id: int) -> Tensor:
    """Two copies of the rows: one with `hide` masked, one with `others` masked."""
    return torch.cat((tokens.masked_fill(hide, mask_id), tokens.masked_fill(others, mask_id)))


def predicting_states(x: Tensor, hide: Tensor) -> Tensor:
    """The states that predict tokens 1, 2, ...: those before, in the copy that masks the token."""
    first, second = x.chunk(2)
    return torch.where(hide[:, 1:, None], first[:, :-1], second[:, :-1])


_NOISE_LOGITS_PER_CHUNK = 1 << 25


@dataclass(eq=False)
class FillTwinObjective:
    """Predict masked tokens from both sides, and detect wrong visible tokens."""

    mask_id: int
    clean: Transformer | None = field(default=None, repr=False)  # None: the model without LoRA
    wrong: float = 0.2  # maximum share of visible tokens to replace
    shown_weight: float = 0.25
    _halves: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)
    _readers: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens, documents = batch.inputs, document_ids(batch)
        starts = document_starts(documents)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        maskable = (places != starts) & (documents >= 0)  # a first token has no state before it
        quarter = quarter_rows(len(tokens))
        if batch.loss_mask is not None:
            answers = _answer_inputs(batch.loss_mask)
            maskable[quarter[1]] &= answers[quarter[1]]
        hide = self._draw_masks(tokens, quarter, rng) & maskable
        noisy = tokens.clone()
        last = quarter[3]
        noise = mask_uniformly(len(tokens[last]), tokens.shape[1], rng, self.wrong)
        samples = self._sample_tokens(model, tokens[last], starts[last], rng)
        replaced = noise.to(tokens.device) & maskable[last]
        noisy[last] = torch.where(replaced, samples, tokens[last])
        halves = cached_halves(self._halves, model, tokens)
        halves.set_starts(starts)
        copies = complementary_copies(noisy, hide, maskable & ~hide, self.mask_id)
        x = halves.bidirectional_pass(model, copies)
        masked_loss, count = _mean_loss(model, predicting_states(x, hide), tokens, maskable)
        noisy_x = torch.cat(tuple(part[last] for part in x.chunk(2)))
        visible = predicting_states(noisy_x, ~hide[last])
        visible_loss, _ = _mean_loss(model, visible, tokens[last], maskable[last])
        statistics = {"hidden": float(masked_loss.detach()), "shown": float(visible_loss.detach())}
        return Loss(masked_loss + self.shown_weight * visible_loss, count, statistics)

    def _draw_masks(self, tokens: Tensor, quarter: list[slice], rng: torch.Generator) -> Tensor:
        length = tokens.shape[1]
        rows = [len(tokens[part]) for part in quarter]
        masks = (
            mask_spans(rows[0], length, rng),
            mask_uniformly(rows[1], length, rng),
            mask_uniformly(rows[2], length, rng),
            mask_uniformly(rows[3], length, rng, most=0.5),
        )
        return torch.cat(masks).to(tokens.device)

    def _sample_tokens(
        self, model: Transformer, tokens: Tensor, starts: Tensor, rng: torch.Generator
    ) -> Tensor:
        """A sample of the causal model at each position; the first token stays."""
        seed = int(torch.randint(1 << 62, (1,), generator=rng))
        device_rng = torch.Generator(tokens.device).manual_seed(seed)  # draws on the device
        with torch.no_grad(), reference_model(model, self.clean) as clean:
            halves = cached_halves(self._readers, clean, tokens)
            halves.set_starts(starts)
            flat = halves.clean_pass(clean, tokens)[:, :-1].flatten(0, 1)
            size = max(64, _NOISE_LOGITS_PER_CHUNK // clean.config.vocab_size)
            samples = [_sample(clean.logits(part).float(), device_rng) for part in flat.split(size)]
        return torch.cat((tokens[:, :1], torch.cat(samples).view(len(tokens), -1)), 1)


def _sample(logits: Tensor, rng: torch.Generator) -> Tensor:
    """Sample one token per row (Gumbel-max)."""
    noise = torch.empty_like(logits).exponential_(generator=rng).clamp(min=1e-20)
    return (logits - noise.log()).argmax(-1)


def _mean_loss(
    model: Transformer, x: Tensor, tokens: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    weights = loss_mask[:, 1:].float()
    count = weights.sum().clamp(min=1)
    return summed_loss(model, x, tokens[:, 1:], weights) / count, count


def quarter_rows(rows: int) -> list[slice]:
    """Split the rows of a batch into the four kinds of noise; the last has at least one row."""
    last = min(rows * 3 // 4, rows - 1)
    borders = [0, last // 3, last * 2 // 3, last, rows]
    return [slice(a, b) for a, b in pairwise(borders)]


def _answer_inputs(loss_mask: Tensor) -> Tensor:
    """Inputs that are targets; `loss_mask` is about the token after each input."""
    return torch.cat((torch.zeros_like(loss_mask[:, :1]), loss_mask[:, :-1]), 1)
