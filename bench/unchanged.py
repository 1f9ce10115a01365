"""Record what a checkout answers, and compare two records, as evidence that a change of the code changes no result.

    python bench/unchanged.py record FOLDER [--only ids,fit]
    python bench/unchanged.py compare FOLDER_A FOLDER_B [--only ids,fit]

PYTHONPATH chooses the checkout, which is asked only through its commands, the files of its sweeps and `isoflop.fit`.
`unchanged.toml` lists the sweeps and fits. Both records must come from one machine, because the corpus is Python's own
library and other processors round differently. Every sweep gets an empty cache. ISOFLOP_DATA names the folder of
published tables, which the part `fit` needs.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DATA = Path(os.environ.get("ISOFLOP_DATA", "/nonexistent"))
BENCHMARKS = Path(os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop") / "benchmarks"
# One thread, because sums over several threads may round differently each time.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Nothing that depends on the speed of this machine, and nothing that uses the network.
HERE = "cluster=local tracker=none evaluate=none cluster.flops_per_second=1e11 cluster.jobs=1 cluster.threads_per_job=1"
PARTS = (*LISTS["sweeps"], "fit")
TOLERANCES = {"evaluate": (1e-6, 0.0), "fit": (1e-12, 1e-6)}  # absolute, relative; the other parts have none
FIELDS = LISTS["fields"]  # of a run's plan, its summary, its curves, an evaluated item, and what a clock decides
TASKS = ",".join(FIELDS["tasks"])
PROMPTS = ("def main(", "import os\n", "    return ", "")
SAMPLING = ("", "--temperature 0.8 --top-k 50 --top-p 0.95 --seed 1")


def isoflop(folder: Path, *arguments: str, codes: Sequence[int] = (0,), until: Path | None = None) -> tuple[int, str]:
    """Run an `isoflop` command in `folder`, killed once the file `until` exists; return its exit code and output."""
    command, cache = [sys.executable, "-m", "isoflop", *arguments], folder / "cache"
    if not cache.exists():
        cache.mkdir(parents=True)
        BENCHMARKS.mkdir(parents=True, exist_ok=True)
        (cache / "benchmarks").symlink_to(BENCHMARKS.resolve())
    with (folder / "output").open("w+") as output, (folder / "errors").open("w+") as errors:
        options: dict[str, Any] = {"env": os.environ | {"ISOFLOP_CACHE": str(cache)}, "start_new_session": True}
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=errors, **options)
        while until is not None and process.poll() is None:
            if until.exists():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return 0, ""
            time.sleep(0.01)
        code = process.wait()
        if code not in codes:
            errors.seek(0)
            raise SystemExit(f"{shlex.join(command)} ended with {code}:\n{errors.read()}")
        output.seek(0)
        return code, output.read()


def sweep_numbers(arguments: str, folder: Path, only_planned: bool) -> dict[str, Any]:
    """Run a sweep; return its plan and, unless `only_planned`, every number of its runs except times."""
    sweep = folder / "outputs/s"
    for name in ("tiny", "small"):
        arguments = arguments.replace(f"{{{name}}}", LISTS[name])
    overrides = [*HERE.split(), *shlex.split(arguments), "sweep=s"]
    isoflop(folder, "sweep", *overrides, until=sweep / "plan.json" if only_planned else None)
    plan = json.loads((sweep / "plan.json").read_text())
    runs = {run["run_id"]: {name: run[name] for name in FIELDS["run"]} for run in plan["runs"]}
    if only_planned:
        return {"runs": runs}
    for name, run in runs.items():
        summary = json.loads((sweep / "runs" / name / "summary.json").read_text())
        lines = [json.loads(line) for line in (sweep / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        run |= {"final": {key: summary[key] for key in FIELDS["final"]}}
        run |= {"curves": {key: [line.get(key) for line in lines] for key in FIELDS["curves"]}}
    with (sweep / "table.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: (row["run_id"], int(row["step"])))
    return {"runs": runs, "table": {key: [row[key] for row in rows] for key in rows[0] if key not in FIELDS["clock"]}}


def checkpoint_answers(folder: Path) -> dict[str, Any]:
    """Evaluate each checkpoint; return its scores, every item, and greedy and sampled texts."""
    answers = {}
    for run in sorted((folder / "outputs/s/runs").iterdir()):
        place = folder / "scores" / run.name
        isoflop(folder, "evaluate", str(run), "--tasks", TASKS, "--limit", "8", "--output", str(place))
        with gzip.open(place / "scores.items.jsonl.gz", "rt") as file:
            lines = [json.loads(line) for line in file]
        items = {f"{item['task']} {item['index']}": {key: item[key] for key in FIELDS["item"]} for item in lines}
        texts = {}
        for prompt in PROMPTS:
            for options in SAMPLING:
                command = ["generate", str(run), prompt, "--max-tokens", "100", "--json", *options.split()]
                texts[f"{prompt!r} {options}"] = json.loads(isoflop(folder, *command)[1])["text"]
        scored = json.loads((place / "scores.json").read_text())["tasks"]
        scores = {
            task: {key: score[key] for key in score if key not in FIELDS["clock"]} for task, score in scored.items()
        }
        answers[run.name] = {"scores": scores, "items": items, "texts": texts}
    return answers


def fits(folder: Path) -> dict[str, Any]:
    """Return the answers (or exit codes) of `isoflop fit` for every table, and fits that only Python offers."""
    pd = importlib.import_module("pandas")
    answers: dict[str, Any] = {}
    for arguments in LISTS["fit"]["tables"].strip().split("\n"):
        name, *options = shlex.split(arguments)
        path = DATA / name
        if name.endswith(".gz"):
            path = folder / Path(name).stem
            pd.read_csv(DATA / name).query("step > 0")[::40].to_csv(path, index=False)
        code, output = isoflop(folder, "fit", str(path), *options, "--json", codes=(0, 2))
        answers[arguments] = code or json.loads(output)
    return dict(numbers(answers | laws()))


def laws() -> dict[str, Any]:
    """Return constants of laws that `isoflop fit` does not offer, decisions, and published laws."""
    import numpy as np

    fit: Any = importlib.import_module("isoflop.fit")

    def read(name: str, **options: Any) -> Any:
        path, *rest = shlex.split(LISTS["fit"][name])
        return fit.read_table(DATA / path, dict(pair.split("=") for pair in rest if "=" in pair), **options)

    runs, gadre = read("epoch", derive_d="6nd", drop_worst=5), read("gadre")
    settings = fit.read_sweep(read("steplaw"), sequence_length=2048)
    se = (gadre.column("loss_hi95_c4_val") - gadre.column("loss_lo95_c4_val")) / 3.92
    bounds = {"E": (0.1, 5), "A": (1, 1e5), "B": (1, 1e5), "a": (0.1, 1), "b": (0.1, 1)}
    function = fit.FunctionLaw(lambda c, N, D: c["E"] + c["A"] / N ** c["a"] + c["B"] / D ** c["b"], bounds)
    table, batch = (runs.N, runs.D, runs.loss), np.geomspace(1e4, 1e6, 12)
    law = fit.ChinchillaLaw().fit(*table)
    fitted = [
        law, function.fit(*table), fit.KaplanLaw().fit(*table),
        fit.OvertrainingLaw().fit(gadre.N, gadre.D, gadre.loss),
        fit.ChinchillaLaw("se").fit(gadre.N, gadre.D, gadre.loss, loss_se=se),
        fit.HyperparameterLaw().fit_cells(fit.cell_optima(*settings)), fit.HyperparameterSurface().fit(*settings),
        fit.CriticalBatchLaw().fit(batch, 1e9 + 2e4 * batch * (1 + 0.1 * np.sin(batch))),
    ]  # fmt: skip
    decisions = [
        law.optimal([1e21, 5.76e23]), fit.token_limited(law, 1e24, 1e11),
        fit.inference_aware(law, 1e13, loss=2.0), fit.compute_optimal(law, 1e22, 3),
    ]  # fmt: skip
    profiles = fit.IsoflopProfiles().fit(*table, runs.flops).profiles_
    return {f"{i} {one.form}": [one.bootstrap(200).constants_, one.objective_] for i, one in enumerate(fitted)} | {
        "task": fit.TaskLaw().fit(gadre.N, gadre.D, gadre.loss, gadre.column("acc_hellaswag"), chance=0.25).constants_,
        "profiles": [[profile.N_best, profile.D_best, profile.loss_best] for profile in profiles],
        "decisions": [[best.values, best.intervals] for best in decisions],
        "published": {one.name: [one.constants, one(**dict.fromkeys(one.inputs, 3e8))] for one in fit.published_laws()},
    }


def numbers(node: Any) -> Any:
    """Convert a result to JSON types, without texts and the counts of agreeing starts."""
    if hasattr(node, "items"):
        text_keys = ("form", "code", "task")
        return {
            str(key): value if isinstance(value, str) else numbers(value)
            for key, value in node.items()
            if key != "agreeing" and (key in text_keys or not isinstance(value, str))
        }
    if hasattr(node, "tolist"):
        return node.tolist()
    return [numbers(item) for item in node if not isinstance(item, str)] if isinstance(node, (list, tuple)) else node


def record(folders: list[Path], parts: list[str]) -> int:
    """Write the checkout's answers in each part to a JSON file; return exit code 0."""
    folder = folders[0].resolve()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = "".join(f'{{"text": "line {i} of {i * i % 97} words"}}\n' for i in range(2000))
    files = LISTS["files"] | {"corpus.jsonl": corpus}
    for part in parts:
        started, results = time.monotonic(), {}
        with tempfile.TemporaryDirectory(prefix="unchanged-") as temporary:
            for name, arguments in LISTS["sweeps"].get(part, {}).items():
                place = Path(temporary) / name.replace(" ", "-")
                for file, content in files.items():
                    (place / file).parent.mkdir(parents=True, exist_ok=True)
                    (place / file).write_text(content)
                results[name] = sweep_numbers(arguments, place, only_planned=part == "ids")
            if part == "evaluate":
                results |= checkpoint_answers(place)
            if part == "fit":
                results = fits(Path(temporary))
        (folder / f"{part}.json").write_text(json.dumps(results, indent=1, sort_keys=True))
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


