"""Interventions for the native library: a table of changes by site, and the entries of each token.

What an intervention does is compiled once; a step only adds which tokens it touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from unspool.backends.cpu.structures import (
    CHANGE,
    CHANGES,
    ChangesStruct,
    address_of,
    contiguous,
)
from unspool.backends.interventions import (
    Add,
    ClampFeature,
    Intervention,
    Scale,
    StepInterventions,
)
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.backends.cpu.plan import ExecutionPlan

Changes = npt.NDArray[np.void]  # of the type CHANGE


@dataclass(slots=True)
class _Compiled:
    """An intervention for the library."""

    changes: Changes
    sites: list[tuple[int, int]]  # number of a site, and index of its first change
    arrays: dict[str, Any]  # memory that the changes point at


@dataclass(slots=True)
class StepChanges:
    """Interventions of a step for the library, and the memory that the struct points at."""

    struct: ChangesStruct
    memory: tuple[Any, ...]


class CpuInterventions:
    """Compiles the interventions of one backend's steps."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._compiled: WeakKeyDictionary[Intervention, _Compiled] = WeakKeyDictionary()
        # The table of the last step: decode steps of the same rows have the same.
        self._digests: tuple[str, ...] = ()
        self._table: tuple[Changes, npt.NDArray[np.int32], npt.NDArray[np.uint8], Any] | None = None

    def for_step(self, step: StepInterventions, num_tokens: int) -> StepChanges:
        """The interventions of a step."""
        spans = step.spans
        is_valid = spans.shape[1:] == (4,) and bool((spans[:, 0] >= 0).all())
        is_valid = is_valid and bool((spans[:, :2] <= num_tokens).all())
        if not is_valid or not bool((spans[:, 2] < len(step.table)).all()):
            raise UnspoolError("the batch names a token or an intervention that does not exist")
        digests = tuple(intervention.digest for intervention in step.table)
        if self._table is None or digests != self._digests:
            self._table, self._digests = self._build_table(step.table), digests
        changes, first_changes, is_used, _ = self._table
        starts, numbers, offsets = (contiguous(array) for array in step.by_token(num_tokens))
        struct = ChangesStruct(
            address_of(changes),
            address_of(first_changes),
            len(step.table),
            address_of(is_used),
            address_of(starts),
            address_of(numbers),
            address_of(offsets),
        )
        return StepChanges(struct, (self._table, starts, numbers, offsets))

    def _build_table(
        self, table: tuple[Intervention, ...]
    ) -> tuple[Changes, npt.NDArray[np.int32], npt.NDArray[np.uint8], Any]:
        first_changes = np.full((len(self._plan.sites), len(table)), -1, np.int32)
        compiled = [self._compile(intervention) for intervention in table]
        base = 0
        for number, item in enumerate(compiled):
            for site, first in item.sites:
                first_changes[site, number] = base + first
            base += len(item.changes)
        changes = np.concatenate([item.changes for item in compiled])
        is_used = np.ascontiguousarray((first_changes >= 0).any(1), np.uint8)
        return changes, first_changes, is_used, compiled

    def _compile(self, intervention: Intervention) -> _Compiled:
        compiled = self._compiled.get(intervention)
        if compiled is not None:
            return compiled
        op, config = intervention.op, self._plan.config
        kind = CHANGES.get(op.kind)
        if kind is None:
            raise UnspoolError(f"the native backend has no intervention {op.kind}")
        lines: list[tuple[Any, ...]] = []
        sites: list[tuple[int, int]] = []
        arrays = op.arrays
        encoder = arrays.get("encoder")
        main = next((a for name, a in arrays.items() if name != "encoder"), None)
        scale = op.scale if isinstance(op, Add) else op.factor if isinstance(op, Scale) else 1.0
        feature = (0.0, 0.0, 0.0)
        if isinstance(op, ClampFeature):
            feature = op.bias, op.threshold, op.value
        for index, layer in intervention.resolve_layers(config):
            sites.append((self._plan.site_number(intervention.site, layer), len(lines)))
            slices = intervention.slices(config, layer)
            for number, part in enumerate(slices):
                lines.append(
                    (
                        _address(main, index),
                        _address(encoder, index),
                        main.shape[-1] if main is not None and main.ndim == 3 else 0,
                        kind,
                        part.start,
                        part.stop - part.start,
                        len(slices) - number,
                        scale,
                        *feature,
                    )
                )
        compiled = _Compiled(np.array(lines, CHANGE), sites, arrays)
        self._compiled[intervention] = compiled
        return compiled


def _address(array: npt.NDArray[np.float32] | None, index: int) -> int:
    """Address of an array's vector, or vectors, for one layer."""
    if array is None:
        return 0
    if array.ndim == 1:
        return address_of(array)
    return address_of(array) + min(index, len(array) - 1) * array.strides[0]
