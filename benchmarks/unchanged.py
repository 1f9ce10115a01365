"""Evidence that a change of the code changes no result: what a checkout answers, recorded, and two records compared.

    python benchmarks/unchanged.py record FOLDER [--only ids,fit]
    python benchmarks/unchanged.py compare FOLDER_A FOLDER_B [--only ids,fit]

The package that `import isoflop` finds is asked, so PYTHONPATH chooses the checkout, and only through what users rely
on: the commands, the files of a sweep, and `isoflop.fit`. Both records must come from one machine: the corpus is
Python's own library, and other processors round differently. Every sweep gets an empty cache, because what earlier
sweeps measured decides what later ones train together. ISOFLOP_DATA names the published tables.
"""

from __future__ import annotations

import argparse
import csv
import gzip
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import isoflop

ROOT = Path(isoflop.__file__).resolve().parent
SWEEP = [sys.executable, str(ROOT / "sweep.py")]
MODULE, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["isoflop"].split(":")
ISOFLOP = [sys.executable, "-c", f"from {MODULE} import {FUNCTION}; {FUNCTION}()"]
DATA = Path(os.environ.get("ISOFLOP_DATA", "/nonexistent"))
BENCHMARKS = Path(os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop") / "benchmarks"
# Sums of several threads need not round the same twice.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# Nothing that depends on the speed of this machine, and nothing that leaves it.
HERE = "cluster=local tracker=none evaluate=none cluster.flops_per_second=1e11 cluster.jobs=1 cluster.threads_per_job=1"
SMALL = "data.max_bytes=2000000 data.sequence_length=64 data.validation_tokens=8192 fit.bootstrap=50 validations=2"
TINY = f"{SMALL} model.width=16 model.depth=2 model.heads=2"
ONE = f"+grid=product {TINY} tokens=40000 grid.axes={{seed:[0]}}"
POINT = "{model.width:32,model.depth:2,model.heads:2,tokens:1000000"
SWEEPS = {  # by part and name; of `ids` the plan alone
    "ids": {
        "smoke": "+grid=smoke",
        "chinchilla": "+grid=chinchilla grid.budgets=[5e10,1e11,3e11]",
        "chinchilla on GPUs": "+grid=chinchilla grid.budgets=[1e17,3e17,1e18] precision=bf16 optimizer.batch_size=256 "
        "data.sequence_length=1024 grid.convention=6nd",
        "chinchilla, other options": "+grid=chinchilla grid.budgets=[1e11] seed=3 schedule=cosine model.qk_norm=true "
        "model.tied_embeddings=false model.window=64 optimizer.z_loss=1e-4 data.separate_documents=true trunks=false",
        "ladder": "+grid=ladder",
        "product": "+grid=product tokens=2000000 "
        "grid.axes={optimizer.learning_rate:[3e-3,6e-3],seed:[0,1],model.kv_heads:[2]}",
        "points": f"+grid=points grid.points=[{POINT}}},{POINT},seed:7,schedule.decay_share:0.1}}]",
        "adaptive": "+grid=adaptive grid.budgets=[1e11,3e11]",
        "data_recipe": "+grid=data_recipe data.max_bytes=2000000",
        "bpe": "+grid=smoke data.tokenizer=bpe data.vocab_size=512",
        "text": "+grid=smoke data=text data.path=corpus.jsonl data.vocab_size=300",
    },
    "smoke": {"smoke": "+grid=smoke fit.bootstrap=50"},
    "ensemble": {
        "rates": f"+grid=product {TINY} model.depth=1 trunks=false "
        "grid.axes={seed:[0,1],optimizer.learning_rate:[3e-3,6e-3],tokens:[40000,60000]}",
        "heads": f"+grid=product {TINY} model.kv_heads=1 model.qk_norm=true model.tied_embeddings=false tokens=40000 "
        "grid.axes={seed:[0,1,2,3]}",
    },
    "trunks": {
        "alone": f"+grid=ladder {SMALL} grid.sizes=[5e3,1e4] grid.tokens_per_parameter=[10,20,30] ensembles=1",
        "together": f"+grid=ladder {SMALL} grid.sizes=[5e3] grid.tokens_per_parameter=[10,12,14,16,40] seed=1",
    },
    "variants": {
        "model": f"+grid=points {TINY} tokens=40000 ensembles=1 trunks=false grid.points=[{{model.kv_heads:1,"
        "model.qk_norm:true},{model.window:32,model.tied_embeddings:false,optimizer.z_loss:1e-4},{schedule.kind:cosine,"
        "data.separate_documents:true},{precision:bf16},{optimizer.weight_decay:0.0,optimizer.gradient_clip:0.1}]",
        "accumulation": f"{ONE} parallel.micro_batch_size=2 parallel.recompute=full",
        "zero 3": f"{ONE} parallel.dp=2 parallel.zero=3",
        "mesh": f"{ONE} parallel.tp=2 parallel.dp=2 parallel.zero=1",
    },
    "evaluate": {
        "models": f"+grid=points {SMALL} data.sequence_length=128 model.width=64 model.depth=2 tokens=260000 "
        "ensembles=1 grid.points=[{seed:0},"
        "{model.kv_heads:2,model.qk_norm:true,model.window:48,model.tied_embeddings:false}]",
    },
}
PARTS = (*SWEEPS, "fit")
RUN = "name N_total N_non_embedding N_kaplan D flops_6nd flops_exact flops_own steps parent first_step budget seed"
FINAL = ("step", "val_loss", "val_loss_se", "val_bpb", "train_loss", "ensemble", "ranks")
CURVES = ("step", "tokens", "flops", "lr", "train_loss", "smoothed_loss", "val_loss", "grad_norm")
CLOCK = ("seconds", "tokens_per_s", "mfu", "estimated_seconds")  # of table.csv and scores, what a clock decides
ITEM = ("prompt", "log_probabilities", "answer", "values", "gold_bpb", "p_right", "margin", "bpb")
TASKS = (
    "hellaswag,arc_easy,piqa@2,lambada_openai,gsm8k_gold,mmlu_cloze,text_code,text_maths,"
    "quiz.jsonl,quiz.jsonl@2,writes,text:held_out"
)
PROMPTS = ("def main(", "import os\n", "    return ", "")
DRAWN = "--temperature 0.8 --top-k 50 --top-p 0.95 --seed 1"
FILES = {
    "corpus.jsonl": "".join(f'{{"text": "line {i} of {i * i % 97} words"}}\n' for i in range(2000)),
    "quiz.jsonl": '{"question": "def add(a, b): return a +", "choices": ["b", "c", "None"], "answer": "b"}\n'
    '{"question": "import", "choices": ["os", "zebra"], "answer": 0}\n'
    '{"question": "for i in", "choices": ["range(3):", "while"], "answer": 0}\n',
    "held_out/one.txt": "class Node:\n    def __init__(self):\n        self.next = None\n",
    "held_out/two.txt": "for line in lines:\n    print(line)\n",
    "writes/data/prompts.jsonl": '{"question": "x = ", "answer": "1"}\n{"question": "def ", "answer": "f"}\n',
    "writes/writes.yaml": "task: writes\ndataset_path: json\ndataset_kwargs: {data_files: {test: data/prompts.jsonl}}\n"
    'test_split: test\noutput_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    'generation_kwargs: {until: ["zzz"], do_sample: false, max_gen_toks: 24}\nmetric_list: [{metric: exact_match}]\n',
}

# What `isoflop fit` is told of every table, some of which it refuses. Of curves (.gz) it gets every fortieth row.
EPOCH = "epoch/svg_extracted_data.csv --column 'N=Model Size' --column 'flops=Training FLOP' --derive-d 6nd"
BEST = f"{EPOCH} --drop-worst 5"
GADRE = "gadre/gadre_runs.csv --column loss=loss_c4_val --column flops=flops_6ND --column run_id=name"
REPEATED = "datablations/parametric_fit_runs.csv --column run_id=name"
STEPLAW = "steplaw/dense_lr_bs_loss.csv --column 'loss=smooth loss' --column run_id=exp_name"
BY_D = "--column N=params --column D=tokens --column group=tokens"
BY_RATE = "--column N=non_embedding_param_size --column D=data_size --column loss=lm_loss --column group=lr"
EXPERTS = "--column N=dense_parameter_count --column D=num_experts --column loss=loss_validation"
STEPS = "--column N=num_params --column D=step --column loss=test_loss"
FEW = "--bootstrap 100"
TABLES = f"""
{EPOCH}
{EPOCH} --objective squares
{BEST}
{BEST} --objective l1
{BEST} --tied
{BEST} --fixed-e 1.8 --seed 7
{BEST} --delta 1e-5 --target-flops 5.76e23 --target-flops 1e26 --bootstrap 4000
{GADRE}
{GADRE} --tied
gadre/eval_metadata.csv
{REPEATED}
{REPEATED} --drop-worst 20 --objective l1
porian/isoflop_points.csv --column N=n --column budget=flops --derive-d 6nd {FEW}
porian/optimal_pairs.csv --column N=n --column D=t
porian/published_fits.csv
{STEPLAW} {FEW}
llama3/isoflops.csv --column N=params --column D=tokens
oellm/best.csv --column flops=C
kempner/runs.csv --column N=params --column D=tokens --column loss=val_loss --column flops=iso_flop {FEW}
gemstones/hot_100bplus.csv --column N=params_active_precise --column D=tokens --column loss=final_loss {FEW}
routed/final.csv {EXPERTS}
routed/curves.csv.gz --column N=dense_parameter_count --column D=step --column loss=loss_validation {FEW}
curves/chess.csv.gz {STEPS} {FEW}
curves/mlp_schedules.csv.gz {STEPS} {FEW}
scalebench/data_constrained_train.csv {BY_D}
scalebench/data_constrained_test.csv {BY_D}
scalebench/lr_bsz_train.csv {BY_RATE} {FEW}
scalebench/lr_bsz_test.csv {BY_RATE}
scalebench/moe_train.csv {EXPERTS} --column group=loss_validation
scalebench/moe_test.csv {EXPERTS}
scalebench/domain_mixture_train.csv
scalebench/domain_mixture_test.csv
"""


def call(command: list[str], folder: Path, codes: tuple[int, ...] = (0,), until: Path | None = None) -> tuple[int, str]:
    """Runs a command in a folder, with the cache that lies there; its exit code and what it printed.

    With `until` it is killed as soon as that file is there.
    """
    cache = folder / "cache"
    if not cache.exists():
        cache.mkdir(parents=True)
        BENCHMARKS.mkdir(parents=True, exist_ok=True)
        (cache / "benchmarks").symlink_to(BENCHMARKS.resolve())
    environment = os.environ | {"ISOFLOP_CACHE": str(cache)}
    with (folder / "output").open("w+") as output, (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
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


def swept(arguments: str, folder: Path, only_planned: bool) -> dict[str, Any]:
    """The plan of a sweep and, once it is trained, every number of its runs that no clock decides."""
    sweep = folder / "outputs/s"
    command = [*SWEEP, *HERE.split(), *shlex.split(arguments), "sweep=s"]
    call(command, folder, until=sweep / "plan.json" if only_planned else None)
    plan = json.loads((sweep / "plan.json").read_text())
    runs = {run["run_id"]: {name: run[name] for name in RUN.split()} for run in plan["runs"]}
    found = {"runs": runs, "together": sorted(unit["runs"] for unit in plan["units"] if len(unit["runs"]) > 1)}
    if not only_planned:
        for name, run in runs.items():
            summary = json.loads((sweep / "runs" / name / "summary.json").read_text())
            lines = [json.loads(line) for line in (sweep / "runs" / name / "metrics.jsonl").read_text().splitlines()]
            run |= {"final": {key: summary[key] for key in FINAL}}
            run |= {"curves": {key: [line.get(key) for line in lines] for key in CURVES}}
        with (sweep / "table.csv").open() as file:
            rows = sorted(csv.DictReader(file), key=lambda row: (row["run_id"], int(row["step"])))
        found["table"] = {key: [row[key] for row in rows] for key in rows[0] if key not in CLOCK}
    return found


def evaluated(folder: Path) -> dict[str, Any]:
    """What checkpoints answer: scores, every item, and texts, the likeliest and drawn ones."""
    answers = {}
    for run in sorted((folder / "outputs/s/runs").iterdir()):
        place = folder / "scores" / run.name
        call([*ISOFLOP, "evaluate", str(run), "--tasks", TASKS, "--limit", "8", "--output", str(place)], folder)
        with gzip.open(place / "scores.items.jsonl.gz", "rt") as file:
            items = {
                f"{item['task']} {item['index']}": {key: item[key] for key in ITEM} for item in map(json.loads, file)
            }
        texts = {}
        for prompt in PROMPTS:
            for how in ("", DRAWN):
                command = [*ISOFLOP, "generate", str(run), prompt, "--max-tokens", "100", "--json", *how.split()]
                texts[f"{prompt!r} {how}"] = json.loads(call(command, folder)[1])["text"]
        tasks = json.loads((place / "scores.json").read_text())["tasks"]
        scores = {task: {key: score[key] for key in score if key not in CLOCK} for task, score in tasks.items()}
        answers[run.name] = {"scores": scores, "items": items, "texts": texts}
    return answers


def fitted(folder: Path) -> dict[str, Any]:
    """What `isoflop fit` says of every table, or the exit code with which it refuses one; and what only Python asks."""
    import pandas as pd

    answers: dict[str, Any] = {}
    for arguments in TABLES.split("\n")[1:-1]:
        name, *options = shlex.split(arguments)
        path = DATA / name
        if name.endswith(".gz"):
            path = folder / Path(name).stem
            pd.read_csv(DATA / name).query("step > 0")[::40].to_csv(path, index=False)
        code, said = call([*ISOFLOP, "fit", str(path), *options, "--json"], folder, codes=(0, 2))
        answers[arguments] = code or json.loads(said)
    return dict(numbers(answers | laws()))


def laws() -> dict[str, Any]:
    """Laws that the command does not fit, decisions, and what is known of published laws."""
    import numpy as np
    import pandas as pd
    from isoflop import fit

    def read(arguments: str, **options: Any) -> fit.RunTable:
        name, *rest = shlex.split(arguments)
        return fit.read_table(DATA / name, dict(pair.split("=") for pair in rest if "=" in pair), **options)

    runs, gadre, repeated = read(EPOCH, derive_d="6nd", drop_worst=5), read(GADRE), read(REPEATED)
    settings = fit.read_sweep(read(STEPLAW), sequence_length=2048)
    routed, chess = pd.read_csv(DATA / "routed/final.csv"), pd.read_csv(DATA / "curves/chess.csv.gz")
    dense, chess = routed[routed.num_experts == 1], chess[(chess.run == 0) & (chess.step > 0)]
    se = (gadre.column("loss_hi95_c4_val") - gadre.column("loss_lo95_c4_val")) / 3.92
    batch = np.geomspace(1e4, 1e6, 12)
    bounds = {"E": (0.1, 5), "A": (1, 1e5), "B": (1, 1e5), "a": (0.1, 1), "b": (0.1, 1)}
    own = fit.FunctionLaw(lambda c, N, D: c["E"] + c["A"] / N ** c["a"] + c["B"] / D ** c["b"], bounds)
    table = (runs.N, runs.D, runs.loss)
    law = fit.ChinchillaLaw().fit(*table)
    fitted = [
        law, own.fit(*table), fit.KaplanLaw().fit(*table), fit.OvertrainingLaw().fit(gadre.N, gadre.D, gadre.loss),
        fit.ChinchillaLaw("se").fit(gadre.N, gadre.D, gadre.loss, loss_se=se),
        fit.PowerLaw(True).fit(dense.dense_parameter_count, dense.loss_validation),
        fit.BrokenPowerLaw().fit(chess.step, chess.test_loss),
        fit.RepetitionLaw(tied=True).fit(repeated.N, repeated.D, repeated.column("U"), repeated.loss),
        fit.HyperparameterLaw().fit_cells(fit.cell_optima(*settings)), fit.HyperparameterSurface().fit(*settings),
        fit.CriticalBatchLaw().fit(batch, 1e9 + 2e4 * batch * (1 + 0.1 * np.sin(batch))),
    ]  # fmt: skip
    described = {
        f"{number} {each.form}": [each.bootstrap(200).constants_, each.objective_, [*map(each.interval, each.names)]]
        for number, each in enumerate(fitted)
    }
    decided = [
        law.optimal([1e21, 5.76e23]), fit.token_limited(law, 1e24, 1e11), fit.inference_aware(law, 1e13, loss=2.0),
        fit.compute_optimal(law, 1e22, 3),
    ]  # fmt: skip
    profiles = fit.IsoflopProfiles().fit(*table, runs.flops).profiles_
    published = {
        each.name: [each.constants, each.intervals, each.fitted, each(**dict.fromkeys(each.inputs, 3e8))]
        for each in fit.published_laws()
    }
    return described | {
        "task": fit.TaskLaw().fit(gadre.N, gadre.D, gadre.loss, gadre.column("acc_hellaswag"), chance=0.25).constants_,
        "profiles": [[each.N_best, each.D_best, each.loss_best] for each in profiles],
        "decided": [[best.values, best.intervals] for best in decided],
        "published": published,
    }


def numbers(node: Any) -> Any:
    """A result as JSON holds it, without its sentences, and without how many starts agree."""
    if hasattr(node, "items"):
        words = ("form", "code", "task")
        return {
            str(key): value if isinstance(value, str) else numbers(value)
            for key, value in node.items()
            if key != "agreeing" and (key in words or not isinstance(value, str))
        }
    if hasattr(node, "tolist"):
        return node.tolist()
    return [numbers(each) for each in node if not isinstance(each, str)] if isinstance(node, (list, tuple)) else node


def record(folder: Path, parts: list[str]) -> None:
    """Writes a JSON file for each part."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        began, found = time.monotonic(), {}
        with tempfile.TemporaryDirectory(prefix="unchanged-") as temporary:
            for name, arguments in SWEEPS.get(part, {}).items():
                place = Path(temporary) / name.replace(" ", "-")
                for file, content in FILES.items():
                    (place / file).parent.mkdir(parents=True, exist_ok=True)
                    (place / file).write_text(content)
                found[name] = swept(arguments, place, only_planned=part == "ids")
            if part == "evaluate":
                found |= evaluated(place)
            if part == "fit":
                found = fitted(Path(temporary))
        (folder / f"{part}.json").write_text(json.dumps(found, indent=1, sort_keys=True))
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


def compare(folders: list[Path], parts: list[str]) -> int:
    """Prints a line for each difference; returns the exit code."""
    tolerances = {"evaluate": (1e-6, 0.0), "fit": (1e-12, 1e-6)}
    lines: list[str] = []
    for part in parts:
        files = [folder / f"{part}.json" for folder in folders]
        lines += [f"{part}: {file} is missing" for file in files if not file.exists()]
        if all(file.exists() for file in files):
            old, new = (json.loads(file.read_text()) for file in files)
            lines += differences(old, new, *tolerances.get(part, (0.0, 0.0)), part)
    print("\n".join(lines) or f"no difference in {', '.join(parts)}")
    return 1 if lines else 0


def differences(old: Any, new: Any, absolute: float, relative: float, where: str) -> Iterator[str]:
    """A line for each leaf that differs by more; a list of leaves is one."""

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, float) and isinstance(other, float):
            both = math.isnan(one) and math.isnan(other)
            return both or math.isclose(one, other, rel_tol=relative, abs_tol=absolute)
        return type(one) is type(other) and bool(one == other)

    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key in old and key in new:
                yield from differences(old[key], new[key], absolute, relative, f"{where} / {key}")
            else:
                yield f"{where} / {key}: only in the {'first' if key in old else 'second'}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if any(isinstance(each, (dict, list)) for each in [*old, *new]):
            for place, pair in enumerate(zip(old, new, strict=True)):
                yield from differences(*pair, absolute, relative, f"{where} / {place}")
        elif unequal := [pair for pair in zip(old, new, strict=True) if not equal(*pair)]:
            first, second = unequal[0]
            yield f"{where}: {len(unequal)} of {len(old)} differ, the first: {first!r} and {second!r}"
    elif not equal(old, new):
        yield f"{where}: {str(old)[:200]!r} and {str(new)[:200]!r}"


def main() -> int:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; it takes some of {','.join(PARTS)}")
    if len(options.folders) != (1 if options.command == "record" else 2):
        parser.error(f"{len(options.folders)} folders were given; record takes one, compare two")
    if options.command == "compare":
        return compare(options.folders, parts)
    record(options.folders[0].resolve(), parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
