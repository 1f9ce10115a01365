"""Commands on a sweep with a randomly damaged file print one sentence and no traceback. Seeds are fixed."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop import fit
from isoflop.sweeps import prepare
from isoflop.sweeps.cli import main as cli
from isoflop.sweeps.entry import guarded
from isoflop.sweeps.execute import conduct
from isoflop.sweeps.observe import doctor
from isoflop.train.files import write_json
from small_runs import Patch

ATTACKS = int(os.environ.get("ISOFLOP_TEST_ATTACKS", "60"))  # damaged sweeps, on each of which every command runs
DEEP = "[" * 100_000
WILD: list[Any] = [
    None, True, -1, 0, 2**63, 10**30, 10**400, 1e308, float("nan"), float("-inf"), "", "é\x1b[31m", "../../x", "a\0b",
    "9" * 5000, "nan", [], {}, [[]], {"a": {}}, [1, "a", None], "%s",
]  # fmt: skip
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)
EXTRA_IN_SWEEP = {  # files that an undisturbed sweep does not have
    "added.json": {}, "cancel.json": {"by": "me"}, "adaptive.json": {"rounds": [], "ended": None},
    "fit_failure.json": {"reason": "no"}, "jobs/keeper.json": {"scorings": {"a": 1}, "fits": {"tries": 1}},
    "preflight.json": {"decides": {}, "nodes": {}},
}  # fmt: skip
EXTRA_IN_RUN = {
    "state.json": {"state": "failed", "attempt": 1, "host": "n", "job_id": "7", "since": 1.0, "reason": "broke"},
    "failure.json": {"cause": "hung", "reason": "x", "rank": 0, "host": "n", "step": 1, "hosts": ["n"]},
    "attempt.json": {"attempt": 2, "began": 1.0, "host": "n", "job_id": "7", "steps": 9, "begins": 0, "first_step": 0,
                     "metrics_bytes": 1, "flops_per_step": 1.0, "gpus": 0, "share": 1.0},
}  # fmt: skip


def key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of keys and indices of every value in nested dicts and lists."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from key_paths(inner, (*path, key))


def damaged(rng: random.Random, text: str, is_yaml: bool) -> bytes:
    """Return the text with one value replaced or deleted, cut, with random bytes, or replaced as a whole."""
    kind = rng.choice(["value"] * 5 + ["delete"] * 3 + ["torn", "binary", "else"])
    if kind == "torn":
        return text[: rng.randrange(len(text))].encode()
    if kind == "binary":
        return bytes(rng.randrange(256) if rng.random() < 0.02 else byte for byte in text.encode())
    if kind == "else":
        return rng.choice(["", "null", "7", DEEP, '{"a":' * 50_000, "\0" * 9, BOMB if is_yaml else "[]"]).encode()
    value = node = yaml.safe_load(text) if is_yaml else json.loads(text)
    *above, last = rng.choice(list(key_paths(value)) or [("x",)])
    for key in above:
        node = node[key]
    if kind == "delete" and last in node:
        del node[last]
    else:
        node[last] = rng.choice(WILD)
    return (yaml.safe_dump(value) if is_yaml else json.dumps(value)).encode()


def damage(rng: random.Random, sweep: Path) -> tuple[Path, Path]:
    """Damage a random file; return it and a random run."""
    runs = sorted((sweep / "runs").iterdir())
    run = rng.choice(runs)
    for folder, files in ((sweep, EXTRA_IN_SWEEP), (run, EXTRA_IN_RUN)):
        for name, content in files.items() if rng.random() < 0.4 else ():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
    names = [*sweep.glob("*"), *sweep.glob("jobs/*.json"), *sweep.glob("fit/law.json")]
    names += [*run.glob("*"), *run.glob("checkpoints/*/*")]
    files = sorted(path for path in names if path.suffix in (".json", ".yaml", ".jsonl", ".csv"))
    path = rng.choice(files)
    if path.suffix in (".json", ".yaml"):
        path.write_bytes(damaged(rng, path.read_text(), path.suffix == ".yaml"))
    else:
        lines = path.read_bytes().splitlines() or [b"{}"]
        number = rng.randrange(len(lines))
        is_json = path.suffix == ".jsonl"
        lines[number] = (
            damaged(rng, lines[number].decode(), False) if is_json else rng.choice([b"x", b"\xff", b'"', b""])
        )
        path.write_bytes(b"\n".join(lines))
    return path, run


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    """Replace training, plots and resampling by quick stand-ins."""
    analyze = fit.analyze

    def analyze_quickly(runs: Any, targets: Any, bootstrap: int, *others: Any, **named: Any) -> Any:
        return analyze(runs, targets, min(bootstrap, 2), *others, **named)

    monkeypatch.setattr(
        conduct, "_conduct_here", lambda prepared, only=None: conduct.outcome(prepare.from_disk(prepared.sweep))
    )
    monkeypatch.setattr(doctor, "lock_problem", lambda folder: None)
    monkeypatch.setattr(fit, "analyze", analyze_quickly)
    monkeypatch.setattr(
        fit, "write_report", lambda analysis, folder, **named: write_json(folder / "law.json", analysis.to_dict())
    )


def attack(smoke: Path, folder: Path, seed: int, monkeypatch: Patch, capsys: Any, commands: list[str]) -> None:
    rng = random.Random(seed)
    sweep = Path(shutil.copytree(smoke, folder / f"sweep{seed}", ignore=shutil.ignore_patterns("*.html", "*.png")))
    path, run = damage(rng, sweep)
    for command in commands:
        arguments = [
            str(run) if argument == "RUN" else run.name if argument == "ID" else argument
            for argument in command.split()
        ]
        sweep_argument = [] if arguments[0] == "plan" else [str(sweep)]
        monkeypatch.setattr(sys, "argv", ["isoflop", arguments[0], *sweep_argument, *arguments[1:]])
        try:
            code = guarded(cli._run)
        except Exception as error:
            raise AssertionError(f"{command} after damage {seed} to {path.relative_to(sweep)}") from error
        stderr = capsys.readouterr().err
        assert code in (0, 1, 2), (command, path)
        if code == 2:
            errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, (command, path, stderr)
            assert "\x1b" not in stderr
            assert len(errors[0]) < 1300


QUICK = ["status --json", "doctor --dry-run", "logs", "plan RUN --ranks 2", "retry ID", "doctor", "status"]


Attack = Callable[[int, list[str]], None]  # takes a seed and commands


@pytest.fixture
def attacks(smoke: tuple[Path, str], tmp_path: Path, monkeypatch: Patch, capsys: Any) -> Attack:
    return lambda seed, commands: attack(smoke[0], tmp_path, seed, monkeypatch, capsys, commands)


def test_damage_of_any_file_is_one_sentence(attacks: Attack) -> None:
    for seed in range(3):
        attacks(seed, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_damage_of_any_file_is_one_sentence_for_every_command(part: int, attacks: Attack) -> None:
    commands = [*QUICK[:-2], "report", "fit --bootstrap 2 --convention 6nd", "suggest --budget 1e13", "sync", "cancel"]
    commands += ["extend grid.tokens_per_parameter=[30]", "retry --diverged", "retry", *QUICK[-2:]]
    for seed in range(1000 + part, 1000 + ATTACKS, 5):
        attacks(seed, commands)
