"""The head of a model that gives numbers to a text instead of a next token: a reward model.

transformers calls it `score`: one matrix (`LlamaForSequenceClassification` and its kin, token
classification with a bias), or two with a ReLU between (Qwen's process-reward models). The layers
below it are an ordinary model's, and are loaded as such.

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
    """Matrices with their biases, a ReLU between two of them."""

    layers: tuple[tuple[Floats, Floats | None], ...]
    per_token: bool  # made to score every step of a text, and not only the whole

    @property
    def labels(self) -> int:
        """How many numbers each token gets."""
        return len(self.layers[-1][0])

    def __call__(self, vectors: Floats) -> Floats:
        """What it says of vectors that have passed the layers and the last norm."""
        x = np.asarray(vectors, np.float32)
        for number, (weight, bias) in enumerate(self.layers):
            x = np.maximum(x, 0) if number else x
            x = x @ weight.T if bias is None else x @ weight.T + bias
        return x


def read_score_head(folder: Path) -> ScoreHead:
    """The head that lies in a checkpoint's folder."""
    parts: dict[tuple[int, str], Floats] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = SafetensorsFile(file)
        for name in found.tensors:
            if known := _NAME.fullmatch(name):
                parts[int(known[1] or 0), known[2]] = found.stored(name).float32()
    numbers = sorted(number for number, kind in parts if kind == "weight")
    if not numbers:
        raise ModelFileError(
            f"{folder}: has no score head (score.weight), so it is no reward model; name a "
            "sequence-classification checkpoint in safetensors, or ask a model: --judge ask:MODEL"
        )
    named = read_json(folder / "config.json").get("architectures") or [""]
    layers = tuple((parts[n, "weight"], parts.get((n, "bias"))) for n in numbers)
    return ScoreHead(layers, str(named[0]).endswith(_PER_TOKEN))
