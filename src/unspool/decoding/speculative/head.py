"""Drafting heads: one decoder layer that reads the model's hidden states, run in plain torch.

EAGLE-3 heads and MTP layers (multi-token prediction) have the same structure. The input of the
layer joins the embedding of a token with the hidden state of the position before it: the model's
hidden state where the text has been computed, the head's own output for drafted tokens. A subclass
of `DraftHead` defines how the two are joined; `HeadContext` has the KV cache of the layer for one
text; `build_draft` builds a chain or a tree from the logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from unspool.backends.cuda.graphs import GraphCache
from unspool.backends.step import Floats, Ints, LoadedModel
from unspool.decoding.speculative.controller import DraftShape
from unspool.engine.request import DraftTree
from unspool.model.config import Rotary
from unspool.model.layers.parts import Norm, apply_rope
from unspool.model.layers.transformer import Attention, RopeTables, softmax_with_sinks

_FIRST_CAPACITY = 256  # positions of a KV cache
_MAX_FREE, _MAX_FREE_CAPACITY = 8, 2048  # buffers that are kept for later texts
_GRAPH_ROWS = 8  # positions of a read in a captured graph
_GRAPH_ROOM = _GRAPH_ROWS + 32  # positions after those read: of padding, and of a draft
_FIRST_ROPE_CAPACITY = 4096  # positions of the RoPE tables


@runtime_checkable
class DeviceModel(Protocol):
    """A model whose vectors need not leave its device."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of int32 tokens, [n, width]."""

    def project(self, vectors: Tensor) -> Tensor:
        """Apply the head to normalized vectors."""


class LayerInput(NamedTuple):
    """Joined token embeddings and hidden states."""

    residual: Tensor  # [n, width]: what the layer's outputs are added to
    normed: Tensor  # [n, ...]: input of the attention


