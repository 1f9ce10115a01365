"""The critical batch: McCandlish's hyperbola, Kaplan's and Zhang's laws of it, and where a run first reaches a loss."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.hyperparameters.hyperparameters import CriticalBatchLaw, HyperparameterLaw, tokens_to_loss

E_MIN, S_MIN = 2e9, 5000.0
B_CRIT = E_MIN / S_MIN
BATCH = np.geomspace(B_CRIT / 30, B_CRIT * 30, 10)


def test_exact_pairs_of_steps_and_tokens_give_the_hyperbola_back():
    E = E_MIN * (1 + BATCH / B_CRIT)
    S = E / BATCH
    np.testing.assert_allclose((S / S_MIN - 1) * (E / E_MIN - 1), 1.0, rtol=1e-10)  # McCandlish et al., equation 2.11
    law = CriticalBatchLaw().fit(E / S, E)
    np.testing.assert_allclose([law.E_min_, law.S_min_, law.B_crit_], [E_MIN, S_MIN, B_CRIT], rtol=1e-8)
    np.testing.assert_allclose(law.predict(batch=B_CRIT), 2 * E_MIN, rtol=1e-8)
    np.testing.assert_allclose(law.predict(0.2 * B_CRIT), 1.2 * E_MIN, rtol=1e-8)  # Zhang et al.'s 20 %
    assert repr(CriticalBatchLaw.from_json(law.to_json())) == repr(law)


def test_batches_on_one_side_name_the_constant_that_they_do_not_show():
    small = CriticalBatchLaw().fit(BATCH, 1e9 * BATCH**-0.01)  # larger batches need no more tokens
    assert small.degenerate_ == ["S_min"]
    assert small.B_crit_ == np.inf
    large = CriticalBatchLaw().fit(BATCH, 1e4 * BATCH**1.01)  # larger batches need no fewer steps
    assert large.degenerate_ == ["E_min"]
    with pytest.raises(fit.InputError, match="at least 3 different batches; there are 2"):
        CriticalBatchLaw().fit([1e5, 1e5, 1e6], [1e9, 1e9, 2e9])


def test_the_critical_batch_gives_kaplans_law_back():
    """B_crit(L) = B* / L^(1 / alpha_B), Kaplan et al. 2020, table 5: B* = 2.1e8 tokens, alpha_B = 0.21."""
    losses, batches = np.array([4.5, 4.0, 3.5, 3.0, 2.5]), []
    for L in losses:
        critical = 2.1e8 / L ** (1 / 0.21)
        batch = critical * np.geomspace(0.05, 20, 6)
        batches.append(CriticalBatchLaw().fit(batch, 1e9 / L**3 * (1 + batch / critical)).B_crit_)
    law = HyperparameterLaw("critical_batch", ("loss",)).fit(losses, batches)
    np.testing.assert_allclose([law.k_, -1 / law.p_loss_], [2.1e8, 0.21], rtol=1e-7)


def test_a_run_reaches_a_loss_where_its_curve_crosses_it_first():
    x = np.geomspace(1e6, 1e9, 40)
    curve = 30 * x**-0.12  # straight in the logarithms, so the interpolation is exact
    at = tokens_to_loss(x[::-1], curve[::-1], 3.3)
    np.testing.assert_allclose(30 * at**-0.12, 3.3, rtol=1e-12)
    assert np.isnan(tokens_to_loss(x, curve, 1.0))
    assert tokens_to_loss(x, curve, curve[7]) == pytest.approx(x[7], rel=1e-12)
    bump = np.where(np.arange(40) == 20, 10.0, curve)  # a spike after the first crossing changes nothing
    assert tokens_to_loss(x, bump, curve[15]) == pytest.approx(x[15], rel=1e-12)
    with pytest.raises(fit.InputError, match="below it from its first point"):
        tokens_to_loss(x, curve, 20.0)
