"""The names and shapes of a model's weights, and how files call and lay out the same numbers.

`shapes(config)` lists our names in the order the data meets them. A `Rule` says where one or
several of them stand in somebody else's file. Reading and writing use the same rules, so what
can be loaded can be saved.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError, UnspoolWarning
from unspool.model.config import ModelConfig
from unspool.model.recurrence import Recurrence
from unspool.model.stored import Stored

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Layout = Literal[
    "plain", "transposed", "per_head", "interleaved", "plus_one", "gated_heads", "grouped",
    "grouped_values", "channels", "log_of_minus", "flat", "pairs", "pairs_transposed",
]  # fmt: skip


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every weight of the model by our name, with its shape."""
    width = config.width
    found: dict[str, Shape] = {"embed.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        found["position_embed.weight"] = (config.context, width)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = (width,)
        if config.norm == "layer" and config.norm_bias:
            found[f"{name}.bias"] = (width,)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)

    if config.embedding_norm:
        norm("embed_norm")
    if config.token_width:
        every = config.layers * config.token_width
        linear("token_inputs.embed", config.vocab_size, every, False)
        linear("token_inputs.project", every, width, False)
        found["token_inputs.norm.weight"] = (config.token_width,)
    sides = ("gate", "up") if config.gated else ("up",)
    for layer in range(config.layers):
        at = f"layers.{layer}"
        if config.normed_attention(layer):
            norm(f"{at}.attention_norm")
        shape = config.shape(layer)
        if config.mixer(layer) == "attention":
            found.update(_attention_shapes(config, layer))
        elif config.mixer(layer) != "none":
            found.update(_mixer_shapes(config, layer))
        if config.norm_after or config.norm_sums:
            norm(f"{at}.attention_post_norm")
        if config.normed_feed(layer):
            norm(f"{at}.feed_norm")
        experts = dense = f"{at}.feed"
        if config.has_both(layer):
            dense, experts = f"{at}.feed.dense", f"{at}.feed.experts"
            for side in ("dense_norm", "dense_post_norm", "experts_norm", "experts_post_norm"):
                norm(f"{at}.feed.{side}")
            norm(f"{at}.feed.router_norm")
            found[f"{at}.feed.expert_scale"] = (config.experts,)
        if config.has_experts(layer):
            count, inner = config.experts, config.expert_width
            linear(f"{experts}.router", count, width, config.router_bias)
            if config.selection_bias:
                found[f"{experts}.selection_bias"] = (count,)
            if config.shared_width and config.shared_gated:
                linear(f"{experts}.shared_gate", 1, width, False)
            if config.shared_width:
                for side in sides:
                    linear(f"{experts}.shared.{side}", config.shared_width, width, False)
                linear(f"{experts}.shared.down", width, config.shared_width, False)
            for name, rows, columns in (
                *((side, inner, width) for side in sides), ("down", width, inner),
            ):  # fmt: skip
                found[f"{experts}.{name}.weight"] = (count, rows, columns)
                if config.expert_bias:
                    found[f"{experts}.{name}.bias"] = (count, rows)
        if config.has_feed(layer) and (not config.has_experts(layer) or config.has_both(layer)):
            for side in sides:
                linear(f"{dense}.{side}", shape.ff_width, width, config.ff_bias)
            linear(f"{dense}.down", width, shape.ff_width, config.ff_bias)
        if config.norm_after or config.norm_sums:
            norm(f"{at}.feed_post_norm")
        if config.token_width:
            linear(f"{at}.token_input.gate", config.token_width, width, False)
            linear(f"{at}.token_input.out", width, config.token_width, False)
            norm(f"{at}.token_input.norm")
        if config.layer_scale:
            found[f"{at}.scale"] = (1,)
    if config.head_transform:
        if config.norm_before:
            norm("transform.norm")
        linear("transform.dense", width, width, config.head_transform_bias)
    norm("norm")
    if not config.tied:
        linear("head", config.vocab_size, width, config.head_bias)
    elif config.head_bias:
        found["head_bias"] = (config.vocab_size,)
    return found


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    shape, own = config.shape(layer), config.kv_source(layer) == layer
    rows = {"q": shape.out_width}
    if config.attention_gate:
        rows["gate"] = shape.out_width
    if own:
        rows["k"] = shape.kv_width
    if own and config.has_values(layer):
        rows["v"] = shape.kv_width
    found: dict[str, Shape] = {}
    for name, count in rows.items():
        found[f"{name}.weight"] = (count, config.width)
        if config.qkv_bias:
            found[f"{name}.bias"] = (count,)
    if config.qk_norm != "none":
        whole, head = config.qk_norm == "whole", shape.head_width
        found["q_norm.weight"] = (shape.out_width if whole else head,)
        if own:
            found["k_norm.weight"] = (shape.kv_width if whole else head,)
    if config.sinks:
        found["sinks"] = (shape.heads,)
    found["out.weight"] = (config.width, shape.out_width)
    if config.out_bias:
        found["out.bias"] = (config.width,)
    return {f"layers.{layer}.attention.{name}": size for name, size in found.items()}


