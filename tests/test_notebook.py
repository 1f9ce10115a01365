"""The notebook runs from top to bottom, on the project's own runs, without torch."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_the_notebook_runs_and_what_it_shows_is_kept(name):
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # What readers see on the web is the outputs as committed.
    assert sum(bool(cell.outputs) for cell in code) >= len(code) - 2
    check = nbformat.v4.new_code_cell("import sys; assert 'torch' not in sys.modules, 'the notebook loads torch'")
    notebook.cells.append(check)
    kernel = {"name": "python3", "display_name": sys.executable, "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()  # raises


def test_there_is_a_notebook():
    assert (NOTEBOOKS / "fit_loss_curves.ipynb").is_file()
