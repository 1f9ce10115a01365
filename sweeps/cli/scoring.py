"""`isoflop evaluate`: one or several checkpoints, scored with tasks that are loaded once, and a page of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...train.errors import UserError
from ...train.files import read_json
from ..results.evaluation import Scoring
from ..results.pages import peers_of

SCORES = "scores.json"


@dataclass(frozen=True)
class Options:
    """How checkpoints are scored; see `evaluate.checkpoint.evaluate_checkpoint`."""

    tasks: str
    limit: int | None
    ngram: int | None
    device: str
    precision: str
    ranks: int
    batch_tokens: int | None


@dataclass(frozen=True)
class _Scored:
    """A checkpoint and where its scores are."""

    folder: Path
    scores: dict[str, Any]
    checkpoint: Path | None = None


def score_all(
    checkpoints: Sequence[Path], output: Path | None, against: Path | None, options: Options, as_json: bool
) -> None:
    """Scores the checkpoints, writes their pages, and shows the scores.

    Args:
        checkpoints: checkpoints or run directories.
        output: folder of one, or of a folder for each of several; None: each in its own directory.
        against: a checkpoint, or the scores of one, that each is compared with.
        options: of the scoring.
        as_json: print the scores as JSON, a list where there are several.

    Raises:
        UserError: a checkpoint that cannot be had, a task that is not known, an output that cannot be written.
    """
    from ...evaluate.checkpoint import choose_device
    from ...evaluate.inference.ranks import on_ranks
    from ...train.checkpoint.checkpoint import find

    paths = [find(path) for path in checkpoints]
    folders = _folders(paths, output)
    other = None if against is None else _read(against)
    wanted = list(zip(paths, folders, strict=True))
    if against is not None and other is None:
        wanted.append((path := find(against), path))
    device = choose_device(options.device)
    scored = on_ranks(options.ranks, lambda ranks: _score(wanted, options, ranks, as_json), device=device)
    if scored is None:  # another rank of a job than the first
        return
    if against is not None and other is None:
        other = scored.pop()
    for one in scored:
        _write_page(one, other)
    if as_json:
        found = [one.scores for one in scored]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    else:
        _show(scored)


def _score(wanted: Sequence[tuple[Path, Path]], options: Options, ranks: Any, quietly: bool) -> list[_Scored] | None:
    """One after the other, on every rank alike; only the first has an answer."""
    from ...evaluate.checkpoint import evaluate_checkpoint
    from ...evaluate.tasks.tasks import load_suite

    speaks = ranks.rank == 0 and not quietly
    say = _say if speaks else (lambda line: None)
    shared = Scoring(load_suite(options.tasks, options.limit, progress=say))
    found = []
    for number, (path, folder) in enumerate(wanted, 1):
        if len(wanted) > 1:
            say(f"{path} ({number} of {len(wanted)})")
        scores = evaluate_checkpoint(
            path, output=folder / SCORES, device=options.device, precision=options.precision, ngram=options.ngram,
            suite=shared.suite, tokens=shared.tokens, overlaps=shared.overlaps, ranks=ranks,
            batch_tokens=options.batch_tokens, progress=say,
        )  # fmt: skip
        found.append(_Scored(folder, scores, path))
    return found if ranks.rank == 0 else None


def _say(line: str) -> None:
    print(line, flush=True)


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


def _folders(paths: Sequence[Path], output: Path | None) -> list[Path]:
    if output is None:
        return list(paths)
    if len(paths) == 1:
        return [output]
    # runs/<id>/checkpoints/step_<n>: the run's name and the step tell checkpoints apart, for people too.
    names = [f"{path.absolute().parent.parent.name}_{path.name}" for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"checkpoints of the same name {twice} cannot share --output {output}; score them one by one")
    return [output / name for name in names]


def _read(against: Path) -> _Scored | None:
    """Scores that are there already: the file, or a folder that holds it; None where it is a checkpoint."""
    file = against if against.is_file() else against / SCORES
    if not file.is_file() or (against.is_dir() and (against / "manifest.json").is_file()):
        return None
    scores = read_json(file)
    if scores is None or not isinstance(scores.get("tasks"), dict):
        raise UserError(f"{file} is not a file of scores; give a checkpoint, or what `isoflop evaluate` wrote")
    return _Scored(file.parent, scores)


def _write_page(one: _Scored, other: _Scored | None) -> None:
    from ...evaluate.pages.report import write_checkpoint_report
    from ...evaluate.records.items import items_path, read_items

    items = read_items(items_path(one.folder / SCORES), _warn)
    peers = [] if one.checkpoint is None else peers_of(one.checkpoint.absolute())
    against = None
    if other is not None:
        against = (other.scores, read_items(items_path(other.folder / SCORES), _warn))
    write_checkpoint_report(one.scores, one.folder / "report.html", items, peers, against)


def _show(scored: Sequence[_Scored]) -> None:
    from ...evaluate.pages.report import format_scores

    for one in scored:
        if len(scored) > 1:
            print(one.scores["checkpoint"])
        print(format_scores(one.scores))
        print(f"report: {one.folder / 'report.html'}")
