"""Base of the plan builder: named buffers, and operations that every part of a model uses."""

from __future__ import annotations

from unspool.backends.cpu.plan import ExecutionPlan, Operation
from unspool.model.config import ModelConfig


class PlanParts:
    """A plan under construction."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.plan = ExecutionPlan(config)

    def buffer(self, name: str, width: int, rows: str = "tokens") -> str:
        """Declare a buffer; its width is the maximum over all declarations."""
        current_width = self.plan.buffers.get(name, (0, rows))[0]
        self.plan.buffers[name] = (max(width, current_width), rows)
        return name

    def add(self, operation: Operation) -> None:
        self.plan.operations.append(operation)

    def linear(
        self,
        source: str,
        target: str,
        matrices: tuple[str, ...],
        *,
        norm: str = "",
        kind: str = "linear",
        rows: str = "tokens",
        experts: int = 0,
    ) -> None:
        centred = self.config.norm == "layer"
        self.add(
            Operation(
                kind=kind,
                source=source,
                target=target,
                rows=rows,
                matrices=matrices,
                width=self.plan.buffers[source][0],
                prepare="norm" if norm else "none",
                vector=f"{norm}.weight" if norm else "",
                second_vector=f"{norm}.bias" if norm and centred and self.config.norm_bias else "",
                centred=bool(norm) and centred,
                epsilon=self.config.norm_eps,
                experts=experts,
            )
        )

    def norm(
        self,
        source: str,
        target: str,
        name: str,
        *,
        width: int,
        offset: int = 0,
        add: bool = False,
        centred: bool | None = None,
    ) -> None:
        centred = self.config.norm == "layer" if centred is None else centred
        self.add(
            Operation(
                kind="norm",
                source=source,
                target=target,
                offset=offset,
                width=width,
                vector=f"{name}.weight",
                second_vector=f"{name}.bias" if centred and self.config.norm_bias else "",
                centred=centred,
                epsilon=self.config.norm_eps,
                add=add,
            )
        )

    def snapshot(self, number: int) -> None:
        """Mark a point where x can be observed; free when it is not."""
        self.add(Operation(kind="snapshot", source="x", layer=number))
