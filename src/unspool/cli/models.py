"""`unspool models`: list, download, remove and describe models; `unspool ps`."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli.inspection import find_checkpoint
from unspool.cli.output import print_columns, print_json, print_table
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.model.config import ModelConfig
    from unspool.model.hub.catalogue import CatalogueEntry
    from unspool.model.hub.find import CachedModel
    from unspool.model.hub.inspect import MemoryPlan
    from unspool.text.tokenizer.tokenizer import Tokenizer

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A path, a short name or a repo id.", autocompletion=o.complete_model),
]

models = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="List, download, remove and describe models.",
    epilog="Examples:  unspool models list --all   ·   unspool models pull qwen3-0.6b   ·   "
    "unspool models show model.gguf",
)


# -- list, download, remove ------------------------------------------------------------------------


@models.command("list")
def list_models(
    everything: Annotated[
        bool, typer.Option("--all", help="Also list models to download.")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """List the models on this machine, also those of Ollama, llama.cpp and LM Studio.

    Models with the source "shipped" are part of Unspool: two for each puzzle.

    [b]Examples[/b]

      unspool models list
      unspool models list --all
    """
    from unspool.model.hub.find import cached_models

    local = sorted(cached_models(include_unusable=True), key=lambda model: bool(model.problem))
    if as_json:
        rows = [_model_facts(model) for model in local]
        print_json({"models": rows, "catalogue": _catalogue_facts()} if everything else rows)
        return
    print_table("name size kind source fits", [_model_row(model) for model in local])
    if all(model.source == "shipped" for model in local):
        print("no others yet; unspool models pull downloads the default model (98 MB)")
    if everything:
        print()
        _print_catalogue()


@models.command()
def catalogue(as_json: o.Json = False) -> None:
    """List recommended models to download, with their short names.

    Models that do not fit in free memory are marked.

    [b]Example[/b]

      unspool models catalogue
    """
    if as_json:
        print_json(_catalogue_facts())
    else:
        _print_catalogue()


@models.command()
def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A short name or a repo id. Default: the default model.",
            autocompletion=o.complete_download,
        ),
    ] = None,
) -> None:
    """Download a model, for use without a network.

    [b]Examples[/b]

      unspool models pull
      unspool models pull qwen3-0.6b
      unspool models pull HuggingFaceTB/SmolLM2-360M-Instruct
      unspool models pull hf.co/Qwen/Qwen3-4B-GGUF:Q8_0
    """
    from unspool.model.hub.find import find_model

    print(find_model(model, refresh=True))


@models.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=o.complete_model)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove downloaded models. Models of other programs are never removed.

    [b]Examples[/b]

      unspool models rm qwen3-0.6b
      unspool models rm HuggingFaceTB/SmolLM2-360M-Instruct --yes
    """
    from unspool.model.hub.find import plan_removal
    from unspool.model.hub.memory import format_bytes

    for removal in [plan_removal(name) for name in names]:
        if not yes:
            if not sys.stdin.isatty():
                raise UnspoolError(f"removing {removal.name} needs a confirmation; add --yes")
            typer.confirm(
                f"remove {removal.name} ({format_bytes(removal.bytes)})?", abort=True, err=True
            )
        print(f"removed {removal.name}, {format_bytes(removal.run())}")


def _print_catalogue() -> None:
    from unspool.model.hub.catalogue import catalogue
    from unspool.model.hub.memory import free_memory

    free = free_memory()
    rows = [_entry_row(entry, free) for entry in catalogue().values()]
    print_table("name size kind fits licence for", rows)


def _entry_row(entry: CatalogueEntry, free: int) -> list[str]:
    from unspool.model.hub.memory import format_bytes

    kind, fits = entry.best(free)
    verdict = "yes" if fits else f"needs {format_bytes(entry.required_bytes(kind))}"
    return [entry.name, format_bytes(entry.bytes(kind)), kind, verdict, entry.licence, entry.use]


def _model_row(model: CachedModel) -> list[str]:
    from unspool.model.hub.memory import format_bytes

    if model.problem:
        fits = f"cannot be opened: {model.problem.partition(';')[0]}"
    else:
        fits = "yes" if model.fits else f"needs {format_bytes(model.required_bytes)}"
    return [model.name, format_bytes(model.bytes), model.kind or "", model.source, fits]


