"""The score head of a reward model.

In transformers it is called `score`: one matrix (`LlamaForSequenceClassification` and similar,
token classification with a bias), or two with a ReLU between (Qwen's process-reward models). The
layers below it are those of an ordinary model.

    head = read_score_head(Path("reward-model"))
    head(vectors)                                  # [tokens, width] -> [tokens, labels]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.config_hf import read_json
from unspool.model.safetensors_file import SafetensorsFile

Floats = npt.NDArray[np.float32]
_NAME = re.compile(r"(?:score|classifier)(?:\.(\d+))?\.(weight|bias)")
_PER_TOKEN = ("ForTokenClassification", "ForProcessRewardModel")


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Matrices with biases, and ReLUs between them."""

    layers: tuple[tuple[Floats, Floats | None], ...]
    per_token: bool  # trained to score every step, not only the full text

    @property
    def labels(self) -> int:
        """Number of outputs."""
        return len(self.layers[-1][0])

    def __call__(self, vectors: Floats) -> Floats:
        """Scores of hidden states after the last norm."""
        x = np.asarray(vectors, np.float32)
        for number, (weight, bias) in enumerate(self.layers):
            x = np.maximum(x, 0) if number else x
            x = x @ weight.T if bias is None else x @ weight.T + bias
        return x


def read_score_head(folder: Path) -> ScoreHead:
    """Read the score head of a checkpoint's folder."""
    parts: dict[tuple[int, str], Floats] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = SafetensorsFile(file)
        for name in tensors.tensors:
            if match := _NAME.fullmatch(name):
                parts[int(match[1] or 0), match[2]] = tensors.stored(name).float32()
    numbers = sorted(number for number, kind in parts if kind == "weight")
    if not numbers:
        raise ModelFileError(
            f"{folder}: has no score head (score.weight), so it is not a reward model; give a "
            "sequence-classification checkpoint in safetensors, or use --judge ask:MODEL"
        )
    architectures = read_json(folder / "config.json").get("architectures") or [""]
    layers = tuple((parts[n, "weight"], parts.get((n, "bias"))) for n in numbers)
    return ScoreHead(layers, str(architectures[0]).endswith(_PER_TOKEN))