class DraftHead(ABC):
    """A drafting head with its weights, for any number of texts.

    Its layer has full attention. Tokens are int32 tensors on the device.
    """

    attention: Attention
    rotary: Rotary
    ids: Tensor  # the token of each logit
    has_fixed_shapes = True  # its operations depend on shapes only, so graphs can be captured

    def __init__(
        self, name: str, model: LoadedModel, layers: tuple[int, ...], max_length: int = 0
    ) -> None:
        self.name, self.model = name, model
        self.device_model = model if isinstance(model, DeviceModel) else None
        self.layers = layers  # hidden states it reads: n is the input of layer n
        self.device = torch.device(model.device)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self._max_length = max_length  # longest text; some kinds of RoPE depend on it
        self.rope = RopeTables(torch.zeros(0), torch.zeros(0))  # of the first positions
        # Whether graphs are captured: not if embeddings or logits are computed on the host.
        self.captures_graphs = self.device.type == "cuda" and self.device_model is not None
        self.graphs = GraphCache(self.device)
        self._free: list[HeadBuffers] = []  # of texts that are gone, with their graphs

    @abstractmethod
    def read_hidden(self, vectors: Tensor) -> Tensor:
        """Convert the model's hidden states [layers, n, width] to those that `join` takes."""

    @abstractmethod
    def join(self, hidden: Tensor, tokens: Tensor) -> LayerInput:
        """Join tokens with the hidden states [n, width] before them."""

    @abstractmethod
    def finish(self, inputs: LayerInput, mixed: Tensor) -> Tensor:
        """Compute hidden states [n, width] from the attention output: those of the next tokens."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token over `ids`, from the result of `finish`."""

    def context(self) -> HeadContext:
        return HeadContext(self)

    def to_tensor(self, array: Floats | Tensor) -> Tensor:
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
        return tensor.to(self.device, self.dtype)

    def to_host_tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A tensor of the host that can be copied to the device without waiting."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Copy an array to the device without waiting for what runs there."""
        return self.to_host_tensor(array).to(self.device, non_blocking=True)

    def buffers(self, capacity: int) -> HeadBuffers:
        """Buffers for at least `capacity` positions, new or of a text that is gone."""
        capacity = max(_FIRST_CAPACITY, 1 << (capacity - 1).bit_length())
        for place, free in enumerate(self._free):
            if free.capacity == capacity:
                del self._free[place]
                free.clear()
                return free
        return HeadBuffers(self, capacity)

    def recycle(self, buffers: HeadBuffers) -> None:
        """Keep buffers for the next text, if they are small."""
        if buffers.capacity <= _MAX_FREE_CAPACITY and len(self._free) < _MAX_FREE:
            self._free.append(buffers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of the model."""
        if self.device_model is not None:
            return self.device_model.embed(tokens).to(self.dtype)
        distinct, index = np.unique(tokens.cpu().numpy(), return_inverse=True)
        rows = [self.model.rows("embed.weight", int(t), int(t) + 1)[0] for t in distinct]
        return self.to_tensor(np.stack(rows)[index] * np.float32(self.model.config.embedding_scale))

    def queries_keys_values(
        self, normed: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with RoPE, and values, [heads, n, head_width] each.

        Args:
            normed: [n, ...], from `join`.
            rope: Rows of the RoPE tables: n of them, or one for all.
        """
        query = self.attention.queries(normed[None], None)[0]
        key, value = self.attention.keys_values(normed[None], None)
        rotated = apply_rope(torch.cat((query, key[0])), *rope)
        return rotated[: len(query)], rotated[len(query) :], value[0]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention output [n, heads * head_width] of queries [heads, n, head_width].

        Not `scaled_dot_product_attention`: on Hopper it may select cuDNN, which builds a graph for
        every new number of keys.

        Args:
            keys: [positions, kv_heads, head_width].
            values: The same.
            mask: What each query does not attend to, [n, positions].
        """
        attention, end = self.attention, len(keys)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        # Grouped-query attention: the query heads of a key head become more queries.
        scores = torch.baddbmm(
            query.new_empty(()), query.reshape(len(keys), -1, query.shape[-1]), keys.mT,
            beta=0, alpha=attention.scale,
        ).view(*query.shape[:2], end)  # fmt: skip
        cap = attention.config.attention_softcap
        if cap:
            scores = torch.tanh(scores / cap) * cap
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        weights = softmax_with_sinks(scores, attention.sinks).to(values.dtype)
        mixed = weights.view(len(keys), -1, end) @ values
        return mixed.view(query.shape).transpose(0, 1).flatten(1)

    def rope_rows(self, positions: Ints) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ascending positions, [n, width / 2] each."""
        first, end = int(positions[0]), int(positions[-1]) + 1
        self.grow_rope(end)
        has_gaps = end - first > len(positions)
        rows = self.to_device(positions) if has_gaps else slice(first, end)
        return self.rope.cosine[rows], self.rope.sine[rows]

    def grow_rope(self, end: int) -> None:
        """Make the RoPE tables long enough for positions up to `end`."""
        capacity = len(self.rope.cosine)
        if end > capacity:
            covered = np.arange(max(end, 2 * capacity, _FIRST_ROPE_CAPACITY))
            cosine, sine = self.rotary.tables(covered, self._max_length)
            self.rope = RopeTables(self.to_tensor(cosine), self.to_tensor(sine))


def fuse_norms(module: nn.Module) -> None:
    """Replace the RMSNorms of a module by torch's, which is one kernel on a GPU.

    That kernel needs gains in the dtype of the vectors.
    """
    for name, child in module.named_children():
        if isinstance(child, Norm):
            gain = 1 + child.weight.float() if child.plus_one else child.weight
            fused = nn.RMSNorm(gain.shape, child.eps, device="meta")
            fused.weight = nn.Parameter(gain.to(child.weight.dtype), requires_grad=False)
            setattr(module, name, fused)
        else:
            fuse_norms(child)


@dataclass(slots=True, eq=False)
class DraftNode:
    """A drafted token; the root (parent None) is the last token of the text."""

    token: int | Tensor  # a tensor [1] if only the device knows it
    parent: DraftNode | None = None
    depth: int = 0
    score: float = 0.0  # log-probability of the path
    hidden: Tensor = field(init=False, repr=False)  # after this token, [1, width]
    slot: int = -1  # of its key in the KV cache; the root's key belongs to the text


class RootInput(NamedTuple):
    """What the last position read gives to the root of the next draft."""

    length: int  # positions read
    token: int
    inputs: LayerInput
    query: Tensor  # [heads, 1, head_width]


class HeadBuffers:
    """Hidden states, keys and values of the positions of one text."""

    def __init__(self, head: DraftHead, capacity: int) -> None:
        self.capacity, shape = capacity, head.attention.shape
        sizes = ((head.model.config.width,), *(((shape.kv_heads, shape.head_width),) * 2))
        self.hidden, self.keys, self.values = (
            torch.zeros((capacity, *size), dtype=head.dtype, device=head.device) for size in sizes
        )
        self.graphs: LevelGraphs | None = None
        if head.captures_graphs and head.has_fixed_shapes and capacity:
            self.graphs = LevelGraphs(head, self)

    def clear(self) -> None:
        """Remove what another text left: masked values have a weight of 0, but 0 * NaN is NaN."""
        self.values.zero_()
        if self.graphs is not None:
            self.graphs.clear()

    def copy(self, other: HeadBuffers, count: int) -> None:
        """Copy the first `count` positions of other buffers."""
        for name in ("hidden", "keys", "values"):
            getattr(self, name)[:count] = getattr(other, name)[:count]


class LevelGraphs:
    """Short reads and the levels of a chain as captured graphs, bound to the buffers of one text.

    The host takes longer to launch the small operations of a head than the device to run them. The
    shapes in a graph are fixed: a read has _GRAPH_ROWS positions, of which the last ones may not
    exist, and attention masks the rest of the capacity.
    """

    def __init__(self, head: DraftHead, buffers: HeadBuffers) -> None:
        self._head, self._buffers = head, buffers
        self._cache, self._rope = GraphCache(head.device, head.graphs), head.rope
        device, rows, width = head.device, _GRAPH_ROWS, head.model.config.width
        options: dict[str, Any] = {"dtype": head.dtype, "device": device}
        self._vectors = torch.zeros(len(head.layers), rows, width, **options)
        # Of a read: tokens, positions, slots; the number of the last row, the slot after it and the
        # next position.
        self._ints = torch.zeros(3 * rows + 3, dtype=torch.int64, device=device)
        self._place = torch.zeros(2, dtype=torch.int64, device=device)  # slot, position of a level
        self._token = torch.zeros(1, dtype=torch.int32, device=device)
        self._slots = torch.arange(buffers.capacity, device=device)
        self._root: tuple[Tensor, ...] = ()  # residual, normed, query
        self.hidden = torch.zeros(1, width, **options)  # after the last level
        self._logits: Tensor | None = None

    def clear(self) -> None:
        """Remove what a read left, as the next one may be shorter."""
        self._vectors.zero_()

    def read(
        self, first: int, positions: Ints, vectors: Floats | Tensor, following: Sequence[int]
    ) -> None:
        """Read positions into the slots from `first` on."""
        head, count, rows = self._head, len(positions), _GRAPH_ROWS
        last = int(positions[-1])
        head.grow_rope(last + _GRAPH_ROOM)
        if self._rope is not head.rope:
            self._cache.clear()
            self._rope = head.rope
        ints = np.full((3, rows), last)
        ints[0], ints[0, :count] = 0, following
        ints[1, :count] = positions
        ints[2] = first + np.arange(rows)
        numbers = np.concatenate((ints.ravel(), (count - 1, first + count, last + 1)))
        self._ints.copy_(head.to_host_tensor(numbers), non_blocking=True)
        self._vectors[:, :count] = head.to_tensor(vectors)
        self._cache.run("read", self._read)

    def root(self) -> Tensor:
        """Logits after the last position read."""
        self._cache.run("root", self._expand_root)
        assert self._logits is not None
        return self._logits

    def level(self, token: int | Tensor) -> Tensor:
        """Logits after a drafted token that follows the last one expanded."""
        self._token.copy_(torch.tensor([token]) if isinstance(token, int) else token)
        self._cache.run("level", self._expand_level)
        assert self._logits is not None
        return self._logits

    def _read(self) -> None:
        head, buffers = self._head, self._buffers
        tokens, positions, slots = self._ints[:-3].view(3, -1)
        hidden = head.read_hidden(self._vectors)
        inputs = head.join(hidden, tokens.int())
        query, keys, values = head.queries_keys_values(inputs.normed, self._rope_rows(positions))
        buffers.hidden.index_copy_(0, slots, hidden.to(buffers.hidden.dtype))
        self._write(slots, keys, values)
        last = self._ints[-3:-2]
        root = (inputs.residual[last], inputs.normed[last], query[:, last])
        if not self._root:
            self._root = tuple(tensor.clone() for tensor in root)
        for target, source in zip(self._root, root, strict=True):
            target.copy_(source)

    def _expand_root(self) -> None:
        self._place.copy_(self._ints[-2:])
        residual, normed, query = self._root
        self._finish(LayerInput(residual, normed), query, self._slots >= self._place[0])

    def _expand_level(self) -> None:
        slot, position = self._place[:1], self._place[1:]
        inputs = self._head.join(self.hidden, self._token)
        rope = self._rope_rows(position)
        query, keys, values = self._head.queries_keys_values(inputs.normed, rope)
        self._write(slot, keys, values)
        self._finish(inputs, query, self._slots > slot)
        self._place += 1

    def _finish(self, inputs: LayerInput, query: Tensor, mask: Tensor) -> None:
        head, buffers = self._head, self._buffers
        mixed = head.attend(query, buffers.keys, buffers.values, mask[None])
        self.hidden.copy_(head.finish(inputs, mixed))
        logits = head.logits(self.hidden)
        if self._logits is None:
            self._logits = logits.clone()
        self._logits.copy_(logits)

    def _rope_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope.cosine[positions], self._rope.sine[positions]

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for target, source in ((self._buffers.keys, keys), (self._buffers.values, values)):
            target.index_copy_(0, slots, source.transpose(0, 1).to(target.dtype))


class HeadContext:
    """The state of a head for one text: the positions it has read.

    Each has a hidden state, and a key and a value of the layer. Position p joins the hidden state
    of p with token p + 1. Keys of drafted tokens follow those of the text until the next draft.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head, self._buffers = head, HeadBuffers(head, 0)
        self._length = self._num_drafted = 0
        self._root: RootInput | None = None
        self._graph_root: tuple[int, int] | None = None  # positions and token of a graph's root
        self._graph_depth = -1  # of the next level of a chain in graphs; -1: there is none

    def __del__(self) -> None:
        if self._buffers.capacity:
            self._head.recycle(self._buffers)

    def __len__(self) -> int:
        return self._length

    @property
    def hidden(self) -> Tensor:
        """The hidden states that were read, [positions, width]."""
        return self._buffers.hidden[: self._length]

    def truncate(self, count: int) -> None:
        """Keep only the first `count` positions."""
        self._length, self._num_drafted = min(self._length, count), 0

    @torch.inference_mode()
    def fork(self, count: int) -> HeadContext:
        """Return the context of another text that shares the first `count` positions."""
        other = HeadContext(self._head)
        other._reserve(count)
        other._buffers.copy(self._buffers, count)
        other._length = count
        return other

    @torch.inference_mode()
    def read(self, positions: Ints, vectors: Floats | Tensor, following: Sequence[int]) -> None:
        """Read positions: the model's hidden states [layers, n, width], and each next token."""
        head, first, end = self._head, self._length, self._length + len(positions)
        self._reserve(end + _GRAPH_ROOM)
        self._root, self._graph_root, self._graph_depth = None, None, -1
        graphs = self._buffers.graphs
        if graphs is not None and len(positions) <= _GRAPH_ROWS:
            graphs.read(first, positions, vectors, following)
            self._graph_root = end, following[-1]
        else:
            hidden = head.read_hidden(head.to_tensor(vectors))
            inputs = head.join(hidden, head.to_device(np.array(following, np.int32)))
            query, keys, values = head.queries_keys_values(inputs.normed, head.rope_rows(positions))
            self._buffers.hidden[first:end] = hidden
            self._write(first, keys, values)
            last = LayerInput(inputs.residual[-1:], inputs.normed[-1:])
            self._root = RootInput(end, following[-1], last, query[:, -1:])
        self._length, self._num_drafted = end, 0

    @torch.inference_mode()
    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Tensor:
        """Logits of the token after each node of one level; sets the nodes' hidden states.

        A node attends to the text, its ancestors and itself. The logits may be overwritten by the
        next level.
        """
        head = self._head
        logits = self._expand_in_graph(nodes[0]) if len(nodes) == 1 else None
        if logits is not None:
            return logits
        self._graph_depth = -1
        position = np.array([len(tokens) - 2 + nodes[0].depth])
        if nodes[0].parent is None:
            self._num_drafted = 0
            inputs, query = self._root_input(nodes[0], position)
        else:
            inputs = self._join(nodes)
            query, keys, values = head.queries_keys_values(inputs.normed, head.rope_rows(position))
            first = self._length + self._num_drafted
            self._reserve(first + len(nodes))
            self._write(first, keys, values)
            self._num_drafted += len(nodes)
            for row, node in enumerate(nodes):
                node.slot = first + row
        end, buffers = self._length + self._num_drafted, self._buffers
        mixed = head.attend(query, buffers.keys[:end], buffers.values[:end], self._mask(nodes))
        hidden = head.finish(inputs, mixed)
        for row, node in enumerate(nodes):
            node.hidden = hidden[row : row + 1]
        return head.logits(hidden)

    def _expand_in_graph(self, node: DraftNode) -> Tensor | None:
        """Expand the root, or the next token of a chain; None: it is neither of a graph."""
        graphs, slot = self._buffers.graphs, self._length + self._num_drafted
        if graphs is None:
            return None
        if node.parent is None:
            if self._graph_root != (self._length, node.token):
                return None
            self._num_drafted = 0
            logits = graphs.root()
        elif node.depth == self._graph_depth and slot < self._buffers.capacity:
            node.slot = slot
            self._num_drafted += 1
            logits = graphs.level(node.token)
        else:
            return None
        self._graph_depth, node.hidden = node.depth + 1, graphs.hidden
        return logits

    def _root_input(self, root: DraftNode, position: Ints) -> tuple[LayerInput, Tensor]:
        """Layer input and query of the root: those of the last read unless it was dropped."""
        last = self._root
        if last is not None and (last.length, last.token) == (self._length, root.token):
            return last.inputs, last.query
        head, inputs = self._head, self._join([root])
        return inputs, head.queries_keys_values(inputs.normed, head.rope_rows(position))[0]

    def _join(self, nodes: list[DraftNode]) -> LayerInput:
        """Join the nodes of one level with the hidden states before them."""
        last = self.hidden[-1:]
        states = [last if node.parent is None else node.parent.hidden for node in nodes]
        hidden = states[0] if len(states) == 1 else torch.cat(states)
        ids = nodes[0].token
        if not isinstance(ids, Tensor):
            ids = self._head.to_device(np.array([node.token for node in nodes], np.int32))
        return self._head.join(hidden, ids)

    def _write(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [kv_heads, n, head_width] from a slot on."""
        end = first + keys.shape[1]
        self._buffers.keys[first:end] = keys.transpose(0, 1)
        self._buffers.values[first:end] = values.transpose(0, 1)

    def _mask(self, nodes: list[DraftNode]) -> Tensor | None:
        """The keys that each node does not attend to: those of other branches; None: there are
        none."""
        is_masked = np.ones((len(nodes), self._length + self._num_drafted), np.bool_)
        is_masked[:, : self._length] = False
        for row, node in enumerate(nodes):
            ancestor: DraftNode | None = node
            while ancestor is not None and ancestor.slot >= 0:
                is_masked[row, ancestor.slot] = False
                ancestor = ancestor.parent
        return self._head.to_device(is_masked) if is_masked.any() else None

    def _reserve(self, count: int) -> None:
        """Make room for at least `count` positions."""
        old = self._buffers
        if count <= old.capacity:
            return
        self._buffers = self._head.buffers(count)
        if old.capacity:
            self._buffers.copy(old, self._length + self._num_drafted)
            self._head.recycle(old)
        self._graph_root, self._graph_depth = None, -1


# -- Build a draft from a head's logits: a greedy chain, or a small tree


@torch.inference_mode()
def build_draft(
    context: HeadContext, tokens: Sequence[int], ids: Tensor, shape: DraftShape, temperature: float
) -> DraftTree | list[int]:
    """Build a draft of this shape after these tokens."""
    if shape.width == 1:
        return _build_chain(context, tokens, ids, shape, temperature)
    level, all_nodes = [DraftNode(int(tokens[-1]))], list[DraftNode]()
    for depth in range(1, shape.levels + 1):
        logprobs, indices = _logprobs(context.expand(level, tokens), temperature).topk(shape.width)
        pairs = torch.stack((ids[indices].double(), logprobs.double()), -1)
        candidates = [
            DraftNode(int(token), node, depth, node.score + logprob)
            for node, row in zip(level, pairs.tolist(), strict=True)  # one copy to the host
            for token, logprob in row
        ]
        candidates.sort(key=lambda node: -node.score)
        all_nodes += candidates
        level = candidates[: shape.width]
    all_nodes.sort(key=lambda node: -node.score)  # stable: parents stay before their children
    selected = all_nodes[: shape.nodes]
    number: dict[DraftNode | None, int] = {node: place for place, node in enumerate(selected)}
    parents = [number.get(node.parent, -1) for node in selected]
    return DraftTree([int(node.token) for node in selected], parents)


def _build_chain(
    context: HeadContext, tokens: Sequence[int], ids: Tensor, shape: DraftShape, temperature: float
) -> list[int]:
    """Draft greedily while the joint probability is at least `shape.min_probability`.

    Tokens stay on the device until the end, where one copy brings them to the host. A minimum
    probability is checked at every level: waiting for a number takes less time than computing a
    level that is dropped.
    """
    node, drafted, score = DraftNode(int(tokens[-1])), list[Tensor](), 0.0
    for depth in range(1, shape.levels + 1):
        logits = context.expand([node], tokens)
        if shape.min_probability:
            logprob, index = _logprobs(logits, temperature).max(-1)
            score += logprob.item()
            if score < math.log(shape.min_probability):
                break
        else:
            index = logits.argmax(-1)
        token = ids[index]
        node = DraftNode(token, node, depth)
        drafted.append(token)
    return list(torch.cat(drafted).tolist()) if drafted else []


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).log_softmax(-1)
