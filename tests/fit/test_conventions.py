"""Counting conventions: models whose optimum is known under every convention, and runs of Porian et al."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.conventions import by_convention
from isoflop.fit.flops import FlopsPerToken
from isoflop.train.config import ModelConfig
from isoflop.train.flops import count_parameters, training_flops_per_token

E, A, B, ALPHA, BETA = 1.8, 480.0, 2100.0, 0.35, 0.37
VOCABULARY, CONTEXT = 50_000, 2048
BUDGETS = (1e17, 3e17, 1e18, 3e18, 1e19, 3e19)


def models(width):
    """Count N in two ways and exact FLOPs per token: tied embeddings 50k x width, width / 64 layers of 12 width^2."""
    inner = 12 * width**3 / 64
    total = inner + VOCABULARY * width
    return {"N_total": total, "N_non_embedding": inner, "exact": 6 * total + 12 * width**2 / 64 * CONTEXT}


def loss_of(total, D):
    return E + A / total**ALPHA + B / D**BETA


def family(noise=0.0005, convention="exact", sizes=9, seed=0):
    """Return isoFLOP runs whose loss is a law in N_total, at budgets in the FLOPs that `convention` names."""
    rng = np.random.default_rng(seed)
    rows = []
    for C in BUDGETS:
        best = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (C / 6) ** (BETA / (ALPHA + BETA))
        widths = np.geomspace(16, 8192, 20_001)
        centre = widths[np.argmin(np.abs(models(widths)["N_total"] - best))]
        for m in map(models, centre * np.geomspace(0.55, 1.8, sizes)):
            D = C / (m["exact"] if convention == "exact" else 6 * m[convention])
            loss = loss_of(m["N_total"], D) * np.exp(noise * rng.standard_normal())
            row = {"budget": C, "D": D, "loss": loss, "N_total": m["N_total"], "N_kaplan": m["N_non_embedding"]}
            rows.append(row | {"flops": C, "flops_exact": m["exact"] * D})
    return pd.DataFrame(rows)


def best(C, count, spend):
    """Return the optimal sizes for C (m,), in `count`: those with the lowest loss of 200,000 widths."""
    m = models(np.geomspace(8, 65536, 200_001))
    flops_per_token = m["exact"] if spend == "exact" else 6 * m[count]
    return np.array([m[count][np.argmin(loss_of(m["N_total"], c / flops_per_token))] for c in np.atleast_1d(C)])


def truth(row):
    """Return the mean slope of N*(C) over the budgets of a row's profiles."""
    C = np.array([p.flops for p in row.approaches["isoflop"].profiles.accepted_])[[0, -1]]
    count = {"N_kaplan": "N_non_embedding"}.get(row.parameters, row.parameters)
    return np.diff(np.log(best(C, count, row.flops)))[0] / np.log(C[1] / C[0])


@pytest.fixture(scope="module")
def rows():
    conventions = by_convention(fit.read_table(family()), targets=(1e21,), bootstrap=60)
    return {(row.parameters, row.flops): row for row in conventions}


def test_every_exponent_is_the_closed_form_in_its_own_count(rows):
    assert set(rows) == {(count, flops) for count in ("N_total", "N_kaplan") for flops in ("6nd", "exact")}
    assert [key for key, row in rows.items() if row.own] == [("N_total", "exact")]
    row = rows["N_total", "6nd"]
    a = BETA / (ALPHA + BETA)
    assert abs(row.approaches["isoflop"].exponent - a) < 0.01
    assert abs(row.approaches["parametric"].exponent - a) < 0.003
    low, high = row.approaches["parametric"].exponent_interval
    assert low < a < high
    np.testing.assert_allclose(row.approaches["parametric"].at(1e21).N, best(1e21, "N_total", "6nd"), rtol=0.05)


def test_under_exact_flops_approach_3_allocates_under_those(rows):
    approach = rows["N_total", "exact"].approaches["parametric"]
    np.testing.assert_allclose(approach.exponent, truth(rows["N_total", "exact"]), atol=0.004)
    # 100 times beyond the runs the allocation still agrees, because p and q are those of the family.
    for C in (1e18, 1e21):
        np.testing.assert_allclose(approach.at(C).N, best(C, "N_total", "exact"), rtol=0.05)
    low, high = approach.exponent_interval
    assert low < approach.exponent < high


def test_without_embeddings_the_exponent_is_the_numeric_one(rows):
    """Loss depends on N_total only: in N_kaplan the vertices find the optimum, and approach 3 fits a wrong form."""
    for flops, shift in (("6nd", 0.24), ("exact", 0.18)):
        row, other = rows["N_kaplan", flops], rows["N_total", flops]
        assert truth(row) - truth(other) > shift
        # The line through the valleys has a prior slope of 0.5, which five budgets within two decades do not outweigh.
        for key in ("isoflop", "parametric"):
            assert abs(row.approaches[key].exponent - truth(row)) < 0.08
            assert row.approaches[key].exponent - other.approaches[key].exponent > shift - 0.08
        for p in row.approaches["isoflop"].profiles.accepted_:
            np.testing.assert_allclose(p.N_best, best(p.flops, "N_non_embedding", flops), rtol=0.06)
    assert rows["N_kaplan", "6nd"].moved > 2
    assert rows["N_kaplan", "exact"].moved == 1.0


