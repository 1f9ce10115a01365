"""Random tables, degenerate ones among them: a fit answers, or refuses in one sentence, and never warns."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit

ONCE_WRONG = (4, 5, 12, 15, 19, 20)  # seeds whose tables once gave a traceback, a warning or an unfounded answer


def random_table(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 18))
    N, D = 10 ** rng.uniform(4, 9, n), 10 ** rng.uniform(6, 11, n)
    if rng.random() < 0.5:
        N = rng.choice(10.0 ** np.arange(5, 9), n)
    law = 1.5 + 40 / N**0.3 + 85 / D**0.3
    one_differs = np.full(n, 3.0)
    one_differs[0] = 4.0
    kinds = {
        "law": law,
        "equal": np.full(n, 3.0),
        "equal but for rounding": 3 * (1 + 1e-15 * rng.standard_normal(n)),
        "one differs": one_differs,
        "huge": law * 1e300,
        "decades": 10.0 ** rng.uniform(-50, 50, n),
        "noise": law * np.exp(rng.standard_normal(n)),
        "rising": 1 + 0.1 * np.log10(N * D),
    }
    frame = pd.DataFrame({"N": N, "D": D, "loss": list(kinds.values())[seed % len(kinds)]})
    if rng.random() < 0.3:
        frame["flops"] = 6 * N * D * 10 ** rng.uniform(-9, 9, n)
    if rng.random() < 0.3:
        frame["weight"] = 10 ** rng.uniform(-30, 30, n)
    if rng.random() < 0.3:
        frame["run_id"] = rng.integers(0, max(n // 2, 1), n)
    if rng.random() < 0.2:
        with np.errstate(over="ignore"):
            frame = frame.astype(np.float32)
    return frame


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", sorted({*range(8), *ONCE_WRONG}))  # tables of all kinds, and of those
def test_a_random_table_is_answered_or_refused_in_one_sentence(seed):
    try:
        runs = fit.read_table(random_table(seed))
        form = "gamma" if seed in ONCE_WRONG else "chinchilla, tied"
        fit.FormMixture([form], draws=10).fit(runs).forecast(N=[1e10], D=[1e12])
        analysis = fit.analyze(runs, targets=(1e18,), bootstrap=0, intervals="noise") if seed % 3 == 0 else None
    except fit.InputError as error:
        refusal = str(error)
    else:
        refusal = "None."
        for approach in analysis.approaches.values() if analysis else ():
            assert approach.reason or np.isfinite(approach.exponent)
    assert refusal.endswith(".")
    assert "\n" not in refusal


def test_equal_values_determine_a_power_law_only_without_an_offset():
    x = np.geomspace(1, 100, 9)
    assert fit.PowerLaw().fit(x, np.full(9, 3.0)).p_ == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(fit.InputError, match="y is 3 in every row"):
        fit.PowerLaw(offset=True).fit(x, 3.0 * (1 + 1e-15 * np.cos(x)))


def test_new_names_of_the_groups_and_another_order_of_the_rows_change_no_interval():
    rng = np.random.default_rng(3)
    flops = np.repeat(10.0 ** np.arange(16, 21), 8)
    N = np.sqrt(flops / 120) * np.tile(np.geomspace(0.1, 10, 8), 5)
    D = flops / 6 / N
    loss = (1.5 + 40 / N**0.3 + 85 / D**0.3) * np.exp(0.01 * rng.standard_normal(40))
    runs = pd.DataFrame({"N": N, "D": D, "loss": loss, "flops": flops, "group": np.arange(40) // 2})
    moved = runs.assign(group=99 - runs.group).sample(frac=1.0, random_state=0)

    def intervals(t):
        columns = [t[name].to_numpy() for name in ("N", "D", "loss", "flops")]
        yield fit.Envelope().fit(*columns).bootstrap(30, t.group).N_law_.interval("p")
        yield fit.forecast(t, 1e10, 1e12, forms=["kaplan"])[["low", "high"]].to_numpy()[0]
        law = fit.ChinchillaLaw().fit(*columns[:3])
        for method in ("wild", "pairs"):
            yield law.bootstrap(30, t.group, method=method).interval("alpha")
            yield law.predict_interval(1e10, 1e12, kind="run")

    for before, after in zip(intervals(runs), intervals(moved), strict=True):
        assert after == pytest.approx(before, rel=1e-5)
