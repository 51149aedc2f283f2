"""The nearest orthogonal matrix, by Newton and Schulz's iteration: what Muon turns momentum into.

The iteration needs a matrix whole. Where matrices are spread over processes by their rows, each
process is sent all rows of some of them, turns those, and sends the rows back: two messages, and
every matrix is turned once in all, not once in each process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# The polynomial by which the singular values are brought near one, and how often it is applied.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TURNS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrix of each, about: singular values come near one."""
    x = _exact_enough(matrices)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    whole = x.flatten(0, -3)
    whole = whole / whole.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_TURNS):
        gram = whole @ whole.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        whole = torch.baddbmm(whole, update, whole, beta=a)
    x = whole.view(x.shape)
    return x.mT if tall else x


def _exact_enough(matrices: Tensor) -> Tensor:
    return matrices.bfloat16() if matrices.is_cuda else matrices.float()


def turned(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The nearest orthogonal matrix of each, all of one shape; of what is spread over processes
    the rows that this one has."""
    first = matrices[0]
    if not isinstance(first, DTensor):
        return list(orthogonal(torch.stack(list(matrices))))
    own = [each.to_local() for each in matrices if isinstance(each, DTensor)]
    if first.ndim > 2:  # experts: what is spread are whole matrices
        return list(orthogonal(torch.stack(own))) if own[0].numel() else own
    return _sent_and_turned(own, len(first), first.device_mesh.get_group())


def _sent_and_turned(own: list[Tensor], rows: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Of every matrix the rows of this process; process r of W turns matrices r, r + W, ..."""
    world, rank = group.size(), group.rank()
    columns, count = own[0].shape[1], len(own)
    each = -(-rows // world)
    rows_of = [min(rows, (r + 1) * each) - min(rows, r * each) for r in range(world)]
    taken = [len(range(r, count, world)) for r in range(world)]  # matrices that each process turns
    ordered = [matrix for r in range(world) for matrix in own[r::world]]
    to_owners = [taken[r] * rows_of[rank] * columns for r in range(world)]
    from_all = [taken[rank] * rows_of[r] * columns for r in range(world)]

    def exchange(values: Tensor, given: list[int], wanted: list[int]) -> Tensor:
        received = values.new_empty(sum(wanted))
        dist.all_to_all_single(received, values, wanted, given, group=group)
        return received

    sent = _exact_enough(torch.stack(ordered)).reshape(-1)
    pieces = exchange(sent, to_owners, from_all).split(from_all)
    back = sent.new_empty(0)
    if taken[rank]:
        whole = torch.cat(
            [piece.view(taken[rank], r, columns) for piece, r in zip(pieces, rows_of, strict=True)],
            1,
        )
        back = torch.cat([part.reshape(-1) for part in orthogonal(whole).split(rows_of, 1)])
    mine = exchange(back, from_all, to_owners).view(count, rows_of[rank], columns)
    places = [n for r in range(world) for n in range(r, count, world)]
    found: list[Tensor] = [mine[0]] * count
    for place, matrix in zip(places, mine, strict=True):
        found[place] = matrix
    return found
