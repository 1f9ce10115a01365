"""Rules of the code base: which room may import which, and which packages planning and fitting must not load."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from wording import ROOMS, texts

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "fit": set(),
    "train": set(),
    "evaluate": {"train"},
    "sweeps": {"train", "evaluate", "fit", "bench"},
    "bench": {"sweeps", "train", "evaluate", "fit"},
}
# Packages that train/ may import at the top of a file. All others are imported where used, so that a minimal GPU image
# can run it.
TRAIN_TOP = {"torch", "numpy", "safetensors", "msgspec"}
NO_TORCH = (
    "train/config.py", "train/flops.py", "train/errors.py", "train/memory.py",
    "train/model/shape.py", "train/schedule.py", "train/planner/planner.py",
    "train/planner/validation.py", "train/job/environment.py", "train/job/failure.py", "train/parallel/buckets.py",
    "train/parallel/schedules.py", "train/files.py",
)  # fmt: skip


@functools.cache
def statements(path: Path) -> tuple[list[ast.stmt], list[ast.AST]]:
    """Return the top-level statements of a file, and all its imports, also inside functions."""
    tree = ast.parse(path.read_text())
    return tree.body, [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> list[tuple[int, str]]:
    """Return (relative level, module) of every import in a file, or of those at its top."""
    nodes = statements(path)[0 if top_level_only else 1]
    result = []
    for node in nodes:
        if isinstance(node, ast.Import):
            result += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            result += [(node.level, name) for name in names]
    return result


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


def test_only_functions_of_the_command_line_import_the_benchmarks() -> None:
    for path in files("sweeps"):
        depth = len(path.relative_to(ROOT).parts) - 1
        modules = [module for level, module in imports(path) if level == depth + 1 and module.split(".")[0] == "bench"]
        at_top = [m for level, m in imports(path, top_level_only=True) if level == depth + 1 and m.startswith("bench")]
        assert not modules or path.parent.name == "cli", f"{path.relative_to(ROOT)} imports {modules}"
        assert not at_top, f"{path.relative_to(ROOT)} imports {at_top} at the top"


def test_train_imports_little_at_the_top() -> None:
    standard = sys.stdlib_module_names
    for path in files("train"):
        heads = {module.split(".")[0] for level, module in imports(path, top_level_only=True) if level == 0}
        allowed = standard | {"msgspec"} if path.relative_to(ROOT).as_posix() in NO_TORCH[:-1] else standard | TRAIN_TOP
        if path.name == "files.py":
            allowed = standard | {"numpy"}
        if path.parent.name == "kernels":  # each is imported when a kernel is first launched
            allowed = standard | TRAIN_TOP | {"triton"}
        assert heads <= allowed, f"{path.relative_to(ROOT)} imports {heads - allowed} at the top"


def loaded(*statements: str) -> list[set[str]]:
    """Return the top-level modules that a new interpreter has loaded after each of some statements."""
    show = "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    code = "\n".join(["import sys", *(f"{statement}\n{show}" for statement in statements)])
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/")
    return [set(line.split()) for line in output.splitlines()]


def test_a_notebook_can_fit_without_torch() -> None:
    (modules,) = loaded("from isoflop import fit; fit.ChinchillaLaw, fit.read_table, fit.analyze, fit.write_report")
    assert not modules & {"torch", "hydra", "lm_eval", "pandas", "matplotlib", "plotly"}


def test_evaluate_from_the_root_is_hugging_faces() -> None:
    """Check that our room does not shadow their package, which lm-eval's tasks import, in scripts run from the root."""
    find = "from importlib.util import find_spec; print(find_spec('evaluate').origin)"  # importing it takes seconds
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {find}"
    origin = Path(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip())
    assert origin.parts[-2:] == ("evaluate", "__init__.py")
    assert not origin.is_relative_to(ROOT / "evaluate")


