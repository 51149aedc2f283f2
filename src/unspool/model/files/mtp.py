"""Multi-token prediction (MTP) layers of a checkpoint: find, read and write their tensors.

Three formats hold the same layer:

    Qwen3.5, Qwen3-Next    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, and
                           mtp.layers.0 with the tensors of an ordinary layer
    DeepSeek, GLM          a layer after the last one, with eh_proj, enorm, hnorm, shared_head.norm
    GGUF                   the same: blk.N.nextn.eh_proj, .enorm, .hnorm, .shared_head_norm

The weights are named as in `layers.mtp.MtpLayer`. Checkpoints with several MTP layers are read up
to the first one, which then drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.files.stored import FileTensor
from unspool.model.files.tensor_mapping import Fetch, is_in_file, read_weights, write_weights
from unspool.model.weights import TensorRule

if TYPE_CHECKING:
    import torch

# Weight -> its name in a file.
_QWEN = {
    "fc": "fc", "embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden",
    "norm": "norm",
}  # fmt: skip
_NEXTN = {"fc": "eh_proj", "embed_norm": "enorm", "hidden_norm": "hnorm"}
_PREFIXES = ("mtp.", "model.mtp.")
_LAYER = "layers.0."  # of the weights in the one-layer config
_STATE_PREFIX = "mtp."  # of the weights in a model that is trained with its MTP layer


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """The first MTP layer of a checkpoint."""

    config: ModelConfig  # of the layer
    rules: tuple[TensorRule, ...]  # of the tensors in the layer
    names: Mapping[str, tuple[str, ...]]  # weight -> tensors that may hold it, by preference
    fetch: Fetch
    plus_one: bool = False  # norm weights are stored with the one already added
    num_layers: int = 1  # MTP layers in the checkpoint

    def weights(self) -> Iterator[tuple[str, FileTensor]]:
        """Yield every weight with its tensor.

        Raises:
            ModelFileError: A tensor is missing or has another shape than the model's settings say.
        """
        width = self.config.width
        for weight, names in self.names.items():
            tensor = next((t for name in names if (t := self.fetch(name)) is not None), None)
            if tensor is None:
                raise ModelFileError(f"the MTP layer lacks {names[0]}; it is incomplete")
            shape = (width, 2 * width) if weight == "fc" else (width,)
            if tensor.shape != shape:
                raise ModelFileError(
                    f"the MTP layer does not fit the model: {names[0]} has shape {tensor.shape}, "
                    f"expected {shape}"
                )
            is_shifted = self.plus_one and weight != "fc"
            yield f"{weight}.weight", tensor.minus_one() if is_shifted else tensor
        try:
            for name, tensor in read_weights(self.config, self.rules, self.fetch, _LAYER):
                yield f"layer.{name.removeprefix(_LAYER)}", tensor
        except ModelFileError as error:
            raise ModelFileError(f"the MTP layer does not fit the model: {error}") from error


def find_mtp_in_hf(
    config: ModelConfig,
    rules: tuple[TensorRule, ...],
    prefix: str,
    names: Collection[str],
    fetch: Fetch,
) -> MtpTensors | None:
    """Find the MTP layer of a safetensors checkpoint; `prefix` is that of the model's tensors."""
    for mtp_prefix in _PREFIXES:
        if is_in_file(f"{mtp_prefix}fc.weight", names):
            layer_rules = _rules_of_layer(rules, mtp_prefix, 0)
            count = _count(names, f"{mtp_prefix}layers.{{}}.", "input_layernorm.weight", 0)
            qwen_files = {w: (f"{mtp_prefix}{name}.weight",) for w, name in _QWEN.items()}
            return _tensors(config, layer_rules, qwen_files, names, fetch, max(1, count))
    number = config.layers
    layer = f"{prefix}layers.{number}."
    if not is_in_file(f"{layer}eh_proj.weight", names):
        return None
    files: dict[str, tuple[str, ...]] = {
        w: (f"{layer}{name}.weight",) for w, name in _NEXTN.items()
    }
    files["norm"] = (f"{layer}shared_head.norm.weight", f"{prefix}norm.weight")
    count = _count(names, f"{prefix}layers.{{}}.", "eh_proj.weight", number)
    return _tensors(config, _rules_of_layer(rules, prefix, number), files, names, fetch, count)


def find_mtp_in_gguf(
    config: ModelConfig, rules: tuple[TensorRule, ...], names: Collection[str], fetch: Fetch
) -> MtpTensors | None:
    """Find the MTP layer of a GGUF file."""
    number = config.layers
    layer = f"blk.{number}.nextn."
    if f"{layer}eh_proj.weight" not in names:
        return None
    files: dict[str, tuple[str, ...]] = {
        w: (f"{layer}{name}.weight",) for w, name in _NEXTN.items()
    }
    files["norm"] = (f"{layer}shared_head_norm.weight", "output_norm.weight")
    count = _count(names, "blk.{}.nextn.", "eh_proj.weight", number)
    tensors = _tensors(config, _rules_of_layer(rules, "", number), files, names, fetch, count)
    return replace(tensors, plus_one=config.norm_plus_one)


def _tensors(
    config: ModelConfig,
    rules: tuple[TensorRule, ...],
    files: Mapping[str, tuple[str, ...]],
    names: Collection[str],
    fetch: Fetch,
    count: int,
) -> MtpTensors:
    routers = [rule.tensor for rule in rules if "layers.{i}.feed.router.weight" in rule.weights]
    dense = not any(is_in_file(name, names) for name in routers)
    return MtpTensors(config.mtp_layer_config(dense=dense), rules, files, fetch, num_layers=count)


def _rules_of_layer(
    rules: tuple[TensorRule, ...], prefix: str, number: int
) -> tuple[TensorRule, ...]:
    """The rules of layers, for one layer of the file under a prefix."""
    layer_rules = (rule for rule in rules if "{i}" in rule.tensor)
    return tuple(
        replace(
            rule,
            tensor=(
                rule.tensor.replace("{p}", prefix) if "{p}" in rule.tensor else prefix + rule.tensor
            ).replace("{i}", str(number)),
        )
        for rule in layer_rules
    )


def _count(names: Collection[str], pattern: str, tensor: str, first: int) -> int:
    number = first
    while is_in_file(pattern.format(number) + tensor, names):
        number += 1
    return number - first


def write_mtp(
    config: ModelConfig, rules: tuple[TensorRule, ...], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a file for the weights with the prefix `mtp.`, under the names of Qwen3.5."""
    mtp_weights = {
        name.removeprefix(_STATE_PREFIX): tensor
        for name, tensor in weights.items()
        if name.startswith(_STATE_PREFIX)
    }
    if not mtp_weights:
        return {}
    layer = {
        name.replace("layer.", _LAYER, 1): tensor
        for name, tensor in mtp_weights.items()
        if name.startswith("layer.")
    }
    dense = f"{_LAYER}feed.router.weight" not in layer
    layer_rules = _rules_of_layer(rules, _PREFIXES[0], 0)
    tensors = write_weights(config.mtp_layer_config(dense=dense), layer_rules, layer, _LAYER)
    for weight, name in _QWEN.items():
        tensors[f"{_PREFIXES[0]}{name}.weight"] = mtp_weights[f"{weight}.weight"]
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
