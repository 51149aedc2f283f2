"""Rules for the tensor names that families share, in safetensors and in GGUF files.

`{p}` is a prefix that differs between exports of the same model, `{i}` the layer, `{e}` the expert.
"""

from __future__ import annotations

from unspool.model.weights import Layout, TensorRule


def layer(file_name: str, *weights: str, layout: Layout = "plain") -> tuple[TensorRule, TensorRule]:
    """Rules for the weight and the bias of a module in a layer."""
    return (
        TensorRule(
            f"{file_name}.weight", tuple(f"layers.{{i}}.{o}.weight" for o in weights), layout
        ),
        TensorRule(f"{file_name}.bias", tuple(f"layers.{{i}}.{o}.bias" for o in weights), layout),
    )


def rules(*groups: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    return tuple(rule for group in groups for rule in group)


ENDS = (
    TensorRule("{p}embed_tokens.weight", ("embed.weight",)),
    TensorRule("{p}norm.weight", ("norm.weight",)),
    TensorRule("lm_head.weight", ("head.weight",)),
    TensorRule("language_model.lm_head.weight", ("head.weight",)),
    TensorRule("lm_head.bias", ("head.bias",)),
    TensorRule("lm_head.bias", ("head_bias",)),
)
IN_LAYER = "{p}layers.{i}."
ATTENTION = rules(
    layer(IN_LAYER + "self_attn.q_proj", "attention.q"),
    layer(IN_LAYER + "self_attn.k_proj", "attention.k"),
    layer(IN_LAYER + "self_attn.v_proj", "attention.v"),
    layer(IN_LAYER + "self_attn.o_proj", "attention.out"),
    layer(IN_LAYER + "self_attn.q_norm", "attention.q_norm"),
    layer(IN_LAYER + "self_attn.k_norm", "attention.k_norm"),
)
FEED = rules(
    layer(IN_LAYER + "mlp.gate_proj", "feed.gate"),
    layer(IN_LAYER + "mlp.up_proj", "feed.up"),
    layer(IN_LAYER + "mlp.down_proj", "feed.down"),
)
NORMS_BEFORE = rules(
    layer(IN_LAYER + "input_layernorm", "attention_norm"),
    layer(IN_LAYER + "post_attention_layernorm", "feed_norm"),
)
NORMS_AFTER = rules(
    layer(IN_LAYER + "post_attention_layernorm", "attention_post_norm"),
    layer(IN_LAYER + "post_feedforward_layernorm", "feed_post_norm"),
)
NORMS_AROUND = rules(
    layer(IN_LAYER + "input_layernorm", "attention_norm"),
    NORMS_AFTER,
    layer(IN_LAYER + "pre_feedforward_layernorm", "feed_norm"),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Rules for the router and the expert matrices of a mixture-of-experts block."""
    expert_prefix = "experts.{e}."
    names = {
        "gate": "router",
        expert_prefix + gate: "gate",
        expert_prefix + up: "up",
        expert_prefix + down: "down",
    }
    stacked, sides = f"{IN_LAYER}{block}.experts.", ("gate", "up")
    return (
        *(
            TensorRule(
                f"{IN_LAYER}{block}.{file_name}.weight", (f"layers.{{i}}.feed.{weight}.weight",)
            )
            for file_name, weight in names.items()
        ),
        # Some files stack the matrices of all experts in one tensor.
        TensorRule(f"{stacked}gate_up_proj", tuple(f"layers.{{i}}.feed.{o}.weight" for o in sides)),
        TensorRule(f"{stacked}down_proj", ("layers.{i}.feed.down.weight",)),
    )


LLAMA = rules(ENDS, ATTENTION, NORMS_BEFORE, FEED)


def gguf_rules(*, interleaved: bool, plus_one: bool, gated: bool = False) -> tuple[TensorRule, ...]:
    """llama.cpp's tensor names, the same for every family.

    Args:
        interleaved: Rows of queries and keys are permuted for the rotation of adjacent pairs.
        plus_one: Norm weights are stored with the one already added.
        gated: Rows of a head's gate follow those of its queries.
    """
    rope_layout: Layout = "interleaved" if interleaved else "plain"
    norm: Layout = "plus_one" if plus_one else "plain"
    return rules(
        (
            TensorRule("token_embd.weight", ("embed.weight",)),
            TensorRule("position_embd.weight", ("position_embed.weight",)),
            TensorRule("output_norm.weight", ("norm.weight",), norm),
            TensorRule("output_norm.bias", ("norm.bias",)),
            TensorRule("output.weight", ("head.weight",)),
            TensorRule("output.bias", ("head.bias",)),
            TensorRule("output.bias", ("head_bias",)),
        ),
        layer("blk.{i}.attn_norm", "attention_norm", layout=norm),
        layer("blk.{i}.attn_q", "attention.q", "attention.gate", layout="gated_heads")
        if gated
        else layer("blk.{i}.attn_q", "attention.q", layout=rope_layout),
        layer("blk.{i}.attn_k", "attention.k", layout=rope_layout),
        layer("blk.{i}.attn_v", "attention.v"),
        layer("blk.{i}.attn_qkv", "attention.q", "attention.k", "attention.v"),
        layer("blk.{i}.attn_q_norm", "attention.q_norm", layout=norm),
        layer("blk.{i}.attn_k_norm", "attention.k_norm", layout=norm),
        layer("blk.{i}.attn_output", "attention.out"),
        layer("blk.{i}.post_attention_norm", "attention_post_norm", layout=norm),
        layer("blk.{i}.ffn_norm", "feed_norm", layout=norm),
        layer("blk.{i}.ffn_gate", "feed.gate"),
        layer("blk.{i}.ffn_up", "feed.up"),
        layer("blk.{i}.ffn_up", "feed.gate", "feed.up"),  # Phi-3: both in one
        layer("blk.{i}.ffn_down", "feed.down"),
        layer("blk.{i}.post_ffw_norm", "feed_post_norm", layout=norm),
        layer("blk.{i}.ffn_gate_inp", "feed.router"),
        layer("blk.{i}.ffn_gate_exps", "feed.gate"),
        layer("blk.{i}.ffn_up_exps", "feed.up"),
        layer("blk.{i}.ffn_down_exps", "feed.down"),
        layer("blk.{i}.ffn_gate.{e}", "feed.gate"),  # files from before experts were stacked
        layer("blk.{i}.ffn_up.{e}", "feed.up"),
        layer("blk.{i}.ffn_down.{e}", "feed.down"),
        GGUF_RECURRENT,
    )


GGUF_RECURRENT = rules(
    layer("blk.{i}.shortconv.in_proj", "mixer.b", "mixer.c", "mixer.x"),
    layer("blk.{i}.shortconv.conv", "mixer.conv", layout="channels"),
    layer("blk.{i}.shortconv.out_proj", "mixer.out"),
    layer("blk.{i}.attn_qkv", "mixer.qkv"),
    layer("blk.{i}.attn_gate", "mixer.z"),
    layer("blk.{i}.ssm_beta", "mixer.b"),
    layer("blk.{i}.ssm_alpha", "mixer.a"),
    (
        TensorRule("blk.{i}.ssm_a", ("layers.{i}.mixer.a_log",), "log_of_minus"),
        TensorRule("blk.{i}.ssm_dt.bias", ("layers.{i}.mixer.dt_bias",)),
        TensorRule("blk.{i}.ssm_norm.weight", ("layers.{i}.mixer.norm_weight",)),
        TensorRule("blk.{i}.exp_probs_b.bias", ("layers.{i}.feed.selection_bias",)),
    ),
    layer("blk.{i}.ffn_gate_inp_shexp", "feed.shared_gate"),
    layer("blk.{i}.ffn_gate_shexp", "feed.shared.gate"),
    layer("blk.{i}.ffn_up_shexp", "feed.shared.up"),
    layer("blk.{i}.ffn_down_shexp", "feed.shared.down"),
)
