"""Laws on disk: an exact round trip, answers without a new fit, and one sentence for any other file."""

import json

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.laws.persistence import FORMAT, VERSION
from isoflop.sweeps.cli.main import app
from typer.testing import CliRunner

from tests.fit.test_law import points


@pytest.fixture(scope="module")
def law():
    return fit.ChinchillaLaw(delta=3e-3).fit(*points(0, 40)).bootstrap(30, groups=np.arange(40) // 2)


@pytest.fixture
def saved(law, tmp_path):
    law.to_json(tmp_path / "law.json")
    return tmp_path / "law.json"


@pytest.mark.parametrize(
    "make",
    [
        lambda: fit.ChinchillaLaw(tied=True).fit(*points(0, 40)),
        lambda: fit.ChinchillaLaw(E=1.7).fit(*points(0, 40)),
        lambda: fit.ChinchillaLaw("se").fit(*points(0, 40), loss_se=np.full(40, 1e-3)),
        lambda: fit.ChinchillaLaw("squares", np.inf).fit(*points(0, 40)),
        lambda: fit.PowerLaw(offset=True).fit(np.geomspace(1, 100, 9), 1 + np.geomspace(1, 100, 9) ** -0.5),
    ],
)
def test_every_option_survives_the_round_trip(make):
    law = make()
    back = fit.read_law(law.to_json())
    assert back.options() == law.options()
    assert back.scatter_ == law.scatter_
    some = [law.data_[name] for name in law.inputs]
    assert (back.predict(*some) == law.predict(*some)).all()


def test_provenance_says_version_date_and_the_hash_of_the_data(law):
    content = law.to_dict()
    assert set(content["provenance"]) == {"isoflop", "date"}
    assert len(content["data"]["sha256"]) == 64
    other = fit.ChinchillaLaw().fit(*points(1, 40)).to_dict()
    assert other["data"]["sha256"] != content["data"]["sha256"]


def change(content, *path, to):
    content = json.loads(json.dumps(content))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(content)


BAD = [
    (lambda c: change(c, "version", to=7), f"is version 7 of the law format; this isoflop reads version {VERSION}"),
    (lambda c: change(c, "format", to="x"), f"is not a law \\(its format is not '{FORMAT}'\\)"),
    (lambda c: change(c, "form", to="x"), "holds a law of form 'x'; known forms are chinchilla"),
    (lambda c: change(c, "data", "columns", "N", 3, to=1e9), "does not match its sha256"),
    (lambda c: change(c, "options", to={"gamma": 1}), "is not a complete law"),
    (lambda c: json.dumps(c)[:-50], "is not valid: Input data was truncated"),
    (lambda c: '{"a":' * 20000 + "1" + "}" * 20000, "is nested too deeply"),
    (lambda c: change(c, "fit", "theta", to="x"), r"Expected array, got str - at \$.fit.theta"),
    (lambda c: change(c, "fit", "theta", to=[0.0] * 9), "theta has 9 numbers, and the law 5"),
    (lambda c: change(c, "fit", "starts", to=[]), r"Expected object, got array - at \$.fit.starts"),
    (lambda c: change(c, "data", "weight", to=[1.0]), "columns differ in length"),
    (lambda c: change(c, "data", "columns", "D", 2, to=-1), "D is -1 in row 2"),
    (lambda c: change(c, "data", to=3), r"Expected object, got int - at \$.data"),
    (lambda c: change(c, "flops_per_token", to="6nd"), r"\$.flops_per_token"),
]


@pytest.mark.parametrize(("damage", "message"), BAD)
def test_a_file_that_is_no_law_is_one_sentence_and_exit_code_2(law, tmp_path, damage, message):
    path = tmp_path / "law.json"
    path.write_text(damage(law.to_dict()))
    with pytest.raises(fit.InputError, match=message) as caught:
        fit.read_law(path)
    assert "\n" not in str(caught.value)
    result = CliRunner().invoke(app, ["fit", str(path)])
    assert isinstance(result.exception, fit.InputError)  # which the command turns into exit code 2


def test_a_law_of_another_form_is_refused_by_a_class():
    power = fit.PowerLaw().fit([1.0, 2.0, 4.0], [1.0, 2.0, 4.5])
    with pytest.raises(fit.InputError, match="form 'power'; 'chinchilla' is expected"):
        fit.ChinchillaLaw.from_json(power.to_json())


def test_a_saved_law_answers_as_the_law_does(law, saved):
    answer = fit.answer(saved, [1e22, 1e26])
    best = law.optimal([1e22, 1e26])
    np.testing.assert_allclose([row["N"] for row in answer["optimal"]], best.N)
    np.testing.assert_allclose([row["N_ci"] for row in answer["optimal"]], best.interval("N"))
    assert answer["law"] == {"form": "chinchilla"} | law.constants_
    assert [w["code"] for w in answer["warnings"]] == ["extrapolation"]
    assert fit.answer(saved, [1e20])["warnings"] == []
    with pytest.raises(fit.InputError, match="target is -1"):
        fit.answer(saved, [-1.0])
    with pytest.raises(fit.InputError, match=r"cannot be read \(No such file"):
        fit.read_law(saved.with_name("other.json"))


def test_a_reports_law_keeps_its_warnings_and_a_damaged_mixture_is_refused(tmp_path, quick_pictures):
    N, D, loss = points(0, 40)
    loss[3] *= 1.5  # an outlier, which the report warns about
    runs = fit.read_table(pd.DataFrame({"N": N, "D": D, "loss": loss}))
    fit.write_report(fit.analyze(runs, targets=(1e23,), bootstrap=10), tmp_path)
    whole = (tmp_path / "law.json").read_text()
    answer = fit.answer(tmp_path / "law.json", [1e20])
    assert any("outlier" in w["code"] for w in answer["warnings"])
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "law.json"), "--target-flops", "1e20", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["optimal"][0]["N"] == answer["optimal"][0]["N"]
    (tmp_path / "other.json").write_text(json.dumps(json.loads(whole) | {"warnings": 5}))
    with pytest.raises(fit.InputError, match=r"Expected array, got int at \$.warnings"):
        fit.answer(tmp_path / "other.json")
    refused = CliRunner().invoke(app, ["fit", str(tmp_path / "law.json"), "--tied"])
    assert "only --target-flops, --convention, --intervals and --json apply" in str(refused.exception)
    assert fit.answer(tmp_path / "law.json", [1e23])["intervals"] == "mixture"

    gone = [("share", "size", -1), ("forms", "gamma"), ("forms", "gamma", "constants", "gamma"), ("rate", "size")]
    for *path, last in [*gone, ("forms", "gamma", "draws", "E", -1), ("ends", 0)]:
        content = json.loads(whole)
        place = content["mixture"]
        for key in path:
            place = place[key]
        del place[last]
        (tmp_path / "law.json").write_text(json.dumps(content))
        with pytest.raises(fit.InputError, match=r"law.json holds a mixture whose forms, shares and draws"):
            fit.answer(tmp_path / "law.json", [1e23])
