"""llama.cpp through llama-cpp-python's low-level calls, the same GGUF file; see protocol.py.

The high-level class of that package samples in Python and copies logits; that would measure the
wrapper. Here a step is one `llama_decode` and one argmax.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
from protocol import Options, serve

CHUNK = 2048  # tokens that one call may bring; llama.cpp's own default


class LlamaCpp:
    weights = None

    def __init__(self, options: Options) -> None:
        # Kept as an attribute: C calls it later.
        self._quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self._quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.threads = options.threads
        settings = ll.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = ll.llama_model_load_from_file(options.model.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self.vocab = ll.llama_model_get_vocab(self.model)
        self.vocab_size = ll.llama_vocab_n_tokens(self.vocab)
        self.weight_bytes = Path(options.model).stat().st_size
        self.name = f"llama-cpp-python {ll.__version__}"
        self.context: Any = None
        self.shape = (0, 0)
        self.batch = ll.llama_batch_init(CHUNK, 0, 1)

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        self._open(len(prompts), max(map(len, prompts)) + new)
        feed = [
            (token, place, row, place == len(ids) - 1)
            for row, ids in enumerate(prompts)
            for place, token in enumerate(ids)
        ]
        written: list[list[int]] = [[] for _ in prompts]
        for _ in range(new):
            for start in range(0, len(feed), CHUNK):
                part = feed[start : start + CHUNK]
                found = iter(self._run(part).argmax(-1).tolist())
                for _, _, row, wanted in part:
                    if wanted:
                        written[row].append(next(found))
            mark()
            feed = [
                (text[-1], len(prompts[row]) + len(text) - 1, row, True)
                for row, text in enumerate(written)
            ]
        return written

    def logits(self, ids: list[int]) -> Any:
        self._open(1, len(ids))
        feed = [(token, place, 0, True) for place, token in enumerate(ids)]
        parts = [
            self._run(feed[start : start + CHUNK]).copy() for start in range(0, len(ids), CHUNK)
        ]
        return np.concatenate(parts)

    def first(self, text: str) -> str:
        data, room = text.encode(), (ll.llama_token * (len(text) + 8))()
        count = ll.llama_tokenize(self.vocab, data, len(data), room, len(room), True, False)
        token = self.write([list(room[:count])], 1, lambda: None)[0][0]
        piece = ctypes.create_string_buffer(64)
        length = ll.llama_token_to_piece(self.vocab, token, piece, 64, 0, False)
        return piece.raw[:length].decode("utf-8", "replace")

    def _open(self, rows: int, length: int) -> None:
        """Room for so many texts of this length, empty; made anew only where it must grow."""
        length = -(-length // 256) * 256
        if self.context and self.shape == (rows, length):
            ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
            return
        if self.context:
            ll.llama_free(self.context)
        settings = ll.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = rows * length, rows
        settings.n_batch = CHUNK
        settings.n_threads = settings.n_threads_batch = self.threads
        self.context = ll.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no room for {rows} texts of {length} tokens")
        self.shape = (rows, length)

    def _run(self, feed: list[tuple[int, int, int, bool]]) -> Any:
        batch = self.batch
        batch.n_tokens = len(feed)
        for at, (token, place, row, wanted) in enumerate(feed):
            batch.token[at], batch.pos[at], batch.logits[at] = token, place, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
        code = ll.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        rows = sum(wanted for *_, wanted in feed)
        if not rows:
            return np.empty((0, self.vocab_size), np.float32)
        found = ll.llama_get_logits(self.context)
        return np.ctypeslib.as_array(found, (rows, self.vocab_size))


if __name__ == "__main__":
    serve(LlamaCpp)