def _mixer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """The weights of a recurrent layer; the taps of its convolution are [tokens, channels]."""
    recurrence, width, mixer = config.recurrence, config.width, config.mixer(layer)
    assert recurrence is not None
    channels = recurrence.channels(mixer, width)
    heads, values = recurrence.value_heads, recurrence.values
    if mixer == "conv":
        found: dict[str, Shape] = {f"{name}.weight": (width, width) for name in "bcx"}
        values = width
    else:
        rows = {"qkv": channels, "z": values, "b": heads, "a": heads}
        if mixer == "mamba2":
            rows = {"z": values, "vkq": channels, "dt": heads}
        found = {f"{name}.weight": (count, width) for name, count in rows.items()}
        found |= {"a_log": (heads,), "dt_bias": (heads,)}
        found |= {"d": (heads,)} if mixer == "mamba2" else {}
        found["norm_weight"] = (values if mixer == "mamba2" else recurrence.value_width,)
    found["conv.weight"] = (recurrence.conv_kernel, channels)
    if recurrence.conv_bias:
        found["conv.bias"] = (channels,)
    found["out.weight"] = (width, values)
    return {f"layers.{layer}.mixer.{name}": size for name, size in found.items()}


def parameter_count(config: ModelConfig) -> int:
    return sum(map(math.prod, shapes(config).values()))


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of somebody's file (or one an expert) and the weights of ours it holds.

    Names may contain {i} (the layer) and {e} (the expert). Several of ours in one of theirs
    stand below each other, rows of the first on top; in the layout "pairs" the rows of two
    alternate, in each expert's matrix or bias.
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = "plain"
    plus: str = ""  # another of their tensors, whose first row is added to every row
    reserved: int = 0  # rows at the top that no token reads

    @property
    def for_experts(self) -> bool:
        signs = ("{e}", "_exps.weight", "_exps.bias", ".experts.", "_moe.input_", "_moe.output_")
        return any(sign in self.theirs for sign in signs)


Fetch = Callable[[str], Stored | None]


def read_weights(
    config: ModelConfig, rules: tuple[Rule, ...], fetch: Fetch
) -> Iterator[tuple[str, Stored]]:
    """Every weight of ours, found in a file by its rules; `fetch` gives their tensor or None.

    Numbers stay as the file has them, packed or not, wherever only rows are moved.
    """
    wanted = shapes(config)
    done: set[str] = set()
    for name in wanted:
        if name in done:
            continue
        tried = []
        for rule, theirs, parts in _fitting(rules, name, wanted):
            tried.append(theirs.replace("{e}", "*"))
            whole = _fetch(theirs, config, fetch)
            if whole is None:
                continue
            whole = _readable_rows(rule, whole, fetch)
            pieces = _split(rule, whole, [wanted[part] for part in parts], config)
            for part, piece in zip(parts, pieces, strict=True):
                if piece.shape != wanted[part]:
                    raise ModelFileError(
                        f"tensor {theirs} has shape {piece.shape} where the settings "
                        f"need {wanted[part]}; the settings and the weights do not belong together"
                    )
                done.add(part)
                yield part, piece
            break
        else:
            raise ModelFileError(
                f"the checkpoint lacks {' or '.join(tried) or name}, which a "
                f"{config.family} model needs; it is incomplete"
            )


