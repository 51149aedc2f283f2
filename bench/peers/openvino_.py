"""OpenVINO GenAI, weights in 4 bits as optimum-intel converts them; see protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Options, serve, size_of


class OpenVino:
    weights = None

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pipeline = openvino_genai.LLMPipeline(
            options.model, "CPU", INFERENCE_NUM_THREADS=options.threads
        )
        path = Path(options.model)
        self.weight_bytes = size_of(path, "openvino_model.bin") or path.stat().st_size
        self.name = f"openvino-genai {openvino_genai.__version__}"
        self.plain: Any = None
        self.several: Any = None

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = new
        settings.ignore_eos, settings.do_sample = True, False
        ids = openvino.Tensor(np.array(prompts, np.int64))
        if len(prompts) == 1:
            found = self.pipeline.generate(ids, settings, _Marks(mark))
        else:
            found = self._several().generate(ids, settings)
        return [list(map(int, row)) for row in found.tokens]

    def _several(self) -> Any:
        """Several texts in one tensor: on x86 only the older kind of attention takes them."""
        if self.several is None:
            self.several = openvino_genai.LLMPipeline(
                self.options.model,
                "CPU",
                INFERENCE_NUM_THREADS=self.options.threads,
                ATTENTION_BACKEND="SDPA",
            )
        return self.several

    def logits(self, ids: list[int]) -> Any:
        if self.plain is None:
            core = openvino.Core()
            file = Path(self.options.model) / "openvino_model.xml"
            self.plain = core.compile_model(file, "CPU").create_infer_request()
        self.plain.reset_state()
        text = np.array([ids], np.int64)
        given = {
            "input_ids": text,
            "attention_mask": np.ones_like(text),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return self.plain.infer(given)["logits"][0]

    def first(self, text: str) -> str:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens, settings.apply_chat_template = 1, False
        return str(self.pipeline.generate(text, settings))


class _Marks(openvino_genai.StreamerBase):
    """Hears of each token as it comes."""

    def __init__(self, mark: Callable[[], None]) -> None:
        super().__init__()
        self.mark = mark

    def write(self, token: Any) -> Any:
        self.mark()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


if __name__ == "__main__":
    serve(OpenVino)
