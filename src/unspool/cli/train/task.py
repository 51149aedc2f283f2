"""`unspool train task`: ask a model the questions of a task, and count the right answers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unspool.cli import options as o


@o.model_options
def task(
    name: Annotated[str, typer.Argument(help="A task of reasoning-gym: leg_counting, ...")],
    adapter: o.Adapter = None,
    count: Annotated[int, typer.Option(min=1, help="How many questions.")] = 100,
    seed: Annotated[
        int, typer.Option(help="Of the questions; not the one that was trained with.")
    ] = 1_000_000,
    max_tokens: o.MaxTokens = 128,
    show: Annotated[int, typer.Option(min=0, help="Show so many answers.")] = 3,
    *,
    chosen: o.ModelChoice,
) -> None:
    """How many questions of a task a model answers exactly (at temperature 0).

    [b]Examples[/b]

      unspool train task family_relationships
      unspool train task family_relationships --adapter runs/tune-family_relationships/...
    """
    from unspool.train.tuning.tasks import Task, accuracy

    asked = Task(name)
    lm = o.with_adapter(chosen.load(), adapter)
    shown: list[tuple[Any, str, float]] = []
    share = accuracy(
        lm,
        asked.entries(count, seed),
        asked,
        max_tokens=max_tokens,
        told=lambda *answer: shown.append(answer),
    )
    for entry, answer, score in shown[:show]:
        print(f"{'right' if score >= 1 else 'wrong'}: {answer.strip()!r} ({entry['answer']!r})")
    print(f"{share:.1%} of {count} questions of {name}")