def test_runs_moved_to_a_shared_budget_find_its_optimum():
    """Compare runs planned under one convention and read under another with runs planned under the other."""
    moved, planned = (
        {(r.parameters, r.flops): r for r in by_convention(fit.read_table(family(convention=name)))}["N_total", "6nd"]
        for name in ("exact", "N_total")
    )
    assert moved.moved > 1.05
    assert planned.moved == 1.0
    assert planned.own
    moved_size, planned_size = (row.approaches["isoflop"].profiles.N_law_.predict(1e18) for row in (moved, planned))
    np.testing.assert_allclose(moved_size, planned_size, rtol=0.03)


def test_the_own_row_is_the_fit_of_the_table():
    frame = family().drop(columns=["N_kaplan", "flops_exact"])
    table = fit.read_table(frame.assign(flops=6 * frame.N_total * frame.D))
    (row,) = by_convention(table, bootstrap=20)
    assert row.own
    law = fit.ChinchillaLaw().fit(table.N, table.D, table.loss).bootstrap(20, groups=table.run_id)
    profiles = fit.IsoflopProfiles("valley").fit(table.N, table.D, table.loss, table.flops, table.budget).bootstrap(20)
    envelope = fit.Envelope().fit(table.N, table.D, table.loss, table.flops, table.budget)
    exponents = [row.approaches[key].exponent for key in ("parametric", "isoflop", "envelope")]
    assert exponents == [law.exponents_[0], profiles.N_law_.p_, envelope.N_law_.p_]
    intervals = [row.approaches[key].exponent_interval for key in ("parametric", "isoflop")]
    assert intervals == [law.interval("a"), profiles.N_law_.interval("p")]


def test_a_count_that_is_missing_or_zero_is_left_out_with_the_reason():
    frame = family()
    frame.loc[3, "N_kaplan"] = 0.0
    frame.loc[4:5, "flops_exact"] = np.nan
    conventions = {(r.parameters, r.flops): r for r in by_convention(fit.read_table(frame))}
    assert "N_kaplan is missing or zero in 1 of 54" in conventions["N_kaplan", "6nd"].reason
    assert "flops_exact is missing or zero in 2 of 54" in conventions["N_total", "exact"].reason
    assert conventions["N_total", "6nd"].reason == ""
    assert conventions["N_kaplan", "6nd"].to_dict()["approaches"] == {}


def test_flops_of_a_size_extrapolate_as_the_projects_counts():
    def at(depth):
        model = ModelConfig(width=64 * depth, depth=depth, heads=depth, vocab_size=32_000)
        return count_parameters(model).N_total, training_flops_per_token(model, 2048)

    N, flops_per_token = np.array([at(depth) for depth in range(2, 9)], dtype=float).T
    D = np.full(len(N), 1e9)
    spend = FlopsPerToken.measured(N, D, flops_per_token * D)
    np.testing.assert_allclose(spend(N), flops_per_token, rtol=0.02)  # hidden widths are rounded to multiples
    large, exact = at(80)
    assert large > 1000 * N.max() / 3
    np.testing.assert_allclose(spend(np.array([large])), exact, rtol=0.02)
    assert flops_per_token[-1] / N[-1] > 1.08 * exact / large  # so a constant 6N, or the runs' mean, would miss by more
    doubled = FlopsPerToken.measured(N, D, 12 * N * D)
    np.testing.assert_allclose(doubled(np.array([1e7, 1e12])), 12 * np.array([1e7, 1e12]), rtol=1e-12)


@pytest.mark.published
def test_the_same_runs_of_porian_et_al_move_by_a_sixth_between_counts():
    """In their tuned runs the two counts differ by an output head of 50432 x width, exactly so in every size."""
    points = fit.load_published("porian")
    kaplan = points.query("dataset == 'rw' and hparams == 'base' and param_count == 'kaplan'").n.unique()
    tuned = points.query("file == 'summary_df' and dataset == 'rw' and hparams == 'tuned' and val == 'val'")
    counts = dict(zip(np.sort(tuned.n.unique()), np.sort(kaplan), strict=True))
    heads = (np.array(list(counts)) - np.array(list(counts.values()))) / 50432
    np.testing.assert_array_equal(heads, np.round(heads))
    frame = tuned.assign(
        N_total=tuned.n, N_kaplan=tuned.n.map(counts), D=tuned.flops / (6 * tuned.n), budget=tuned.flops
    )
    conventions = by_convention(fit.read_table(frame.drop(columns="n")), (5.88e23,))
    a = {row.parameters: row.approaches["isoflop"].exponent for row in conventions if row.flops == "6nd"}
    assert 0.4907 < a["N_total"] < 0.5045  # their interval for these runs
    assert 0.64 < a["N_kaplan"] < 0.72  # theirs, with a longer warm-up and training loss: 0.703 to 0.721
