"""`unspool models show` and `plan`: what a model is, and what the native backend does with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.completing import model_names
from unspool.cli.table import print_columns

if TYPE_CHECKING:
    from unspool.model.config import ModelConfig
    from unspool.model.files.checkpoint import Checkpoint
    from unspool.text.tokenizer.tokenizer import Tokenizer

Model = Annotated[
    str | None,
    typer.Argument(help="A path, a short name or a repo id.", autocompletion=model_names),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


def info(model: Model = None, offline: o.Offline = False) -> None:
    """What a model is: family, size, precision, context, vocabulary, template.

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
    cache = 2 * config.kv_floats_per_token
    seen = summarize_model(checkpoint.path)
    rows = {
        "path": str(checkpoint.path),
        "family": config.family,
        "parameters": f"{parameter_count(config):,}",
        "size": format_bytes(seen.bytes) + (f", {seen.kind}" if seen.kind else ""),
        "memory": f"about {format_bytes(seen.required_bytes)} to run; "
        f"{format_bytes(free_memory())} are free",
        "bits per weight": f"{checkpoint.bits_per_weight():.2f}",
        "context": _context(config),
        "layers": f"{config.layers} of width {config.width}, {_heads(config)}",
        "feed-forward": f"{_widths(config)} ({config.activation}{', gated' * config.gated})",
        "positions": _positions(config),
        "sight": _sight(config),
        "keys and values": f"{cache:,} bytes a token in 16 bits",
        "vocabulary": "none in this folder",
        "chat template": "none",
    }
    if config.sight != "causal" or config.mask_id is not None:
        rows["mask token"] = _mask(config, tokenizer)
    if config.state_bytes:
        rows["recurrent state"] = f"{config.state_bytes:,} bytes at each place that is kept"
    if config.experts:
        rows["experts"] = f"{config.experts}, {config.experts_per_token} a token"
    if tokenizer is not None:
        ends = ", ".join(sorted(tokenizer.token_text(i) for i in tokenizer.end_ids))
        rows["vocabulary"] = f"{len(tokenizer):,} ({tokenizer.kind}); ends with {ends or 'none'}"
        if tokenizer.chat_template:
            rows["chat template"] = f"yes, {len(tokenizer.chat_template):,} characters"
    print_columns([[name, value] for name, value in rows.items()])


def plan(
    model: Model = None,
    gpus: Annotated[int | None, typer.Option(help="How many GPUs there would be.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each, like 80GB.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a text.")] = None,
    batch: Annotated[int | None, typer.Option(help="Texts at once.")] = None,
    offline: o.Offline = False,
    as_json: Json = False,
) -> None:
    """What the native backend would do with a model; or, with --gpus, what fits where.

    Of the model only its settings are read: a folder with nothing but its config.json will do.

    [b]Examples[/b]

      unspool models plan
      unspool models plan ./model.gguf
      unspool models plan ./model --gpus 4 --memory 80GB --context 32768 --batch 8
    """
    if (gpus, memory, context, batch) == (None, None, None, None):
        from unspool.backends.cpu.plan import format_plan

        print(format_plan(find_checkpoint(model, offline)))
        return
    from unspool.cli.gpu_plan import gpu_plan

    gpu_plan(model, gpus, memory, context, batch, offline=offline, as_json=as_json)


def find_checkpoint(model: str | None, offline: bool) -> Checkpoint:
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    return open_checkpoint(find_model(model, offline=offline))


def _heads(config: ModelConfig) -> str:
    """The heads of all layers, or of each kind of layer."""
    shapes = dict.fromkeys(config.shape(layer) for layer in range(config.layers))
    kinds = dict.fromkeys((shape.heads, shape.kv_heads, shape.head_width) for shape in shapes)
    said = []
    for heads, kv_heads, width in kinds:
        shared = f", {kv_heads} for keys and values" if kv_heads != heads else ""
        said.append(f"{heads} heads of {width}{shared}")
    return " or ".join(said)


def _widths(config: ModelConfig) -> str:
    widths = dict.fromkeys(config.shape(layer).ff_width for layer in range(config.layers))
    return " or ".join(map(str, widths))


def _sight(config: ModelConfig) -> str:
    """How far a token looks."""
    if config.sight == "causal":
        return "back, from left to right"
    far = f"to the end of its block of {config.block}" if config.block else "over the whole text"
    return f"{far}; guesses the token {'behind it' if config.shifted else 'in its own place'}"


def _mask(config: ModelConfig, tokenizer: Tokenizer | None) -> str:
    if config.mask_id is None:
        return "none is named; the model's tokenizer_config.json would say it"
    if tokenizer is None or config.mask_id >= len(tokenizer):
        return str(config.mask_id)
    return f"{config.mask_id} {tokenizer.token_text(config.mask_id)}"


def _context(config: ModelConfig) -> str:
    usual = config.default_context
    if usual == config.context:
        return f"{usual:,} tokens"
    return (
        f"{usual:,} tokens; up to {config.context:,} with --context, whose other rotary factors "
        f"(LongRoPE) also change texts shorter than {usual:,}"
    )


def _positions(config: ModelConfig) -> str:
    if config.rotary is None:
        return config.positions
    scaled = "" if config.rotary.scaling == "none" else f", {config.rotary.scaling} scaling"
    windows = [w for w in config.windows if w]
    window = f"; {len(windows)} layers see {windows[0]:,} tokens" if windows else ""
    return f"rotary, base {config.rotary.base:,.0f}{scaled}{window}"
