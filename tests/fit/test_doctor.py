"""The doctor: each check warns about a table with its fault and about no other, published tables included."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.checks import doctor
from isoflop.fit.checks.doctor import COLUMNS
from isoflop.fit.checks.outliers import find_outliers

LAW = {"E": 1.82, "A": 482.0, "B": 2085.0, "alpha": 0.348, "beta": 0.366}
NATS_TO_BITS = 1 / np.log(2)


def healthy(seed=0, noise=0.003, constants=None, sizes=6, budgets=(3e18, 1e19, 3e19, 1e20)):
    """Return 24 isoFLOP runs around a known law's optimum, with every column that the doctor reads, without faults."""
    rng, c, rows = np.random.default_rng(seed), constants or LAW, []
    for C in budgets:
        best = (c["alpha"] * c["A"] / c["beta"] / c["B"]) ** (1 / (c["alpha"] + c["beta"])) * (C / 6) ** (
            c["beta"] / (c["alpha"] + c["beta"])
        )
        for N in best * np.geomspace(0.2, 5, sizes):
            D = round(C / (6 * N) / 2**17) * 2**17
            loss = (c["E"] + c["A"] / N ** c["alpha"] + c["B"] / D ** c["beta"]) * np.exp(noise * rng.standard_normal())
            rows.append({"run_id": f"{len(rows):010x}", "budget": C, "N": round(N), "D": D, "loss": loss})
    t = pd.DataFrame(rows)
    return t.assign(
        flops=6.0 * t.N * t.D,
        loss_se=0.004,
        N_total=t.N,
        N_non_embedding=(0.85 * t.N).round(),
        vocab_size=32000,
        width=32,
        tokenizer="bpe",
        train_loss=t.loss * np.exp(0.01 * rng.standard_normal(len(t))),
        val_bpb=t.loss * NATS_TO_BITS / 4.2,
        schedule="wsd",
        decay_share=0.2,
        schedule_tokens=t.D,
        warmup_share=np.minimum(0.05, t.N / t.D),
        epochs=0.3,
        learning_rate=6e-3,
        batch_size=64,
        trials=1,
        parent=np.nan,
    )


def bare(**options):
    return healthy(**options)[["run_id", "N", "D", "loss"]]


def with_losses(t, constants, rng):
    """Return the table with the losses of a law and noise of 0.4 %."""
    return t.assign(loss=fit.ChinchillaLaw.evaluate(constants, t.N, t.D) * np.exp(0.004 * rng.standard_normal(len(t))))


def ladder(constants, rng):
    """Return five sizes, each at five ratios of tokens per parameter."""
    N = np.repeat(np.geomspace(2e7, 6e8, 5).round(), 5)
    return with_losses(pd.DataFrame({"N": N, "D": (N * np.tile([5.0, 10, 20, 40, 80], 5)).round()}), constants, rng)


def at_random(constants, rng):
    points = 10 ** rng.uniform([7, 8.5], [9, 10.5], (24, 2))
    return with_losses(pd.DataFrame(points, columns=["N", "D"]).round(), constants, rng)


def warning_codes(table, targets=(), **options):
    return [w.code for w in doctor.examine(fit.read_table(table, **options), targets)]


def changed(name, value, rows=None, table=healthy):
    """Return a function that makes the table with one column set, in all rows or in some."""

    def broken():
        t = table()
        new = pd.Series(value(t) if callable(value) else value, t.index)
        if rows is None:
            return t.assign(**{name: new})
        t[name] = t[name].astype(object if isinstance(value, str) else float)
        t.loc[t.index[rows], name] = new.iloc[rows]
        return t

    return broken


def other_tokenizer():
    t = healthy()
    t.loc[::2, "loss"] *= 1.1
    t["val_loss"] = t["train_loss"] = np.nan
    return t


def few_in_bits():
    """Return too few runs for a surface, so that only bits per byte reveal the fault."""
    t = healthy(budgets=(3e18, 1e20), sizes=5)
    t.loc[[1, 4], "loss"] *= NATS_TO_BITS
    return t


