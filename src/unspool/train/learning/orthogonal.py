"""Nearest orthogonal matrix by Newton-Schulz iteration, for Muon.

The iteration needs full matrices. If matrices are sharded by rows, each process receives all rows
of some of them, orthogonalizes those, and sends the rows back: two all-to-all exchanges, and every
matrix is processed once, not once per process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# Polynomial that moves the singular values towards 1, and how often it is applied.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximate nearest orthogonal matrices: singular values near 1."""
    x = _to_compute_dtype(matrices)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    batch = x.flatten(0, -3)
    batch = batch / batch.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = batch @ batch.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        batch = torch.baddbmm(batch, update, batch, beta=a)
    x = batch.view(x.shape)
    return x.mT if tall else x


def _to_compute_dtype(matrices: Tensor) -> Tensor:
    return matrices.bfloat16() if matrices.is_cuda else matrices.float()


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Nearest orthogonal matrices of matrices of one shape; of sharded ones the local rows."""
    first = matrices[0]
    if not isinstance(first, DTensor):
        return list(orthogonal(torch.stack(list(matrices))))
    local = [matrix.to_local() for matrix in matrices if isinstance(matrix, DTensor)]
    if first.ndim > 2:  # experts are sharded as full matrices
        return list(orthogonal(torch.stack(local))) if local[0].numel() else local
    return _orthogonalize_sharded(local, len(first), first.device_mesh.get_group())


def _orthogonalize_sharded(
    local: list[Tensor], rows: int, group: dist.ProcessGroup
) -> list[Tensor]:
    """The local rows of each result; process r of W computes matrices r, r + W, ..."""
    world, rank = group.size(), group.rank()
    columns, count = local[0].shape[1], len(local)
    shard_rows = -(-rows // world)
    rows_of = [min(rows, (r + 1) * shard_rows) - min(rows, r * shard_rows) for r in range(world)]
    num_owned = [len(range(r, count, world)) for r in range(world)]  # matrices by process
    ordered = [matrix for r in range(world) for matrix in local[r::world]]
    to_owners = [num_owned[r] * rows_of[rank] * columns for r in range(world)]
    from_all = [num_owned[rank] * rows_of[r] * columns for r in range(world)]

    def exchange(values: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        received = values.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, values, receive_sizes, send_sizes, group=group)
        return received

    shards = _to_compute_dtype(torch.stack(ordered)).reshape(-1)
    pieces = exchange(shards, to_owners, from_all).split(from_all)
    results = shards.new_empty(0)
    if num_owned[rank]:
        owned = [
            piece.view(num_owned[rank], r, columns)
            for piece, r in zip(pieces, rows_of, strict=True)
        ]
        full = orthogonal(torch.cat(owned, 1))
        results = torch.cat([part.reshape(-1) for part in full.split(rows_of, 1)])
    local_results = exchange(results, from_all, to_owners).view(count, rows_of[rank], columns)
    order = [n for r in range(world) for n in range(r, count, world)]
    by_number = dict(zip(order, local_results, strict=True))
    return [by_number[n] for n in range(count)]
