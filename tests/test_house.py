"""The house: which room may import which, and what planning and fitting must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "fit": set(),
    "train": set(),
    "evaluate": {"train"},
    "sweeps": {"train", "evaluate", "fit", "bench"},
    "bench": {"sweeps", "train", "evaluate", "fit"},
}
# What train/ may import at the top of a file; everything else where it is used, so that a bare GPU image can run it.
TRAIN_TOP = {"torch", "numpy", "safetensors"}
NO_TORCH = (
    "train/config.py", "train/flops.py", "train/errors.py", "train/memory.py", "train/model/activations.py",
    "train/schedule.py", "train/ensemble/members.py",
    *(f"train/parallel/{name}.py" for name in ("shapes", "environment", "share", "cost", "planner", "buckets")),
    "train/files.py",
)  # fmt: skip


def imports(path: Path, top_level_only: bool = False) -> list[tuple[int, str]]:
    """(level of relativity, module) of every import statement of a file; not those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = list(tree.body) if top_level_only else [n for n in ast.walk(tree) if not _type_checking(n)]
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name) for name in names]
    return found


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_that_its_arrows_point_to(room: str) -> None:
    for path in files(room):
        depth = len(path.relative_to(ROOT).parts) - 1  # dots that reach the root from here, less one
        for level, module in imports(path):
            head = module.split(".")[0]
            if level == depth + 1 and head in {*ALLOWED}:
                assert head in ALLOWED[room] | {room}, f"{path.relative_to(ROOT)} imports {head}"
            assert not (level == 0 and head == "isoflop"), f"{path.relative_to(ROOT)} imports isoflop absolutely"


def test_the_test_above_sees_a_forbidden_import(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("from ..train.flops import f\ndef g():\n    from .. import fit\n")
    assert imports(tmp_path / "x.py") == [(2, "train.flops"), (2, "fit")]


def test_train_imports_little_at_the_top() -> None:
    standard = sys.stdlib_module_names
    for path in files("train"):
        heads = {module.split(".")[0] for level, module in imports(path, top_level_only=True) if level == 0}
        allowed = set(standard) if path.relative_to(ROOT).as_posix() in NO_TORCH[:-1] else standard | TRAIN_TOP
        if path.name == "files.py":
            allowed = standard | {"numpy"}
        if path.parent.name == "kernels":  # each is imported when a kernel is first launched
            allowed = standard | TRAIN_TOP | {"triton"}
        assert heads <= allowed, f"{path.relative_to(ROOT)} imports {heads - allowed} at the top"


def loaded(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").split())


def test_a_notebook_can_fit_without_torch() -> None:
    assert not loaded("from isoflop import fit; fit.ChinchillaLaw; fit.read_table; fit.analyze") & {
        "torch",
        "hydra",
        "lm_eval",
    }


def test_planning_loads_neither_torch_nor_pandas() -> None:
    modules = loaded(
        "import isoflop.sweeps.entry, isoflop.sweeps.execute.conduct, "
        "isoflop.train.data.corpora, isoflop.train.data.tokenizers"
    )
    assert not modules & {"torch", "pandas", "scipy", "lm_eval", "datasets", "wandb", "plotly"}


def test_no_file_outgrows_a_sitting() -> None:
    """About 300 lines; a file that needs more needs a reason, and none has needed 420."""
    for room in ALLOWED:
        for path in files(room):
            assert len(path.read_text().splitlines()) <= 420, path