def _model_facts(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.bytes,
        "kind": model.kind,
        "source": model.source,
        "needs": model.required_bytes,
        "fits": model.fits and not model.problem,
        "problem": model.problem or None,
    }


def _catalogue_facts() -> list[dict[str, Any]]:
    from unspool.model.hub.catalogue import catalogue
    from unspool.model.hub.memory import free_memory

    free = free_memory()
    facts = []
    for entry in catalogue().values():
        kind, fits = entry.best(free)
        size = {"kind": kind, "bytes": entry.bytes(kind), "needs": entry.required_bytes(kind)}
        facts.append({**asdict(entry), **size, "fits": fits})
    return facts


# -- describe a model ------------------------------------------------------------------------------


def info(model: ModelArgument = None, offline: o.Offline = False) -> None:
    """Describe a model: family, size, precision, context, vocabulary, chat template.

    [b]Examples[/b]

      unspool models show
      unspool models show ./model.gguf
    """
    from unspool.loading import open_tokenizer
    from unspool.model.hub.inspect import summarize_model
    from unspool.model.hub.memory import format_bytes, free_memory
    from unspool.model.weights import parameter_count

    checkpoint = find_checkpoint(model, offline)
    config, tokenizer = checkpoint.config, open_tokenizer(checkpoint)
    summary = summarize_model(checkpoint.path)
    rows = {
        "path": str(checkpoint.path),
        "family": config.family,
        "parameters": f"{parameter_count(config):,}",
        "size": format_bytes(summary.bytes) + (f", {summary.kind}" if summary.kind else ""),
        "memory": f"about {format_bytes(summary.required_bytes)} to run; "
        f"{format_bytes(free_memory())} are free",
        "bits per weight": f"{checkpoint.bits_per_weight():.2f}",
        "context": _describe_context(config),
        "layers": f"{config.layers} of width {config.width}, {_describe_heads(config)}",
        "feed-forward": f"{_ff_widths(config)} ({config.activation}{', gated' * config.gated})",
        "positions": _describe_positions(config),
        "attention": _describe_attention(config),
        "KV cache": f"{2 * config.kv_floats_per_token:,} bytes per token in 16 bits",
        "vocabulary": "none in this folder",
        "chat template": "none",
    }
    if config.sight != "causal" or config.mask_id is not None:
        rows["mask token"] = _describe_mask_token(config, tokenizer)
    if config.state_bytes:
        rows["recurrent state"] = f"{config.state_bytes:,} bytes per saved position"
    if (mtp := checkpoint.mtp) is not None:
        layers = f"{mtp.num_layers} layer{'s' * (mtp.num_layers > 1)}"
        rows["MTP"] = f"{layers} for speculative decoding: --speculate mtp"
    if config.experts:
        rows["experts"] = f"{config.experts}, {config.experts_per_token} per token"
    if tokenizer is not None:
        ends = ", ".join(sorted(tokenizer.token_text(i) for i in tokenizer.end_ids))
        rows["vocabulary"] = f"{len(tokenizer):,} ({tokenizer.kind}); end tokens: {ends or 'none'}"
        if tokenizer.chat_template:
            rows["chat template"] = f"yes, {len(tokenizer.chat_template):,} characters"
    print_columns([[name, value] for name, value in rows.items()])


def _describe_heads(config: ModelConfig) -> str:
    """The heads of all layers, or of each kind of layer."""
    shapes = dict.fromkeys(config.shape(layer) for layer in range(config.layers))
    kinds = dict.fromkeys((shape.heads, shape.kv_heads, shape.head_width) for shape in shapes)
    parts = []
    for heads, kv_heads, width in kinds:
        shared = f", {kv_heads} for keys and values" if kv_heads != heads else ""
        parts.append(f"{heads} heads of {width}{shared}")
    return " or ".join(parts)


def _ff_widths(config: ModelConfig) -> str:
    widths = dict.fromkeys(config.shape(layer).ff_width for layer in range(config.layers))
    return " or ".join(map(str, widths))


def _describe_attention(config: ModelConfig) -> str:
    if config.sight == "causal":
        return "causal"
    span = f"to the end of its block of {config.block}" if config.block else "bidirectional"
    return f"{span}; predicts the {'next' if config.shifted else 'same'} position"


