"""The whole analysis: its JSON format, answers from any table that allows one, and each warning in its place."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.approaches import QUANTITIES
from isoflop.fit.checks.checks import run_checks
from isoflop.fit.solver import solver


def sweep(budgets=(2e15, 6e15, 2e16, 6e16), sizes=6, noise=0.002, seed=0, **columns):
    """Return a sweep's table of a known law: exact FLOPs 3 % above 6ND, and an intermediate checkpoint for each run."""
    rng = np.random.default_rng(seed)
    rows = []
    for C in budgets:
        best = 0.11 * C**0.5
        for N in best * np.geomspace(0.2, 5, sizes):
            D = C / (6 * N * 1.03)
            loss = (1.5 + 40 / N**0.3 + 85 / D**0.3) * np.exp(noise * rng.standard_normal())
            run = f"{len(rows):010x}"
            row = {"run_id": run, "state": "done", "budget": C, "N": round(N), "D": D, "loss": loss, "flops": C}
            row |= columns
            rows.append(row | {"final": False, "step": 1, "D": D / 2, "flops": C / 2, "loss": loss + 0.4})
            rows.append(row | {"final": True, "step": 2})
    return pd.DataFrame(rows)


def analyze(table, **options):
    """Analyse without resamples or the mixture of forms, which only some tests need."""
    options = {"targets": (1e18,), "bootstrap": 0, "intervals": "noise"} | options
    return fit.analyze(fit.read_table(table), **options)


def warning_codes(analysis):
    return {w.code for w in analysis.warnings}


@pytest.fixture(scope="module")
def analysis():
    return analyze(sweep(), targets=(1e17, 1e18), bootstrap=40)


def test_a_good_sweep_gets_three_answers_that_agree_and_cover_the_truth(analysis):
    assert analysis.interior_minima == 4
    assert analysis.verdict.sentence.startswith("Isoflop and parametric agree at 1e17 FLOPs within")
    truth = (40 / 85) ** (1 / 0.6) * (1e18 / 6) ** 0.5
    for approach in analysis.approaches.values():
        low, high = approach.at(1e18).N_ci
        assert low < truth < high
        assert approach.exponent_interval[0] < 0.5 < approach.exponent_interval[1]
    assert warning_codes(analysis) <= {"backtest_short"}


def test_a_fit_that_did_not_converge_has_no_numbers_anywhere(monkeypatch, tmp_path, quick_pictures):
    monkeypatch.setattr(solver, "ITERATIONS", 2)
    analysis = analyze(sweep(), bootstrap=20, intervals="mixture")
    [message] = [w.message for w in analysis.warnings if w.code == "no_parametric"]
    assert "no_mixture" in warning_codes(analysis)
    assert "did not converge from any of 64 starts" in message
    page = fit.write_report(analysis, tmp_path / "fit").read_text()
    assert ", approach 3 · parametric</span>" not in page  # a tile
    assert ">Approach 3 · parametric</td>" not in page  # a row
    content = json.loads((tmp_path / "fit/law.json").read_text())
    assert {content[name] for name in ("law", "objective", "converged")} == {None}
    assert [content["ci"], content["optimal"], content["backtest"]["steps"]] == [{}, [], []]
    parametric = [
        content["approaches"]["parametric"],
        *(row["approaches"]["parametric"] for row in content["conventions"]),
    ]
    for answer in parametric:
        assert {name: value for name, value in answer.items() if value not in (None, [])} == {
            "reason": answer["reason"]
        }
    with pytest.raises(fit.InputError, match="the report has no parametric fit"):
        fit.answer(tmp_path / "fit/law.json")