# Tensors that files hold beside the weights, and that do not change what the text model computes.
UNUSED_TENSORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\.rotary_emb\.(original_)?inv_freq$",  # computed from the settings
        r"\.attn_rot_embd(\.|$)",  # the same in old GGUF files
        r"^rope_(freqs|factors_long|factors_short)\.weight$",  # GGUF: read with the settings
        r"\.(attn|attention)\.(masked_)?bias$",  # GPT-2 and GPT-NeoX: the causal mask
        r"embeddings\.position_ids$",  # BERT: 0, 1, 2, ...
        r"(^|\.)(pooler|cls\.seq_relationship)\.",  # BERT: heads for other tasks
        r"^(score|classifier)\.",  # a reward model's head: read by `score_head.py`
        r"^v_head\.",  # a value head, of use only in training
        # Images and sound: only text is read.
        r"^(model\.|thinker\.)?(visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector"
        r"|embed_vision|embed_audio|image_newline|talker|token2wav|code2wav)(\.|$)",
        r"^(model\.)?mtp(_\w+)?\.",  # multi-token prediction: drafts that are not read
        r"\.(k|v|q|prob|input|output|input_global|output_global)_scale$",  # of 8-bit activations
    )
)
# What a quantized weight is made of, behind its name and behind the name without ".weight".
_BESIDE_WEIGHT = (
    "_packed", "_shape", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point",
    "_g_idx",
)  # fmt: skip
_BESIDE_MODULE = (".qweight", ".qzeros", ".scales", ".g_idx", ".biases", ".scale", ".input_scale")
_NAMED = 4  # tensors that a message names


def parts_of_tensor(name: str) -> tuple[str, ...]:
    """The names under which a file may hold a tensor: its own, and those of its quantized parts."""
    module = name.removesuffix(".weight").removesuffix("_blocks")
    return (
        name,
        *(name + ending for ending in _BESIDE_WEIGHT),
        *(module + ending for ending in _BESIDE_MODULE if name.endswith(".weight")),
        *([f"{module}_scales"] if name.endswith("_blocks") else []),
    )


def is_in_file(name: str, names: Collection[str]) -> bool:
    """Whether a file has a tensor, as it is or quantized."""
    packed = (name, f"{name}_packed", f"{name.removesuffix('.weight')}.qweight")
    return any(form in names for form in packed)


