"""What is measured on a GPU: the parts, what each must reach, and the shapes of the models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

# As published in each model's config.json, except that the smallest has a head of its own (as many
# bytes to read, and texts that wander). Weights are random, so that nothing is downloaded.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
}  # fmt: skip

# The same models for a machine without a GPU: what runs is the whole of it, in seconds.
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "max_position_embeddings": 512,
}  # fmt: skip

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the table."""

    key: str
    title: str
    shape: str
    work: str = "one"  # one text, many, first (time to the first token), load, server
    prompt: int = 128
    new: int = 256
    rows: int = 1
    options: dict[str, Any] = field(default_factory=lambda: dict(GREEDY))
    packed: str = ""  # the blocks of a GGUF file, instead of bfloat16
    exact: bool = False
    must: float | None = None  # tokens a second, or the share of the limit for `first`
    aim: float | None = None
    peers: tuple[str, ...] = ()  # ways in which transformers does the same
    seconds: float = 150  # after which the part is given up

    @property
    def model(self) -> tuple[str, str, bool]:
        """Parts with the same one share a process."""
        return self.shape, self.packed, self.exact

    @property
    def context(self) -> int:
        return self.prompt + self.new + 8


_BATCH: dict[str, Any] = {"work": "many", "rows": 256, "new": 128}
PARTS = {
    part.key: part
    for part in (
        Part(key="8b", title="8B bf16, one text", shape="8b", must=250, aim=263,
             peers=("static",)),
        Part(key="8b-sampled", title="8B bf16, one text, sampled", shape="8b", options=SAMPLED),
        Part(key="8b-2300", title="8B bf16, one text behind 2,300 tokens", shape="8b",
             prompt=2300, new=128, must=230),
        Part(key="8b-16000", title="8B bf16, one text behind 16,000 tokens", shape="8b",
             prompt=16000, new=128),
        Part(key="8b-first", title="8B bf16, first token behind 4,096", shape="8b", work="first",
             prompt=4096, new=1, must=0.5),
        Part(key="8b-64", title="8B bf16, 64 requests of 512 + 128", shape="8b", work="many",
             rows=64, prompt=512, new=128, peers=("continuous", "static")),
        Part(key="135m", title="135M bf16, one text", shape="135m", must=2500, aim=3000,
             peers=("static",)),
        Part(key="135m-sampled", title="135M bf16, one text, sampled", shape="135m",
             options=SAMPLED),
        Part(key="0.6b", title="0.6B bf16, 256 requests of 128 + 128", shape="0.6b", must=30000,
             aim=45000, peers=("continuous", "static"), **_BATCH),
        Part(key="0.6b-sampled", title="the same, sampled (T 0.8, top-p 0.95)", shape="0.6b",
             must=25000, options=SAMPLED, **_BATCH),
        Part(key="8b-q4", title="8B at 4 bits (Q4_0), one text", shape="8b", packed="Q4_0",
             must=500, aim=700),
        Part(key="8b-q4k", title="8B at 4 bits (Q4_K), one text", shape="8b", packed="Q4_K"),
        Part(key="8b-q8", title="8B at 8 bits (Q8_0), one text", shape="8b", packed="Q8_0"),
        Part(key="8b-load", title="8B bf16, from the disk to the GPU", shape="8b", work="load",
             seconds=240),
        Part(key="server", title="our server, 0.6B bf16, 256 streams of 128 + 128", shape="0.6b",
             work="server", rows=256, new=128, must=10000, aim=20000, seconds=180),
        Part(key="8b-exact", title="8B bf16, one text, exact", shape="8b", exact=True),
        Part(key="8b-64-exact", title="8B bf16, 64 requests of 512 + 128, exact", shape="8b",
             work="many", rows=64, prompt=512, new=128, exact=True),
        Part(key="0.6b-exact", title="0.6B bf16, 256 requests of 128 + 128, exact", shape="0.6b",
             exact=True, **_BATCH),
    )
}  # fmt: skip
QUICK = ("8b", "135m", "135m-sampled", "0.6b", "0.6b-sampled")
FULL = tuple(key for key in PARTS if key not in ("8b-q4k", "8b-q8"))


def tiny(part: Part) -> Part:
    """The same part, small enough for any machine."""
    return replace(
        part,
        prompt=min(part.prompt, 24),
        new=min(part.new, 4),
        rows=min(part.rows, 3),
        must=None,
        aim=None,
    )


def shape_of(part: Part, small: bool) -> dict[str, Any]:
    """The model as a config.json says it."""
    return {**SHAPES[part.shape], **(_TINY if small else {})}
