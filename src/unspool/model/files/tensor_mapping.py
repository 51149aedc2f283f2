"""Read a model's weights from the tensors of a file, check them, and write them back.

A family's rules (`TensorRule`) say which tensor holds which weights. Reading and writing use the
same rules, so every checkpoint that can be loaded can be saved.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError, UnspoolWarning
from unspool.model.config import ModelConfig, Recurrence
from unspool.model.files.stored import FileTensor
from unspool.model.weights import Layout, Shape, TensorRule, weight_shapes

if TYPE_CHECKING:
    import torch

Fetch = Callable[[str], FileTensor | None]


def read_weights(
    config: ModelConfig, rules: tuple[TensorRule, ...], fetch: Fetch, prefix: str = ""
) -> Iterator[tuple[str, FileTensor]]:
    """Yield every weight of the model with its tensor.

    Args:
        fetch: Returns a tensor of the file by name, or None.
        prefix: Only weights whose names start with it.

    Tensors stay packed as in the file wherever only rows are moved.
    """
    expected_shapes = weight_shapes(config)
    read_names: set[str] = set()
    for name in expected_shapes:
        if name in read_names or not name.startswith(prefix):
            continue
        tried = []
        for rule, file_name, parts in _fitting(rules, name, expected_shapes):
            tried.append(file_name.replace("{e}", "*"))
            tensor = _fetch(file_name, config, fetch)
            if tensor is None:
                continue
            tensor = _readable_rows(rule, tensor, fetch)
            pieces = _split(rule, tensor, [expected_shapes[part] for part in parts], config)
            for part, piece in zip(parts, pieces, strict=True):
                if piece.shape != expected_shapes[part]:
                    raise ModelFileError(
                        f"tensor {file_name} has shape {piece.shape} where the settings "
                        f"need {expected_shapes[part]}; the settings and the weights do not belong "
                        "together"
                    )
                read_names.add(part)
                yield part, piece
            break
        else:
            raise ModelFileError(
                f"the checkpoint lacks {' or '.join(tried) or name}, which a "
                f"{config.family} model needs; it is incomplete"
            )


# Tensors of files that do not affect what the text model computes.
UNUSED_TENSORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\.rotary_emb\.(original_)?inv_freq$",  # computed from the settings
        r"\.attn_rot_embd(\.|$)",  # the same in old GGUF files
        r"^rope_(freqs|factors_long|factors_short)\.weight$",  # GGUF: read with the settings
        r"\.(attn|attention)\.(masked_)?bias$",  # GPT-2 and GPT-NeoX: the causal mask
        r"embeddings\.position_ids$",  # BERT: 0, 1, 2, ...
        r"(^|\.)(pooler|cls\.seq_relationship)\.",  # BERT: heads for other tasks
        r"^(score|classifier)\.",  # a reward model's head: read by `checkpoint.py`
        r"^v_head\.",  # a value head, of use only in training
        # Images and sound: only text is read.
        r"^(model\.|thinker\.)?(visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector"
        r"|embed_vision|embed_audio|image_newline|talker|token2wav|code2wav)(\.|$)",
        r"^(model\.)?mtp(_\w+)?\.",  # multi-token prediction: read by `mtp.py`
        r"\.(k|v|q|prob|input|output|input_global|output_global)_scale$",  # of 8-bit activations
    )
)
# Suffixes of the parts of a quantized weight: of its name, and of its name without ".weight".
_BESIDE_WEIGHT = (
    "_packed", "_shape", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point",
    "_g_idx",
)  # fmt: skip
_BESIDE_MODULE = (".qweight", ".qzeros", ".scales", ".g_idx", ".biases", ".scale", ".input_scale")
_NAMED = 4  # tensors that a message names


def stored_names(name: str) -> tuple[str, ...]:
    """The names under which a file may hold a tensor: its name, and those of quantized parts."""
    module = name.removesuffix(".weight").removesuffix("_blocks")
    return (
        name,
        *(name + ending for ending in _BESIDE_WEIGHT),
        *(module + ending for ending in _BESIDE_MODULE if name.endswith(".weight")),
        *([f"{module}_scales"] if name.endswith("_blocks") else []),
    )


def is_in_file(name: str, names: Collection[str]) -> bool:
    """Whether a file has a tensor, quantized or not."""
    packed = (name, f"{name}_packed", f"{name.removesuffix('.weight')}.qweight")
    return any(form in names for form in packed)


def check_tensors(
    config: ModelConfig,
    rules: tuple[TensorRule, ...],
    names: Collection[str],
    fetch: Fetch,
    *,
    spare_layers: int = 0,
) -> None:
    """Raise if a file lacks weights of the model, or has weights that the settings do not use.

    Args:
        names: Every tensor of the file.
        fetch: Reads one of them; called only for small ones and for copies of a weight.
        spare_layers: Layers after the model's last one that are not part of it.

    Raises:
        ModelFileError: A weight is missing; or the file has more layers or experts than the
            settings say, or a tensor in a layer that the model would not use.

    Warns about tensors outside the layers that are neither used nor known (`UNUSED_TENSORS`).
    """
    expected_shapes = weight_shapes(config)
    used: dict[str, str] = {}  # weight -> the tensor it is read from
    read: set[str] = set()
    missing: list[str] = []
    for name in expected_shapes:
        if name in used:
            continue
        candidates: list[str] = []
        for rule, file_name, parts in _fitting(rules, name, expected_shapes):
            experts = range(config.experts) if "{e}" in file_name else (0,)
            tensors = [file_name.replace("{e}", str(expert)) for expert in experts]
            candidates += tensors[:1]
            if all(is_in_file(tensor, names) for tensor in tensors):
                used.update(dict.fromkeys(parts, file_name))
                read.update(form for tensor in tensors for form in stored_names(tensor))
                read.add(rule.added_tensor)
                break
        else:
            missing.append(" or ".join(candidates) or name)
    if missing:
        raise ModelFileError(
            f"the checkpoint lacks {_list_names(missing)}, which a {config.family} model with "
            f"{config.layers} layers needs; it is incomplete, or the settings are another model's"
        )
    patterns = [(rule, _pattern_of(rule.tensor)) for rule in rules]
    stems = {rule.tensor.partition("{i}")[0] for rule in rules if "{i}" in rule.tensor}
    in_layer = re.compile(f"(?:{'|'.join(map(re.escape, sorted(stems)))})(\\d+)\\.")
    beyond: list[str] = []
    unused_in_layers: list[str] = []
    unknown: list[str] = []
    for name in sorted(names):
        if name in read or any(pattern.search(name) for pattern in UNUSED_TENSORS):
            continue
        layer = int(match[1]) if stems and (match := in_layer.match(name)) else -1
        if layer >= config.layers + spare_layers:
            beyond.append(name)
        elif layer >= config.layers:
            continue
        elif matching_rules := _rules_of(name, patterns):
            if not any(
                _is_redundant(name, rule, layer, config, used, fetch) for rule in matching_rules
            ):
                unused_in_layers.append(name)
        else:
            (unused_in_layers if layer >= 0 else unknown).append(name)
    if beyond:
        raise ModelFileError(
            f"the settings have {config.layers} layers, and the file has more: "
            f"{_list_names(beyond)}; the settings and the weights do not belong together"
        )
    if unused_in_layers:
        raise ModelFileError(
            f"the file has weights that a {config.family} model with these settings does not use: "
            f"{_list_names(unused_in_layers)}; the settings and the weights do not belong together"
        )
    if unknown:
        warnings.warn(
            f"unused tensors in the checkpoint: {_list_names(unknown)}",
            UnspoolWarning,
            stacklevel=2,
        )


def _list_names(names: list[str]) -> str:
    """The first few names, and the number of the others."""
    listing = ", ".join(names[:_NAMED])
    return listing if len(names) <= _NAMED else f"{listing} and {len(names) - _NAMED} more"


def _pattern_of(file_name: str) -> re.Pattern[str]:
    """A rule's tensor name as a pattern: {e} matches any expert, {i} any layer."""
    escaped = re.escape(file_name).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+")
    return re.compile(escaped)