def compare(folders: list[Path], parts: list[str]) -> int:
    """Print a line for each difference of two records; return exit code 1 if there is one, else 0."""
    lines: list[str] = []
    for part in parts:
        files = [folder / f"{part}.json" for folder in folders]
        if missing := [str(file) for file in files if not file.exists()]:
            lines.append(f"{part}: {' and '.join(missing)} is missing")
            continue
        old, new = (dict(leaves(json.loads(file.read_text()), part)) for file in files)
        for where in sorted(old.keys() | new.keys()):
            if where not in old or where not in new:
                lines.append(f"{where}: only in the {'first' if where in old else 'second'}")
            elif not equal(old[where], new[where], *TOLERANCES.get(part, (0.0, 0.0))):
                lines.append(f"{where}: {str(old[where])[:200]} and {str(new[where])[:200]}")
    print("\n".join(lines) or f"no difference in {', '.join(parts)}")
    return 1 if lines else 0


def leaves(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each leaf of a JSON tree; a list of numbers and texts is one leaf."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{where} / {key}")
    elif isinstance(node, list) and any(isinstance(item, (dict, list)) for item in node):
        for place, value in enumerate(node):
            yield from leaves(value, f"{where} / {place}")
    else:
        yield where, node


def equal(old: Any, new: Any, absolute: float, relative: float) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(equal(*pair, absolute, relative) for pair in zip(old, new, strict=True))
    if isinstance(old, float) and isinstance(new, float):
        both = math.isnan(old) and math.isnan(new)
        return both or math.isclose(old, new, rel_tol=relative, abs_tol=absolute)
    return type(old) is type(new) and bool(old == new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; it accepts {','.join(PARTS)}")
    if len(options.folders) != {"record": 1, "compare": 2}[options.command]:
        parser.error(f"{len(options.folders)} folders were given; record takes one, compare two")
    return (compare if options.command == "compare" else record)(options.folders, parts)


if __name__ == "__main__":
    sys.exit(main())
