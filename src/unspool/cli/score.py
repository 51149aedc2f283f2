"""`unspool score`: how well the model saw a given text coming, token by token."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.errors import count


@o.model_options
def score(
    text: Annotated[
        str | None, typer.Argument(help="The text to judge; - or nothing reads stdin.")
    ] = None,
    top: Annotated[int, typer.Option(help="Also the k likeliest at each place.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
    *,
    chosen: o.ModelChoice,
) -> None:
    """Judge a text: the surprise of each token, and the perplexity of the whole.

    [b]Examples[/b]

      unspool score "The cat sat on the mat"
      unspool score --top 3 "Paris is the capital of Germany"
      unspool score --json < essay.txt
    """
    from unspool.cli.run import read_prompt

    given = read_prompt(text)
    result = chosen.load().score(given, top=top)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    import math

    from rich.table import Table
    from rich.text import Text

    from unspool.cli.show import chance_style, legend, out, quoted

    console = out()
    line = Text()
    for position in result.positions:
        style = chance_style(math.exp(position.logprob)) if position.logprob is not None else "dim"
        line.append(position.text, style)
    console.print(line)
    console.print(legend())
    if top or console.is_terminal:
        table = Table("token", "id", "probability", "surprise (bits)", "rank", box=None)
        if top:
            table.add_column(f"the {top} likeliest here")
        for position in result.positions:
            if position.logprob is None:
                cells = ["–", "–", "–"]
            else:
                bits = -position.logprob / math.log(2)
                rank = str((position.rank or 0) + 1)
                cells = [f"{math.exp(position.logprob):.2%}", f"{bits:.2f}", rank]
            best = [f"{quoted(c.text)} {c.probability:.1%}" for c in position.candidates]
            extra = ["  ".join(best)] if top else []
            table.add_row(quoted(position.text), str(position.token), *cells, *extra)
        console.print(table)
    console.print(f"{count(len(result.tokens), 'token')}, {result.describe()}")