def test_what_is_planned_listed_and_written_needs_no_torch_and_training_no_compiler() -> None:
    planning = "import isoflop.sweeps.entry, isoflop.sweeps.execute.conduct"
    planning += ", isoflop.train.data.corpora, isoflop.train.data.tokenizers"
    pages = "import isoflop.evaluate.items, isoflop.evaluate.pages.sweep_report, isoflop.evaluate.pages.paired"
    tasks = "from isoflop.evaluate.tasks import tasks; tasks.expand('small'); tasks.benchmarks_directory()"
    training = "import isoflop.train.loop, isoflop.evaluate.checkpoint"
    planned, listed, trained = loaded(planning, f"{pages}; {tasks}", training)
    assert not planned & {"torch", "pandas", "scipy", "lm_eval", "datasets", "wandb", "plotly"}
    assert not listed & {"torch", "lm_eval", "datasets", "pyarrow"}
    assert "sympy" not in trained  # PyTorch imports it only for the compiler; it doubles the import time


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return the files that each file imports, also inside functions and under TYPE_CHECKING."""
    all_files = {path.relative_to(ROOT).as_posix() for room in ALLOWED for path in files(room)}
    result: dict[str, set[str]] = {}
    for name in all_files:
        targets: set[tuple[str, ...]] = set()
        package = tuple(name.split("/")[:-1])
        for node in statements(ROOT / name)[1]:
            if isinstance(node, ast.ImportFrom) and node.level:
                parent = package[: len(package) - node.level + 1] + tuple(node.module.split(".") if node.module else ())
                targets |= {parent, *((*parent, alias.name) for alias in node.names)}
        # An import passes the __init__.py of every folder on its way.
        targets |= {target[:depth] for target in targets for depth in range(1, len(target))} - {
            package[:depth] for depth in range(len(package) + 1)
        }
        files_named = {"/".join(target) + end for target in targets for end in (".py", "/__init__.py")}
        result[name] = (files_named & all_files) - {name}
    return result


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the same graph between folders: the first folders where both paths differ. Parents do not count."""
    result: dict[str, set[str]] = {}
    for name, others in graph.items():
        for other in others:
            importer, imported = name.split("/")[:-1], other.split("/")[:-1]
            shared = next((i for i, (a, b) in enumerate(zip(importer, imported, strict=False)) if a != b), 0)
            if shared:
                result.setdefault("/".join(importer[: shared + 1]), set()).add("/".join(imported[: shared + 1]))
    return result


def test_no_circles_of_files_or_folders() -> None:
    graphlib.TopologicalSorter(graph()).prepare()  # raises CycleError, which names the circle
    graphlib.TopologicalSorter(folders(graph())).prepare()


# Words at which readers stumbled, and openings of docstrings that name no action.
ODD = re.compile(
    r"\b(anew|besides?|dear(er|est)|foretell\w*|foretold|herein|hitherto|thereafter|whereby|mend(s|ed|ing)?|nobody|somebody"
    r"|whoever|had better|came of|comes of|cannot be had|not to be had|looks? after|goes on from|of (its|their) own)\b",
    re.IGNORECASE,
)
VERB = re.compile(r"(?!(An?|At|For|How|In|Of|On|The|That|This|What|Where|Whether|Which|Who)\b)[A-Z][a-z-]*(?<!s)\b")
VERBS_IN_S = {"Compress", "Express", "Pass", "Process", "Suppress"}


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_wording_is_plain_english(folder: str) -> None:
    problems = []
    for path in files(folder):
        for text in texts(path) if path != Path(__file__) else ():
            odd = ODD.search(text.text)
            first = text.text.split()[0].strip(",.:")
            if odd:
                problems.append(f"{path}:{text.line}: {odd[0]!r} in a {text.kind}")
            elif text.kind == "function" and folder != "tests" and not (VERB.match(first) or first in VERBS_IN_S):
                problems.append(f"{path}:{text.line}: a function's docstring starts with {first!r}, not with a verb")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "planted").glob("*.toml")), ids=lambda path: path.stem)
def test_every_planted_bug_still_has_its_place_and_its_tests(path: Path) -> None:
    planted = tomllib.loads(path.read_text())
    for bug in planted["bugs"]:
        assert (ROOT / bug["file"]).read_text().count(bug["old"]) == 1, bug["name"]
        assert bug["new"] != bug["old"]
        assert bug["tests"]
        assert set(bug["tests"]) <= planted["tests"].keys()
    for name, test in planted["tests"].items():
        file, _, function = test.partition("::")
        assert not function or f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(), name
