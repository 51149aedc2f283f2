"""Models with random weights, for machines where none can be downloaded, and a null model."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from lib.shapes import BLOCK_NUMBERS, SHAPES, random_blocks
from unspool.backends.step import StepBatch, StepLimits, StepResult
from unspool.model.config import ModelConfig


def random_transformer(shape: dict[str, Any], dtype: str, device: str) -> Any:
    """Plain transformer created on the device; its texts do not loop."""
    import torch

    from unspool.model.files.config_json import config_from_hf
    from unspool.model.layers.transformer import Transformer

    config = config_from_hf(shape)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device), torch.no_grad():
            model = Transformer(config)
            scale = 4 / config.width**0.5
            model.embed.weight.normal_(0, scale if config.tied else 1)
            if model.head is not None:
                model.head.weight.normal_(0, scale)
    finally:
        torch.set_default_dtype(default)
    return model.eval().requires_grad_(False)


def tiny_causal(folder: Path) -> Path:
    """Save a random model with a byte vocabulary, and a text, to test a benchmark itself."""
    from unspool.model.files.checkpoint import save_weights
    from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
    from unspool.train.learning.model_size import new_config, new_model

    model = folder / "model"
    if not (model / "config.json").exists():
        settings = TokenizerSettings(vocab_size=260)
        model.mkdir(parents=True, exist_ok=True)
        config = new_config(2, 264, 256, width=32, head_width=8, ff_width=64)
        save_weights(config, new_model(config, 1).state_dict(), model)
        save_tokenizer_files(train_bpe([], settings), settings, model)
        words = "\n\n".join(f"the {n} people of these states go on {n * n}" for n in range(400))
        (folder / "words.txt").write_text(words)
    return model


# -- Hugging Face folder of Qwen3-0.6B's shape -----------------------------------------------------

CONTROLS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> None:
    """Write config, random weights and vocabulary like a downloaded checkpoint."""
    import torch

    from unspool.model.files.checkpoint import save_checkpoint

    shape = SHAPES["0.6b"] | {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape["vocab_size"])
    save_checkpoint(random_transformer(shape, "bfloat16", device), folder)


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level vocabulary of `size` pieces, with a chat template.

    Random weights write any token id, so every id has a piece: the 256 bytes, invented words and
    two control tokens. Each letter of a prompt is a token.
    """
    from tokenizers import pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"Ġw{number}" for number in range(size - len(pieces) - len(CONTROLS))]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *CONTROLS])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bytes_only = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [
            {"id": vocabulary[control], "content": control, "special": True, **flags}
            for control in CONTROLS
        ],
        "pre_tokenizer": {**bytes_only, "add_prefix_space": False},
        "post_processor": None,
        "decoder": {**bytes_only, "add_prefix_space": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    settings = {"eos_token": CONTROLS[1], "chat_template": TEMPLATE}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


# -- GGUF files ------------------------------------------------------------------------------------


def random_rows(rows: int, columns: int, kind: str) -> Any:
    """Random quantized rows."""
    blocks = columns // BLOCK_NUMBERS[kind]
    flat = random_blocks(min(rows, 1024) * blocks, columns, kind).reshape(min(rows, 1024), -1)
    return np.ascontiguousarray(np.tile(flat, (-(-rows // len(flat)), 1))[:rows])


class GgufFile:
    """A GGUF file that is written tensor by tensor; `bytes_read` counts the quantized ones."""

    def __init__(self, path: Path, family: str) -> None:
        import gguf

        self.path, self.types = path, gguf.GGMLQuantizationType
        self.writer = gguf.GGUFWriter(path.with_suffix(".part"), family)
        self.family, self.bytes_read = family, 0
        self._blocks: dict[tuple[int, int, str], Any] = {}  # equal sizes share their numbers

    def settings(self, values: dict[str, int | float]) -> None:
        for key, value in values.items():
            add = self.writer.add_float32 if isinstance(value, float) else self.writer.add_uint32
            add(f"{self.family}.{key}", value)

    def matrix(self, name: str, rows: int, columns: int, kind: str) -> None:
        key = (rows, columns, kind)
        if key not in self._blocks:
            self._blocks[key] = random_rows(*key)
        data = self._blocks[key]
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=self.types[kind])
        self.bytes_read += data.nbytes

    def vocabulary(self, size: int, family: str) -> None:
        """Bytes, and a made-up word for every other token."""
        from unspool.text.tokenizer.pieces import byte_characters

        letters = byte_characters()
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre(family)
        self.writer.add_token_list([*letters, *(f"<{n}>" for n in range(len(letters), size))])
        self.writer.add_token_types([1] * size)
        self.writer.add_token_merges(["a b"])
        self.writer.add_eos_token_id(size - 1)

    def vector(self, name: str, values: Any) -> None:
        self.writer.add_tensor(name, np.asarray(values, np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        self.path.with_suffix(".part").replace(self.path)


def write_llama_gguf(shape: dict[str, Any], kind: str, path: Path) -> float:
    """Write a Llama of random blocks; return the bytes that one token reads."""
    file = GgufFile(path, "llama")
    width, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    file.settings({
        "block_count": shape["num_hidden_layers"], "embedding_length": width,
        "context_length": shape["max_position_embeddings"], "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.key_length": size, "attention.value_length": size,
        "rope.dimension_count": size, "rope.freq_base": float(shape["rope_theta"]),
        "attention.layer_norm_rms_epsilon": shape["rms_norm_eps"],
    })  # fmt: skip
    file.vocabulary(shape["vocab_size"], "llama-bpe")
    file.matrix("token_embd", shape["vocab_size"], width, kind)
    if not shape.get("tie_word_embeddings"):
        file.bytes_read = 0  # of the embedding only a row is read
        file.matrix("output", shape["vocab_size"], width, kind)
    file.vector("output_norm.weight", np.ones(width))
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            file.vector(f"{prefix}{name}.weight", np.ones(width))
        for name, rows, columns in (
            ("attn_q", heads * size, width), ("attn_k", kv_heads * size, width),
            ("attn_v", kv_heads * size, width), ("attn_output", width, heads * size),
            ("ffn_gate", inner, width), ("ffn_up", inner, width), ("ffn_down", width, inner),
        ):  # fmt: skip
            file.matrix(prefix + name, rows, columns, kind)
    file.close()
    return file.bytes_read


def write_qwen35_gguf(path: Path) -> None:
    """Write a model of Qwen3.5-0.8B's shape: 18 layers of gated DeltaNet, 6 of attention."""
    width, layers, inner, vocab_size = 1024, 24, 3584, 248_320
    heads, kv_heads, size = 8, 2, 256
    delta_heads, delta_size, kernel, interval = 16, 128, 4, 4
    delta = delta_heads * delta_size
    random, file = np.random.default_rng(0), GgufFile(path, "qwen35")
    file.settings({
        "block_count": layers, "context_length": 32_768, "embedding_length": width,
        "feed_forward_length": inner, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": size,
        "attention.value_length": size, "rope.dimension_count": size // 4,
        "full_attention_interval": interval, "ssm.conv_kernel": kernel,
        "ssm.state_size": delta_size, "ssm.group_count": delta_heads,
        "ssm.time_step_rank": delta_heads, "ssm.inner_size": delta, "rope.freq_base": 1e7,
        "attention.layer_norm_rms_epsilon": 1e-6,
    })  # fmt: skip
    file.writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    file.vocabulary(vocab_size, "qwen35")

    def vector(name: str, *shape: int, mean: float = 1.0) -> None:
        file.vector(name, mean + 0.1 * random.standard_normal(shape))

    file.matrix("token_embd", vocab_size, width, "Q8_0")
    vector("output_norm.weight", width)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        vector(f"{prefix}attn_norm.weight", width)
        vector(f"{prefix}post_attention_norm.weight", width)
        matrices = [
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ]
        if (layer + 1) % interval:
            matrices += [
                ("attn_qkv", 3 * delta, width), ("attn_gate", delta, width),
                ("ssm_alpha", delta_heads, width), ("ssm_beta", delta_heads, width),
                ("ssm_out", width, delta),
            ]  # fmt: skip
            vector(f"{prefix}ssm_conv1d.weight", 3 * delta, kernel, mean=0.2)
            vector(f"{prefix}ssm_a", delta_heads, mean=-1.0)
            vector(f"{prefix}ssm_dt.bias", delta_heads, mean=-2.0)
            vector(f"{prefix}ssm_norm.weight", delta_size)
        else:
            matrices += [
                ("attn_q", 2 * heads * size, width), ("attn_k", kv_heads * size, width),
                ("attn_v", kv_heads * size, width), ("attn_output", width, heads * size),
            ]  # fmt: skip
            vector(f"{prefix}attn_q_norm.weight", size)
            vector(f"{prefix}attn_k_norm.weight", size)
        for name, rows, columns in matrices:
            kind = "Q8_0" if name in ("ssm_alpha", "ssm_beta") else "Q4_0"
            file.matrix(prefix + name, rows, columns, kind)
    file.close()


# -- Null model ------------------------------------------------------------------------------------

VOCABULARY = 49_152
CONTEXT = 4096


class NullDevice:
    """Backend that takes a fixed time per step and returns tokens that were not computed."""

    page_size, page_bytes, overlaps, echoes = 16, 1, True, False
    state_bytes = state_count = 0
    page_count, context, vocab_size = 200_000, CONTEXT, VOCABULARY
    limits = StepLimits(max_rows=256, prefill_tokens=8192, prefill_beside_decode=2048)

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.idle_at = 0.0  # when all launched steps are done
        self.logits = np.zeros((256, VOCABULARY), np.float32)
        self.logprobs = np.full(256, -1.5)
        self.num_launched = 0

    def set_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> Any:
        self.num_launched += 1
        self.idle_at = max(self.idle_at, time.perf_counter()) + self.step_s
        count = len(batch.sample_indices)
        tokens = (np.arange(count) * 7919 + self.num_launched * 31) % (VOCABULARY - 1000) + 500
        logits = self.logits[: len(batch.logits_indices)]
        return _NullStep(StepResult(tokens, self.logprobs[:count], logits), self.idle_at)


class _NullStep:
    def __init__(self, outcome: StepResult, done_at: float) -> None:
        self.outcome, self.done_at = outcome, done_at

    def ready(self) -> bool:
        return time.perf_counter() >= self.done_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.done_at - time.perf_counter()))
        return self.outcome


class NullLoaded:
    """Loaded model whose backend is the null device."""

    config = ModelConfig(
        family="null", vocab_size=VOCABULARY, width=64, layers=1, heads=1, kv_heads=1,
        head_width=64, ff_width=64, context=CONTEXT, positions="none",
    )  # fmt: skip
    precision, device, numerics = "nothing", "none", "null"

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def backend(self, *, memory: int | None, context: int) -> NullDevice:
        return NullDevice(self.step_s)

    def fingerprint(self) -> str:
        return "null"
