"""Tables: every input format gives the same runs, and every bad table gives one sentence that names its fault."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit


def frame(n=8):
    rng = np.random.default_rng(0)
    N, D = rng.integers(10_000, 10**9, n), rng.integers(10**6, 10**10, n)
    return pd.DataFrame({"run_id": [f"r{i}" for i in range(n)], "N": N, "D": D, "loss": rng.uniform(2, 4, n)})


def test_csv_parquet_sweep_directory_and_frame_give_the_same_runs(tmp_path):
    table = frame()
    table.to_csv(tmp_path / "table.csv", index=False)
    table.to_parquet(tmp_path / "runs.parquet")
    for source in (table, tmp_path / "table.csv", str(tmp_path), tmp_path / "runs.parquet"):
        runs = fit.read_table(source)
        np.testing.assert_array_equal(runs.N, table.N)
        np.testing.assert_allclose(runs.loss, table.loss, rtol=1e-15)
        assert runs.run_id.tolist() == table.run_id.tolist()
        np.testing.assert_array_equal(runs.flops, 6.0 * table.N * table.D)
        assert any("6ND" in note for note in runs.notes)
        assert np.isnan(runs.loss_se).all()
        assert (runs.weight == 1).all()
        assert len(runs) == 8
    back = fit.read_table(runs.to_frame())
    np.testing.assert_array_equal(back.N, runs.N)
    np.testing.assert_array_equal(back.loss, runs.loss)
    assert repr(runs).startswith("8 runs of ")
    assert runs._repr_html_().count("<tr") <= 11


def test_only_finished_rows_are_used_and_the_rest_is_noted():
    table = frame()
    table["final"] = ["True", "False"] * 4
    table["state"] = ["done"] * 6 + ["diverged"] * 2
    table.loc[6:, "loss"] = np.nan
    runs = fit.read_table(table)
    assert runs.run_id.tolist() == ["r0", "r2", "r4"]
    assert any("4 intermediate checkpoints" in note for note in runs.notes)
    assert any("unfinished runs" in note for note in runs.notes)
    np.testing.assert_array_equal(runs.column("N"), runs.N)
    assert np.isnan(runs.column("nothing")).all()


def test_names_are_mapped_d_is_derived_and_the_worst_are_dropped():
    table = frame().rename(columns={"N": "Model Size"}).drop(columns="D")
    table["Training FLOP"] = 1e18
    runs = fit.read_table(table, {"N": "Model Size", "flops": "Training FLOP"}, derive_d="6nd", drop_worst=3)
    assert len(runs) == 5
    assert runs.dropped == 3
    assert runs.derived_d
    np.testing.assert_allclose(6 * runs.N * runs.D, 1e18)
    assert runs.loss.max() < np.sort(table.loss)[-3]
    assert [n for n in runs.notes if "3 highest losses were dropped" in n]
    assert [n for n in runs.notes if "derived as FLOPs / (6N)" in n]


def cell(row, column, value):
    table = frame().astype({column: object})
    table.loc[row, column] = value
    return table


BAD = [
    (cell(3, "loss", np.nan), {}, "loss is nan in row 3"),
    (cell(0, "N", 0), {}, "N is 0 in row 0; it must be a finite number above zero"),
    (cell(2, "D", "many"), {}, "D is 'many' in row 2; a number is expected"),
    *((cell(2, "D", text), {}, f"D is {text!r} in row 2") for text in ("0,1B", "3,0B", "1,5", "3 tiny", "1_0")),
    *((cell(1, name, True), {}, f"{name} is True in row 1") for name in ("N", "loss")),
    (cell(0, "D", 1 + 1j), {}, "D is (1+1j) in row 0; a number"),
    (frame().assign(D=pd.Timestamp("2026-01-01")), {}, "D is Timestamp"),
    (frame().assign(loss=pd.Timedelta("1h")), {}, "loss is Timedelta"),
    (frame().drop(columns="loss"), {}, "has no column 'loss'; it has run_id, N, D"),
    (pd.DataFrame({"step": [1], "n_tokens_seen": 9}), {}, "add one, or select it with `columns={'N': '...'}`"),
    (frame().drop(columns="D"), {"derive_d": "6nd"}, "no column 'flops'"),
    (frame().rename(columns={"N": "N_no_emb"}), {}, "`columns={'N': 'N_no_emb'}` selects it"),
    (
        frame().rename(columns={"N": "params_active"}).assign(params_total=1),
        {},
        "`columns={'N': 'params_active'}` or `columns={'N': 'params_total'}` selects it",
    ),
    (frame().rename(columns={"N": "log10_N"}), {}, "log10_N is a logarithm: `t['N'] = 10 ** t['log10_N']` makes"),
    (frame().rename(columns={"D": "ln tokens"}), {}, "`t['D'] = np.exp(t['ln tokens'])` makes"),
    (frame().drop(columns="D").assign(flops=1e18), {}, "derive D from the FLOPs"),
    (frame(), {"columns": {"N": "Size"}}, "has no column 'Size'; it has run_id, N, D, loss"),
    (frame(), {"columns": {"size": "N"}}, "'size' is not a known name; choose among N, D, loss"),
    (frame(), {"drop_worst": 8}, "drop_worst is 8; it must be at least 0 and below 8"),
    (frame().iloc[:0], {}, "has no rows"),
    (frame().assign(final=False), {}, "none of a finished run"),
    (frame().assign(weight=-1.0), {}, "weight is -1 in row 0"),
    (pd.concat([frame(), frame()[["N"]]], axis=1), {}, "more than one column 'N'"),
    (42, {}, "table is a int"),
]


def test_too_many_columns_or_runs_are_said_at_once(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{i}" for i in range(20_001)) + "\n")
    with pytest.raises(fit.InputError, match="has more than 20,000 columns; one row per run is expected"):
        fit.read_table(path)
    path.write_text(",".join(f"c{i}" for i in range(30)) + "\n" + "1," * 29 + "1\n")
    with pytest.raises(fit.InputError, match=r"no column 'N'; it has c0, .*, c19 and 10 more"):
        fit.read_table(path)
    path.write_text("N,D,loss\n" + "1e7,1e9,3.0\n" * 20000)
    with pytest.raises(fit.InputError, match="20,000 rows of finished runs; at most 10,000"):
        fit.read_table(path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_sizes_without_a_finite_product_are_one_sentence(size):
    with pytest.raises(fit.InputError, match=r"N is 1e[+-]200 in row 0; it must be from 1e-60 to 1e\+60"):
        fit.read_table(pd.DataFrame({"N": [size], "D": [size], "loss": [3.0]}))


@pytest.mark.parametrize(("source", "options", "message"), BAD)
def test_a_bad_table_is_one_sentence(source, options, message):
    with pytest.raises(fit.InputError) as caught:
        fit.read_table(source, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


FILES = [
    ("empty.csv", b"", "is empty"),
    ("header.csv", b"N,D,loss\n", "has no rows"),
    ("twice.csv", b"N,D,loss,N\n1,2,3,4\n", "more than one column 'N'"),
    ("ragged.csv", b"N,D,loss\n1,2,3\n1,2,3,4,5\n", "is not a readable CSV file"),
    ("noise.csv", bytes(range(128, 256)) * 20, "is not a readable CSV file"),
    ("train.log", b"step 1 loss 3.2\nstep 2 loss 3.1\n", "begins with 'step 1 loss 3.2' and not with a header"),
    ("kv.log", b"step=1, loss=3.2\nstep=2, loss=3.1\n", "not with a header like N,D,loss; give a CSV, JSON"),
    ("fake.parquet", b"PAR1 but not really", "is not a readable Parquet file"),
    ("empty.parquet", b"", "is not a readable Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_a_broken_file_is_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(fit.InputError) as caught:
        fit.read_table(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_without_a_table_say_what_to_give(tmp_path):
    with pytest.raises(
        fit.InputError, match=r"does not exist; give a CSV, JSON, .* or Parquet file .*, or a sweep directory"
    ):
        fit.read_table(tmp_path / "no.csv")
    with pytest.raises(fit.InputError, match=r"has no table\.csv"):
        fit.read_table(tmp_path)


def test_the_row_that_is_named_is_the_line_of_the_file(tmp_path):
    table = frame()
    table.loc[3, "loss"] = -1
    table.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(fit.InputError) as caught:
        fit.read_table(tmp_path / "t.csv")
    line = int(str(caught.value).split(" in row ")[1].split(";")[0])
    assert ",-1.0" in (tmp_path / "t.csv").read_text().splitlines()[line - 1]


def test_sizes_perplexities_and_json_lines_are_read(tmp_path):
    rows = pd.DataFrame(
        {"params": ["125M", "1.3B"], "tokens": ["2,500,000,000", "26B tokens"], "val_ppl": [20.0, 10.0]}
    )
    rows.to_json(tmp_path / "runs.jsonl", orient="records", lines=True)
    t = fit.read_table(tmp_path / "runs.jsonl", {"loss": "val_ppl"})
    np.testing.assert_allclose(t.N, [125e6, 1.3e9])
    np.testing.assert_allclose(t.D, [2.5e9, 26e9])
    np.testing.assert_allclose(t.loss, np.log([20.0, 10.0]))
    assert "perplexity" in t.notes[0]


@pytest.mark.parametrize(
    ("names", "units"),
    [
        (("num_params", "train_tokens", "eval/loss"), (1, 1)),
        (("Params", "tokens seen", "val/loss"), (1, 1)),
        (("params (M)", "tokens [in billions]", "loss"), (1e6, 1e9)),
        (("N_M", "tokens_b", "Loss"), (1e6, 1e9)),
        (("N (millions)", "D (1e9)", "Val Loss"), (1e6, 1e9)),
    ],
)
def test_common_names_and_their_units_are_read(names, units):
    table = pd.DataFrame({"N": ["10", "1,000"], "D": [2.5, 4], "loss": [3, 2]}).set_axis(list(names), axis=1)
    t = fit.read_table(table)
    np.testing.assert_allclose(t.N, [10 * units[0], 1000 * units[0]])
    np.testing.assert_allclose(t.D, [2.5 * units[1], 4 * units[1]])
    assert any(names[0] in note for note in t.notes) == (units[0] != 1)
    sized = table.astype({names[0]: object, names[1]: object})
    sized.iloc[0, :2] = "125M", "2 billion tokens"  # a cell's unit comes first
    np.testing.assert_allclose([fit.read_table(sized).N[0], fit.read_table(sized).D[0]], [125e6, 2e9])


def test_json_records_semicolons_and_tabs_are_read(tmp_path):
    table = frame()
    table.to_json(tmp_path / "runs.json", orient="records")
    table.to_csv(tmp_path / "semicolons.csv", sep=";", index=False)
    table.to_csv(tmp_path / "tabs.tsv", sep="\t", index=False)
    for path in tmp_path.iterdir():
        np.testing.assert_allclose(fit.read_table(path).loss, table.loss)


def logged_steps(runs=12, steps=60, every=1):
    """Return a tracker's history: three runs of each size, a loss every few rows, and N and D in half of the others."""
    rng, rows = np.random.default_rng(0), []
    for run in range(runs):
        N = 10.0 ** (7 + run // 3)
        D = N * (5, 20, 80)[run % 3] * np.arange(1, steps + 1) / steps
        rows.append(pd.DataFrame({"run": f"r{run}", "N": N, "D": D, "loss": 1.8 + 4e2 / N**0.3 + 2e3 / D**0.37}))
        rows[-1].loc[np.arange(1, steps + 1) % every > 0, "loss"] = np.nan
        rows[-1].loc[rng.random(steps) < 0.5 * (every > 1), ["N", "D"]] = np.nan
    return pd.concat(rows, ignore_index=True)


def test_of_logged_steps_the_last_with_a_loss_is_a_run():
    table = logged_steps()
    last = table.iloc[59::60]
    by_step = table.assign(step=table.index % 60).sort_values("step", kind="stable").reset_index(drop=True)
    for source in (table, by_step, table.drop(columns="run"), table.sample(frac=1, random_state=0)):
        t = fit.read_table(source)
        assert sorted(t.loss) == sorted(last.loss)
        assert t.earlier == 12 * 59
        assert "logged_steps" in {warning.code for warning in fit.examine(t)}
    t = fit.read_table(logged_steps(steps=200, every=10))
    assert sorted(t.loss) == sorted(last.loss)
    assert (0.9 * last.D.to_numpy() < t.D).all()
    assert len(fit.read_table(table, {"group": "run"})) == len(fit.read_table(table.assign(final=True))) == 12 * 60
    assert len(fit.read_table(logged_steps(steps=35))) == 12 * 35  # as many as a table of checkpoints: the doctor warns


def test_a_grid_of_separate_runs_is_not_taken_for_logged_steps():
    N, D = np.repeat(np.geomspace(1e7, 1e9, 12), 30), np.tile(np.geomspace(1e9, 1e11, 30), 12)
    t = pd.DataFrame({"N": N, "D": D, "loss": 1.8 + 4e2 / N**0.3 + 2e3 / D**0.37, "run": np.arange(360) % 3})
    for table in (t, t.assign(run="grid"), t.assign(run_id="grid"), t.assign(run=np.arange(360))):
        assert len(fit.read_table(table)) == 360
    assert len(set(fit.read_table(t).run_id)) == 360  # here `run` numbers seeds


def test_what_fit_offers_is_its_product_alone() -> None:
    assert dir(fit) == fit.__all__
    assert all(not name.startswith("_") and callable(getattr(fit, name)) for name in dir(fit))