def _rules_of(name: str, patterns: list[tuple[TensorRule, re.Pattern[str]]]) -> list[TensorRule]:
    """The rules that match a tensor, or the quantized weight that it is a part of."""
    candidates = [name]
    for ending in _BESIDE_WEIGHT:
        candidates += [name.removesuffix(ending)] if name.endswith(ending) else []
    for ending in _BESIDE_MODULE:
        candidates += [f"{name.removesuffix(ending)}.weight"] if name.endswith(ending) else []
    return [rule for rule, pattern in patterns if any(map(pattern.fullmatch, candidates))]


def _is_redundant(
    name: str,
    rule: TensorRule,
    layer: int,
    config: ModelConfig,
    used: Mapping[str, str],
    fetch: Fetch,
) -> bool:
    """Whether a tensor that matches a rule does not affect the computation."""
    parts = [part.replace("{i}", str(layer)) for part in rule.weights]
    if parts == ["head.weight"] and config.tied:
        return True  # checked before: equal to the embedding
    if used.keys() >= set(parts):
        return True  # another name of a weight that was read under the preferred name
    if layer >= 0 and config.mixer(layer) == "attention" and config.kv_source(layer) != layer:
        borrowed = tuple(f"layers.{layer}.attention.{part}" for part in ("k", "v"))
        if all(part.startswith(borrowed) for part in parts):
            return True  # the layer reads another layer's keys and values
    if "{e}" in rule.tensor:
        return False
    tensor = fetch(name)
    if tensor is None:
        return False
    if name.endswith(".bias") and not tensor.float32().any():
        return True  # some quantizers write a bias of zeros for every matrix
    if parts == ["head.bias"] and (bias := fetch(used.get("head_bias", ""))) is not None:
        return is_same(tensor, bias)  # the bias of a tied head
    return False


