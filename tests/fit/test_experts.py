"""Laws of mixtures of experts: published constants come back, answers are optima, bad tables get one sentence."""

import json

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.experts import by_experts, expert_columns
from isoflop.fit.errors import InputError

# As printed: Clark et al. 2022, table 3; Krajewski et al. 2024, table 1; Ludziejewski et al. 2025, table 3; Abnar et
# al. 2025, table 3.
CLARK = {
    "S-Base": {"a": -0.082, "b": -0.108, "c": 0.009, "d": 1.104, "E_start": 1.847, "E_max": 314.478},
    "RL-R": {"a": -0.083, "b": -0.126, "c": 0.012, "d": 1.111, "E_start": 1.880, "E_max": 469.982},
    "Hash": {"a": -0.087, "b": -0.136, "c": 0.012, "d": 1.157, "E_start": 4.175, "E_max": 477.741},
}
LUDZIEJEWSKI = {"a": 35.91, "alpha": -0.1889, "delta": -0.2285, "gamma": 0.0098, "b": 35.98, "beta": -0.1775}
LUDZIEJEWSKI |= {"omega": 0.5529, "zeta": -0.0259, "E_start": 2.0732, "E_max": 290.4521, "c": 1.3637}
ABNAR = {"a": 16612.50, "alpha": 0.5962, "b": 5455.67, "beta": 0.3954, "c": 0.4598, "lambda": -0.1666, "d": 17.26}
ABNAR |= {"delta": 0.1603, "gamma": 0.1595, "e": 0.94}
KRAJEWSKI = {"a": 18.1, "alpha": 0.115, "b": 30.8, "beta": 0.147, "g": 2.1, "gamma": 0.58, "c": 0.47}
CUTOFF = {"S-Base": 937e9, "RL-R": 85e9, "Hash": 83e9}  # Clark et al., section 5.2
PUBLISHED = {"clark": CLARK["S-Base"], "krajewski": KRAJEWSKI, "ludziejewski": LUDZIEJEWSKI, "abnar": ABNAR}
SHARE, D_CLARK = 0.6, 1.3e11


def columns(form, seed=0, n=200):
    """Return inputs of a law over the range of its paper's runs."""
    rng = np.random.default_rng(seed)
    N, D, E = 10 ** rng.uniform(7.9, 9.5, n), 10 ** rng.uniform(8.7, 11, n), 2.0 ** rng.integers(0, 6, n)
    if form == "clark":
        return N, 2.0 ** rng.integers(0, 10, n)
    if form == "krajewski":
        return 10 ** rng.uniform(8.3, 9.8, n), 10 ** rng.uniform(9.5, 11.3, n), 2.0 ** rng.integers(0, 5, n)
    return (N if form == "ludziejewski" else N * (1 + (E - 1) * SHARE), D, E)


def simulated(form, seed=0, noise=0.003, **options):
    x = columns(form, seed)
    error = noise * np.random.default_rng(seed + 100).standard_normal(len(x[0]))
    law = fit.ExpertLaw(form, **options)
    return law.fit(*x, law.evaluate(PUBLISHED[form], *x) * np.exp(error))


def table(n=120, seed=0):
    """Return a table of dense models and mixtures with two experts per token, by the law of Ludziejewski et al."""
    N, D, E = (v[:n] for v in columns("ludziejewski", seed))
    loss = fit.ExpertLaw("ludziejewski").evaluate(LUDZIEJEWSKI, N, D, E)
    loss = loss * np.exp(0.003 * np.random.default_rng(seed + 1).standard_normal(n))
    of = {"N_active": N, "N_total": N * (1 + (E - 1) * SHARE), "D": D, "loss": loss}
    return pd.DataFrame(
        of | {"experts": np.where(E > 1, 2 * E, np.nan), "experts_per_token": np.where(E > 1, 2, np.nan)}
    )


@pytest.mark.parametrize("form", PUBLISHED)
def test_exact_data_give_the_constants_of_experts_back(form):
    law = simulated(form, noise=0.0)
    assert law.starts_["agreeing"] >= 0.5 * law.starts_["tried"]
    for name, value in PUBLISHED[form].items():
        np.testing.assert_allclose(law.constants_[name], value, rtol=1e-6, err_msg=name)  # conditioning times rounding


