"""Engine workers: `python bench/lib/engines.py ENGINE --model PATH` loads a model and runs jobs.

Runs in the environment of its engine, so it imports nothing but the standard library, numpy and
that engine. Messages are JSON objects, one per line. After loading the worker writes
    {"ready": true, "load_s": 0.4, "engine": "llama-cpp-python 0.3.36", "weights": null,
     "weight_bytes": 96600000}
where "weights" is the precision if only the engine knows it. Then it answers jobs from stdin:
    {"work": "write", "prompts": [[1, 2], [3, 4]], "new": 128}
        -> {"seconds": 1.9, "first_s": 0.1, "ids": [[...], [...]]}
    {"work": "logits", "ids": [1, 2, 3], "file": "logits.npy"}  -> {"rows": 3}
    {"work": "memory"}                                          -> {"peak_mb": 288.0}
A job that fails is answered with {"error": "reason"}. With --cold TEXT the worker writes the first
token after the text and exits, which is how cold starts are timed.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[list[int]]


class Engine:
    """Base of all engines: they are created with a model path, a thread count and a dtype."""

    name: str
    weights: str | None = None  # precision, if only the engine knows it
    weight_bytes: int  # bytes of weights that one step reads

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        """Write exactly `new` greedy tokens after each prompt; call `mark` with the first."""
        raise NotImplementedError

    def logits(self, ids: list[int]) -> Any:
        """One row of logits for each token of a text, as numpy."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def first_token(self, text: str) -> str:
        return self.decode(self.write([self.encode(text)], 1, lambda: None)[0])


class Unspool(Engine):
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import unspool

        settings: dict[str, Any] = {"device": "cpu", "progress": False}
        try:
            self.lm = unspool.load(model, threads=threads, **settings)
        except unspool.SettingsError:  # no native kernels: torch has its own thread setting
            import torch

            torch.set_num_threads(threads)
            self.lm = unspool.load(model, **settings)
        self.weights = precision = self.lm.model.precision
        self.weight_bytes = Path(model).stat().st_size
        if precision in ("float32", "bfloat16", "float16"):  # the file's blocks were dequantized
            config = self.lm.config
            heads = (config.heads * 2 + config.kv_heads * 2) * config.head_width
            layer = config.width * (heads + 3 * config.ff_width)
            numbers = config.layers * layer + config.vocab_size * config.width
            self.weight_bytes = numbers * (4 if precision == "float32" else 2)
        self.name = f"unspool {unspool.__version__}"
        self.encode, self.decode = self.lm.tokenizer.encode, self.lm.tokenizer.decode

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        options: dict[str, Any] = {"temperature": 0, "end": False, "top": 0, "explain": False}
        texts = [self.lm.begin(ids, max_tokens=new, **options) for ids in prompts]
        for generation, steps in texts:
            for _ in generation.extend(steps):
                mark()
        return [list(generation.tokens) for generation, _ in texts]

    def logits(self, ids: list[int]) -> Any:
        with self.lm.open_branch(ids) as branch:
            return self.lm.engine.extend(branch, num_logits=len(ids))


