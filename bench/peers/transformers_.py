"""transformers on torch, the unpacked weights in --dtype; see protocol.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import Options, serve, size_of

os.environ["HF_HUB_OFFLINE"] = "1"  # the folder has everything; a lookup would cost seconds


class Transformers:
    weights = None

    def __init__(self, options: Options) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(options.threads)
        self.torch, self.folder = torch, options.model
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        on_disk = size_of(Path(options.model), "*.safetensors")  # in 32 bits
        self.weight_bytes = on_disk if options.dtype == "float32" else on_disk // 2
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        torch = self.torch
        ids = torch.tensor(prompts)

        def heard(written: Any, scores: Any, **_: Any) -> Any:
            mark()
            return torch.zeros(len(written), dtype=torch.bool)

        with torch.inference_mode():
            found = self.model.generate(
                ids, max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0,
                attention_mask=torch.ones_like(ids), stopping_criteria=[heard],
            )  # fmt: skip
        rows: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return rows

    def logits(self, ids: list[int]) -> Any:
        with self.torch.inference_mode():
            return self.model(self.torch.tensor([ids])).logits[0].float().numpy()

    def first(self, text: str) -> str:
        import transformers

        words = transformers.AutoTokenizer.from_pretrained(self.folder)
        return str(words.decode(self.write([words.encode(text)], 1, lambda: None)[0]))


if __name__ == "__main__":
    serve(Transformers)
