"""ONNX Runtime GenAI, weights in 4 bits as its own model builder packs them; see protocol.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from protocol import Options, serve, size_of


class OnnxRuntime:
    weights = None

    def __init__(self, options: Options) -> None:
        settings = og.Config(options.model)
        threads = {"intra_op_num_threads": options.threads}
        settings.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self.model = og.Model(settings)
        self.weight_bytes = size_of(Path(options.model), "*.onnx", "*.onnx.data")
        self.name = f"onnxruntime-genai {og.__version__}"

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        length = len(prompts[0])
        writer = self._writer(len(prompts), length + new)
        writer.append_tokens(np.array(prompts, np.int32))
        for _ in range(new):
            writer.generate_next_token()
            mark()
        return [writer.get_sequence(row)[length:].tolist() for row in range(len(prompts))]

    def logits(self, ids: list[int]) -> Any:
        writer = self._writer(1, len(ids) + 1)
        writer.append_tokens(np.array([ids], np.int32))
        found = writer.get_output("logits")[0]
        if len(found) != len(ids):
            raise RuntimeError("this engine gives logits of the last token only")
        return found

    def first(self, text: str) -> str:
        words = og.Tokenizer(self.model)
        return str(words.decode(self.write([words.encode(text).tolist()], 1, lambda: None)[0]))

    def _writer(self, rows: int, length: int) -> Any:
        settings = og.GeneratorParams(self.model)
        # No end before the last token: every engine writes equally many.
        settings.set_search_options(
            batch_size=rows, max_length=length, min_length=length, do_sample=False
        )
        return og.Generator(self.model, settings)


if __name__ == "__main__":
    serve(OnnxRuntime)