class LlamaCpp(Engine):
    """The low-level API: its high-level class samples in Python, which would be measured too."""

    CHUNK = 2048  # tokens per call; llama.cpp's default

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import llama_cpp

        self.api, self.threads = llama_cpp, threads
        # Kept as an attribute: C calls it later.
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.weight_bytes = Path(model).stat().st_size
        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        self.context: Any = None
        self.shape = (0, 0)
        self.batch = llama_cpp.llama_batch_init(self.CHUNK, 0, 1)

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        self._open(len(prompts), max(map(len, prompts)) + new)
        feed = [
            (token, position, row, position == len(ids) - 1)
            for row, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        written: Rows = [[] for _ in prompts]
        for _ in range(new):
            for start in range(0, len(feed), self.CHUNK):
                part = feed[start : start + self.CHUNK]
                picks = iter(self._run(part).argmax(-1).tolist())
                for _, _, row, has_logits in part:
                    if has_logits:
                        written[row].append(next(picks))
            mark()
            feed = [
                (text[-1], len(prompts[row]) + len(text) - 1, row, True)
                for row, text in enumerate(written)
            ]
        return written

    def logits(self, ids: list[int]) -> Any:
        import numpy as np

        self._open(1, len(ids))
        feed = [(token, position, 0, True) for position, token in enumerate(ids)]
        starts = range(0, len(ids), self.CHUNK)
        return np.concatenate([self._run(feed[s : s + self.CHUNK]).copy() for s in starts])

    def encode(self, text: str) -> list[int]:
        data, buffer = text.encode(), (self.api.llama_token * (len(text) + 8))()
        count = self.api.llama_tokenize(
            self.vocab, data, len(data), buffer, len(buffer), True, False
        )
        return list(buffer[:count])

    def decode(self, ids: list[int]) -> str:
        piece = ctypes.create_string_buffer(64)
        length = self.api.llama_token_to_piece(self.vocab, ids[0], piece, 64, 0, False)
        return piece.raw[:length].decode("utf-8", "replace")

    def _open(self, rows: int, length: int) -> None:
        """Make an empty context for `rows` texts of this length; reuse one of the same shape."""
        length = -(-length // 256) * 256
        if self.context and self.shape == (rows, length):
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
            return
        if self.context:
            self.api.llama_free(self.context)
        settings = self.api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.n_batch = rows * length, rows, self.CHUNK
        settings.n_threads = settings.n_threads_batch = self.threads
        self.context = self.api.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no memory for {rows} texts of {length} tokens")
        self.shape = (rows, length)

    def _run(self, feed: list[tuple[int, int, int, bool]]) -> Any:
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(feed)
        for index, (token, position, row, has_logits) in enumerate(feed):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, has_logits
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with code {code}")
        rows = sum(has_logits for *_, has_logits in feed)
        if not rows:
            return np.empty((0, self.vocab_size), np.float32)
        pointer = self.api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (rows, self.vocab_size))


class OnnxRuntime(Engine):
    """ONNX Runtime GenAI, weights in 4 bits as its own model builder packs them."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import onnxruntime_genai

        self.api = onnxruntime_genai
        settings = self.api.Config(model)
        options = {"intra_op_num_threads": threads}
        settings.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = self.api.Model(settings)
        self.weight_bytes = file_bytes(Path(model), "*.onnx", "*.onnx.data")
        self.name = f"onnxruntime-genai {self.api.__version__}"

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        length = len(prompts[0])
        generator = self._generator(prompts, length + new)
        for _ in range(new):
            generator.generate_next_token()
            mark()
        return [generator.get_sequence(row)[length:].tolist() for row in range(len(prompts))]

    def logits(self, ids: list[int]) -> Any:
        rows = self._generator([ids], len(ids) + 1).get_output("logits")[0]
        if len(rows) != len(ids):
            raise RuntimeError("this engine returns logits of the last token only")
        return rows

    def encode(self, text: str) -> list[int]:
        return list(self.api.Tokenizer(self.model).encode(text).tolist())

    def decode(self, ids: list[int]) -> str:
        return str(self.api.Tokenizer(self.model).decode(ids))

    def _generator(self, prompts: Rows, length: int) -> Any:
        import numpy as np

        settings = self.api.GeneratorParams(self.model)
        # The minimum length keeps it from ending early: every engine writes as many tokens.
        settings.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        generator = self.api.Generator(self.model, settings)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator


class CTranslate2(Engine):
    """CTranslate2, weights in 8 bits as its own converter packs them."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import ctranslate2

        self.folder = Path(model)
        self.model = ctranslate2.Generator(
            model, compute_type="int8", intra_threads=threads, inter_threads=1
        )
        # It takes the text of tokens, not their ids.
        self.pieces = json.loads((self.folder / "vocabulary.json").read_text(encoding="utf-8"))
        self.weight_bytes = file_bytes(self.folder, "model.bin")
        self.name = f"ctranslate2 {ctranslate2.__version__}"

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        results = self.model.generate_batch(
            [[self.pieces[token] for token in ids] for ids in prompts],
            max_length=new, min_length=new, beam_size=1, sampling_topk=1,
            include_prompt_in_result=False, callback=lambda step: bool(mark()),
        )  # fmt: skip
        return [result.sequences_ids[0] for result in results]

    def logits(self, ids: list[int]) -> Any:
        import numpy as np

        return np.array(self.model.forward_batch([ids]))[0]

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer().encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer().decode(ids))