def check_tensors(
    config: ModelConfig,
    rules: tuple[Rule, ...],
    names: Collection[str],
    fetch: Fetch,
    *,
    spare_layers: int = 0,
) -> None:
    """Refuse a file that lacks weights of the model, or has weights the settings have no place for.

    Args:
        names: Every tensor of the file.
        fetch: Reads one of them; called only for small ones and for copies of a weight.
        spare_layers: Layers behind the model's own that are known to be no part of it.

    Raises:
        ModelFileError: A weight is missing; or the file has more layers or experts than the
            settings say, or a tensor in a layer that the model would not use.

    Warns about tensors outside the layers that are neither used nor known (`UNUSED_TENSORS`).
    """
    wanted = shapes(config)
    used: dict[str, str] = {}  # our weights -> the tensor they are read from
    read: set[str] = set()
    missing: list[str] = []
    for name in wanted:
        if name in used:
            continue
        candidates: list[str] = []
        for rule, theirs, parts in _fitting(rules, name, wanted):
            experts = range(config.experts) if "{e}" in theirs else (0,)
            tensors = [theirs.replace("{e}", str(expert)) for expert in experts]
            candidates += tensors[:1]
            if all(is_in_file(tensor, names) for tensor in tensors):
                used.update(dict.fromkeys(parts, theirs))
                read.update(form for tensor in tensors for form in parts_of_tensor(tensor))
                read.add(rule.plus)
                break
        else:
            missing.append(" or ".join(candidates) or name)
    if missing:
        raise ModelFileError(
            f"the checkpoint lacks {_list_names(missing)}, which a {config.family} model with "
            f"{config.layers} layers needs; it is incomplete, or the settings are another model's"
        )
    patterns = [(rule, _pattern_of(rule.theirs)) for rule in rules]
    stems = {rule.theirs.partition("{i}")[0] for rule in rules if "{i}" in rule.theirs}
    in_layer = re.compile(f"(?:{'|'.join(map(re.escape, sorted(stems)))})(\\d+)\\.")
    beyond: list[str] = []
    strange: list[str] = []
    unknown: list[str] = []
    for name in sorted(names):
        if name in read or any(pattern.search(name) for pattern in UNUSED_TENSORS):
            continue
        layer = int(found[1]) if stems and (found := in_layer.match(name)) else -1
        if layer >= config.layers + spare_layers:
            beyond.append(name)
        elif layer >= config.layers:
            continue
        elif known := _rules_of(name, patterns):
            if not any(_is_redundant(name, rule, layer, config, used, fetch) for rule in known):
                strange.append(name)
        else:
            (strange if layer >= 0 else unknown).append(name)
    if beyond:
        raise ModelFileError(
            f"the settings say that the model has {config.layers} layers, and the file has more: "
            f"{_list_names(beyond)}; the settings and the weights do not belong together"
        )
    if strange:
        raise ModelFileError(
            f"the file has weights that a {config.family} model with these settings does not use: "
            f"{_list_names(strange)}; the settings and the weights do not belong together"
        )
    if unknown:
        warnings.warn(
            f"tensors of the checkpoint that are not used: {_list_names(unknown)}",
            UnspoolWarning,
            stacklevel=2,
        )


def _list_names(names: list[str]) -> str:
    """A few names, and how many there are if those are not all."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _pattern_of(theirs: str) -> re.Pattern[str]:
    """A rule's name as a pattern: {e} is any expert, and {i} any layer."""
    escaped = re.escape(theirs).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+")
    return re.compile(escaped)


def _rules_of(name: str, patterns: list[tuple[Rule, re.Pattern[str]]]) -> list[Rule]:
    """The rules that know a tensor, or the quantized weight that it is a part of."""
    whole = [name]
    for ending in _BESIDE_WEIGHT:
        whole += [name.removesuffix(ending)] if name.endswith(ending) else []
    for ending in _BESIDE_MODULE:
        whole += [f"{name.removesuffix(ending)}.weight"] if name.endswith(ending) else []
    return [rule for rule, pattern in patterns if any(map(pattern.fullmatch, whole))]


def _is_redundant(
    name: str,
    rule: Rule,
    layer: int,
    config: ModelConfig,
    used: Mapping[str, str],
    fetch: Fetch,
) -> bool:
    """Whether the model computes the same with and without a tensor that a rule knows."""
    parts = [part.replace("{i}", str(layer)) for part in rule.ours]
    if parts == ["head.weight"] and config.tied:
        return True  # checked before: the same numbers as the embedding
    if used.keys() >= set(parts):
        return True  # another name for a weight, of which the rules prefer the one that was read
    if layer >= 0 and config.mixer(layer) == "attention" and config.kv_source(layer) != layer:
        borrowed = tuple(f"layers.{layer}.attention.{part}" for part in ("k", "v"))
        if all(part.startswith(borrowed) for part in parts):
            return True  # the layer reads another layer's keys and values
    if "{e}" in rule.theirs:
        return False
    tensor = fetch(name)
    if tensor is None:
        return False
    if name.endswith(".bias") and not tensor.float32().any():
        return True  # some quantizers write a bias of zeros for every matrix
    if parts == ["head.bias"] and (bias := fetch(used.get("head_bias", ""))) is not None:
        return is_same(tensor, bias)  # of a head that is the embedding
    return False


