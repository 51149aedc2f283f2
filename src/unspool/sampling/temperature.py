"""Stages that flatten or sharpen the whole distribution: temperature, fixed and dynamic."""

from __future__ import annotations

from unspool.sampling.arrays import Array
from unspool.sampling.candidates import Candidates
from unspool.sampling.rows import Rows

_COLDEST = 1e-6
"""Colder than this acts as this: there all but the best (and its equals) have vanished already,
and dividing by less would overflow."""


class Temperature:
    """Divides the logits by the temperature. (At 0 the chain is greedy and never comes here.)"""

    name = "temperature"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        return scaled(candidates, rows.column("temperature", candidates.logits))


class DynamicTemperature:
    """Temperature between T - range and T + range: the surer the model, the colder.

    T_min + (T_max - T_min) · (entropy / largest possible entropy)^exponent, over the remaining
    candidates; a row with one candidate stays as it is.
    """

    name = "dynamic_temperature"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        entropy = candidates.measure(entropy=True).entropy
        number = ops.double(candidates.remaining()[:, None])
        several = number > 1
        most = ops.log(ops.where(several, number, 2.0))
        middle = rows.column("temperature", entropy)
        span = rows.column("dynatemp_range", entropy)
        coldest = ops.at_least(middle - span, 0.0)
        sureness = ops.at_least(entropy, 0.0) / most
        warmth = sureness ** rows.column("dynatemp_exponent", entropy)
        temperature = coldest + (middle + span - coldest) * warmth
        temperature = ops.where(several, temperature, 1.0)
        return scaled(candidates, ops.like(temperature, candidates.logits))


def scaled(candidates: Candidates, temperature: Array) -> Candidates:
    warm = candidates.ops.at_least(temperature, _COLDEST)
    return candidates.with_logits(candidates.logits / warm, ordered=candidates.ordered)
