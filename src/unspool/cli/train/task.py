"""`unspool train task`: measure a model's accuracy on a task of reasoning-gym."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unspool.cli import options as o


@o.model_options
def task(
    name: Annotated[str, typer.Argument(help="A task of reasoning-gym: leg_counting, ...")],
    adapter: o.Adapter = None,
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 100,
    seed: Annotated[
        int, typer.Option(help="Seed of the questions; use another than in training.")
    ] = 1_000_000,
    max_tokens: o.MaxTokens = 128,
    show: Annotated[int, typer.Option(min=0, help="Number of answers to show.")] = 3,
    *,
    chosen: o.ModelChoice,
) -> None:
    """Share of a task's questions that a model answers correctly, at temperature 0.

    [b]Examples[/b]

      unspool train task family_relationships
      unspool train task family_relationships --adapter runs/tune-family_relationships/...
    """
    from unspool.train.tuning.tasks import Task, accuracy

    gym_task = Task(name)
    lm = o.with_adapter(chosen.load(), adapter)
    answers: list[tuple[Any, str, float]] = []
    share = accuracy(
        lm,
        gym_task.entries(count, seed),
        gym_task,
        max_tokens=max_tokens,
        on_answer=lambda *answer: answers.append(answer),
    )
    for entry, answer, score in answers[:show]:
        print(f"{'right' if score >= 1 else 'wrong'}: {answer.strip()!r} ({entry['answer']!r})")
    print(f"{share:.1%} of {count} questions of {name} are answered correctly")
