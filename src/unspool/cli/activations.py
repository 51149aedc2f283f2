"""`unspool activations`, `vector`, `features`, `lens`, `patch`, `attribute`: inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import SettingsError, count

if TYPE_CHECKING:
    from rich.text import Text

    from unspool.lens.gradients import TokenAttribution
    from unspool.lens.patching import Sweep

_MAX_COLUMNS = 16  # of a table; more are printed as a list of the strongest cells
_COLUMN = 6  # characters of a cell

Layers = Annotated[
    str | None, typer.Option("--layers", help="Layers, from 0: 5, 3,5 or 8-20. Default: all.")
]


# -- activations -----------------------------------------------------------------------------------


@o.model_options
def activations(
    corpus: Annotated[Path, typer.Argument(help="Texts: JSON lines, or lines of text.")],
    folder: Annotated[Path, typer.Argument(help="Where the shards are written.")],
    sites: Annotated[
        str, typer.Option(help="Sites or hook names, comma-separated: resid_post,mlp_out.")
    ] = "resid_post",
    layers: Layers = None,
    positions: Annotated[str, typer.Option(help="all or last.")] = "all",
    field: Annotated[str, typer.Option(help="The text in each JSON object.")] = "text",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Cut longer texts. Default: context.")
    ] = None,
    values: Annotated[str, typer.Option(help="Numbers in the file: float32, float16.")] = "float32",
    format: Annotated[str, typer.Option(help="safetensors, or parquet.")] = "safetensors",
    shard_mb: Annotated[int, typer.Option(help="Megabytes in a shard.")] = 256,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Write the activations of many texts to a folder. Rerun the same command to resume.

    Each shard has one row for each token: text, position, token, and the activations by the hook
    names of TransformerLens.

    [b]Examples[/b]

      unspool activations corpus.jsonl out/ --sites resid_post --layers 15
      unspool activations notes.txt out/ --sites mlp_out,attn_out --positions last
      unspool activations corpus.jsonl out/ --sites blocks.5.hook_resid_post --format parquet
    """
    if positions not in ("all", "last"):
        raise SettingsError(f"--positions must be all or last, got {positions!r}")
    if format not in ("safetensors", "parquet"):
        raise SettingsError(f"--format must be safetensors or parquet, got {format!r}")
    if shard_mb < 1:
        raise SettingsError(f"--shard-mb must be >= 1, got {shard_mb}")
    selected = parse_layers(layers)
    lm = model_choice.load()
    saved = lm.save_activations(
        corpus,
        folder,
        sites=[name.strip() for name in sites.split(",") if name.strip()],
        layers=selected,
        positions=positions,
        field=field,
        max_tokens=max_tokens,
        dtype=values,
        format=format,  # type: ignore[arg-type]
        shard_bytes=shard_mb << 20,
    )
    out.say(
        f"{count(saved.num_texts, 'text')}, {count(saved.num_rows, 'row')} in "
        f"{count(saved.num_shards, 'shard')}: {saved.folder}"
    )
    if saved.num_cut:
        out.say(f"{count(saved.num_cut, 'text')} longer than the limit: only the start was read")


def parse_layers(text: str | None) -> list[int] | None:
    """Parse layer numbers: 5, 3,5 or 8-20."""
    if text is None:
        return None
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            numbers += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        numbers = []
    if not numbers:
        raise SettingsError(f"--layers must be numbers such as 5, 3,5 or 8-20, got {text!r}")
    return numbers


# -- vector ----------------------------------------------------------------------------------------


