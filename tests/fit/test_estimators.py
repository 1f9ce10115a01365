"""Laws and functions from Python: tables in place of columns, copies, and scikit-learn's tools."""

import contextlib
import inspect
import pickle

import numpy as np
import pandas as pd
import pytest
from isoflop import fit

N, D = (axis.ravel() for axis in np.meshgrid(10.0 ** np.arange(6, 9, 0.5), 10.0 ** np.arange(8, 11, 0.5)))
LOSS = (1.7 + 400 / N**0.34 + 410 / D**0.28) * np.exp(np.random.default_rng(0).normal(0, 1e-3, N.size))
FRAME = pd.DataFrame({"N_total": N, "tokens": D, "val_loss": LOSS, "trunk": np.arange(N.size) // 2, "U": D / 2})
RUNS, X = fit.read_table(FRAME), np.stack([N, D], axis=1)
LAW = fit.ChinchillaLaw().fit(N, D, LOSS).bootstrap(20, groups=RUNS.group)


@pytest.mark.parametrize("columns", [(RUNS,), (FRAME,), (X, LOSS), (X.tolist(), LOSS), (FRAME.iloc[:, :2], LOSS)])
def test_a_law_takes_a_table_or_x_and_y(columns):
    law = fit.ChinchillaLaw().fit(*columns)
    assert law.constants_ == LAW.constants_
    assert law.score(*columns) == LAW.score(N, D, LOSS) > 0.99
    assert np.array_equal(law.predict(columns[0]), LAW.predict(N, D))


def test_a_law_of_a_table_takes_its_weights_and_resamples_its_groups():
    law = fit.read_law(fit.ChinchillaLaw().fit(RUNS).to_json())
    assert np.array_equal(law.bootstrap(20).draws_["E"], LAW.draws_["E"])
    assert not np.array_equal(law.bootstrap(20, groups=RUNS.run_id).draws_["E"], LAW.draws_["E"])
    weighted = fit.FormMixture(["chinchilla"], draws=0).fit(FRAME.assign(weight=N))
    assert weighted.laws_["chinchilla"].constants_ == fit.ChinchillaLaw().fit(N, D, LOSS, weight=N).constants_


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_takes_laws():
    from sklearn.base import clone, is_regressor
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.utils.estimator_checks import check_estimator

    search = GridSearchCV(fit.ChinchillaLaw(), {"tied": [True, False], "delta": [1]}, cv=3).fit(X, LOSS)
    assert search.best_params_ == {"tied": False, "delta": 1}
    assert np.array_equal(search.predict(X), fit.ChinchillaLaw(delta=1).fit(X, LOSS).predict(N, D))
    errors = cross_val_score(make_pipeline(fit.ChinchillaLaw()), X, LOSS, cv=3, scoring="neg_mean_squared_error")
    assert (errors > -1e-3).all()
    assert is_regressor(LAW)
    assert repr(clone(LAW)) == repr(fit.ChinchillaLaw())
    # The other checks draw other numbers of inputs, zeros or negative numbers, or ask for scikit-learn's exceptions
    # and words, for parameters that only `fit` checks, or for arguments of the names X and y.
    names = "estimator_cloneable estimator_tags_renamed estimator_repr mixin_order no_attributes_set_in_init fit1d"
    names += " parameters_default_constructible get_params_invariance supervised_y_no_nan fit_non_negative"
    results = {result["check_name"]: result for result in check_estimator(fit.ChinchillaLaw(), on_fail=None)}
    assert {name for name in names.split() if results[f"check_{name}"]["status"] != "passed"} == set()


def calls():
    for name in fit.__all__:
        public = getattr(fit, name)
        if inspect.isclass(public) and hasattr(public, "fit") and public is not fit.Law:
            laws = [[fit.ChinchillaLaw()]] if public is fit.Forecaster else []
            yield pytest.param(lambda *columns, law=public, laws=laws: law(*laws).fit(*columns), 1, id=name)
        elif inspect.isfunction(public) and name not in ("read_curves", "forecast_final", "signal_to_noise", "verdict"):
            required = [p for p in inspect.signature(public).parameters.values() if p.default is p.empty]
            yield pytest.param(public, len(required), id=name)


@pytest.mark.parametrize(("call", "required"), [*calls()])
def test_what_is_no_table_is_answered_in_one_sentence(call, required):
    for wrong in (None, "no such file", {"N": 1}, LAW, [RUNS]):
        with contextlib.suppress(fit.InputError):
            call(*[wrong] * required)


def test_figures_and_approaches_take_tables(tmp_path, quick_pictures):
    for runs in (RUNS, FRAME):
        assert len(fit.plot_isoflop(runs).collections) > 0
        assert len(fit.plot_contours(LAW, runs).collections) == len(LAW.plot().collections)
        assert fit.Envelope().fit(runs).loss_.size
        assert [warning.code for warning in fit.examine(runs)] == [warning.code for warning in fit.examine(RUNS)]
    analysis = fit.analyze(FRAME, bootstrap=0, intervals="noise")
    assert repr(pickle.loads(pickle.dumps(analysis))) == repr(analysis)
    assert all(path.stat().st_size for path in fit.save_figures(analysis, tmp_path / "new" / "figures"))