class OpenVino(Engine):
    """OpenVINO GenAI, weights in 4 bits as optimum-intel converts them."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import openvino_genai

        self.api, self.folder = openvino_genai, Path(model)
        self.options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = self.api.LLMPipeline(model, "CPU", **self.options)
        size = file_bytes(self.folder, "openvino_model.bin")
        self.weight_bytes = size or self.folder.stat().st_size
        self.name = f"openvino-genai {self.api.__version__}"
        self.forward: Any = None
        self.batched: Any = None

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        import numpy as np
        import openvino

        class Streamer(self.api.StreamerBase):  # type: ignore[misc,name-defined]
            def write(self, token: Any) -> Any:
                mark()
                return running

            def end(self) -> None: ...

        running = self.api.StreamingStatus.RUNNING
        settings = self.api.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = new
        settings.ignore_eos, settings.do_sample = True, False
        ids = openvino.Tensor(np.array(prompts, np.int64))
        if len(prompts) == 1:
            result = self.pipeline.generate(ids, settings, Streamer())
        else:
            if self.batched is None:  # on x86 only this attention takes several texts
                options = {**self.options, "ATTENTION_BACKEND": "SDPA"}
                self.batched = self.api.LLMPipeline(str(self.folder), "CPU", **options)
            result = self.batched.generate(ids, settings)
        return [list(map(int, row)) for row in result.tokens]

    def logits(self, ids: list[int]) -> Any:
        import numpy as np
        import openvino

        if self.forward is None:
            model = openvino.Core().compile_model(self.folder / "openvino_model.xml", "CPU")
            self.forward = model.create_infer_request()
        self.forward.reset_state()
        text = np.array([ids], np.int64)
        inputs = {
            "input_ids": text, "attention_mask": np.ones_like(text),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        return self.forward.infer(inputs)["logits"][0]

    def first_token(self, text: str) -> str:
        settings = self.api.GenerationConfig()
        settings.max_new_tokens, settings.apply_chat_template = 1, False
        return str(self.pipeline.generate(text, settings))


class Transformers(Engine):
    """transformers on torch, dequantized weights in --dtype."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the folder is complete; a lookup would cost seconds
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch, self.tokenizers = torch, transformers.AutoTokenizer
        self.folder = model
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        ).eval()
        on_disk = file_bytes(Path(model), "*.safetensors")  # in 32 bits
        self.weight_bytes = on_disk if dtype == "float32" else on_disk // 2
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def write(self, prompts: Rows, new: int, mark: Callable[[], None]) -> Rows:
        torch = self.torch
        ids = torch.tensor(prompts)

        def on_token(written: Any, scores: Any, **_: Any) -> Any:
            mark()
            return torch.zeros(len(written), dtype=torch.bool)

        with torch.inference_mode():
            tokens = self.model.generate(
                ids, max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0,
                attention_mask=torch.ones_like(ids), stopping_criteria=[on_token],
            )  # fmt: skip
        return list(tokens[:, ids.shape[1] :].tolist())

    def logits(self, ids: list[int]) -> Any:
        with self.torch.inference_mode():
            return self.model(self.torch.tensor([ids])).logits[0].float().numpy()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizers.from_pretrained(self.folder).encode(text))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizers.from_pretrained(self.folder).decode(ids))


def file_bytes(folder: Path, *patterns: str) -> int:
    return sum(file.stat().st_size for pattern in patterns for file in folder.glob(pattern))


def run_job(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    if job["work"] == "memory":
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return {"peak_mb": int(peak) / 1024}  # mapped files included
    if job["work"] == "logits":
        import numpy as np

        rows = engine.logits(job["ids"])
        np.save(job["file"], np.asarray(rows, np.float32))
        return {"rows": len(rows)}
    times: list[float] = []
    start = time.perf_counter()
    ids = engine.write(job["prompts"], job["new"], lambda: times.append(time.perf_counter()))
    end = time.perf_counter()
    lengths = [len(row) for row in ids]
    if lengths != [job["new"]] * len(job["prompts"]):
        raise RuntimeError(f"wrote {lengths} tokens instead of {job['new']} each")
    return {"seconds": end - start, "first_s": [*times, end][0] - start, "ids": ids}


def serve(engine_class: Callable[..., Engine], words: Sequence[str]) -> None:
    """Load the model, then answer jobs until stdin ends."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description="An engine that answers jobs on stdin.")
    parser.add_argument("--model", required=True, help="file or folder of the weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="precision of transformers")
    parser.add_argument("--cold", metavar="TEXT", help="write one token after TEXT and exit")
    args = parser.parse_args(words)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(args.threads))
    # stdout carries the answers only; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = engine_class(args.model, args.threads, args.dtype)
    if args.cold is not None:
        answers.write(engine.first_token(args.cold) + "\n")
        return
    ready = {"ready": True, "load_s": time.perf_counter() - start, "engine": engine.name}
    ready |= {"weights": engine.weights, "weight_bytes": engine.weight_bytes}
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        try:
            answer = run_job(engine, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


ENGINES: dict[str, Callable[..., Engine]] = {
    "us": Unspool,
    "llama_cpp": LlamaCpp,
    "onnxruntime": OnnxRuntime,
    "ctranslate2": CTranslate2,
    "openvino": OpenVino,
    "transformers": Transformers,
}

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not hide installed ones
    serve(ENGINES[sys.argv[1]], sys.argv[2:])
