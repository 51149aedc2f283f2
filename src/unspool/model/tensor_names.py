"""What other people's files call the weights of a layer: the names that families share.

`{p}` stands for a prefix that differs between exports of the same model, `{i}` for the layer and
`{e}` for the expert.
"""

from __future__ import annotations

from unspool.model.weights import Layout, Rule


def layer(theirs: str, *ours: str, layout: Layout = "plain") -> tuple[Rule, Rule]:
    """The weight and the bias of something inside a layer."""
    return (
        Rule(f"{theirs}.weight", tuple(f"layers.{{i}}.{o}.weight" for o in ours), layout),
        Rule(f"{theirs}.bias", tuple(f"layers.{{i}}.{o}.bias" for o in ours), layout),
    )


def rules(*groups: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(rule for group in groups for rule in group)


ENDS = (
    Rule("{p}embed_tokens.weight", ("embed.weight",)),
    Rule("{p}norm.weight", ("norm.weight",)),
    Rule("lm_head.weight", ("head.weight",)),
    Rule("language_model.lm_head.weight", ("head.weight",)),
    Rule("lm_head.bias", ("head.bias",)),
    Rule("lm_head.bias", ("head_bias",)),
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


def experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The router of a block of experts, and what each expert holds."""
    each = "experts.{e}."
    names = {"gate": "router", each + gate: "gate", each + up: "up", each + down: "down"}
    stacked, sides = f"{IN_LAYER}{block}.experts.", ("gate", "up")
    return (
        *(
            Rule(f"{IN_LAYER}{block}.{theirs}.weight", (f"layers.{{i}}.feed.{ours}.weight",))
            for theirs, ours in names.items()
        ),
        # Some files hold the matrices of all experts in one tensor.
        Rule(f"{stacked}gate_up_proj", tuple(f"layers.{{i}}.feed.{o}.weight" for o in sides)),
        Rule(f"{stacked}down_proj", ("layers.{i}.feed.down.weight",)),
    )


LLAMA = rules(ENDS, ATTENTION, NORMS_BEFORE, FEED)


def gguf(*, interleaved: bool, plus_one: bool, gated: bool = False) -> tuple[Rule, ...]:
    """llama.cpp's names, the same for every family.

    `interleaved`: rows of queries and keys are ordered for a rotation of neighbours.
    `plus_one`: norm weights are stored with the one already added.
    `gated`: rows of a head's gate stand behind those of its queries.
    """
    turned: Layout = "interleaved" if interleaved else "plain"
    norm: Layout = "plus_one" if plus_one else "plain"
    return rules(
        (
            Rule("token_embd.weight", ("embed.weight",)),
            Rule("position_embd.weight", ("position_embed.weight",)),
            Rule("output_norm.weight", ("norm.weight",), norm),
            Rule("output_norm.bias", ("norm.bias",)),
            Rule("output.weight", ("head.weight",)),
            Rule("output.bias", ("head.bias",)),
            Rule("output.bias", ("head_bias",)),
        ),
        layer("blk.{i}.attn_norm", "attention_norm", layout=norm),
        layer("blk.{i}.attn_q", "attention.q", "attention.gate", layout="gated_heads")
        if gated
        else layer("blk.{i}.attn_q", "attention.q", layout=turned),
        layer("blk.{i}.attn_k", "attention.k", layout=turned),
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
        Rule("blk.{i}.ssm_a", ("layers.{i}.mixer.a_log",), "log_of_minus"),
        Rule("blk.{i}.ssm_dt.bias", ("layers.{i}.mixer.dt_bias",)),
        Rule("blk.{i}.ssm_norm.weight", ("layers.{i}.mixer.norm_weight",)),
        Rule("blk.{i}.exp_probs_b.bias", ("layers.{i}.feed.selection_bias",)),
    ),
    layer("blk.{i}.ffn_gate_inp_shexp", "feed.shared_gate"),
    layer("blk.{i}.ffn_gate_shexp", "feed.shared.gate"),
    layer("blk.{i}.ffn_up_shexp", "feed.shared.up"),
    layer("blk.{i}.ffn_down_shexp", "feed.shared.down"),
)