def test_the_joint_law_reduces_to_the_printed_chinchilla_laws_and_optima():
    """Ludziejewski et al., table 4 (amplitude and exponent of N and of D by E) and table 1 (N and D at 1e21 FLOPs)."""
    printed = {1: (30.3640, 0.1817, 53.9838, 0.1965), 8: (21.8330, 0.1676, 119.9126, 0.2338)}
    printed[32] = (16.5424, 0.1557, 234.6726, 0.2652)
    law = simulated("ludziejewski", noise=0.0, share=SHARE)
    N, D = 1e9, 2e10
    for E, (m, mu, n, nu) in printed.items():
        # Exponents printed to four digits are worth 5e-5 * ln(2e10) = 1e-3 of a term.
        assert law.predict(N, D, E) == pytest.approx(m * N**-mu + n * D**-nu + 1.3637, rel=2e-3)
    for E, N, D in ((1, 5.7e9, 29.3e9), (8, 3.8e9, 44.3e9), (32, 2.85e9, 58.4e9)):
        best = law.optimal(1e21, experts=E)
        # They divide by the exponents of table 4, so that N and D are good to a few per cent.
        np.testing.assert_allclose([best.N[0], best.D[0]], [N, D], rtol=0.03)


def test_effective_parameters_are_those_of_the_dense_model_of_equal_loss():
    law = simulated("clark", noise=0.0, tokens=D_CLARK)
    N, E = np.array([5e6, 1e8, 1.3e9]), np.array([1.0, 128.0, 512.0])
    dense = law.effective_parameters(N, E)
    assert dense[0] == pytest.approx(N[0], rel=1e-9)
    np.testing.assert_allclose(law.predict(dense, np.ones(3)), law.predict(N, E), rtol=1e-9)
    # At one number of tokens FLOPs go with parameters.
    np.testing.assert_allclose(law.leverage(6 * N[1] * D_CLARK, E), law.effective_parameters(N[1], E) / N[1], rtol=1e-9)
    assert law.effective_parameters(5e6, 128.0) == pytest.approx(55e6, rel=0.1)  # their example of a small model


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ludziejewski", "abnar"])
def test_leverage_is_where_dense_reaches_the_loss_of_a_mixture(form):
    law = simulated(form, share=SHARE).bootstrap(24)
    C, E = 1e20, 16.0
    leverage = law.leverage(C, E)
    mixture, dense = law.optimal(C, experts=E), law.optimal(C * leverage, experts=1.0)
    assert leverage > 1.0
    np.testing.assert_allclose(dense.loss, mixture.loss, rtol=1e-9)
    assert law.leverage(C, 1.0) == pytest.approx(1.0, rel=1e-6)
    low, high = law.interval_of(lambda c: law.leverage(C, E, c))
    assert low < leverage < high
    # The simulated law's own leverage.
    exact = simulated(form, noise=0.0, share=SHARE).leverage(C, E)
    assert low < exact < high


def test_the_best_sparsity_is_the_lowest_loss_of_a_grid():
    law, C = simulated("ludziejewski", share=SHARE), 1e21
    free, bounded = law.optimal(C), law.optimal(C, most_parameters=1e10)
    assert free.more["experts"][0] == pytest.approx(32.0)  # more experts always help, so it is the largest number
    assert bounded.more["N_total"][0] == pytest.approx(1e10, rel=1e-9)
    E = np.linspace(1.0, 32.0, 400)[:, None]
    N = np.geomspace(1e8, 1e10, 1000)
    loss = np.where(N * (1 + (E - 1) * SHARE) <= 1e10, law.predict(N, C / 6 / N, E), np.inf)
    assert bounded.loss[0] <= loss.min() * (1 + 1e-4)  # the law's own grid has 49 numbers of experts
    assert bounded.loss[0] > free.loss[0]
    assert bounded.more["sparsity"][0] == pytest.approx(1 - 1 / bounded.more["experts"][0])


def test_at_one_number_of_tokens_a_form_is_without_them():
    N, _, E = columns("ludziejewski")
    y = fit.ExpertLaw("ludziejewski").evaluate(LUDZIEJEWSKI, N, np.full_like(N, 1e10), E)
    law = fit.ExpertLaw("ludziejewski", tokens=1e10).fit(N, E, y)
    assert law.inputs == ("N_active", "experts")
    assert not {"beta", "zeta"} & set(law.names)
    np.testing.assert_allclose(law.predict(N, E), y, rtol=1e-9)  # b and omega absorb the term of D
    assert law.optimal(6e19).D[0] == 1e10
    assert "D^" not in law.equation(str)


