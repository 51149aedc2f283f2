"""Drafting heads in Unspool's format on the CPU kernels, as three short programs.

The first fuses hidden states and computes keys and values, the second projects embeddings for the
mixture of the last tokens, the third drafts one token for each of several nodes. RoPE and the page
layout are done here, so positions that were not read have no keys.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from unspool.backends.cpu.model import CpuModel
from unspool.backends.cpu.packing import PackedMatrix, pack, pack_all
from unspool.backends.cpu.plan import ExecutionPlan, Operation
from unspool.backends.cpu.program import FloatKvPages, NativeProgram, TokenRows
from unspool.backends.step import Floats, Ints
from unspool.decoding.speculative.arrays import apply_rope
from unspool.decoding.speculative.head import (
    DraftNode,
    HeadConfig,
    HeadFiles,
    gather_rows,
    last_tokens,
)
from unspool.model.config import Rotary
from unspool.model.files.stored import FileTensor

ROWS = 64  # maximum of a program run
_CACHED_PROJECTIONS = 4096  # tokens


class CpuHead:
    """A head for a model of the CPU backend; it uses the model's embedding."""

    def __init__(self, files: HeadFiles, model: CpuModel, context: int) -> None:
        self.config = config = files.config
        self.name, self.layers, self.ids = config.name, config.layers, files.ids
        model.wait()
        rows = FileTensor.from_float32(gather_rows(model, "head.weight", files.ids))
        matrices: dict[str, PackedMatrix] = pack_all(files.matrices, threads=model.threads)
        matrices["head"] = pack(rows, store="8", threads=model.threads)
        matrices["embed"] = model.packed["embed.weight"]
        positions = np.arange(context + ROWS)
        rotary = Rotary(width=config.head_width, base=config.rope_theta)
        self.cosine, self.sine = rotary.tables(positions, 0)

        def program(plan: ExecutionPlan, *shared: str) -> NativeProgram:
            return NativeProgram(
                plan, matrices, files.norms, threads=model.threads, rows=ROWS,
                shared=shared,
            )  # fmt: skip

        plans = _Plans(model, config, len(files.ids))
        self.read_program = program(plans.read(), "features", "fused", "keys_values")
        self.project_program = program(plans.project(), "words")
        self.draft_program = program(plans.draft(), "state", "earlier", "x", "words", "logits")
        self._projected: dict[int, Floats] = {}
        self._embedding = FloatKvPages(config.kv_heads, config.head_width, self.cosine, self.sine)
        self._embedding.write(0, *(np.zeros((1, config.kv_heads, config.head_width), "f4"),) * 2)

    def context(self) -> CpuHeadContext:
        return CpuHeadContext(self)

    def projected(self, token: int) -> Floats:
        """Projection of a token for the mixture, for each position it may have in it."""
        projection = self._projected.get(token)
        if projection is None:
            batch = TokenRows(np.array([token]), np.zeros(1, np.int64), 1, 1)
            self.project_program.run_tokens(batch, self._embedding)
            projection = self.cache_projection(token, self.project_program.buffers["words"][0])
        return projection

    def cache_projection(self, token: int, projection: Floats) -> Floats:
        if len(self._projected) >= _CACHED_PROJECTIONS:
            self._projected.clear()
        stored = self._projected[token] = projection.copy()
        return stored


class CpuHeadContext:
    """The state of the head for one text."""

    def __init__(self, head: CpuHead) -> None:
        config = head.config
        self._head, self._length = head, 0
        self._fused = np.empty((64, config.width), np.float32)
        self._memory = FloatKvPages(config.kv_heads, config.head_width, head.cosine, head.sine)
        zeros = np.zeros((1, config.kv_heads, config.head_width), np.float32)
        self._memory.write(0, zeros, zeros)  # attention sink

    def __len__(self) -> int:
        return self._length

    def truncate(self, count: int) -> None:
        self._length = min(self._length, count)

    def fork(self, count: int) -> CpuHeadContext:
        other = copy.copy(self)
        other._fused, other._memory = self._fused[: count + 64].copy(), self._memory.copy(count + 1)
        other.truncate(count)
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        for start in range(0, len(positions), ROWS):
            self._read(positions[start : start + ROWS], vectors[:, start : start + ROWS])

    def _read(self, positions: Ints, vectors: Floats) -> None:
        head, count, length = self._head, len(positions), self._length
        config, buffers = head.config, head.read_program.buffers
        buffers["features"][:count] = vectors.swapaxes(0, 1).reshape(count, -1)
        head.read_program.run(count)
        kv = buffers["keys_values"][:count].reshape(count, 2, config.kv_heads, -1)
        keys = apply_rope(kv[:, 0], head.cosine[positions], head.sine[positions])
        self._memory.write(length + 1, keys, kv[:, 1])
        if length + count > len(self._fused):
            grown = np.empty((length + count, config.width), np.float32)
            self._fused = np.concatenate((self._fused, grown))
        self._fused[length : length + count] = buffers["fused"][:count]
        self._length += count

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        logits = [self._expand(nodes[at : at + ROWS], tokens) for at in range(0, len(nodes), ROWS)]
        return np.concatenate(logits) if len(logits) > 1 else logits[0]

    def _expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        head, count = self._head, len(nodes)
        config, buffers = head.config, head.draft_program.buffers
        width = config.word_width
        for row, node in enumerate(nodes):
            parent = node.parent
            buffers["state"][row] = (
                self._fused[self._length - 1] if parent is None else parent.state
            )
            earlier = last_tokens(node, tokens, config.words)[1:]
            for back, token in enumerate(earlier):
                part = head.projected(token)[(back + 1) * width : (back + 2) * width]
                buffers["earlier"][row, back * width : (back + 1) * width] = part
        depths = np.array([node.depth for node in nodes])
        batch = TokenRows(
            np.array([node.token for node in nodes]),
            depths + (len(tokens) - 1),
            self._length + 1,
            self._memory.num_pages,
        )
        head.draft_program.run_tokens(batch, self._memory)
        states = buffers["x"][:count].copy()
        for row, node in enumerate(nodes):
            node.state = states[row]
            head.cache_projection(node.token, buffers["words"][row])
        return buffers["logits"][:count]