def checkpoints_of_four_runs(**columns):
    t = healthy(budgets=(3e18, 3e19, 3e20), sizes=2)
    rows = [
        row._asdict() | {"D": row.D * k / 8, "loss": row.loss + 0.1 * (8 - k), "flops": row.flops * k / 8, "step": k}
        for row in t.itertuples(index=False)
        for k in range(1, 9)
    ]
    t = pd.DataFrame(rows).drop(columns=["budget", "schedule_tokens", "val_bpb", "warmup_share"])
    return t.assign(**{name: make(t) for name, make in columns.items()})


def swept():
    rng, t = np.random.default_rng(0), healthy()
    rates = t.assign(learning_rate=3e-3), t.assign(learning_rate=12e-3, loss=t.loss * (1 + 0.02 * rng.random(len(t))))
    t = pd.concat([t, *rates], ignore_index=True)
    return t.assign(run_id=[f"{i:010x}" for i in range(len(t))])


def edges(keep):
    return lambda: healthy(sizes=14).query(keep)


def accelerating():
    """Return runs whose losses fall ever faster with compute."""
    t = bare()
    return t.assign(loss=t.loss * np.exp(-0.01 * np.log(6.0 * t.N * t.D / 3e18) ** 2))


FAULTS = [
    ("units", changed("N", lambda t: t.N / 1e6, table=bare)),
    ("units", changed("D", lambda t: t.D / 1e9, table=bare)),
    ("units", changed("flops", lambda t: t.flops / 8.64e19)),
    ("units", changed("loss", lambda t: t.loss * NATS_TO_BITS, table=bare)),
    ("units", changed("loss", lambda t: t.loss * 8, table=bare)),
    ("units", changed("loss", 10.5, rows=[3], table=lambda: healthy().drop(columns="val_bpb"))),
    ("units", changed("loss_unit", "bits")),
    ("units", lambda: bare().rename(columns={"N": "D", "D": "N"})),
    ("loss_units_mixed", few_in_bits),
    ("loss_units_mixed", changed("loss_unit", ["nats", "bits"] * 12)),
    ("tokenizers_mixed", changed("tokenizer", "bytes", rows=[0, 5])),
    ("tokenizers_mixed", changed("vocab_size", 50257, rows=[0, 5])),
    ("tokenizers_mixed", other_tokenizer),
    ("losses_mixed", changed("loss_kind", ["train", "val", "val", "val"] * 6)),
    ("losses_mixed", changed("loss", lambda t: t.train_loss, rows=slice(0, 9))),
    ("schedules_mixed", changed("schedule", "constant", rows=slice(18, 24))),
    ("schedules_mixed", changed("decay_share", 0.0, rows=slice(0, 6))),
    ("schedule_unmatched", changed("schedule_tokens", lambda t: t.D.max())),
    ("schedule_unmatched", lambda: healthy().drop(columns="schedule_tokens").assign(max_steps=5000, step=2000)),
    ("long_warmup", changed("warmup_share", 0.3)),
    ("long_warmup", lambda: healthy().drop(columns="warmup_share").assign(warmup_tokens=1.5e9)),
    ("long_warmup", lambda: healthy().drop(columns="warmup_share").assign(warmup_steps=3000, steps=9000)),
    ("N_mixed", changed("N", lambda t: t.N_non_embedding, rows=slice(0, 6))),
    ("non_embedding_N", lambda: healthy().assign(N=lambda t: t.N_non_embedding, flops=lambda t: 6 * t.N * t.D)),
    ("non_embedding_N", changed("vocab_size", 256000, table=lambda: healthy().assign(width=2048))),
    ("active_parameters", changed("params_active", lambda t: t.N / 8)),
    ("active_parameters", lambda: healthy().assign(Na=lambda t: t.N, Nt=lambda t: 8 * t.N)),
    ("checkpoints", checkpoints_of_four_runs),
    ("checkpoints", lambda: checkpoints_of_four_runs(run_id=lambda t: t.run_id + "/step_" + t.step.astype(str))),
    ("checkpoints", lambda: checkpoints_of_four_runs(run_id=lambda t: t.index.astype(str))),
    ("branches", changed("parent", "00000000ff", rows=slice(0, 4))),
    ("branches", changed("parent", "0000000004", rows=slice(0, 4))),
    ("duplicate_runs", lambda: pd.concat([healthy(), healthy().tail(2)])),
    ("duplicate_runs", lambda: pd.concat([healthy(), healthy().tail(2).assign(run_id=["a", "b"])])),
    ("settings_swept", swept),
    ("best_of_sweep", changed("learning_rate", lambda t: np.random.default_rng(0).choice([1e-3, 2e-3, 4e-3], len(t)))),
    ("best_of_sweep", changed("trials", 12)),
    ("repeated_data", changed("epochs", 6.0, rows=slice(0, 6))),
    ("repeated_data", lambda: healthy().drop(columns="epochs").assign(unique_tokens=2e8)),
    ("few_runs", lambda: ladder(LAW, np.random.default_rng(0)).iloc[[0, 2, 4, 10, 12, 14, 20, 22, 24]]),
    ("few_sizes", lambda: healthy(sizes=4)),
    ("edge_minimum", edges("N < 0.3 * N.groupby(budget).transform('max')")),
    ("edge_minimum", edges("N > 0.5 * N.groupby(budget).transform('mean')")),
    ("early_regime", accelerating),
    ("narrow_span", lambda: healthy(budgets=(3e18, 1e19))),
    ("flop_convention", changed("flops", lambda t: t.flops * 1.4)),
    ("flops_inconsistent", changed("flops", lambda t: t.flops * 3, rows=slice(0, None, 2))),
    # Columns are recognised by their other names, in upper and lower case.
    ("long_warmup", lambda: healthy().drop(columns="warmup_share").assign(**{"Warmup Ratio": 0.4, "LR": 1e-3})),
    ("schedules_mixed", lambda: changed("schedule", "const", rows=[0])().rename(columns={"schedule": "Decay"})),
]