def is_same(tensor: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors are equal; reads a part at a time."""
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
    config: ModelConfig,
    rules: tuple[TensorRule, ...],
    weights: Mapping[str, torch.Tensor],
    prefix: str = "",
) -> dict[str, torch.Tensor]:
    """The tensors of a file that hold these weights, by the first matching rule of each; only
    weights whose names start with `prefix`."""
    import torch

    config.require_head()
    expected_shapes = weight_shapes(config)
    result: dict[str, torch.Tensor] = {}
    written: set[str] = set()
    for name in expected_shapes:
        if name in written or not name.startswith(prefix):
            continue
        fitting = next(_fitting(rules, name, expected_shapes), None)
        if fitting is None:
            raise ModelFileError(f"no rule of the {config.family} family writes {name}")
        rule, file_name, parts = fitting
        written.update(parts)
        tensor = _join(rule, [weights[part] for part in parts], config)
        if "{e}" in file_name:
            for expert, piece in enumerate(tensor):
                result[file_name.replace("{e}", str(expert))] = piece.contiguous()
        else:
            padding = tensor.new_zeros(rule.reserved, *tensor.shape[1:])
            result[file_name] = (
                torch.cat((padding, tensor)) if rule.reserved else tensor
            ).contiguous()
            if rule.added_tensor:
                result[rule.added_tensor] = tensor.new_zeros(1, *tensor.shape[1:])
    return result


def _fitting(
    rules: tuple[TensorRule, ...], name: str, expected_shapes: Mapping[str, Shape]
) -> Iterator[tuple[TensorRule, str, list[str]]]:
    """The rules that may hold a weight: each with the tensor's name and all weights in it."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    axes = len(expected_shapes[name])  # the matrices or the biases of all experts
    for_experts = axes == 3 or (axes == 2 and name.endswith(".bias"))
    for rule in rules:
        parts = [part.replace("{i}", layer) for part in rule.weights]
        fits = (
            rule.for_experts == for_experts or rule.tensor in rule.weights
        )  # Unspool's own format
        if fits and name in parts and expected_shapes.keys() >= set(parts):
            yield rule, rule.tensor.replace("{i}", layer), parts


def _fetch(name: str, config: ModelConfig, fetch: Fetch) -> FileTensor | None:
    if "{e}" not in name:
        return fetch(name)
    experts = [fetch(name.replace("{e}", str(expert))) for expert in range(config.experts)]
    tensors = [expert for expert in experts if expert is not None]
    return type(tensors[0]).stacked(tensors) if len(tensors) == config.experts else None


def _readable_rows(rule: TensorRule, tensor: FileTensor, fetch: Fetch) -> FileTensor:
    """The tensor without reserved rows, and with the rule's added tensor."""
    if rule.reserved:
        tensor = tensor.rows(rule.reserved, tensor.shape[0])
    added = fetch(rule.added_tensor) if rule.added_tensor else None
    return (
        tensor if added is None else FileTensor.from_float32(tensor.float32() + added.float32()[0])
    )


def _split(
    rule: TensorRule, tensor: FileTensor, parts: list[Shape], config: ModelConfig
) -> list[FileTensor]:
    if rule.layout in ("transposed", "pairs_transposed") and len(tensor.shape) >= 2:
        tensor = tensor.transposed()
    if rule.layout in ("pairs", "pairs_transposed"):
        return [tensor.every_second(first) for first in range(2)]
    if len(parts[0]) == 3:
        return _split_experts(tensor, parts)
    if rule.layout == "transposed":
        pass
    elif rule.layout == "plus_one":
        tensor = tensor.minus_one()
    elif rule.layout == "channels":  # a convolution: [channels, (1,) kernel] in files
        if len(tensor.shape) > 1:
            tensor = FileTensor.from_float32(
                np.ascontiguousarray(tensor.float32().reshape(tensor.shape[0], -1).T)
            )
    elif rule.layout == "log_of_minus":
        tensor = FileTensor.from_float32(np.log(-tensor.float32().reshape(-1)))
    elif rule.layout == "flat":
        tensor = FileTensor.from_float32(tensor.float32().reshape(-1))
    else:
        order = row_order(rule.layout, tensor.shape[0], config)
        if order is not None:
            tensor = tensor.reordered(order)
    if len(parts) == 1:
        return [tensor]
    ends = np.cumsum([shape[0] for shape in parts]).tolist()
    if ends[-1] != tensor.shape[0]:
        return [tensor] * len(parts)  # the caller reports the wrong shape
    return [tensor.rows(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _split_experts(tensor: FileTensor, parts: list[Shape]) -> list[FileTensor]:
    """Matrices of all experts; some files hold them transposed or concatenated."""
    rows, columns = sum(shape[1] for shape in parts), parts[0][2]
    if tensor.shape[1:] == (columns, rows) and rows != columns:
        tensor = tensor.transposed()
    ends = np.cumsum([shape[1] for shape in parts]).tolist()
    if len(parts) == 1 or ends[-1] != tensor.shape[1]:
        return [tensor] * len(parts)  # the caller checks the shape
    return [tensor.inner_rows(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def row_order(layout: Layout, count: int, config: ModelConfig) -> npt.NDArray[np.int64] | None:
    """The permutation from a file's rows to the model's; None: none, or an impossible count."""
    recurrence = config.recurrence
    if layout == "grouped" and recurrence is not None:
        return _grouped_order(recurrence, count)
    if layout == "interleaved":  # llama.cpp rotates adjacent pairs, here halves of a head
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
    """Queries, keys, values and gates of all heads, from rows grouped by key head."""
    if count != 2 * (recurrence.key_dim + recurrence.value_dim):
        return None
    key, value = recurrence.key_width, recurrence.value_dim // recurrence.key_heads
    groups = np.arange(count).reshape(recurrence.key_heads, -1)
    parts = np.split(groups, np.cumsum((key, key, value)), axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


def _join(rule: TensorRule, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    import torch

    if rule.layout in ("pairs", "pairs_transposed"):
        tensor = torch.stack(parts, 2).flatten(1, 2)
    else:
        tensor = torch.cat(parts, parts[0].ndim - 2) if len(parts) > 1 else parts[0]
    if rule.layout == "channels":
        return tensor.t()[:, None] if tensor.ndim > 1 else tensor
    if rule.layout == "log_of_minus":
        return -tensor.exp()
    if rule.layout in ("transposed", "pairs_transposed") and tensor.ndim >= 2:
        return tensor.transpose(-1, -2)
    if rule.layout == "plus_one":
        return tensor + 1
    order = row_order(rule.layout, len(tensor), config)
    return tensor if order is None else tensor[torch.from_numpy(np.argsort(order))]