def _describe_mask_token(config: ModelConfig, tokenizer: Tokenizer | None) -> str:
    if config.mask_id is None:
        return "none; tokenizer_config.json of the model does not name one"
    if tokenizer is None or config.mask_id >= len(tokenizer):
        return str(config.mask_id)
    return f"{config.mask_id} {tokenizer.token_text(config.mask_id)}"


def _describe_context(config: ModelConfig) -> str:
    default = config.default_context
    if default == config.context:
        return f"{default:,} tokens"
    return (
        f"{default:,} tokens; up to {config.context:,} with --context, whose other rotary factors "
        f"(LongRoPE) also change texts shorter than {default:,}"
    )


def _describe_positions(config: ModelConfig) -> str:
    if config.rotary is None:
        return config.positions
    scaling = "" if config.rotary.scaling == "none" else f", {config.rotary.scaling} scaling"
    windows = [w for w in config.windows if w]
    window = f"; {len(windows)} layers see {windows[0]:,} tokens" if windows else ""
    return f"rotary, base {config.rotary.base:,.0f}{scaling}{window}"


# -- plan: what fits on which GPUs -----------------------------------------------------------------

_DEFAULT_GPU_BYTES = 80_000_000_000  # if this machine has no GPU
_MAX_GPUS = 1024


def plan(
    model: ModelArgument = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each GPU, like 80GB.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per text.")] = None,
    batch: Annotated[int | None, typer.Option(help="Texts in parallel.")] = None,
    offline: o.Offline = False,
    as_json: o.Json = False,
) -> None:
    """Show how the native backend runs a model; or, with --gpus, what fits on which GPUs.

    Only the configuration is read: a folder with only a config.json is enough.

    [b]Examples[/b]

      unspool models plan
      unspool models plan ./model.gguf
      unspool models plan ./model --gpus 4 --memory 80GB --context 32768 --batch 8
    """
    if (gpus, memory, context, batch) == (None, None, None, None):
        from unspool.backends.cpu.plan import format_plan

        print(format_plan(find_checkpoint(model, offline)))
        return
    from unspool.model.hub.inspect import plan_memory
    from unspool.model.hub.memory import PLANNED_CONTEXT, format_bytes, parse_size

    for name, value in {"gpus": gpus, "context": context, "batch": batch}.items():
        if value is not None and value < 1:
            raise SettingsError(f"--{name} must be >= 1, got {value}")
    local = _local_gpus() if gpus is None or memory is None else []
    num_gpus = gpus or len(local) or 1
    if num_gpus > _MAX_GPUS:
        raise SettingsError(f"--gpus must be <= {_MAX_GPUS:,}, got {num_gpus}")
    gpu_bytes = parse_size(memory) if memory is not None else min(local, default=_DEFAULT_GPU_BYTES)
    config, packed = _planned_model(model, offline)
    length = min(context or PLANNED_CONTEXT, config.context)
    plans = plan_memory(config, gpus=num_gpus, memory=gpu_bytes, packed=packed)
    if as_json:
        rows = [{**asdict(fit), "texts": fit.texts(length)} for fit in plans]
        print_json({"gpus": num_gpus, "memory": gpu_bytes, "context": length, "ways": rows})
        return
    _print_model(config)
    parallel = f" · {batch} in parallel" if batch else ""
    gpu_words = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    print(f"{gpu_words} of {format_bytes(gpu_bytes)} · texts of {length:,} tokens{parallel}\n")
    titles = ["", "weights per GPU", "per token", "tokens", f"texts of {length:,}", "fits"]
    print_columns([titles, *(_plan_row(fit, length, batch or 1) for fit in plans)])
    print(f"\n{_advice(plans, length, batch or 1)}")


def _print_model(config: ModelConfig) -> None:
    from unspool.model.hub.memory import format_bytes
    from unspool.model.weights import parameter_count

    parameters = parameter_count(config)
    cache = f"{2 * config.kv_floats_per_token:,} bytes of KV cache per token"
    state = f", {format_bytes(config.state_bytes)} per recurrent state" * bool(config.state_bytes)
    print(
        f"{config.family} · {parameters / 1e9:,.1f} billion parameters, "
        f"{format_bytes(2 * parameters)} in 16 bits · {cache}{state}"
    )