def tuned():
    """Return runs whose learning rate follows a rule of D and batch size."""
    t = healthy().assign(batch_size=lambda t: 2.0 ** np.log2(0.2 * t.D**0.5).round())
    return t.assign(learning_rate=1e-4 * t.D**-0.2 * t.batch_size**0.5)


def two_seeds():
    t = pd.concat([healthy(), healthy(seed=1)], ignore_index=True)
    return t.assign(run_id=[f"{i:010x}" for i in range(len(t))])


def rounded_copies():
    t = pd.concat([bare(), bare().assign(run_id=lambda t: t.run_id + "b")])
    return t.assign(loss=t.loss.round(3))


def grouped_checkpoints():
    t = checkpoints_of_four_runs(run_id=lambda t: t.run_id + "/step_" + t.step.astype(str))
    return t.assign(group=t.run_id.str[:10])


SOUND = [
    healthy,
    bare,
    changed("loss", lambda t: t.loss * 1.44, rows=[7], table=bare),  # one diverged run is not another unit
    changed("learning_rate", lambda t: 3e3 * t.N**-0.7 * t.D**0.1),
    changed("learning_rate", lambda t: 2.0 ** np.log2(3e3 * t.N**-0.7 * t.D**0.1).round()),
    changed("learning_rate", lambda t: np.where(t.N.rank() <= 12, 3e-3, 3e-4)),
    tuned,
    two_seeds,
    rounded_copies,
    grouped_checkpoints,
    lambda: checkpoints_of_four_runs(schedule=lambda t: "constant"),
    lambda: changed("parent", "0000000004", rows=slice(0, 4))().assign(trunk=lambda t: t.parent),
]


@pytest.mark.parametrize(("code", "broken"), FAULTS)
def test_a_fault_is_named_and_nothing_else_is(code, broken):
    warnings = doctor.examine(fit.read_table(broken()))
    assert {w.code for w in warnings} == {code}
    assert all(w.message.endswith(".") for w in warnings)