def test_a_law_of_experts_survives_its_file(tmp_path):
    law = simulated("clark", tokens=D_CLARK, share=SHARE).bootstrap(8)
    law.to_json(tmp_path / "law.json")
    back = fit.read_law(tmp_path / "law.json")
    assert type(back) is fit.ExpertLaw
    assert back.get_params() == law.get_params()
    assert repr(back) == repr(law)
    assert (back.optimal(1e20).interval("N") == law.optimal(1e20).interval("N")).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit.ExpertLaw("switch"), "form is 'switch'; choose a law of experts: clark"),
        (lambda: fit.ExpertLaw(share=-1.0), "share is -1.0; it must be a finite number above zero"),
        (lambda: fit.ExpertLaw().fit(N_active=[1e8], loss=[3.0]), "N_active, experts, loss, each once"),
        (lambda: fit.ExpertLaw().fit(*columns("clark")[:1], np.ones(200), np.ones(200)), "experts is at least 1"),
        (lambda: fit.ExpertLaw().fit(columns("clark")[0], columns("clark")[1] / 2, np.ones(200)), "is at least 0.5"),
        (lambda: simulated("krajewski").optimal(1e21), "form is 'krajewski', which holds for one number of experts"),
        (lambda: simulated("clark").optimal(1e21), "tokens is missing"),
        (lambda: simulated("abnar").leverage(1e21, 8), "share is missing"),
        (lambda: simulated("ludziejewski").optimal(1e21, most_parameters=1e9), "the law must be made with share"),
        (lambda: simulated("ludziejewski").effective_parameters(1e9, 8), "only clark has effective parameters"),
        (lambda: fit.ExpertLaw().optimal(1e21), "not fitted"),
        (lambda: expert_columns(fit.read_table(table().drop(columns="N_active"))), "column 'N_active' has no numbers"),
        (lambda: expert_columns(fit.read_table(table().drop(columns="experts"))), "column 'experts' has no numbers"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.slow
def test_a_table_is_answered_by_the_form_that_predicts_it_best():
    study = by_experts(fit.read_table(table()), (1e20, 1e21), bootstrap=20)
    assert min(study.held_out, key=study.held_out.get) == study.law.form == "ludziejewski"
    assert study.law.share == pytest.approx(SHARE)
    assert [row["experts"] for row in study.sparsities] == [1, 2, 4, 8, 16, 32]
    leverages = [row["leverage"] for row in study.sparsities]
    assert leverages[0] == pytest.approx(1.0, rel=1e-6)
    assert leverages == sorted(leverages)
    assert all(row["ci"][0] <= row["leverage"] * (1 + 1e-9) for row in study.sparsities)
    assert [row["most"] is None for row in study.answers] == [True, True, False, False]
    assert study.answers[0]["edge"]


def test_a_table_of_one_number_of_experts_has_no_law():
    frame = table()
    study = by_experts(fit.read_table(frame[frame["experts"] == 8]), (1e21,))
    assert study.law is None
    assert "experts is 4 in every run" in study.reason


@pytest.mark.slow
def test_the_report_has_a_section_for_mixtures_alone(tmp_path, quick_pictures):
    mixtures, dense = table(60), table(60)[["N_total", "D", "loss"]]
    for frame, text in ((mixtures, 'id="figure-experts"'), (mixtures.drop(columns="experts"), "No law of experts")):
        analysis = fit.analyze(fit.read_table(frame), (1e21,), bootstrap=0, intervals="noise")
        assert text in fit.write_report(analysis, tmp_path / text[:2]).read_text()
    assert len(json.loads((tmp_path / "id" / "law.json").read_text())["experts"]["answers"]) == 2
    assert fit.analyze(fit.read_table(dense), (1e21,), bootstrap=0, intervals="noise").experts is None


# The curves of Clark et al. 2022.


def routed(router):
    """Return their runs of one router and the dense ones, with one expert per token in every other layer."""
    where = {"router_type": ["Dense", router], "experts_per_token": 1, "routing_frequency": 0.5, "flop_increase": 1.0}
    return fit.published_runs("routed", where=where)


@pytest.mark.published
@pytest.mark.parametrize("router", CLARK)
def test_the_constants_and_effective_parameters_of_clark_come_back(router):
    """By least squares on the runs of one seed, as their notebook fits."""
    c, frame = expert_columns(routed(router)), routed(router).frame
    c = {name: values[(frame["seed"] == 42).to_numpy()] for name, values in c.items()}
    law = fit.ExpertLaw(objective="squares").fit(c["N_active"], c["experts"], c["loss"]).bootstrap(500)
    for name, value in CLARK[router].items():
        low, high = law.interval(name)
        assert low <= value <= high, name
    # The size from which on experts do not help, which the paper states from constants that are not rounded.
    low, high = law.interval_of(lambda c: 10 ** (-c["b"] / c["c"]))
    assert low < CUTOFF[router] < high
    assert 10 ** -(law.b_ / law.c_) == pytest.approx(CUTOFF[router], rel=0.2)
    # a, b and c are printed to 0.0005, which is worth a factor of up to 1.7 in the effective parameters.
    for N in (1.5e7, 1.3e8, 1.3e9):
        for E in (8.0, 64.0, 256.0):
            rounding = 0.0005 * (1 + np.log10(N)) * (1 + np.log10(E)) / 0.078
            theirs = law.effective_parameters(N, E, CLARK[router]) * 10 ** np.array([-rounding, rounding])
            low, high = law.interval_of(lambda c, N=N, E=E: law.effective_parameters(N, E, c))
            assert low < theirs[1], (N, E)
            assert high > theirs[0], (N, E)
