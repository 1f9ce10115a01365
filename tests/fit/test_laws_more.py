"""Rules for every law: recover constants, agree with SciPy, ignore units, survive its file, refuse bad input."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.laws.broken import BrokenPowerLaw
from isoflop.fit.laws.custom import FunctionLaw
from isoflop.fit.laws.kaplan import KaplanLaw
from isoflop.fit.laws.law import Law
from isoflop.fit.laws.overtraining import OvertrainingLaw
from isoflop.fit.laws.repetition import RepetitionLaw
from scipy.optimize import least_squares

POINTS = 60


def precision(c, N, D, P):
    """Return the loss of Kumar et al. 2024: weights of P bits act as N (1 - exp(-P / gamma)) parameters."""
    return c["E"] + c["A"] / (N * (1 - np.exp(-P / c["gamma"]))) ** c["alpha"] + c["B"] / D ** c["beta"]


BOUNDS = {"E": (0.3, 5), "A": (10, 1e5), "B": (10, 1e5), "alpha": (0.1, 1), "beta": (0.1, 1), "gamma": (0.5, 10)}
BASE = {"E": 1.87, "A": 521.0, "B": 1488.0, "alpha": 0.3527, "beta": 0.3527}


def sizes(rng):
    return 10 ** rng.uniform(7, 9.5, POINTS), 10 ** rng.uniform(9, 11.5, POINTS)


def repeated(rng):
    N, U = 10 ** rng.uniform(7, 9.5, POINTS), 10 ** rng.uniform(8, 10.5, POINTS)
    return N, U * 10 ** np.maximum(rng.uniform(-0.5, 2, POINTS), 0.0), U


def chinchilla(rng):
    """Return random constants; A and B put both terms at 0.3 to 1.5 in the middle of the grid, as in real sweeps."""
    alpha, beta = rng.uniform(0.25, 0.45, 2)
    A, B = rng.uniform(0.3, 1.5) * 1e8**alpha, rng.uniform(0.3, 1.5) * 1e10**beta
    return {"E": rng.uniform(1, 2.5), "A": A, "B": B, "alpha": alpha, "beta": beta}


def kaplan(rng):
    alpha_N, alpha_D = rng.uniform(0.05, 0.2, 2)
    N_c, D_c = 1e8 * rng.uniform(2.5, 4) ** (1 / alpha_N), 1e10 * rng.uniform(2.5, 4) ** (1 / alpha_D)
    return {"N_c": N_c, "D_c": D_c, "alpha_N": alpha_N, "alpha_D": alpha_D}


def tied(rng):
    c = chinchilla(rng)
    eta = c["alpha"] / 2
    return {"E": c["E"], "a": rng.uniform(0.3, 1.5) * 6e16**eta, "b": rng.uniform(0.3, 1.5) * 6e20**eta, "eta": eta}


def broken(rng):
    c0, c1 = rng.uniform(0.1, 0.4), rng.choice([-0.3, 1]) * rng.uniform(0.2, 0.4)
    d1, f1 = 10 ** rng.uniform(4, 7), rng.uniform(0.2, 1)
    return {"a": 0.05, "b": 3 * 1e4**c0, "c0": c0, "c1": c1, "d1": d1, "f1": f1}


@dataclass
class Case:
    """A law with random constants and inputs, and the constants that do not change with the units of the inputs."""

    law: Callable[..., Law]
    truth: Callable
    inputs: Callable
    agreeing: float = 0.95
    options: dict = field(default_factory=dict)
    unitless: tuple = ()

    def data(self, seed, noise=0.0):
        rng = np.random.default_rng(seed)
        truth, inputs = self.truth(rng), self.inputs(rng)
        y = self.make().evaluate(truth, *inputs) * np.exp(noise * rng.standard_normal(POINTS))
        return truth, (*inputs, y)

    def make(self, **options):
        return self.law(**self.options, **options)


def decays(rng):
    return {"R_D": rng.uniform(5, 30), "R_N": rng.uniform(2, 10)}


def with_gamma(rng, low=0.7, high=1.3, **more):
    return chinchilla(rng) | {"gamma": rng.uniform(low, high)} | more


CASES = {
    "chinchilla": Case(fit.ChinchillaLaw, chinchilla, sizes, unitless=("E", "alpha", "beta")),
    "gamma": Case(fit.GammaLaw, with_gamma, sizes, 0.8, unitless=("E", "alpha", "beta", "gamma")),
    "kaplan": Case(KaplanLaw, kaplan, sizes, unitless=("alpha_N", "alpha_D")),
    "gamma, E held": Case(fit.GammaLaw, lambda rng: with_gamma(rng, E=1.2), sizes, 0.8, options={"E": 1.2}),
    "overtraining": Case(OvertrainingLaw, tied, sizes, unitless=("E", "eta")),
    "repetition": Case(RepetitionLaw, lambda r: chinchilla(r) | decays(r), repeated, unitless=("E", "R_D", "R_N")),
    "repetition given the base": Case(RepetitionLaw, lambda r: BASE | decays(r), repeated, options={"base": BASE}),
    "broken": Case(
        BrokenPowerLaw, broken, lambda rng: (np.geomspace(1e2, 1e10, POINTS),), 0.8, unitless=("a", "c0", "c1", "f1")
    ),
    "function": Case(
        FunctionLaw,
        lambda rng: with_gamma(rng, 1.5, 4),
        lambda rng: (*sizes(rng), rng.choice([3.0, 4, 6, 8, 16], POINTS)),
        0.5,
        options={"function": precision, "parameters": BOUNDS, "inputs": ("N", "D", "P"), "tries": 16},
    ),
}
BUILT_IN = [name for name in CASES if name != "function"]
case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@case
def test_exact_data_give_the_constants_back_from_nearly_every_start(case):
    truth, columns = case.data(0)
    law = case.make().fit(*columns)
    assert law.converged_
    assert law.starts_["agreeing"] >= case.agreeing * law.starts_["tried"]
    for name, value in truth.items():
        np.testing.assert_allclose(law.constants_[name], value, rtol=1e-6, err_msg=name)  # conditioning times rounding


@case
def test_the_least_squares_fit_is_where_scipy_ends_from_the_truth(case):
    truth, (*inputs, y) = case.data(2, noise=0.003)
    law = case.make(objective="squares").fit(*inputs, y)
    free = [name for name in law.names if name in law.problem_.coordinates]

    def residual(theta):
        constants = truth | {name: truth[name] * np.exp(t) for name, t in zip(free, theta, strict=True)}
        return np.log(law.evaluate(constants, *inputs)) - np.log(y)

    peer = least_squares(
        residual, np.zeros(len(free)), xtol=1e-15, ftol=1e-15, gtol=1e-15, x_scale="jac", max_nfev=2000
    )
    assert law.objective_ <= peer.cost * (1 + 1e-9)
    ours = np.log([law.constants_[name] / truth[name] for name in free])
    np.testing.assert_allclose(ours, peer.x, atol=1e-4)  # scipy stops at the square root of rounding
    np.testing.assert_allclose(law.residuals(), np.log(y) - np.log(law.predict(*inputs)), atol=1e-11)
    np.testing.assert_allclose(law.predict(*(v[0] for v in inputs)), law.predict(*inputs)[0], rtol=1e-14)


@case
def test_gradient_and_hessian_are_those_of_finite_differences(case):
    _, columns = case.data(3, noise=0.01)
    law = case.make().fit(*columns)
    form, k = law.problem_.form, law.problem_.form.parameters
    rng = np.random.default_rng(0)
    theta = law.theta_ + 0.003 * rng.standard_normal((4, k)) * np.maximum(np.abs(law.theta_), 0.1)
    slope, zero = rng.standard_normal((4, POINTS)), np.zeros((4, POINTS))
    h = 1e-6  # the differences below are then good to h^2 plus rounding / h, about 1e-9 of the largest entry

    def cache(at):
        return form.value(at)[1]

    def close(ours, difference):
        np.testing.assert_allclose(ours, difference, atol=3e-7 * np.abs(difference).max())

    first = np.stack([(form.value(theta + e)[0] - form.value(theta - e)[0]) / (2 * h) for e in h * np.eye(k)])
    gradient, hessian = form.derivatives(cache(theta), slope, zero, True)
    close(gradient, np.einsum("ipn,pn->pi", first, slope))
    absolute, reach = form.sizes(cache(theta), slope, np.abs(slope))
    assert (absolute >= np.abs(gradient) * (1 - 1e-12)).all()
    bound = np.einsum("ipn,pn->pi", np.abs(first), np.abs(slope))
    assert (reach >= bound - 3e-7 * bound.max()).all()
    ahead, behind = ([form.gradient(cache(theta + s * e), slope) for e in h * np.eye(k)] for s in (1, -1))
    close(hessian, (np.stack(ahead, 1) - np.stack(behind, 1)) / (2 * h))
    close(
        form.derivatives(cache(theta), zero, np.abs(slope), False)[1],
        np.einsum("ipn,jpn,pn->pij", first, first, np.abs(slope)),
    )
    step = rng.standard_normal((4, k))
    close(form.along(cache(theta), step), np.einsum("ipn,pi->pn", first, step))
    bend = (form.along(cache(theta + h * step), step) - form.along(cache(theta - h * step), step)) / (2 * h)
    close(form.bend(cache(theta), step), bend)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].unitless])
def test_units_do_not_matter(name):
    """N in millions and D and U in billions give the same exponents, and the same predictions."""
    case = CASES[name]
    _, (*inputs, y) = case.data(5, noise=0.003)
    units = (1e6, 1e9, 1e9)[: len(inputs)]
    plain = case.make().fit(*inputs, y)
    scaled = case.make().fit(*(v / u for v, u in zip(inputs, units, strict=True)), y)
    if name == "repetition":  # tokens in thousands of parameters' units would be another optimum
        scaled = case.make().fit(*(v / 1e6 for v in inputs), y)
    for constant in case.unitless:
        np.testing.assert_allclose(scaled.constants_[constant], plain.constants_[constant], rtol=1e-6)
    np.testing.assert_allclose(scaled.residuals(), plain.residuals(), atol=1e-9)


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_integer_weight_is_that_many_copies_and_zero_is_none(name):
    case = CASES[name]
    _, columns = case.data(6, noise=0.003)
    weight = np.random.default_rng(1).integers(0, 3, POINTS)
    weighted = case.make().fit(*columns, weight=weight)
    copied = case.make().fit(*(np.repeat(v, weight) for v in columns))
    np.testing.assert_allclose(weighted.objective_, copied.objective_, rtol=1e-8)


@case
def test_a_law_survives_its_file_to_the_last_bit(case, tmp_path):
    _, (*inputs, y) = case.data(7, noise=0.003)
    law = case.make(objective="se").fit(*inputs, y, loss_se=0.003 * y).bootstrap(6, groups=np.arange(POINTS) // 2)
    law.to_json(tmp_path / "law.json")
    read = (
        FunctionLaw.from_json(tmp_path / "law.json", precision)
        if law.form == "function"
        else Law.from_json(tmp_path / "law.json")
    )
    assert type(read) is type(law)
    assert read.constants_ == law.constants_
    assert read.options() == law.options()
    assert (read.theta_ == law.theta_).all()
    for name in law.names:
        assert (read.draws_[name] == law.draws_[name]).all()
    assert (read.predict(*inputs) == law.predict(*inputs)).all()
    assert (read.residuals() == law.residuals()).all()
    again, first = json.loads(read.to_json()), json.loads(law.to_json())
    del again["provenance"], first["provenance"]
    assert again == first
    for twin in (read, pickle.loads(pickle.dumps(law)), copy.deepcopy(law)):
        assert repr(twin) == repr(law)
        assert (twin.bootstrap(6, groups=np.arange(POINTS) // 2).draws_[name] == law.draws_[name]).all()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: [np.r_[v[0][:-1], np.nan], *v[1:]], "is nan in row 59; it must be a finite number above zero"),
        (lambda v: [np.r_[0.0, v[0][1:]], *v[1:]], "is 0 in row 0"),
        (lambda v: [*v[:-1], -v[-1]], "is -.* in row 0; it must be a finite number above zero"),
        (lambda v: [*v[:-1], v[-1][:-1]], "columns differ in length"),
        (lambda v: [column[:2] for column in v], "needs at least|needs more than"),
    ],
)
def test_bad_columns_are_one_sentence(name, change, message):
    _, columns = CASES[name].data(9)
    with pytest.raises(fit.InputError, match=message) as caught:
        CASES[name].make().fit(*change(list(columns)))
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")


@pytest.mark.parametrize("name", ["kaplan", "overtraining", "repetition"])
def test_one_size_or_one_ratio_of_tokens_identifies_no_exponent(name):
    _, (N, *rest) = CASES[name].data(10)
    with pytest.raises(fit.InputError, match="needs more than one size"):
        CASES[name].make().fit(np.full(POINTS, 1e9), *rest)
    inputs = (N, 20 * N, 5 * N) if name == "repetition" else (N, 20 * N)
    with pytest.raises(fit.InputError, match="collinear"):
        CASES[name].make().fit(*inputs, rest[-1])


@pytest.mark.parametrize(
    "law",
    [
        fit.ChinchillaLaw("l1", tied=True, E=1.7),
        fit.BrokenPowerLaw(2, offset=False),
        fit.RepetitionLaw(base=BASE),
        fit.FunctionLaw(precision, BOUNDS, inputs=("N", "D", "P"), starts=[], tries=8),
        fit.HyperparameterLaw("batch", ("D",)),
        fit.HyperparameterSurface(batch=None, order=2),
        fit.TaskLaw("exponential"),
    ],
    ids=lambda law: type(law).__name__,
)
def test_parameters_are_read_set_and_cloned_as_in_scikit_learn(law):
    params = law.get_params()
    assert law.clone().get_params() == params or isinstance(law, fit.TaskLaw)
    assert law.set_params(**params) is law
    assert law.get_params() == params
    with pytest.raises(fit.InputError, match="'depth' is not a parameter"):
        law.set_params(depth=3)
    assert repr(pickle.loads(pickle.dumps(law))) == repr(law)
    sklearn = pytest.importorskip("sklearn.base")
    assert repr(sklearn.clone(law)) == repr(law)
