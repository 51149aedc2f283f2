"""Temperature stages: fixed and dynamic."""

from __future__ import annotations

from unspool.sampling.arrays import Array
from unspool.sampling.candidates import Candidates
from unspool.sampling.rows import Rows

_MIN_TEMPERATURE = 1e-6
"""Lower bound of the temperature: below it only the best candidates (ties) have probability, and
dividing by less would overflow."""


class Temperature:
    """Divides the logits by the temperature. (At 0 the chain is greedy and skips this.)"""

    name = "temperature"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        return apply_temperature(candidates, rows.column("temperature", candidates.logits))


class DynamicTemperature:
    """Temperature between T - range and T + range: lower if the model is more certain.

    T_min + (T_max - T_min) · (entropy / maximum entropy)^exponent, over the remaining candidates; a
    row with one candidate does not change.
    """

    name = "dynamic_temperature"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        entropy = candidates.softmax_stats(entropy=True).entropy
        num_candidates = ops.to_float64(candidates.remaining()[:, None])
        has_several = num_candidates > 1
        max_entropy = ops.log(ops.where(has_several, num_candidates, 2.0))
        center = rows.column("temperature", entropy)
        span = rows.column("dynatemp_range", entropy)
        minimum = ops.clamp_min(center - span, 0.0)
        uncertainty = ops.clamp_min(entropy, 0.0) / max_entropy
        fraction = uncertainty ** rows.column("dynatemp_exponent", entropy)
        temperature = minimum + (center + span - minimum) * fraction
        temperature = ops.where(has_several, temperature, 1.0)
        return apply_temperature(candidates, ops.to_array_like(temperature, candidates.logits))


def apply_temperature(candidates: Candidates, temperature: Array) -> Candidates:
    divisor = candidates.ops.clamp_min(temperature, _MIN_TEMPERATURE)
    return candidates.with_logits(candidates.logits / divisor, is_sorted=candidates.is_sorted)
