"""The benchmark of the fits runs, names both sides, and finds ours never worse than the peer."""

import os

import numpy as np
import pytest
from bench_rows import checked_rows
from isoflop.bench import fit as bench_fit
from isoflop.bench.timing import print_benchmark
from scipy.optimize import approx_fprime


def test_rows_have_the_format_of_every_benchmark_and_ours_is_never_worse(monkeypatch, capsys):
    monkeypatch.delenv("ISOFLOP_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    rows = checked_rows(bench_fit.bench_fit(rounds=2, resamples=40, peer_resamples=3, peer_starts=3))
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert len(rows) == 3
    for row in rows:
        assert row["worse"] == 0
        assert "240 random runs" in row["case"]
    assert rows[0]["starts_agreeing"] == rows[0]["starts"] == 64
    assert rows[1]["compared"] == 6
    print_benchmark(rows, bench_fit.ABOUT)
    assert "worse / peer" in capsys.readouterr().out


def test_the_peer_is_given_the_objective_and_its_right_gradient():
    _, N, D, loss = bench_fit._runs()
    peer = bench_fit.Peer(N, D, loss)
    weight = np.random.default_rng(0).integers(0, 3, len(N)).astype(float)
    law = bench_fit.fit.ChinchillaLaw().fit(N, D, loss, weight=weight)
    theta = np.array([np.log(law.A_), np.log(law.B_), np.log(law.E_), law.alpha_, law.beta_])
    assert peer.objective(theta, weight)[0] == pytest.approx(law.objective_, rel=1e-12)
    away = theta + np.array([0.1, -0.2, 0.05, 0.01, -0.01])
    numeric = approx_fprime(away, lambda t: peer.objective(t, weight)[0], 1e-7)
    np.testing.assert_allclose(peer.objective(away, weight)[1], numeric, rtol=1e-4, atol=1e-6)  # one-sided differences
