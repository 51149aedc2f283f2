"""CTranslate2, weights in 8 bits as its own converter packs them; see protocol.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from protocol import Options, serve, size_of


class CTranslate2:
    weights = None

    def __init__(self, options: Options) -> None:
        self.folder = Path(options.model)
        self.model = ctranslate2.Generator(
            options.model, compute_type="int8", intra_threads=options.threads, inter_threads=1
        )
        # It takes tokens by their names, not by their numbers.
        self.names = json.loads((self.folder / "vocabulary.json").read_text(encoding="utf-8"))
        self.weight_bytes = size_of(self.folder, "model.bin")
        self.name = f"ctranslate2 {ctranslate2.__version__}"

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        def heard(step: Any) -> bool:
            mark()
            return False

        found = self.model.generate_batch(
            [[self.names[token] for token in ids] for ids in prompts],
            max_length=new, min_length=new, beam_size=1, sampling_topk=1,
            include_prompt_in_result=False, callback=heard,
        )  # fmt: skip
        return [one.sequences_ids[0] for one in found]

    def logits(self, ids: list[int]) -> Any:
        return np.array(self.model.forward_batch([ids]))[0]

    def first(self, text: str) -> str:
        from tokenizers import Tokenizer

        words = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return str(words.decode(self.write([words.encode(text).ids], 1, lambda: None)[0]))


if __name__ == "__main__":
    serve(CTranslate2)