class _Plans:
    """Builds the plans of the three programs."""

    def __init__(self, model: CpuModel, config: HeadConfig, vocabulary: int) -> None:
        self._model, self._config, self._vocabulary = model, config, vocabulary
        self._plan = ExecutionPlan(model.config)

    def _buffers(self, rows: str, **widths: int) -> None:
        self._plan.buffers.update({name: (width, rows) for name, width in widths.items()})

    def _linear(
        self, source: str, target: str, matrix: str, *, norm: str = "", width: int = 0,
        add: bool = False, activated: bool = False, rows: str = "tokens",
    ) -> None:  # fmt: skip
        self._plan.operations.append(
            Operation(
                kind="linear", source=source, target=target, matrices=(matrix,), rows=rows,
                width=width or self._plan.buffers[source][0], vector=norm, add=add,
                prepare="norm" if norm else "activation" if activated else "none",
                gated=activated, epsilon=self._config.norm_eps,
            )
        )  # fmt: skip

    def _embed(self) -> None:
        self._plan.operations.append(Operation(kind="embed", target="e", matrices=("embed",)))

    def read(self) -> ExecutionPlan:
        config = self._config
        self._plan = ExecutionPlan(self._model.config)
        features = config.width * len(config.layers)
        kv_width = 2 * config.kv_heads * config.head_width
        self._buffers("selected", features=features, fused=config.width, keys_values=kv_width)
        for number in range(len(config.layers)):
            self._plan.operations.append(
                Operation(
                    kind="norm", source="features", target="features", rows="selected",
                    offset=number * config.width, width=config.width,
                    vector=f"features.norm.{number}", epsilon=config.norm_eps,
                )
            )  # fmt: skip
        self._linear("features", "fused", "features.fuse", rows="selected")
        self._linear(
            "fused", "keys_values", "context.keys_values", norm="context.norm", rows="selected"
        )
        return self._plan

    def project(self) -> ExecutionPlan:
        config = self._config
        self._plan = ExecutionPlan(self._model.config)
        self._buffers("tokens", e=config.width, words=config.words * config.word_width)
        self._embed()
        self._linear("e", "words", "words.project", norm="words.norm")
        return self._plan

    def draft(self) -> ExecutionPlan:
        config, width = self._config, self._config.width
        inner, words = config.heads * config.head_width, config.words * config.word_width
        self._plan = ExecutionPlan(self._model.config)
        self._buffers(
            "tokens", e=width, state=width, x=width, words=words, mix=2 * config.mix_width,
            earlier=words - config.word_width, queries=inner, mixed=inner,
            hidden=2 * config.ff_width, output=width, logits=self._vocabulary,
        )  # fmt: skip
        self._embed()
        self._linear("e", "words", "words.project", norm="words.norm")
        self._linear("words", "mix", "mix.last_word", width=config.word_width)
        self._linear("earlier", "mix", "mix.earlier_words", add=True)
        self._linear("state", "x", "join.state", norm="join.state.norm")
        self._linear("e", "x", "join.word", norm="join.word.norm", add=True)
        self._linear("x", "queries", "attention.query", norm="attention.norm")
        self._plan.operations += [
            Operation(
                kind="rope", source="queries", heads=config.heads, rotary=0, queries_only=True
            ),
            Operation(
                kind="attention",
                source="queries",
                target="mixed",
                heads=config.heads,
                scale=config.head_width**-0.5,
            ),
        ]
        self._linear("mixed", "x", "attention.out", add=True)
        self._linear("x", "hidden", "feed.gate_up", norm="feed.norm")
        self._linear("hidden", "x", "feed.down", width=config.ff_width, add=True, activated=True)
        self._plan.operations.append(Operation(kind="gather", source="x", target="output"))
        self._linear("x", "mix", "mix.state", norm="mix.norm", add=True)
        self._linear("mix", "output", "mix.out", width=config.mix_width, add=True, activated=True)
        self._linear("output", "logits", "head", norm="final.norm")
        return self._plan
