"""The probability that a run still wins its group, also in replays where the outcome is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from isoflop.fit.curves.hopeless import YOUNG, Trial, chance_to_win

SHARE = np.linspace(0.01, 1, 100)


def make_trial(excess: float, group: object = "a", noise: float = 0.0, seed: int = 0) -> Trial:
    """Return a curve whose log loss ends `excess` above log 2."""
    luck = np.random.default_rng(seed).normal(0.0, 1.0, len(SHARE)) * noise
    loss = 2.0 * np.exp(0.3 * (SHARE**-0.4 - 1) + excess + luck)
    return Trial(group, SHARE, loss, 2.0 * float(np.exp(excess)))


def under_way(run: Trial, share: float) -> Trial:
    seen = run.share <= share
    return replace(run, share=run.share[seen], loss=run.loss[seen], final=None)


def test_who_lies_far_behind_is_hopeless_and_who_leads_is_not() -> None:
    finished = [make_trial(excess) for excess in (0.0, 0.02, 0.05, 0.2)]
    chances = [chance_to_win(under_way(make_trial(excess), 0.4), finished) for excess in (-0.05, 0.0, 0.03, 0.1, 0.4)]
    probabilities = [chance.probability for chance in chances if chance is not None]
    assert len(probabilities) == 5
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[0] > 0.9
    assert 0.2 < probabilities[1] < 0.8
    assert probabilities[-1] < 1e-3
    expected = chances[-1]
    assert expected is not None
    assert 2.0 * np.exp(0.2) < expected.loss < 2.0 * np.exp(0.5)


def test_young_runs_and_unfinished_groups_get_no_verdict() -> None:
    far = make_trial(0.5)
    assert chance_to_win(under_way(far, YOUNG - 0.02), [make_trial(0.0)]) is None
    assert chance_to_win(under_way(far, 0.5), [make_trial(0.0, "b")]) is None
    assert chance_to_win(replace(far, share=far.share[:0], loss=far.loss[:0], final=None), [make_trial(0.0)]) is None


def test_other_groups_teach_how_sure_a_difference_is_but_not_what_is_best() -> None:
    run, rival = under_way(make_trial(0.02, noise=0.001, seed=1), 0.6), make_trial(0.0)
    others = [make_trial(0.01 * i - 1.0, "b", 0.001, i) for i in range(12)]
    alone, taught = chance_to_win(run, [rival]), chance_to_win(run, [rival, *others])
    assert alone is not None
    assert taught is not None
    assert taught.probability < alone.probability / 3


def test_a_stated_probability_holds_where_curves_scatter() -> None:
    random, probabilities, won = np.random.default_rng(3), [], []
    for _ in range(150):
        end = random.normal(0.0, 0.03, 13)  # at half its tokens a run lies off its end by 0.02
        drift = random.normal(0.0, 0.02, 13)
        group = [replace(make_trial(e + d), final=2.0 * float(np.exp(e))) for e, d in zip(end, drift, strict=True)]
        chance = chance_to_win(under_way(group[0], 0.5), group[1:])
        assert chance is not None
        probabilities.append(chance.probability)
        won.append(end[0] < end[1:].min())
    assert abs(np.mean(probabilities) - np.mean(won)) < 0.06
    low = np.array(probabilities) < 0.02
    assert low.sum() > 30
    assert np.array(won)[low].mean() < 0.05
