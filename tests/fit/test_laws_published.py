"""Published fits of repetition and of over-training, reproduced to their digits, and what a better optimizer finds."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.laws.overtraining import OvertrainingLaw
from isoflop.fit.laws.repetition import RepetitionLaw
from isoflop.fit.solver.solver import solve
from scipy.optimize import curve_fit

# The base of Muennighoff et al. 2023, fitted by them to points of a figure of Hoffmann et al. 2022 (their README).
A, B, E = np.exp([6.255414, 7.3049974, 0.6254804])
C4 = {"E": E, "A": A, "B": B, "alpha": 0.3526596, "beta": 0.3526596}


# Runs that the authors left out of their fit by hand (repository huggingface/datablations, utils/parametric_fit.ipynb,
# "Custom data loading with outliers removed"). Of runs with several seeds they also left out all but the last.
LEFT_OUT = """
2b84b4b 2b88b4b 2b812b4b 2b816b4b 2b824b4b 2b855b1b25 4b212b12b 4b224b12b 4b284b1b9 4b284b6b 4b284b12b2
2b8100m100m 14m7b5100m 14m300b100m 1b12b7100m 1b13b9100m 1b15b9100m 1b17b5100m 619m3b9100m 619m5b9100m
619m7b5100m 2b84b8100m 1b58b8100m 1b112b100m 619m22b100m 421m300b1b5 221m91b400m 221m174b400m 221m600b400m
8b712b12b 8b712b1b5 8b712b400m 8b712b100m 3b926b1b5 2b836b1b5 2b836b400m 2b836b100m 2b246b400m 2b246b100m
1b566b1b5 1b566b100m 1b191b400m 1b191b1b5 1b1250b1b5 1b5174b1b5 2b291b1b5 2b2174b1b5 8b720b1b5 2b877b1b5
"""


@pytest.fixture(scope="module")
def muennighoff():
    """Return the 182 runs of the published fit: N, D, U and loss."""
    runs = fit.load_published("datablations").drop_duplicates("name", keep="last")
    runs = runs[~runs.name.isin(LEFT_OUT.split())]
    return tuple(runs[name].to_numpy(float) for name in ("N", "D", "U", "loss"))


@pytest.mark.published
def test_the_published_decays_are_not_the_best_optimum(muennighoff):
    """Muennighoff et al. give R_D* = 15.39, R_N* = 5.31 with an objective of 0.0158259366 on 182 runs.

    Their objective at their constants is reproduced to seven digits, and there is a local optimum next to them (they
    stopped short of it by one part in a thousand of R). But the objective is flat and has several: the best is at
    R_D = 95.4, R_N = 1.71, 0.13 % lower, and a bootstrap of the runs puts R_D anywhere above 5.
    """
    assert len(muennighoff[0]) == 182
    law = RepetitionLaw(base=C4).fit(*muennighoff)
    form, target = law.problem_.form, law.problem_.target
    residual = np.abs(form.value(np.log([[15.387756, 5.309743]]))[0][0] - target)
    theirs = np.where(residual < 1e-3, residual**2 / 2, 1e-3 * (residual - 5e-4)).sum()
    assert theirs == pytest.approx(0.015825936570763588, rel=1e-6)  # they computed in single precision
    start, box = np.log([[[15.387756, 5.309743]]]), (law.problem_.lower, law.problem_.upper)
    near = solve(form, target, np.ones((1, 182)), start, *box, 1e-3, staged=False)
    assert near.converged[0]
    np.testing.assert_allclose(np.exp(near.theta[0]), [15.4, 5.3], atol=0.05)
    assert near.objective[0] < theirs

    assert law.objective_ < 0.9988 * theirs
    np.testing.assert_allclose([law.R_D_, law.R_N_], [95.365, 1.7059], rtol=1e-4)
    assert law.starts_["agreeing"] < 0.9 * law.starts_["tried"]
    law.bootstrap(100)
    low, high = law.interval("R_D")
    assert low < 8
    assert high > 1e3


@pytest.mark.published
def test_the_authors_own_single_epoch_runs_give_their_tied_exponent():
    """Their notebook, on 62 runs of up to 2.5 epochs: log A, log B, log E, alpha = 6.4526, 8.0230, 0.63987, 0.35954."""
    runs = fit.load_published("datablations")
    runs = runs[runs.D / runs.U <= 2.5]
    assert len(runs) == 62
    law = fit.ChinchillaLaw(tied=True).fit(runs.N, runs.D, runs.loss)
    ours = [np.log(law.A_), np.log(law.B_), np.log(law.E_), law.alpha_]
    np.testing.assert_allclose(ours, [6.4526014, 8.022968, 0.63987476, 0.3595363], rtol=4e-4)
    theirs = dict(zip(("A", "B", "E"), np.exp([6.4526014, 8.022968, 0.63987476]), strict=True))
    theirs |= {"alpha": 0.3595363, "beta": 0.3595363}
    residual = np.abs(np.log(law.evaluate(theirs, runs.N, runs.D) / runs.loss))
    assert law.objective_ < np.where(residual < 1e-3, residual**2 / 2, 1e-3 * (residual - 5e-4)).sum()


def chosen(runs, dataset):
    """Return the five small runs of Gadre et al.: four sizes at 20 tokens per parameter, and the smallest at 320."""
    small = runs[(runs.train_dataset == dataset) & (runs.N < 5e8)]
    return small[(small.cc_mult == 1) | ((small.N < 2e7) & (small.cc_mult == 16))]


@pytest.mark.published
def test_the_published_hold_out_errors_of_over_training():
    """Gadre et al.: 0.71 % (1.4B parameters, 32 times over-trained) and 0.73 % (6.9B), trained on RedPajama and
    evaluated on C4, from five runs. They use least squares in the loss, which a weight of loss^2 in the logarithm is
    to first order; without the weight the same runs give 1.05 % and 1.10 %.
    """
    gadre = fit.load_published("gadre")
    five = chosen(gadre, "rpj")
    assert len(five) == 5
    N, D, loss = (five[name].to_numpy(float) for name in ("N", "D", "loss_c4_val"))
    held = gadre[(gadre.train_dataset == "rpj") & (((gadre.N > 1e9) & (gadre.cc_mult == 32)) | (gadre.N > 5e9))]
    held = held.sort_values("N")

    def errors(law):
        return 100 * np.abs(law.predict(held.N.to_numpy(float), held.D.to_numpy(float)) / held.loss_c4_val - 1)

    peer, _ = curve_fit(
        lambda x, A, B, alpha, E: E + A * x[0] ** -alpha + B * x[1] ** -alpha,
        (N, D), loss, p0=[200, 200, 0.3, 1.8], maxfev=20_000
    )  # fmt: skip
    scipy = OvertrainingLaw().fit(N, D, loss)
    A, B, alpha, E = peer
    scipy.constants_ = {"E": E, "a": A * 6 ** (alpha / 2), "b": B * 6 ** (alpha / 2), "eta": alpha / 2}
    np.testing.assert_allclose(errors(scipy), [0.71, 0.73], atol=0.005)
    weighted = OvertrainingLaw(objective="squares").fit(N, D, loss, weight=loss**2)
    assert weighted.starts_ == {"tried": 64, "agreeing": 64}
    np.testing.assert_allclose(errors(weighted), [0.71, 0.73], atol=0.05)
    np.testing.assert_allclose(errors(OvertrainingLaw(objective="squares").fit(N, D, loss)), [1.05, 1.10], atol=0.01)
    assert (errors(OvertrainingLaw().fit(N, D, loss)) < [0.45, 0.45]).all()