@pytest.mark.parametrize("table", SOUND)
def test_a_table_without_a_fault_hears_nothing(table):
    assert warning_codes(table(), targets=(1e21,) if table in (healthy, bare) else ()) == []


def test_what_the_user_asked_for_is_repeated():
    assert warning_codes(healthy().drop(columns="D"), derive_d="6nd") == ["derived_d"]
    assert warning_codes(healthy(), drop_worst=1) == ["dropped_worst"]
    assert warning_codes(healthy(), targets=(9e21, 2e22)) == ["extrapolation"]  # more than 100 times the largest run
    assert warning_codes(tuned().drop(columns="batch_size")) == ["best_of_sweep"]
    with pytest.raises(fit.InputError, match="target is -1"):
        warning_codes(healthy(), targets=(-1.0,))


def test_tables_of_many_laws_and_designs_hear_nothing():
    """Isoflop grids, ladders and random designs, whose constants differ by tens of percent from the published law's."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        constants = {name: value * np.exp(rng.normal(0, 0.1)) for name, value in LAW.items()}
        grid = healthy(seed, 10 ** rng.uniform(-3.5, -2), constants)
        for t in (grid, ladder(constants, rng), at_random(constants, rng)):
            assert warning_codes(t) == (["units"] if (t.D / t.N).median() < 0.2 else []), seed  # of the oddest law


@pytest.mark.parametrize("mixed", ["some", "half", "dearest", "first"])
def test_bits_among_nats_are_found_row_by_row(mixed):
    """Any rows may be in bits, even if the step is along C and a law could bend to it."""
    for seed in range(4):
        t, rng = bare(seed=seed), np.random.default_rng(100 + seed)
        rows = {
            "some": rng.choice(len(t), 3, replace=False),
            "half": np.flatnonzero(rng.random(len(t)) < 0.5),
            "dearest": np.argsort(t.N * t.D.astype(float)).to_numpy()[-7:],
            "first": np.arange(len(t) // 3),
        }[mixed]
        t.loc[rows, "loss"] *= NATS_TO_BITS
        warning = doctor.examine(fit.read_table(t))[0]  # a step inside of a budget may move its lowest loss to an edge
        assert warning.code == "loss_units_mixed"
        assert f"{len(rows)} of 24 losses" in warning.message


def test_any_column_that_explains_the_losses_is_named_and_a_width_is_not():
    t = pd.concat(
        [healthy(seed=i).assign(corpus=f"c{i}", loss=lambda t, i=i: t.loss * (1 + 0.02 * i)) for i in range(3)]
    )
    t = t.assign(run_id=[f"{i:010x}" for i in range(len(t))], shape=(t.N.rank(pct=True) * 4).round())
    [warning] = doctor.examine(fit.read_table(t.drop(columns=["val_bpb", "train_loss"])))
    assert warning.code == "experiments_pooled"
    assert "--column recipe=corpus" in warning.message
    laws = fit.by_recipe(fit.read_table(t, {"recipe": "corpus"}))
    assert [law.recipe for law in laws] == ["c0", "c1", "c2"]


def test_checkpoints_without_a_run_id_are_recognised_by_their_falling_loss():
    N = np.repeat(np.geomspace(1e7, 1e9, 6).round(), 40)
    D = np.tile(np.geomspace(1e9, 5e10, 40), 6)
    t = pd.DataFrame({"N": N, "D": D, "loss": 1.8 + 480 / N**0.35 + 2100 / D**0.37, "model": [f"m{n:.0f}" for n in N]})
    t.insert(0, "source", "ours")
    [warning] = [w for w in doctor.examine(fit.read_table(t)) if w.code == "checkpoints"]
    assert "6 runs" in warning.message
    assert "--column run_id=model" in warning.message
    shuffled = t.assign(loss=np.random.default_rng(0).permuted(t.loss.to_numpy().reshape(6, 40), axis=1).ravel())
    assert "checkpoints" not in warning_codes(shuffled)


def test_flops_of_a_token_and_schedules_with_steps_in_their_name_are_found():
    t = healthy().assign(flops=lambda t: 6 * t.N)
    [warning] = doctor.examine(fit.read_table(t))
    assert "--column flops=6nd" in warning.message
    assert warning_codes(t, columns={"flops": "6nd"}) == []
    assert warning_codes(changed("schedule", "constant_24000", rows=[0])().assign(decay_share=np.nan)) == [
        "schedules_mixed"
    ]
    assert warning_codes(bare().rename(columns={"N": "N_no_emb"}), columns={"N": "N_no_emb"}) == ["non_embedding_N"]


@pytest.mark.filterwarnings("error")
def test_whatever_the_columns_hold_the_doctor_answers():
    """Words among numbers, zeros, infinities, gaps: columns that the fit does not read are the user's own."""
    oddities = np.array([np.nan, 0, -1, 1, 3.5, "x", "", None, True, "12", "constant", 1e30, np.inf], dtype=object)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 30))
        t = pd.DataFrame({"N": 10 ** rng.uniform(3, 10, n), "D": 10 ** rng.uniform(4, 11, n)})
        t["loss"], t["run_id"] = rng.uniform(0.5, 12, n), rng.choice(["a", "b_step3", "b_step4", "c"], n)
        for names in COLUMNS.values():
            if rng.random() < 0.5 and names[0] not in t:
                t[names[0]] = rng.choice(oddities, n) if rng.random() < 0.5 else rng.uniform(0, 2, n)
        assert all(code.replace("_", "").isalpha() for code in warning_codes(t))


