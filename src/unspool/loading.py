"""Load a model: find its files, choose a backend, load the weights, open the tokenizer.

The native backend runs a model on a CPU, our own kernels (`cuda`) on an NVIDIA GPU; plain torch is
for other devices, and where neither can be used. A backend is imported only when it is chosen. The
native backend repacks weights in the background, so the engine and the tokenizer are imported and
opened after it has started.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.backends.placement import Placement, PlacementChoice
from unspool.backends.torch.parallel import worker
from unspool.errors import SettingsError, UnspoolWarning
from unspool.gc_pause import gc_paused
from unspool.model.adapters import base_model_of, is_adapter
from unspool.model.files.checkpoint import (
    Checkpoint,
    GGUFCheckpoint,
    load_transformer,
    open_checkpoint,
)
from unspool.model.hub.find import find_model

if TYPE_CHECKING:
    from unspool.backends.step import LoadedModel
    from unspool.engine.request import Drafter, DraftMaker
    from unspool.lm import LanguageModel
    from unspool.session import Session, Speculate
    from unspool.text.tokenizer.tokenizer import Tokenizer


def load(
    model: str | Path | None = None,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    context: int | None = None,
    memory: int | None = None,
    quantize: int | None = None,
    kv_bits: int | None = None,
    threads: int | None = None,
    exact: bool = False,
    tensor_parallel: int | None = None,
    devices: str | Sequence[str] | None = None,
    offline: bool = False,
    progress: bool = True,
) -> LanguageModel:
    """Load a model.

    model      a path (a folder with safetensors, a GGUF file, or a LoRA adapter that names its
               model), a short name (`qwen3-0.6b`), a repo id (`org/name`), or nothing for the
               default model; docs/how-to/download-and-manage-models.md lists all.
    device     cpu, cuda, ...; by default a GPU if torch can use one.
    backend    native (CPU), cuda (NVIDIA GPU) or torch (any device); by default the first of these
               that works here.
    dtype      float32, bfloat16 or float16. By default quantized weights, and all weights on a CPU,
               keep the file's precision; on a GPU they are bfloat16. Torch on a CPU uses float32.
    context    maximum tokens of a text; may extend the model's default. A LongRoPE model
               (Phi-3-128k, Phi-4-mini) has its original context of 4,096 tokens by default; with a
               longer one it uses the rotary factors for long texts.
    memory     bytes for the KV cache of all texts and recurrent states; by default a share of the
               free memory.
    quantize   4 or 8: quantize the weights to this many bits while loading (native and cuda).
    kv_bits    bits of a number in the KV cache: 32, 16 or 8 (native backend). By default 16, and 32
               with dtype float32. On other backends the KV cache has the precision of dtype.
    threads    number of threads; by default one for each core (native backend).
    exact      on a GPU: sum in an order that does not depend on the batch, so that a text is the
               same alone and in a batch, bit for bit. The native backend always does that.
    tensor_parallel  split a model that does not fit one GPU over this many processes, one for each
               GPU (torch backend); they are started here, and end with the model or this process.
               In a script that torchrun has started: use its processes; only the first continues.
    devices    put the layers onto these devices in order, "cuda:0,cuda:1" or "auto" for all GPUs
               (torch backend); with tensor_parallel, one for each process.
    offline    do not download; use local files only.
    progress   show progress bars.
    """
    placement = check_load_options(
        context,
        backend=backend,
        device=device,
        dtype=dtype,
        quantize=quantize,
        kv_bits=kv_bits,
        threads=threads,
        exact=exact,
        tensor_parallel=tensor_parallel,
        devices=devices,
    )
    choice = placement.resolve()
    if placement.num_ranks > 1:
        worker.run_worker_unless_rank_zero()
    path = find_model(model, offline=offline, progress=progress)
    if is_adapter(path):  # load its base model with the adapter
        name = base_model_of(path)
        base = load(
            name or None, backend=backend, dtype=dtype, device=device, context=context,
            memory=memory, quantize=quantize, kv_bits=kv_bits, threads=threads, exact=exact,
            tensor_parallel=tensor_parallel, devices=devices, offline=offline, progress=progress,
        )  # fmt: skip
        base.load_adapter("adapter", path)
        return base.adapted("adapter")
    if choice.remark:
        warnings.warn(choice.remark, UnspoolWarning, stacklevel=2)
    with gc_paused():
        checkpoint = open_checkpoint(path)
        if context is not None and checkpoint.config.positions == "learned":
            context = min(context, checkpoint.config.context)  # the table has no more positions
        name = "" if model is None else str(model)
        weights = load_weights(checkpoint, placement, choice, progress=progress, name=name)
        from unspool.lm import LanguageModel

        return LanguageModel(
            weights,
            open_tokenizer(checkpoint),
            path=checkpoint.path,
            context=context,
            memory=memory,
            make_drafter=make_drafter_for,
            load_beside=load_similar,
        )


def make_drafter_for(lm: Session, speculate: Speculate) -> Drafter | DraftMaker | None:
    """Return the drafter for an option `speculate`; a draft model is loaded like `lm`."""
    from unspool.decoding.speculative.drafters import make_drafter

    return make_drafter(speculate, lm, lambda name: load_similar(lm, name))


def load_similar(lm: Session, name: str) -> LanguageModel:
    """Load another model on the backend and device of this one."""
    backend = "native" if lm.model.device == "cpu" else "auto"
    if hasattr(lm.model, "transformer"):
        backend = "torch"
    return load(name, backend=backend, device=lm.model.device)


def check_load_options(context: int | None = None, **placement: Any) -> Placement:
    """Check the options of `load` that do not depend on the model."""
    if context is not None and (type(context) is not int or context < 1):
        raise SettingsError(f"context must be a number of tokens >= 1, got {context!r}")
    return Placement(**placement)


def load_weights(
    checkpoint: Checkpoint,
    placement: Placement,
    choice: PlacementChoice,
    *,
    progress: bool = False,
    name: str = "",
) -> LoadedModel:
    """Load a checkpoint's weights onto the chosen backend and device.

    `name` is the model's name, for other machines, where its path differs.
    """
    if choice.backend == "native":
        from unspool.backends.cpu.model import load_cpu

        store = None if placement.dtype == "auto" else placement.dtype
        if placement.quantize is not None:
            store = str(placement.quantize)
        return load_cpu(
            checkpoint, store=store, threads=placement.threads, kv_bits=placement.native_kv_bits
        )
    dtype = placement.activation_dtype(choice.device)
    loaded: LoadedModel
    if choice.backend == "cuda":
        loaded = _on_gpu(checkpoint, placement, choice.device, dtype, progress)
    elif choice.devices:
        from unspool.backends.torch.several import load_on_devices

        loaded = load_on_devices(checkpoint, choice.devices, placement.num_ranks, dtype, name)
    else:
        from unspool.backends.torch.backend import TorchModel

        loaded = TorchModel(load_transformer(checkpoint, dtype=dtype, device=choice.device))
    if checkpoint.losses:  # the native backend warns itself, after it has read the weights
        warnings.warn(checkpoint.losses, UnspoolWarning, stacklevel=2)
    return loaded


def _on_gpu(
    checkpoint: Checkpoint, placement: Placement, device: str, dtype: str, progress: bool
) -> LoadedModel:
    import torch

    from unspool.backends.cuda.load import load_weights as load_cuda_weights
    from unspool.backends.cuda.model import CudaModel
    from unspool.model.files.checkpoint import fingerprint

    weights = load_cuda_weights(
        checkpoint,
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        keep_packed=placement.dtype == "auto",
        quantize_bits=placement.quantize,
        progress=progress,
    )
    return CudaModel(weights, partial(fingerprint, checkpoint), exact=placement.exact)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return a checkpoint's tokenizer; None if it has none (token ids still work)."""
    from unspool.text.tokenizer.tokenizer import Tokenizer

    if isinstance(checkpoint, GGUFCheckpoint):
        if "tokenizer.ggml.model" not in checkpoint.file.metadata:
            return None
        return Tokenizer.from_gguf(checkpoint.file.metadata)
    from unspool.text.tokenizer.huggingface import has_vocab_and_merges

    folder = checkpoint.path
    if not (folder / "tokenizer.json").exists() and not has_vocab_and_merges(folder):
        return None
    return Tokenizer.from_file(checkpoint.path)
