"""`unspool train sae`: train a sparse autoencoder on the activations of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli import output as out
from unspool.cli.train import options as s


@o.model_options
def sae(
    source: s.Sources = None,
    out_folder: Annotated[
        Path, typer.Option("--out", "-o", help="The folder to write, or to resume.")
    ] = Path("sae"),
    layer: Annotated[int, typer.Option(help="Layer, from 0; negative: from the end.")] = -1,
    site: Annotated[str, typer.Option(help="resid_post, mlp_out, attn_out, ...")] = "resid_post",
    num_features: Annotated[int, typer.Option("--features", help="Number of features.")] = 4096,
    k: Annotated[int, typer.Option(help="Active features of a token.")] = 32,
    tokens: Annotated[int, typer.Option(help="Activations to read.")] = 1_000_000,
    reuse: Annotated[float, typer.Option(help="How often each is used, on average.")] = 4.0,
    batch: Annotated[int, typer.Option(help="Activations in a batch.")] = 1024,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 128,
    num_eval: Annotated[
        int, typer.Option("--eval", help="Texts at the start that are held out, to measure on.")
    ] = 64,
    field: s.Field = None,
    seed: s.Seed = 0,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Train a TopK sparse autoencoder on the activations of a model.

    The folder has SAELens' format. Rerun the same command to resume. At the end it prints what
    held-out texts show: the fraction of variance unexplained (FVU), active features of a token
    (L0), dead features, and the loss of the model with the reconstruction in place.

    [b]Examples[/b]

      unspool train sae wiki.txt --layer 15 --out sae-15
      unspool train sae books/ --layer 15 --features 16384 --tokens 50000000 --out sae-16k
      unspool features "The Golden Gate Bridge" --sae sae-15
    """
    from unspool.backends.placement import check_torch

    check_torch()
    from unspool.progress import progress_bar
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.sae import SaeProgress, SaeSettings, train_sae

    lm = model_choice.load()
    settings = SaeSettings(
        layer=layer % lm.config.layers if -lm.config.layers <= layer < 0 else layer,
        site=site,
        num_features=num_features,
        k=k,
        tokens=tokens,
        reuse=reuse,
        batch=batch,
        rate=rate,
        length=length,
        num_eval=num_eval,
        seed=seed,
    )
    latest: list[SaeProgress] = []

    with interrupt.raise_on_signal(), progress_bar("activations", tokens) as show:

        def report(progress: SaeProgress) -> None:
            latest[:] = [progress]
            show(min(tokens, progress.tokens))

        try:
            quality = train_sae(
                lm, source or [DEFAULT_SOURCE], out_folder, settings, field=field, report=report
            )
        except KeyboardInterrupt:
            done = latest[0].tokens if latest else 0
            out.say(f"stopped after {done:,} activations; rerun the same command to resume")
            raise typer.Exit(interrupt.INTERRUPTED) from None
    if as_json:
        out.print_json_line(quality.to_dict())
        return
    out.say(f"{out_folder}: {num_features:,} features of {site} in layer {settings.layer}")
    for name, value in (
        ("variance unexplained (FVU)", f"{quality.fvu:.3f}"),
        ("active features of a token (L0)", f"{quality.l0:.1f}"),
        (f"not active in {quality.tokens:,} tokens", f"{quality.dead:.1%}"),
        ("loss of the model", f"{quality.loss:.3f}"),
        ("loss with the reconstruction", f"{quality.loss_reconstructed:.3f}"),
        ("loss with zeros", f"{quality.loss_zero:.3f}"),
        ("loss recovered", f"{quality.loss_recovered:.1%}"),
    ):
        out.say(f"  {name:<36} {value}")
