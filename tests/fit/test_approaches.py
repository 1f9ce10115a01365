"""The envelope, and the verdict on the three approaches: what they agree on, and evidence for why they do not."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches import approaches as side
from isoflop.fit.checks.verdict import clashes, find_suspects

from tests.fit.test_isoflop import grid


def test_the_envelope_is_the_best_run_of_each_budget_and_never_a_worse_one():
    N, D, loss, C = grid()
    found = fit.Envelope().fit(N, D, loss, C)
    np.testing.assert_allclose(found.flops_, [1e18, 1e19, 1e20, 1e21])
    np.testing.assert_allclose(found.loss_, [loss[c == C].min() for c in (1e18, 1e19, 1e20, 1e21)])
    np.testing.assert_allclose(found.N_law_.p_, 0.5, rtol=1e-9)
    np.testing.assert_array_equal(found.edges_, 0)
    loss[C == 1e20] += 2.0  # a budget that improves on nothing cheaper is not on the envelope
    assert 1e20 not in fit.Envelope().fit(N, D, loss, C).flops_


def test_the_envelopes_interval_knows_the_spacing_of_the_sizes():
    widths = {}
    for sizes in (5, 41):
        N, D, loss, C = grid(sizes=sizes)
        law = fit.Envelope().fit(N, D, loss, C).bootstrap(200).N_law_
        low, high = law.interval("p")
        assert low < 0.5 < high
        widths[sizes] = high - low
    assert widths[41] < widths[5]


def test_a_winner_at_an_end_of_its_sizes_is_no_optimum():
    N, D, loss, C = grid(centre=6.0)
    found = fit.Envelope().fit(N, D, loss, C).bootstrap(20)
    assert found.edges_ == 4
    assert len(found.flops_) == 0
    assert side.envelope(found).reason == "0 levels of compute improve on cheaper ones, and a law in C needs 2"


def sweep(budgets=(2e15, 6e15, 2e16, 6e16), sizes=6, noise=0.0005, alpha=0.3, beta=0.3, spread=5.0, seed=0):
    """Runs of L = 1.5 + A/N^alpha + B/D^beta whose optimum at 1e16 FLOPs is near 1e7 parameters."""
    rng = np.random.default_rng(seed)
    A, B = 40 * 1e7 ** (alpha - 0.3), 85 * 1.7e8 ** (beta - 0.3)
    rows = []
    for C in budgets:
        best = (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))
        for N in best * np.geomspace(1 / spread, spread, sizes):
            D = C / (6 * N)
            loss = (1.5 + A / N**alpha + B / D**beta) * np.exp(noise * rng.standard_normal())
            rows.append({"run_id": f"r{len(rows)}", "budget": C, "N": N, "D": D, "flops": C, "loss": loss})
    return pd.DataFrame(rows)


def judged(frame, bootstrap=60, method="parabola"):
    """A table and its three approaches."""
    t = fit.read_table(frame)
    law = fit.ChinchillaLaw().fit(t.N, t.D, t.loss)
    profiles = fit.IsoflopProfiles(method).fit(t.N, t.D, t.loss, t.flops, t.budget)
    envelope = fit.Envelope().fit(t.N, t.D, t.loss, t.flops, t.budget)
    if bootstrap:
        for one in (law, profiles, envelope):
            one.bootstrap(bootstrap)
    return t, {
        "envelope": side.envelope(envelope),
        "isoflop": side.isoflop(profiles),
        "parametric": side.parametric(law, ""),
    }


def test_approaches_that_agree_are_said_to_with_how_little_that_says():
    table, found = judged(sweep())
    verdict = fit.verdict(found, (1e18,), table)
    assert verdict.agree is True
    assert verdict.suspects == ()
    _, *narrow = (np.divide(*a.at(1e18).N_ci[::-1]) for a in found.values())
    assert verdict.sentence.startswith("Isoflop and parametric agree at 1e18 FLOPs")
    assert f"factor of {max(narrow):.2g} in N" in verdict.sentence
    untold, found = judged(sweep(), bootstrap=0)
    assert fit.verdict(found, (1e18,), untold).agree is None  # without intervals
    assert fit.verdict({"isoflop": found["isoflop"]}, (1e18,), untold).agree is None  # without rivals


def test_agreement_is_not_claimed_of_wide_intervals():
    """They overlap whatever is true."""
    rng = np.random.default_rng(0)
    table, found = judged(sweep().assign(loss=lambda t: t.loss * np.exp(0.03 * rng.standard_normal(len(t)))))
    verdict = fit.verdict(found, (1e21,), table)
    assert verdict.agree is None
    assert "cannot be judged" in verdict.sentence


def test_approaches_that_disagree_are_named():
    """D grows faster than the FLOPs say, which bends the parametric law and leaves the vertices in N where they are."""
    table, found = judged(sweep().assign(D=lambda t: t.D * (t.budget / 2e15) ** 0.7))
    verdict = fit.verdict(found, (1e18,), table)
    assert verdict.agree is False
    assert verdict.sentence.startswith("The approaches disagree beyond their intervals: ")
    for clash in clashes(found, (6e16, 1e18)):
        one, two = (found[key].at(clash.flops) for key in clash.keys)
        assert str(clash) in verdict.sentence
        assert clash.N == (one.N, two.N)
        low, high = sorted((one.N_ci, two.N_ci))
        assert low[1] < high[0]
    assert verdict.suspects == find_suspects(found, {c.flops for c in clashes(found, (6e16, 1e18))}, table)


SUSPECTS = [
    ("Embeddings are", lambda: sweep().assign(N_non_embedding=lambda t: t.N - 1000 * t.N**0.5)),
    ("won by the smallest or largest size", lambda: sweep().query("budget > 3e15 or N > 6e6")),
]


@pytest.mark.parametrize(("said", "frame"), SUSPECTS)
def test_a_suspect_is_named_where_the_runs_show_it_and_only_there(said, frame):
    table, found = judged(frame())
    assert said in " ".join(find_suspects(found, {6e16}, table))
    table, found = judged(sweep())
    assert find_suspects(found, {6e16}, table) == ()


def test_a_disagreement_beyond_the_runs_alone_is_one_of_extrapolation():
    table, found = judged(sweep())
    (said,) = find_suspects(found, {6e18}, table)
    assert said.startswith("They agree at the largest run and differ only 100 times beyond it")