# Outliers.


def scattered(seed, n=60, noise=None):
    rng = np.random.default_rng(seed)
    N, D = 10 ** rng.uniform(7.5, 10.5, n), 10 ** rng.uniform(9, 12, n)
    error = rng.standard_normal(n) if noise is None else noise(rng, n)
    return N, D, fit.ChinchillaLaw.evaluate(LAW, N, D) * np.exp(0.003 * error)


def test_planted_outliers_are_found():
    N, D, loss = scattered(0)
    planted = [4, 11, 30]
    loss[planted] *= [1.3, 1.12, 0.92]
    outliers = find_outliers(fit.ChinchillaLaw().fit(N, D, loss))
    assert list(outliers.rows) == planted
    others = np.delete(np.arange(60), planted)
    alone = fit.ChinchillaLaw().fit(N[others], D[others], loss[others])
    for name, value in alone.constants_.items():
        np.testing.assert_allclose(outliers.constants[name], value, rtol=1e-4)  # both stop at the solver's tolerance
    np.testing.assert_allclose(np.expm1(outliers.residual[4]), 0.3, atol=0.02)
    assert outliers.scatter < 0.004


def test_an_outlier_that_draws_the_law_to_itself_does_not_hide_the_next():
    """Two outliers are at the corner of the design; the second looks normal until the first is removed."""
    N, D, loss = scattered(1)
    N[:2], D[:2] = [6.8e9, 2e9], [2.5e8, 8e8]
    loss[:2] = fit.ChinchillaLaw.evaluate(LAW, N[:2], D[:2]) * [1.4, 1.08]
    assert list(find_outliers(fit.ChinchillaLaw().fit(N, D, loss)).rows) == [0, 1]


@pytest.mark.parametrize("n", [16, 60])
def test_noise_has_no_outliers_even_where_its_tails_are_exponential(n):
    """By construction one table in a thousand has some; small ones a few more, because their scatter is uncertain."""
    for seed in range(8):
        for noise in (None, lambda rng, n: rng.laplace(size=n)):
            assert not find_outliers(fit.ChinchillaLaw().fit(*scattered(seed, n, noise))).rows.size
    N, D, loss = scattered(2, n=12)
    loss[3] *= 1.5  # too few runs to estimate their scatter
    assert not find_outliers(fit.ChinchillaLaw().fit(N, D, loss)).rows.size


def analysed(table, targets=(1e21,), **options):
    runs = table if isinstance(table, fit.RunTable) else fit.read_table(table)
    return fit.analyze(runs, targets=targets, **({"bootstrap": 0, "intervals": "noise"} | options))