def _plan_row(fit: MemoryPlan, context: int, batch: int) -> list[str]:
    from unspool.model.hub.memory import format_bytes

    if fit.problem:
        return [fit.how, "", "", "", "", fit.problem]
    texts = fit.texts(context)
    if not fit.tokens:
        verdict = "no: the weights leave no memory"
    elif texts < batch:
        needed = format_bytes(batch * context * fit.token)
        verdict = f"no: {batch} such texts need {needed} per GPU"
    else:
        verdict = "yes"
    size = f"{fit.token:,} bytes"
    return [fit.how, format_bytes(fit.weights), size, f"{fit.tokens:,}", f"{texts:,}", verdict]


def _advice(plans: list[MemoryPlan], context: int, batch: int) -> str:
    good = [fit for fit in plans if not fit.problem and fit.texts(context) >= batch]
    if not good:
        return "Nothing fits: use more or larger GPUs, fewer bits per weight, or shorter texts."
    if good[0].gpus == 1:
        return f"One GPU is enough: {good[0].options}"
    fastest = good[-1]
    advice = f"{fastest.how[0].upper()}{fastest.how[1:]}: {fastest.options}"
    if fastest.options.startswith("--tensor"):
        advice += f" (on several machines: torchrun --nproc-per-node {fastest.gpus} -m unspool ...)"
    return advice


def _planned_model(model: str | None, offline: bool) -> tuple[ModelConfig, int]:
    """The configuration of a model, and the bytes of its weights on one GPU."""
    from unspool.model.files.config_json import config_from_hf, read_json
    from unspool.model.weights import parameter_count

    path = Path(model or "")
    path = path.parent if path.name == "config.json" else path
    has_no_weights = (path / "config.json").is_file() and not any(path.glob("*.safetensors"))
    if model and has_no_weights:
        config = config_from_hf(read_json(path / "config.json"))
        return config, 2 * parameter_count(config)
    checkpoint = find_checkpoint(model, offline)
    parameters = parameter_count(checkpoint.config)
    bits = min(16.0, checkpoint.bits_per_weight())
    return checkpoint.config, int(parameters * bits / 8)


def _local_gpus() -> list[int]:
    """Memory of each GPU of this machine, in bytes."""
    from unspool.backends.placement import has_nvidia_driver

    if not has_nvidia_driver():
        return []
    try:
        import torch
    except ImportError:
        return []
    num_gpus = torch.cuda.device_count()
    return [int(torch.cuda.get_device_properties(n).total_memory) for n in range(num_gpus)]


models.command("show")(info)
models.command("info")(info)
models.command("plan")(plan)


# -- ps: models of a running server ----------------------------------------------------------------

_TIMEOUT_S = 10.0


def ps(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    as_json: o.Json = False,
) -> None:
    """List the models that a running server has loaded.

    The API key is read from UNSPOOL_API_KEY.

    [b]Examples[/b]

      unspool ps
      unspool ps --url http://127.0.0.1:9000
    """
    from unspool.model.hub.memory import format_bytes

    loaded = _request_loaded(url if "://" in url else f"http://{url}")
    if as_json:
        print_json(loaded)
    elif not loaded:
        print("no model is loaded")
    else:
        rows = [
            [
                str(model.get("name", "?")),
                format_bytes(int(model.get("size") or 0)),
                _expiry(model),
            ]
            for model in loaded
        ]
        print_table("name size until", rows)


def _request_loaded(url: str) -> list[dict[str, Any]]:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url.rstrip('/')}/api/ps")
    if key := os.environ.get("UNSPOOL_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            content = json.loads(response.read())
        return [dict(model) for model in content["models"]]
    except urllib.error.HTTPError as error:
        hint = "set UNSPOOL_API_KEY to its key" if error.code == 401 else "is it unspool serve?"
        raise UnspoolError(f"the server at {url} responded with {error.code}: {hint}") from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnspoolError(
            f"no server at {url} ({reason}); start one with unspool serve, or give its address"
            " with --url"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise UnspoolError(f"{url} is not an Unspool server") from None


def _expiry(model: dict[str, Any]) -> str:
    """When an unused model is unloaded; a date in the far future means never."""
    when = str(model.get("expires_at") or "")
    if when[:4].isdigit() and int(when[:4]) > time.localtime().tm_year + 50:
        return "forever"
    return when.partition(".")[0].replace("T", " ")