DEGENERATE = [
    pytest.param(lambda t: 1.0 + 0.1 * np.log10(t.N * t.D), marks=pytest.mark.slow, id="rising"),
    pytest.param(lambda t: 3.0 * (1.0 + 1e-15 * np.cos(t.N)), id="equal but for rounding"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", DEGENERATE)
def test_a_degenerate_table_gets_a_report_without_empty_figures(loss, tmp_path):
    analysis = analyze(sweep().assign(loss=loss), bootstrap=5, intervals="mixture")
    assert not any(approach.available for approach in analysis.approaches.values())
    page = fit.write_report(analysis, tmp_path / "fit").read_text()
    assert "No approach has an answer: see the warnings." in page
    assert "exponent a of" not in page
    files = {path.stem for path in (tmp_path / "fit").iterdir()}
    assert {"law", "report", "isoflop"} <= files
    assert not {"bootstrap", "optimal_N", "optimal_D", "optimal_loss"} & files
    flat = analysis.law is None or np.ptp(np.log(analysis.law.predict(analysis.table.N, analysis.table.D))) < 1e-9
    assert (analysis.law is None or "No contours: the law predicts the same loss for all runs." in page) == flat
    assert ("contours" in files) == (not flat)
    assert {approach["exponent"] for approach in analysis.to_dict()["approaches"].values()} == {None}
    steps, influence = analysis.backtest["steps"], analysis.backtest["influence"]
    assert not any(0 in (step["tokens_per_parameter_at_target"], step["N_predicted"]) for step in steps)
    assert influence is None or not any(entry["N"] == 0 for entry in influence["left_out"])


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.slow
def test_a_report_that_fails_leaves_no_folder_and_an_old_one_as_it_was(tmp_path, monkeypatch):
    analysis = analyze(sweep(), bootstrap=20)
    old, new = tmp_path / "old", tmp_path / "new"
    fit.write_report(analysis, old)
    (old / "mine.png").write_text("of the user")
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("isoflop.fit.report.report.render_report", lambda *_: 1 / 0)
        for folder in (old, new):
            with pytest.raises(ZeroDivisionError):
                fit.write_report(analysis, folder)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    fit.write_report(analyze(sweep().assign(loss=3.0), bootstrap=0), old)  # figures of the previous fit would mislead
    assert not (old / "contours.png").exists()
    assert (old / "mine.png").exists()


@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.slow
def test_one_law_gives_one_answer_and_names_its_convention(tmp_path):
    """The table counts 3 % more than 6ND, and more for small models."""
    frame = sweep().assign(flops=lambda t: 6 * t.N * t.D * (1 + 300 * t.N ** (-1 / 3)))
    analysis, C = analyze(frame, bootstrap=50, intervals="mixture"), 1e18
    fit.write_report(analysis, tmp_path)
    as_6nd = analyze(frame, bootstrap=50, convention="6nd", intervals="mixture")
    for convention, report in (("table", analysis), ("6nd", as_6nd)):
        best, content = analysis.law.optimal(C, convention=convention), report.to_dict()
        assert content["convention"] == best.convention == convention
        for kind in ("mixture", "noise"):
            answer = fit.answer(tmp_path / "law.json", [C], convention, kind)
            [answered], [written] = answer["optimal"], content["optimal"]
            if kind == "noise":
                [written] = content["approaches"]["parametric"]["optimal"]
                assert answered["N"] == pytest.approx(best.N[0], rel=1e-6)
            for name, value in answered.items():
                assert value == (written[name] if name == "convention" else pytest.approx(written[name], rel=1e-5))
            assert answer["intervals"] == kind
            assert answer["forms"] == (content["forms"] if kind == "mixture" else {})
        assert content["backtest"]["tokens_per_parameter_at_target_full"] == pytest.approx(best.ratio[0], rel=1e-6)
        [row] = [row for row in content["conventions"] if row["own"]]
        assert row["flops"] == convention
        assert row["approaches"]["parametric"]["N"] == pytest.approx(best.N[0], rel=1e-6)
    assert "1e18 training FLOPs (as the table counts)" in (tmp_path / "report.html").read_text()
    assert repr(analysis.law.optimal(C)).startswith("C (as the table counts) = 1e18")
    assert abs(analysis.law.optimal(C).N[0] / analysis.law.optimal(C, convention="6nd").N[0] - 1) > 0.02
    with pytest.raises(fit.InputError, match="convention is 'exact'; choose one of table"):
        analysis.law.optimal(C, convention="exact")


def test_influence_follows_the_exponents_that_a_law_names(analysis):
    for fitted in (analysis, analyze(sweep(), law=fit.OvertrainingLaw())):
        moves = fitted.backtest["influence"]["left_out"][0]["moves"]
        assert set(fitted.law.exponent_names) <= set(moves)
    assert fit.FunctionLaw(None, {"E": (1, 2), "alpha": (0, 1)}).exponent_names == ("alpha",)


@pytest.mark.filterwarnings("error")
def test_refits_that_never_converge_leave_an_answer_without_intervals(monkeypatch):
    bootstrap = fit.Law.bootstrap

    def without_time(law, *options, **named):
        with monkeypatch.context() as patch:
            patch.setattr(solver, "ITERATIONS", 0)
            return bootstrap(law, *options, **named)

    monkeypatch.setattr(fit.Law, "bootstrap", without_time)
    analysis = analyze(sweep(), bootstrap=20, intervals="mixture")
    assert {"bootstrap_unconverged", "no_mixture"} <= warning_codes(analysis)
    assert analysis.law.bootstrap_["resamples"] == 0
    assert np.isnan(analysis.law.predict_interval([1e7, 1e8], [1e9, 1e9], kind="run")).all()
    assert {step["inside"] for step in analysis.backtest["tested"]["ahead"]} <= {None}
    json.dumps(analysis.to_dict(), allow_nan=False)


@pytest.mark.filterwarnings("error")
def test_a_law_with_infinite_intervals_raises_no_warning():
    frame = sweep(sizes=3, noise=0.01).query("final").iloc[[0, 1, 2, 5, 8, 9]]
    analysis = analyze(frame, bootstrap=10, law=fit.KaplanLaw())
    assert analysis.backtest["influence"]["left_out"]


def test_the_json_is_the_contracts(analysis):
    content = json.loads(json.dumps(analysis.to_dict(), allow_nan=False))
    assert list(content["law"]) == ["form", "E", "A", "B", "alpha", "beta"]
    assert content["law"]["form"] == "chinchilla"
    assert set(content["ci"]) == {"E", "A", "B", "alpha", "beta"}
    assert all(low < content["law"][name] < high for name, (low, high) in content["ci"].items())
    assert set(content["starts"]) == {"tried", "agreeing"}
    assert content["objective"] == analysis.law.objective_
    assert [o["flops"] for o in content["optimal"]] == [1e17, 1e18]
    for optimum in content["optimal"]:
        assert {"flops", "N", "D", "loss", "N_ci", "D_ci", "loss_ci"} <= set(optimum)
        for name in ("N", "D", "loss"):
            low, high = optimum[f"{name}_ci"]
            assert low < optimum[name] < high
    assert set(content["approaches"]) == {"envelope", "isoflop", "parametric"}
    assert content["interior_minima"] == 4
    assert all(set(w) == {"code", "message"} for w in content["warnings"])
    assert {"loss_error", "N_predicted", "N_measured", "steps"} <= set(content["backtest"])


@pytest.fixture(scope="module")
def mixture_analysis():
    return analyze(sweep(), targets=(1e17, 1e18), bootstrap=40, intervals="mixture")


def test_the_mixture_of_forms_answers_first_and_covers_more_than_the_noise(analysis, mixture_analysis):
    content, mixture = mixture_analysis.to_dict(), mixture_analysis.mixture.mixture
    (_, best), (_, by_law) = content["optimal"], content["approaches"]["parametric"]["optimal"]
    assert best["N"] == pytest.approx(mixture.optimal(1e18).N[0])
    assert best["N_ci"] == pytest.approx(mixture.optimal(1e18).interval("N")[0])
    assert np.ptp(np.log(best["N_ci"])) > np.ptp(np.log(by_law["N_ci"]))
    assert content["forms"] == pytest.approx(mixture.weights_)
    assert [content["intervals"], mixture_analysis.ranked[0].key] == ["mixture", "mixture"]
    assert content["law"]["form"] == "chinchilla"
    noise = analysis.to_dict()  # the same seed gives the same numbers
    assert noise["approaches"] == content["approaches"]
    assert noise["optimal"] == content["approaches"]["parametric"]["optimal"]
    assert [noise["intervals"], noise["forms"]] == ["noise", {}]
    assert analyze(sweep(), targets=(1e17, 1e18), bootstrap=40, seed=1).to_dict()["ci"] != noise["ci"]
    with pytest.raises(fit.InputError, match="intervals is 'wide'; choose one of mixture, noise"):
        analyze(sweep(), intervals="wide")


def test_an_interval_that_determines_nothing_is_no_interval():
    far = analyze(sweep(noise=0.02), targets=(1e60,), bootstrap=10)
    [message] = [w.message for w in far.warnings if w.code == "no_interval"]
    assert "parametric interval of N* at 1e60" in message


def test_four_runs_still_get_an_analysis_with_no_law():
    analysis = analyze(sweep(budgets=(2e15, 6e15), sizes=2))
    content = analysis.to_dict()
    assert content["law"] is None
    assert content["ci"] == {}
    assert content["optimal"] == []
    assert content["objective"] is None
    assert {"no_parametric", "no_isoflop", "few_sizes", "narrow_span"} <= warning_codes(analysis)
    assert "5 parameters" in content["approaches"]["parametric"]["reason"]
    json.dumps(content, allow_nan=False)


@pytest.mark.parametrize("runs", [1, 6])
def test_any_number_of_runs_gives_an_analysis(runs):
    table = sweep(noise=0.01)
    table = table[table.final].sample(runs, random_state=0)
    json.dumps(analyze(table, bootstrap=20).to_dict(), allow_nan=False)


@pytest.fixture(scope="module")
def no_resamples():
    return analyze(sweep())


def test_no_bootstrap_means_no_intervals(no_resamples):
    assert no_resamples.to_dict()["ci"] == {}
    assert all(e["N_ci"] is None for a in no_resamples.to_dict()["approaches"].values() for e in a["optimal"])
    assert "cannot confirm one another" in no_resamples.verdict.sentence


def test_bands_contain_their_values_for_every_approach(analysis):
    C = np.geomspace(2e15, 1e17, 5)
    for approach in analysis.approaches.values():
        values, bands = approach.answers(C)
        for name in QUANTITIES:
            assert (bands[name][:, 0] <= values[name] * (1 + 1e-6)).all(), (approach.key, name)
            assert (values[name] * (1 - 1e-6) <= bands[name][:, 1]).all(), (approach.key, name)


def with_outlier():
    table = sweep()
    table.loc[table.index[25], "loss"] *= 1.2
    return table


WARNED = [  # one of the doctor, whose other warnings have tests in test_doctor.py
    ("units", lambda: sweep().assign(N=lambda t: t.N / 1e6)),
    ("loss_outlier", with_outlier),
    ("vertex_refused", lambda: sweep().query("N < 0.09 * budget ** 0.5")),
]


@pytest.mark.parametrize(("code", "table"), WARNED)
def test_a_warning_comes_where_it_belongs_and_only_there(code, table, analysis):
    assert code in warning_codes(analyze(table()))
    assert code not in warning_codes(analysis)


@pytest.mark.slow
def test_a_target_farther_out_than_the_backtest_reached_is_short_of_it(tmp_path):
    analysis = analyze(sweep(), targets=(6.4e17, 6.1e17), bootstrap=20)
    assert analysis.backtest["tested"]["reach"] == pytest.approx(10)  # from 6e15 FLOPs to 6e16
    [message] = [w.message for w in analysis.warnings if w.code == "backtest_short"]
    assert message.startswith("The target 6.4e17 FLOPs (10.7 times) is farther beyond")
    fit.write_report(analysis, tmp_path)
    for C, code in ((6.4e17, ["backtest_short"]), (6.1e17, [])):
        warnings = fit.answer(tmp_path / "law.json", [C])["warnings"]
        assert [w["code"] for w in warnings if w["code"] in ("backtest_short", "extrapolation")] == code
    assert "extrapolation" in warning_codes(analyze(sweep(budgets=(6e16,)), targets=(1e24,), bootstrap=0))


@pytest.mark.slow
def test_a_law_that_bends_away_fails_its_backtest():
    steeper = sweep(noise=0.0003).assign(loss=lambda t: t.loss * (1 + 0.02 * np.log(t.flops / 2e15) ** 2 / 12))
    analysis = analyze(steeper, targets=(1e17,), bootstrap=40)
    [message] = [w.message for w in analysis.warnings if w.code == "backtest_outside"]
    tested = analysis.backtest["tested"]
    assert message.startswith("Fitted to cheaper runs, the parametric errs by more than its intervals allow: ")
    assert f"{tested['inside']:.0%} of {tested['predictions']} losses" in message
    assert "backtest_outside" not in warning_codes(analyze(sweep(), targets=(1e17,), bootstrap=40))
    mixed = analyze(sweep(), targets=(1e17,), bootstrap=20, intervals="mixture").backtest["tested"]
    assert mixed["by"] == "mixture"
    assert mixed["inside"] >= 0.9
    assert [step["runs_fitted"] for step in mixed["ahead"]] == [12, 18]  # six runs of one budget are collinear
    assert mixed["ahead"][0]["factor"] == pytest.approx([10 / 3] * 6 + [10] * 6)


def test_a_backtest_with_all_losses_inside_its_intervals_raises_no_alarm(analysis):
    """Steps share runs, so errors of one sign are common even if the law is right."""
    tested = analysis.backtest["tested"] | {"bias": [0.02, 0.01, 0.01]}
    for inside in (0.95, 0.4):
        judged = replace(analysis, backtest=analysis.backtest | {"tested": tested | {"inside": inside}})
        assert ("backtest_outside" in {w.code for w in run_checks(judged)}) == (inside < 0.5)


def test_approaches_that_disagree_are_warned_of(analysis):
    """What makes a verdict has tests in test_approaches.py."""
    disagreeing = replace(analysis, verdict=replace(analysis.verdict, agree=False))
    assert [w.code for w in {*run_checks(disagreeing)} - {*run_checks(analysis)}] == ["approaches_disagree"]


def test_forms_that_ask_for_other_sizes_are_named(monkeypatch, mixture_analysis):
    sizes = {"chinchilla": [1e9], "gamma": [2e9], "kaplan": [9e9]}
    monkeypatch.setattr(
        mixture_analysis.mixture.mixture, "sizes", lambda *_: {k: np.array(v) for k, v in sizes.items()}
    )
    weights = {"chinchilla": 0.5, "gamma": 0.41, "kaplan": 0.09}
    monkeypatch.setattr(mixture_analysis.mixture.mixture, "weights_", weights)
    assert "forms_disagree" not in {w.code for w in run_checks(mixture_analysis)}
    weights["kaplan"] = 0.2
    [message] = [w.message for w in run_checks(mixture_analysis) if w.code == "forms_disagree"]
    assert "1.00B (chinchilla, weight 50%) and 9.00B (kaplan, weight 20%)" in message


def test_the_approach_that_finds_held_out_sizes_best_is_named_first(no_resamples):
    off = no_resamples.backtest["tested"]["size_error"]
    assert no_resamples.ranked[0].key == no_resamples.backtest["tested"]["best"] == min(off, key=off.get)
    for step in no_resamples.backtest["steps"]:
        assert step["N_measured"]
    expected = [np.log(step["N_predicted"] / step["N_measured"]) for step in no_resamples.backtest["steps"]]
    assert off["parametric"] == pytest.approx(np.sqrt(np.mean(np.square(expected))))


def test_bad_targets_and_resamples_are_one_sentence():
    runs = fit.read_table(sweep())
    with pytest.raises(fit.InputError, match="target is -1"):
        fit.analyze(runs, targets=(-1,))
    with pytest.raises(fit.InputError, match="target is empty"):
        fit.analyze(runs, targets=())
    for name, value in (("seed", -1), ("bootstrap", 10**12), ("bootstrap", -5)):
        with pytest.raises(fit.InputError, match=f"{name} is {value}"):
            fit.analyze(runs, **{name: value})


def test_a_ladder_of_few_trunks_has_intervals_and_says_what_they_leave_out():
    rng = np.random.default_rng(3)
    sizes, ratios = np.geomspace(1e6, 1e8, 4), (10, 20, 40, 80, 160)
    rows = [
        {
            "run_id": f"{i}-{ratio}", "N": N, "D": ratio * N, "trunk": f"{i}-160",
            "loss": (1.5 + 40 / N**0.3 + 85 / (ratio * N) ** 0.3) * np.exp(0.002 * rng.standard_normal()),
        }
        for i, N in enumerate(sizes) for ratio in ratios
    ]  # fmt: skip
    analysis = analyze(pd.DataFrame(rows), bootstrap=10)
    assert analysis.to_dict()["ci"], "four trunks are fewer than five constants, and yet there are intervals"
    assert "few_trunks" in warning_codes(analysis)
    law = fit.ChinchillaLaw().fit(*(analysis.table.column(name) for name in ("N", "D", "loss"))).bootstrap(10)
    assert analysis.to_dict()["ci"] == {name: list(law.interval(name)) for name in law.names}


def written(c, N, D):
    return c["E"] + c["A"] * (N ** -c["alpha"] + 3 * D ** -c["alpha"])


BOUNDS = {"E": (0.1, 10), "A": (1, 1e6), "alpha": (0.05, 2)}


@pytest.mark.usefixtures("quick_pictures")
def test_any_law_of_n_and_d_drives_the_whole_analysis(tmp_path):
    law = fit.FunctionLaw(written, BOUNDS, tries=3)
    rng = np.random.default_rng(0)
    constants = {"E": 1.8, "A": 480.0, "B": 2100.0, "alpha": 0.35, "beta": 0.37}
    C, N = np.repeat(10.0 ** np.arange(18, 21), 5), np.tile(np.geomspace(0.2, 5, 5), 3)
    N = N * 0.05 * np.sqrt(C)
    loss = fit.ChinchillaLaw.evaluate(constants, N, C / (6 * N)) * np.exp(0.002 * rng.standard_normal(15))
    runs = fit.read_table(pd.DataFrame({"N": N, "D": C / (6 * N), "loss": loss}))
    analysis = fit.analyze(runs, (1e22,), 10, law=law, intervals="noise")
    content = analysis.to_dict()
    assert content["law"]["form"] == law.form
    assert content["optimal"][0]["N_ci"][0] < content["optimal"][0]["N"] < content["optimal"][0]["N_ci"][1]
    assert 0.3 < content["approaches"]["parametric"]["exponent"] < 0.7
    assert content["backtest"]["steps"]
    assert content["backtest"]["loss_error"] < 0.05
    assert content["law"].keys() == {"form", *law.names}
    assert fit.write_report(analysis, tmp_path).read_text().count("Plotly.newPlot(id") == 1