def test_losses_in_two_groups_or_without_scatter_are_named():
    for step in (0.03, 0.06):
        t = bare()
        [warning] = doctor.examine(fit.read_table(t.assign(loss=t.loss * (1 + step * (t.index % 2)))))
        assert warning.code == "experiments_pooled"
        assert "12 of 24 losses (0000000001, 0000000003" in warning.message
    assert "no_scatter" in {w.code for w in analysed(bare(noise=0)).warnings}


@pytest.mark.slow
def test_an_analysis_names_its_outliers_and_says_what_they_do():
    t = healthy()
    t.loc[7, "loss"] *= 1.2
    [warning] = [w for w in analysed(t).warnings if "outlier" in w.code]
    assert t.run_id[7] in warning.message
    assert "+20%" in warning.message
    clean = analysed(healthy()).law.optimal(1e21).ratio[0]
    without = float(warning.message.split(" to ")[2].split(",")[0])
    assert abs(np.log(without / clean)) < 0.2


def test_an_analysis_hears_the_doctor_first_and_limits_last():
    t = edges("N < 0.3 * N.groupby(budget).transform('max')")().assign(epochs=6.0, flops=lambda t: 1.4 * t.flops)
    codes = [w.code for w in analysed(t).warnings]
    assert codes.index("repeated_data") < codes.index("vertex_refused")
    assert codes[-1] == "flop_convention"
    assert codes.count("vertex_refused") == 1  # of four budgets
    assert "edge_minimum" not in codes  # the refused vertex reports it, with the reason
    assert analysed(t.head(4)).warnings[0].code == "no_envelope"


def test_a_constant_that_was_fixed_is_no_constant_that_degenerated():
    law = fit.ChinchillaLaw(E=0.0)
    table = healthy(sizes=5, budgets=(3e18, 1e19, 3e19))
    assert not [w for w in analysed(table, law=law, bootstrap=10).warnings if w.code.startswith("degenerate")]


# Published tables.


@pytest.mark.slow
@pytest.mark.published
def test_epochs_five_outliers_are_named_and_the_other_240_have_none():
    dirty, clean = (analysed(fit.published_runs("epoch", drop_worst=drop), (5.76e23,)) for drop in (0, 5))
    [warning] = [w for w in dirty.warnings if "outlier" in w.code]
    assert warning.message.startswith("5 of 245 runs")
    for row, loss in enumerate(("5.006", "4.665", "3.766", "3.794", "3.447")):
        assert f"{row} (loss {loss}" in warning.message
    assert "6.82 to 17.9" in warning.message
    assert {w.code for w in clean.warnings} == {"vertex_refused", "few_sizes", "dropped_worst", "derived_d"}


@pytest.mark.published
def test_datablations_repeats_its_data():
    t = fit.load_published("datablations")
    assert set(warning_codes(t)) == {"repeated_data", "few_sizes", "edge_minimum"}
    assert "repeated_data" not in warning_codes(t[t.D <= 4 * t.U])


@pytest.mark.published
def test_porians_experiments_differ_in_their_edges_only():
    points = fit.load_published("porian").rename(columns={"n": "N"})
    experiment = ["file", "dataset", "hparams", "warmup", "decay", "param_count", "val"]
    edges = 0
    for _, t in points.groupby(experiment):
        codes = warning_codes(t, derive_d="6nd")
        assert set(codes) <= {"edge_minimum", "derived_d"}
        # A long warm-up costs large models most where compute is small, and drives the minimum to the smallest size.
        edges += "edge_minimum" in codes
        assert "edge_minimum" not in codes or set(t.warmup) == {"long"}
    assert edges == 3
    assert set(warning_codes(points, derive_d="6nd")) == {"schedules_mixed", "derived_d"}


@pytest.mark.published
def test_step_laws_sweeps_and_the_best_of_them_are_told_apart():
    t = fit.load_published("steplaw")
    assert warning_codes(t) == ["settings_swept"]
    assert warning_codes(t.loc[t.groupby(["N", "D"])["smooth loss"].idxmin()]) == ["best_of_sweep"]