@o.model_options
def vector(
    positive: Annotated[
        Path, typer.Argument(help="Texts with the property: lines, or JSON lines.")
    ],
    negative: Annotated[Path, typer.Argument(help="Texts without it.")],
    file: Annotated[Path, typer.Argument(help="The control vector to write (.gguf).")],
    layers: Layers = None,
    method: Annotated[str, typer.Option(help="mean, or pca (of pairs).")] = "mean",
    pool: Annotated[str, typer.Option(help="last token of each text, or mean of all.")] = "last",
    field: Annotated[str, typer.Option(help="The text in each JSON object.")] = "text",
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Fit a steering vector from texts with and without a property.

    The file is a control vector of llama.cpp. Use it with --steer.

    [b]Examples[/b]

      unspool vector happy.txt sad.txt happy.gguf --layers 8-20
      unspool "My day was" --raw --steer happy.gguf=1.5
    """
    from unspool.lens.activation_files import read_corpus

    o.check_output_file(file, "FILE")
    selected = parse_layers(layers)
    texts = [list(read_corpus(path, field)) for path in (positive, negative)]
    lm = model_choice.load()
    fitted = lm.steering_vector(
        texts[0],
        texts[1],
        layers=selected,
        method=method,  # type: ignore[arg-type]
        pool=pool,  # type: ignore[arg-type]
        name=file.stem,
    )
    fitted.save(file)
    out.say(f"{file}: {count(len(fitted.layers), 'layer')}, width {fitted.width}")


# -- features --------------------------------------------------------------------------------------


@o.model_options
def features(
    text: Annotated[str, typer.Argument(help="The text.")],
    sae: Annotated[Path, typer.Option(help="Folder of SAELens or Gemma Scope.")],
    layer: Annotated[int | None, typer.Option(help="Its layer, if it does not say.")] = None,
    site: Annotated[str | None, typer.Option(help="Its site, if it does not say.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Features of each token.")] = 5,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Show the active features of each token, by a sparse autoencoder.

    [b]Examples[/b]

      unspool features "The Golden Gate Bridge" --sae sae-15
      unspool features "The Golden Gate Bridge" --sae layer_12/width_16k/average_l0_82 --json
    """
    from unspool.lens.sae import load_sae

    autoencoder = load_sae(sae, site=site, layer=layer)
    lm = model_choice.load()
    token_features = lm.features(text, autoencoder, top=top)
    if as_json:
        out.print_json_line(token_features.to_dict())
        return
    console = out.stdout_console()
    width = max(len(repr(piece)) for piece in token_features.texts)
    for piece, active in zip(token_features.texts, token_features.active, strict=True):
        listed = "  ".join(f"{item.feature}: {item.strength:.2f}" for item in active)
        console.print(f"{piece!r:<{width}}  {listed}", markup=False, highlight=False)


# -- lens ------------------------------------------------------------------------------------------


@o.model_options
def lens(
    corpus: Annotated[Path, typer.Argument(help="Texts: JSON lines, or lines of text.")],
    file: Annotated[Path, typer.Argument(help="The lens to write (.safetensors).")],
    kind: Annotated[str, typer.Option(help="tuned, or jacobian (needs torch).")] = "tuned",
    rank: Annotated[int, typer.Option(help="Rank of the map of each layer.")] = 64,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens of each text that are used.")
    ] = 256,
    field: Annotated[str, typer.Option(help="The text in each JSON object.")] = "text",
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Fit a tuned or a Jacobian lens to the texts of a file.

    Use it in Python with lm.load_lens(FILE) and lm.logit_lens(text, lens=NAME).

    [b]Examples[/b]

      unspool lens corpus.jsonl tuned.safetensors
      unspool lens corpus.jsonl jacobian.safetensors --kind jacobian --rank 32
    """
    from unspool.lens.activation_files import read_corpus

    o.check_output_file(file, "FILE")
    texts = list(read_corpus(corpus, field))
    lm = model_choice.load(**({"backend": "torch"} if kind == "jacobian" else {}))
    fitted = lm.fit_lens(texts, kind=kind, rank=rank, max_tokens=max_tokens)  # type: ignore[arg-type]
    fitted.save(file)
    out.say(f"{file}: {fitted.kind} lens of rank {fitted.rank}, {fitted.num_tokens:,} tokens")


# -- patch -----------------------------------------------------------------------------------------


@o.model_options
def patch(
    clean: Annotated[str, typer.Argument(help="The text whose activations are inserted.")],
    corrupted: Annotated[str, typer.Argument(help="The text that is run with them.")],
    answer: Annotated[str, typer.Option(help="The token that the clean text leads to.")],
    other: Annotated[
        str | None, typer.Option(help="The token that the corrupted text leads to.")
    ] = None,
    site: Annotated[
        str, typer.Option(help="What is patched: resid_post, attn_out, mlp_out, head_out, ...")
    ] = "resid_post",
    sweep: Annotated[
        str | None, typer.Option(help="Axes of the table: layer,position or layer,head.")
    ] = None,
    layers: Layers = None,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Estimate all cells from one gradient (torch).")
    ] = False,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Activation patching: where the difference between two texts is carried.

    Each cell is a run of the corrupted text with one activation of the clean text. Its number is
    the share of the difference that this restores: 0 as corrupted, 1 as clean.

    [b]Examples[/b]

      unspool patch "The capital of Italy is" "The capital of France is" \\
        --answer " Rome" --other " Paris"
      unspool patch "..." "..." --answer " Rome" --site head_out
      unspool patch "..." "..." --answer " Rome" --json > sweep.json
    """
    selected = parse_layers(layers)
    axes: Any = sweep.split(",") if sweep else None
    lm = model_choice.load(**({"backend": "torch"} if approximate else {}))
    result = lm.patch(
        clean,
        corrupted,
        answer=answer,
        other=other,
        site=site,
        sweep=axes,
        layers=selected,
        approximate=approximate,
    )
    if as_json:
        out.print_json_line(result.to_dict())
        return
    print_sweep(result)


def print_sweep(sweep: Sweep) -> None:
    """Print a sweep as a coloured table; a wide one as its strongest cells."""
    from rich.text import Text

    console = out.stdout_console()
    console.print(sweep.describe())
    rows, columns, effects = sweep.table()
    if sweep.clean is not None and sweep.clean != sweep.baseline:
        effects = effects / (sweep.clean - sweep.baseline)
    if len(columns) > _MAX_COLUMNS:
        for cell in sweep.strongest(20):
            place = ", ".join(str(cell[axis]) for axis in sweep.axes)
            console.print(f"{cell['effect']:+8.3f}  {place}")
        return
    largest = float(abs(effects).max()) or 1.0
    width = max(map(len, rows))
    for number, label in enumerate(columns):
        console.print(Text(" " * width + "  " + f"{number}: {label}", style="dim"))
    head = "".join(f"{number:>{_COLUMN}}" for number in range(len(columns)))
    console.print(Text(" " * width + head, style="bold"))
    for label, values in zip(rows, effects.tolist(), strict=True):
        line = Text(label.rjust(width))
        for value in values:
            line.append_text(_cell(value, largest))
        console.print(line)


def _cell(value: float, largest: float) -> Text:
    """An effect on a background: blue above zero, orange below."""
    from rich.text import Text

    share = min(1.0, abs(value) / largest)
    paper = (255, 255, 255)
    ink = (70, 130, 220) if value > 0 else (235, 130, 60)
    mixed = [round(a + (b - a) * share) for a, b in zip(paper, ink, strict=True)]
    style = f"black on rgb({mixed[0]},{mixed[1]},{mixed[2]})"
    return Text(f"{round(value, 2) + 0.0:+.2f}".rjust(_COLUMN), style=style)


# -- attribute -------------------------------------------------------------------------------------


@o.model_options
def attribute(
    text: Annotated[str | None, typer.Argument(help="The text; - or none reads stdin.")] = None,
    token: Annotated[
        str | None, typer.Option(help="The next token that is explained. Default: most likely.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="A token whose logit is subtracted.")] = None,
    method: Annotated[str, typer.Option(help="integrated, or gradient_x_input.")] = "integrated",
    baseline: Annotated[
        str | None, typer.Option(help="A text of as many tokens. Default: the mean embedding.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Points on the path from the baseline.")] = 64,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Attribute the next token's logit to the tokens of the text, by gradients. Needs torch.

    [b]Examples[/b]

      unspool attribute "The capital of Italy is" --token " Rome" --against " Paris"
      unspool attribute "Rome is in Italy" --token "." --baseline "Rome is in Spain"
    """
    prompt = o.read_prompt(text)
    lm = model_choice.load(backend="torch")
    result = lm.token_attribution(
        prompt,
        token=token,
        against=against,
        method=method,  # type: ignore[arg-type]
        baseline=baseline,
        steps=steps,
    )
    if as_json:
        out.print_json_line(result.to_dict())
        return
    _print_attribution(result)


def _print_attribution(result: TokenAttribution) -> None:
    """Print the tokens on backgrounds by their values, and a line for each."""
    from rich.text import Text

    console = out.stdout_console()
    largest = max(abs(item.value) for item in result.values) or 1.0
    console.print(f"logit of {result.text!r}: {result.logit:.3f}, baseline {result.baseline:.3f}")
    for item in result.values:
        line = Text(f"{item.position:>5} ") + _cell(item.value, largest)
        console.print(line + Text(f"  {out.visible(item.text)}"))
    if result.method == "integrated":
        is_large = abs(result.gap) > 0.05 * abs(result.logit - result.baseline)
        advice = "; more --steps make it smaller" if is_large else ""
        console.print(f"error of the sum: {result.gap:+.3f}{advice}", style="dim")