def is_same(tensor: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same numbers; they are read a part at a time."""
    if tensor.shape != other.shape:
        return False
    size = max(1, (1 << 22) // max(1, math.prod(tensor.shape[1:])))
    return all(
        np.array_equal(
            tensor.rows(start, start + size).float32(), other.rows(start, start + size).float32()
        )
        for start in range(0, tensor.shape[0], size)
    )


def write_weights(
    config: ModelConfig, rules: tuple[Rule, ...], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same weights under their names: the first rule that fits each one."""
    import torch

    config.check_head()
    wanted = shapes(config)
    found: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    for name in wanted:
        if name in done:
            continue
        fitting = next(_fitting(rules, name, wanted), None)
        if fitting is None:
            raise ModelFileError(f"a {config.family} checkpoint has no place for {name}")
        rule, theirs, parts = fitting
        done.update(parts)
        whole = _join(rule, [weights[part] for part in parts], config)
        if "{e}" in theirs:
            for expert, piece in enumerate(whole):
                found[theirs.replace("{e}", str(expert))] = piece.contiguous()
        else:
            nothing = whole.new_zeros(rule.reserved, *whole.shape[1:])
            found[theirs] = (torch.cat((nothing, whole)) if rule.reserved else whole).contiguous()
            if rule.plus:
                found[rule.plus] = whole.new_zeros(1, *whole.shape[1:])
    return found


def _fitting(
    rules: tuple[Rule, ...], name: str, wanted: Mapping[str, Shape]
) -> Iterator[tuple[Rule, str, list[str]]]:
    """The rules by which a file may hold a weight: each with their name, and all ours in it."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    axes = len(wanted[name])  # the matrices or the biases of all experts
    for_experts = axes == 3 or (axes == 2 and name.endswith(".bias"))
    for rule in rules:
        parts = [part.replace("{i}", layer) for part in rule.ours]
        fits = rule.for_experts == for_experts or rule.theirs in rule.ours  # our own name
        if fits and name in parts and wanted.keys() >= set(parts):
            yield rule, rule.theirs.replace("{i}", layer), parts


def _fetch(name: str, config: ModelConfig, fetch: Fetch) -> Stored | None:
    if "{e}" not in name:
        return fetch(name)
    experts = [fetch(name.replace("{e}", str(expert))) for expert in range(config.experts)]
    found = [expert for expert in experts if expert is not None]
    return type(found[0]).stacked(found) if len(found) == config.experts else None


def _readable_rows(rule: Rule, whole: Stored, fetch: Fetch) -> Stored:
    """What of their tensor is ours, with what they add to it when it is used."""
    if rule.reserved:
        whole = whole.rows(rule.reserved, whole.shape[0])
    more = fetch(rule.plus) if rule.plus else None
    return whole if more is None else Stored.of(whole.float32() + more.float32()[0])


def _split(rule: Rule, whole: Stored, parts: list[Shape], config: ModelConfig) -> list[Stored]:
    if rule.layout in ("transposed", "pairs_transposed") and len(whole.shape) >= 2:
        whole = whole.transposed()
    if rule.layout in ("pairs", "pairs_transposed"):
        return [whole.every_second(first) for first in range(2)]
    if len(parts[0]) == 3:
        return _split_experts(whole, parts)
    if rule.layout == "transposed":
        pass
    elif rule.layout == "plus_one":
        whole = whole.minus_one()
    elif rule.layout == "channels":  # a convolution's taps: [channels, (1,) tokens] in files
        if len(whole.shape) > 1:
            whole = Stored.of(np.ascontiguousarray(whole.float32().reshape(whole.shape[0], -1).T))
    elif rule.layout == "log_of_minus":
        whole = Stored.of(np.log(-whole.float32().reshape(-1)))
    elif rule.layout == "flat":
        whole = Stored.of(whole.float32().reshape(-1))
    else:
        order = row_order(rule.layout, whole.shape[0], config)
        if order is not None:
            whole = whole.reordered(order)
    if len(parts) == 1:
        return [whole]
    ends = np.cumsum([shape[0] for shape in parts]).tolist()
    if ends[-1] != whole.shape[0]:
        return [whole] * len(parts)  # the caller sees that the shapes differ and says so
    return [whole.rows(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _split_experts(whole: Stored, parts: list[Shape]) -> list[Stored]:
    """Matrices of all experts; some files hold them turned, or several below each other."""
    rows, columns = sum(shape[1] for shape in parts), parts[0][2]
    if whole.shape[1:] == (columns, rows) and rows != columns:
        whole = whole.transposed()
    ends = np.cumsum([shape[1] for shape in parts]).tolist()
    if len(parts) == 1 or ends[-1] != whole.shape[1]:
        return [whole] * len(parts)  # the caller sees whether the shapes differ
    return [whole.inner_rows(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def row_order(layout: Layout, count: int, config: ModelConfig) -> npt.NDArray[np.int64] | None:
    """Which of their rows comes first for us; None: as it is, or their number cannot be right."""
    recurrence = config.recurrence
    if layout == "grouped" and recurrence is not None:
        return _grouped_order(recurrence, count)
    if layout == "interleaved":  # llama.cpp pairs neighbours, we pair halves of a head
        shape, axes = (-1, config.head_width // 2, 2), (0, 2, 1)
    elif layout == "gated_heads":  # query and gate of head 0, then of head 1, ...
        shape, axes = (config.heads, 2, config.head_width), (1, 0, 2)
    elif layout == "grouped_values" and recurrence is not None:  # b and a of key head 0, then ...
        shape, axes = (recurrence.key_heads, 2, -1), (1, 0, 2)
    elif layout != "per_head":
        return None
    else:  # q, k and v of head 0, then of head 1, ...
        shape, axes = (config.heads, 3, config.head_width), (1, 0, 2)
    size = abs(math.prod(shape))
    if not shape[1] or (count % size if -1 in shape else count != size):
        return None
    return np.arange(count).reshape(shape).transpose(axes).reshape(-1)


def _grouped_order(recurrence: Recurrence, count: int) -> npt.NDArray[np.int64] | None:
    """Queries of all key heads, their keys, values and gates, from rows where each key head has all
    of its own together."""
    if count != 2 * (recurrence.keys + recurrence.values):
        return None
    key, value = recurrence.key_width, recurrence.values // recurrence.key_heads
    groups = np.arange(count).reshape(recurrence.key_heads, -1)
    parts = np.split(groups, np.cumsum((key, key, value)), axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


def _join(rule: Rule, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    import torch

    if rule.layout in ("pairs", "pairs_transposed"):
        whole = torch.stack(parts, 2).flatten(1, 2)
    else:
        whole = torch.cat(parts, parts[0].ndim - 2) if len(parts) > 1 else parts[0]
    if rule.layout == "channels":
        return whole.t()[:, None] if whole.ndim > 1 else whole
    if rule.layout == "log_of_minus":
        return -whole.exp()
    if rule.layout in ("transposed", "pairs_transposed") and whole.ndim >= 2:
        return whole.transpose(-1, -2)
    if rule.layout == "plus_one":
        return whole + 1
    order = row_order(rule.layout, len(whole), config)
    return whole if order is None else whole[torch.from_numpy(np.argsort(order))]
