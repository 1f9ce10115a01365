"""The envelope, and the verdict on the three approaches: whether they agree, and the suspected causes if not."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches import approaches as side
from isoflop.fit.checks.verdict import clashes, find_suspects

from tests.fit.test_isoflop import grid


def test_the_envelope_is_the_best_run_of_each_budget_and_never_a_worse_one():
    N, D, loss, C = grid()
    envelope = fit.Envelope().fit(N, D, loss, C)
    np.testing.assert_allclose(envelope.flops_, [1e18, 1e19, 1e20, 1e21])
    np.testing.assert_allclose(envelope.loss_, [loss[c == C].min() for c in (1e18, 1e19, 1e20, 1e21)])
    np.testing.assert_allclose(envelope.N_law_.p_, 0.5, rtol=1e-9)
    np.testing.assert_array_equal(envelope.edges_, 0)
    loss[C == 1e20] += 2.0  # a budget no better than cheaper ones is not on the envelope
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
    envelope = fit.Envelope().fit(N, D, loss, C).bootstrap(20)
    assert envelope.edges_ == 4
    assert len(envelope.flops_) == 0
    assert side.envelope(envelope).reason == "0 levels of compute improve on all cheaper levels, and a law in C needs 2"


def sweep():
    """Return runs of L = 1.5 + 40 / N^0.3 + 85 / D^0.3 whose optimum at 1e16 FLOPs is near 1e7 parameters."""
    C = np.repeat([2e15, 6e15, 2e16, 6e16], 6)
    N = (40 / 85) ** (1 / 0.6) * (C / 6) ** 0.5 * np.tile(np.geomspace(1 / 5, 5, 6), 4)
    loss = (1.5 + 40 / N**0.3 + 85 / (C / 6 / N) ** 0.3) * np.exp(0.0005 * np.random.default_rng(0).standard_normal(24))
    runs = [f"r{i}" for i in range(24)]
    return pd.DataFrame({"run_id": runs, "budget": C, "N": N, "D": C / 6 / N, "flops": C, "loss": loss})


def fit_approaches(frame, bootstrap=60):
    """Return a table and its three fitted approaches."""
    t = fit.read_table(frame)
    law = fit.ChinchillaLaw().fit(t.N, t.D, t.loss)
    profiles = fit.IsoflopProfiles().fit(t.N, t.D, t.loss, t.flops, t.budget)
    envelope = fit.Envelope().fit(t.N, t.D, t.loss, t.flops, t.budget)
    if bootstrap:
        for model in (law, profiles, envelope):
            model.bootstrap(bootstrap)
    return t, {
        "envelope": side.envelope(envelope),
        "isoflop": side.isoflop(profiles),
        "parametric": side.parametric(law, ""),
    }


def test_approaches_that_agree_are_said_to_with_how_little_that_says():
    table, approaches = fit_approaches(sweep())
    verdict = fit.verdict(approaches, (1e18,), table)
    assert verdict.agree is True
    assert verdict.suspects == ()
    _, *widths = (np.divide(*a.at(1e18).N_ci[::-1]) for a in approaches.values())
    assert verdict.sentence.startswith("Isoflop and parametric agree at 1e18 FLOPs")
    assert f"factor of {max(widths):.2g} in N" in verdict.sentence
    table, approaches = fit_approaches(sweep(), bootstrap=0)
    assert fit.verdict(approaches, (1e18,), table).agree is None  # without intervals
    assert fit.verdict({"isoflop": approaches["isoflop"]}, (1e18,), table).agree is None  # without rivals


def test_agreement_is_not_claimed_of_wide_intervals():
    """Wide intervals overlap even if the optima differ."""
    rng = np.random.default_rng(0)
    table, approaches = fit_approaches(
        sweep().assign(loss=lambda t: t.loss * np.exp(0.03 * rng.standard_normal(len(t))))
    )
    verdict = fit.verdict(approaches, (1e21,), table)
    assert verdict.agree is None
    assert "cannot confirm one another" in verdict.sentence


def test_approaches_that_disagree_are_named():
    """D grows faster than the FLOPs say, which bends the parametric law and does not move the vertices in N."""
    table, approaches = fit_approaches(sweep().assign(D=lambda t: t.D * (t.budget / 2e15) ** 0.7))
    verdict = fit.verdict(approaches, (1e18,), table)
    assert verdict.agree is False
    assert verdict.sentence.startswith("The approaches disagree beyond their intervals: ")
    for clash in clashes(approaches, (6e16, 1e18)):
        first, second = (approaches[key].at(clash.flops) for key in clash.keys)
        assert str(clash) in verdict.sentence
        assert clash.N == (first.N, second.N)
        low, high = sorted((first.N_ci, second.N_ci))
        assert low[1] < high[0]
    assert verdict.suspects == find_suspects(approaches, {c.flops for c in clashes(approaches, (6e16, 1e18))}, table)


SUSPECTS = [
    ("Embeddings are", lambda: sweep().assign(N_non_embedding=lambda t: t.N - 1000 * t.N**0.5)),
    ("the smallest or the largest one there", lambda: sweep().query("budget > 3e15 or N > 6e6")),
]


@pytest.mark.parametrize(("sentence", "frame"), SUSPECTS)
def test_a_suspect_is_named_where_the_runs_show_it_and_only_there(sentence, frame):
    table, approaches = fit_approaches(frame())
    assert sentence in " ".join(find_suspects(approaches, {6e16}, table))
    table, approaches = fit_approaches(sweep())
    assert find_suspects(approaches, {6e16}, table) == ()


def test_a_disagreement_beyond_the_runs_alone_is_one_of_extrapolation():
    table, approaches = fit_approaches(sweep())
    (sentence,) = find_suspects(approaches, {6e18}, table)
    assert sentence.startswith("The approaches agree at the largest run and differ only at 100 times its compute")
