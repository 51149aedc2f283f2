"""Load a model: find it, choose the backend that keeps its weights, and open its vocabulary.

On a CPU the native backend runs the model, on an NVIDIA GPU our own kernels (`cuda`); plain torch
is for other devices, and for where either cannot be used. None is imported before it is chosen. The
native backend repacks weights in the background, so what is not needed for that (the engine, the
vocabulary) is imported and opened only when it has begun.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.backends.placement import Choice, Placement
from unspool.backends.torch import torchrun
from unspool.collecting import collecting_later
from unspool.errors import SettingsError, UnspoolError, UnspoolWarning
from unspool.model.adapters import base_of, is_adapter
from unspool.model.checkpoint import (
    Checkpoint,
    GGUFCheckpoint,
    load_transformer,
    open_checkpoint,
)
from unspool.model.hub import find_model

if TYPE_CHECKING:
    from unspool.backends.base import Loaded
    from unspool.engine.request import Drafter, DraftMaker
    from unspool.language_model import LanguageModel
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
    """A model, ready to write.

    model      a path (a folder with safetensors, a GGUF file, or a LoRA adapter that names its
               model), a short name (`qwen3-0.6b`), a repo id (`org/name`), or nothing for the
               default model; docs/models.md has the rest.
    device     cpu, cuda, ...; by default a GPU if there is one that torch can use.
    backend    native (on a CPU), cuda (on an NVIDIA GPU) or torch (anywhere); by default the first
               that can be used here.
    dtype      float32, bfloat16 or float16. By default quantized weights keep the file's own
               numbers, others too on a CPU; on a GPU they are bfloat16. Torch has float32 on a CPU.
    context    limits, or extends, how many tokens a text may have. A LongRoPE model (Phi-3-128k,
               Phi-4-mini) has its original context by default, 4,096 tokens; with a longer one
               all texts are read with the rotary factors for long texts.
    memory     bytes that keys and values of all texts, and recurrent states, may take; by default a
               share of what is free.
    quantize   4 or 8: pack the weights into so many bits while loading (native and cuda).
    kv_bits    bits of a number in the KV cache: 32, 16 or 8 (native backend). By default 16, and 32
               with dtype float32. On other backends the KV cache has the precision of dtype.
    threads    how many work; by default one for each core (native backend).
    exact      on a GPU: sums in one order whatever the batch, so that a text is the same alone and
               among others, to the last bit. The native backend always does that.
    tensor_parallel  split a model that does not fit one GPU over so many processes, one a GPU
               (torch backend); they are started here, and end with the model or this process. In a
               script that torchrun has started: its processes, of which only the first goes on.
    devices    put the layers onto these devices in order, "cuda:0,cuda:1" or "auto" for all GPUs
               (torch backend); with tensor_parallel, one for each process.
    """
    wanted = check_load_options(
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
    choice = wanted.chosen()
    if wanted.ranks > 1:
        torchrun.work_unless_first()
    path = find_model(model, offline=offline, progress=progress)
    if is_adapter(path):  # its model, writing with it
        name = base_of(path)
        base = load(
            name or None, backend=backend, dtype=dtype, device=device, context=context,
            memory=memory, quantize=quantize, kv_bits=kv_bits, threads=threads, exact=exact,
            tensor_parallel=tensor_parallel, devices=devices, offline=offline, progress=progress,
        )  # fmt: skip
        base.load_adapter("adapter", path)
        return base.adapted("adapter")
    if choice.remark:
        warnings.warn(choice.remark, UnspoolWarning, stacklevel=2)
    with collecting_later():
        checkpoint = open_checkpoint(path)
        if context is not None and checkpoint.config.positions == "learned":
            context = min(context, checkpoint.config.context)  # there is no table for more
        name = "" if model is None else str(model)
        weights = load_weights(checkpoint, wanted, choice, progress=progress, name=name)
        from unspool.language_model import LanguageModel

        return LanguageModel(
            weights,
            open_tokenizer(checkpoint),
            path=checkpoint.path,
            context=context,
            memory=memory,
            make_drafter=make_drafter_for,
            load_beside=load_beside,
        )


def make_drafter_for(lm: Session, speculate: Speculate) -> Drafter | DraftMaker | None:
    """Who guesses ahead for a model; another model that drafts is loaded the same way."""
    from unspool.decoding.speculative import make_drafter

    return make_drafter(speculate, lm, lambda name: load_beside(lm, name))


def load_beside(lm: Session, name: str) -> LanguageModel:
    """Another model, on the backend and the device that this one has."""
    backend = "native" if lm.model.device == "cpu" else "auto"
    if hasattr(lm.model, "transformer"):
        backend = "torch"
    return load(name, backend=backend, device=lm.model.device)


def check_load_options(context: int | None = None, **placement: Any) -> Placement:
    """The options of `load` that can be wrong before there is a model."""
    if context is not None and (type(context) is not int or context < 1):
        raise SettingsError(f"context is {context!r}; it must be a number of tokens, at least 1")
    return Placement(**placement)


def load_weights(
    checkpoint: Checkpoint,
    wanted: Placement,
    choice: Choice,
    *,
    progress: bool = False,
    name: str = "",
) -> Loaded:
    """The checkpoint's weights in memory, on the backend and device that were chosen. `name` is
    what the model is called where its files lie elsewhere."""
    if choice.backend == "native":
        from unspool.backends.cpu.loaded import load_cpu

        store = None if wanted.dtype == "auto" else wanted.dtype
        if wanted.quantize is not None:
            store = str(wanted.quantize)
        return load_cpu(
            checkpoint, store=store, threads=wanted.threads, kv_bits=wanted.native_kv_bits
        )
    dtype = wanted.plain_dtype(choice.device)
    loaded: Loaded
    if choice.backend == "cuda" and _fits_kernels(checkpoint, wanted):
        loaded = _on_gpu(checkpoint, wanted, choice.device, dtype, progress)
    elif choice.devices:
        from unspool.backends.torch.several import load_on_several

        loaded = load_on_several(checkpoint, choice.devices, wanted.ranks, dtype, name)
    else:
        from unspool.backends.torch.loaded import TorchModel

        loaded = TorchModel(load_transformer(checkpoint, dtype=dtype, device=choice.device))
    if checkpoint.losses:  # the native backend says it itself, when it has read the weights
        warnings.warn(checkpoint.losses, UnspoolWarning, stacklevel=2)
    return loaded


def _fits_kernels(checkpoint: Checkpoint, wanted: Placement) -> bool:
    """Whether our kernels for GPUs can run this model; plain torch does where they were not asked
    for by name, nor what only they can do."""
    from unspool.backends.cuda.available import lacking

    reason = lacking(checkpoint.config)
    if reason is None:
        return True
    asked = {
        "backend": wanted.backend == "cuda",
        "exact": wanted.exact,
        "quantize": wanted.quantize is not None,
    }
    for name in (name for name, given in asked.items() if given):
        raise UnspoolError(
            f"the kernels for GPUs cannot run this model, because {reason}; leave {name} out, and "
            "plain torch runs it"
        )
    remark = f"running on plain torch, which is slower: {reason}, which our kernels cannot do"
    warnings.warn(remark, UnspoolWarning, stacklevel=3)
    return False


def _on_gpu(
    checkpoint: Checkpoint, wanted: Placement, device: str, dtype: str, progress: bool
) -> Loaded:
    import torch

    from unspool.backends.cuda.load import load_weights as bring
    from unspool.backends.cuda.loaded import CudaModel
    from unspool.model.fingerprint import fingerprint

    weights = bring(
        checkpoint,
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        keep=wanted.dtype == "auto",
        bits=wanted.quantize,
        progress=progress,
    )
    return CudaModel(weights, partial(fingerprint, checkpoint), exact=wanted.exact)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The vocabulary that came with a checkpoint; None if there is none (token ids still work)."""
    from unspool.text.tokenizer.tokenizer import Tokenizer

    if isinstance(checkpoint, GGUFCheckpoint):
        if "tokenizer.ggml.model" not in checkpoint.file.metadata:
            return None
        return Tokenizer.from_gguf(checkpoint.file.metadata)
    from unspool.text.tokenizer.vocab_and_merges import has_vocab_and_merges

    folder = checkpoint.path
    if not (folder / "tokenizer.json").exists() and not has_vocab_and_merges(folder):
        return None
    return Tokenizer.from_file(checkpoint.path)
