"""The law: found again where it is known, the same minimum as scipy's, honest intervals."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from unspool.errors import SettingsError
from unspool.train.scaling import study
from unspool.train.scaling.study import HUBER_DELTA, Law, RunResult, fit

# Chinchilla's own figures (Hoffmann et al. 2022, approach 3).
E, A, ALPHA, B, BETA = 1.69, 406.4, 0.34, 410.7, 0.28
SIZES = (5e6, 2e7, 8e7, 3e8, 1e9)
TOKENS = (1e8, 5e8, 2e9, 1e10)


def true_loss(parameters: float, tokens: float) -> float:
    return E + A / parameters**ALPHA + B / tokens**BETA


def runs(noise: float = 0.0, seed: int = 0) -> list[RunResult]:
    rng = np.random.default_rng(seed)
    return [
        RunResult(n, d, true_loss(n, d) * float(np.exp(noise * rng.standard_normal())))
        for n, d in product(SIZES, TOKENS)
    ]


@pytest.fixture(scope="module")
def law() -> Law:
    """Fitted from all starts; the tests below fit from some of them."""
    return fit(runs(), redraws=0)


@pytest.fixture(autouse=True)
def some_starts(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_STARTS", study._STARTS[::16])


def test_a_known_law_is_found_again(law: Law):
    assert law.e == pytest.approx(E, rel=1e-3)
    assert law.alpha == pytest.approx(ALPHA, rel=1e-3)
    assert law.beta == pytest.approx(BETA, rel=1e-3)
    assert law.a == pytest.approx(A, rel=1e-2)
    assert law.b == pytest.approx(B, rel=1e-2)
    assert law.error < 1e-6


def test_the_minimum_is_the_one_that_scipy_finds():
    """Chinchilla's own way: L-BFGS from a grid of starts."""
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    measured = runs(noise=0.01, seed=3)
    fields = ("parameters", "tokens", "loss")
    x, y, z = (np.log([getattr(run, field) for run in measured]) for field in fields)

    def cost(row: Any) -> float:
        a, alpha, b, beta, e = row
        off = logsumexp([a - alpha * x, b - beta * y, np.full_like(x, e)], axis=0) - z
        far = np.abs(off)
        linear = HUBER_DELTA * (far - HUBER_DELTA / 2)
        return float(np.where(far < HUBER_DELTA, off**2 / 2, linear).sum())

    starts = product((5.0,), (0.3, 0.6), (5.0,), (0.3,), (0.5,))
    options = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-12}
    reference = min(minimize(cost, s, method="L-BFGS-B", options=options).fun for s in starts)
    law = fit(measured, redraws=0)
    mine = cost([np.log(law.a), law.alpha, np.log(law.b), law.beta, np.log(law.e)])
    assert mine <= reference * 1.001


def test_a_larger_run_is_predicted_and_lies_in_the_interval():
    small = [run for run in runs(noise=0.003, seed=1) if run.compute < 2e18]
    law = fit(small, redraws=10)
    expected = true_loss(3e8, 1e10)
    assert law.loss(3e8, 1e10) == pytest.approx(expected, rel=0.02)
    low, high = law.interval(3e8, 1e10) or (0, 0)
    assert low < high
    assert low * 0.99 < expected < high * 1.01
    assert set(law.intervals()) == {"e", "a", "alpha", "b", "beta"}
    low, high = law.intervals()["alpha"]
    assert low < high


def test_one_odd_run_hardly_pulls():
    measured = runs(noise=0.002, seed=2)
    odd = measured[7]
    measured[7] = RunResult(odd.parameters, odd.tokens, odd.loss * 1.3)
    law = fit(measured, redraws=0)
    assert law.loss(1e9, 1e10) == pytest.approx(true_loss(1e9, 1e10), rel=0.02)


def test_the_best_size_for_a_budget(law: Law):
    """No other size of the same compute has a lower loss, and the exponents are the paper's."""
    size, tokens = law.best_at(1e18)
    assert 6 * size * tokens == pytest.approx(1e18)
    best = law.loss(size, tokens)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert law.loss(size * factor, tokens / factor) > best
    grown, _ = law.best_at(1e20)
    assert np.log(grown / size) / np.log(100) == pytest.approx(BETA / (ALPHA + BETA), rel=1e-2)


def test_too_little_to_fit():
    with pytest.raises(SettingsError, match="at least 6 runs, got 5"):
        fit(runs()[:5])
    with pytest.raises(SettingsError, match="two sizes"):
        fit([RunResult(1e6, d * 1e6, 3.0) for d in range(1, 9)])
