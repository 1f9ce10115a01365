"""A checkpoint written by any ranks is read by any others, bit for bit, and the run survives a failure of one rank."""

from __future__ import annotations

import errno
import math
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from isoflop.train.checkpoint import checkpoint, shards, storage
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import CheckpointConfig, ModelConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.layout import Held, Piece, Placement, split_placement, whole_placement
from isoflop.train.parallel.mesh import build_mesh
from meshes import CPU
from small_disk import disk_of
from torch import Tensor

KINDS = ("weight", "exp_avg", "exp_avg_sq")
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 3, 12

Shares = tuple[int, int, int]  # tp, dp, zero
State = dict[tuple[str, str], Tensor]  # (name, kind): the whole tensor


def config_of_run(keep: int = 2) -> RunConfig:
    run = RunConfig(model=ModelConfig(width=WIDTH, depth=1, heads=HEADS, kv_heads=KV_HEADS, vocab_size=64))
    run.data.sequence_length = 8
    run.checkpoint = CheckpointConfig(keep=keep)
    run.parallel.timeout_seconds = 60.0
    return run


CONFIG = config_of_run()
SHAPES = {
    name: tuple(parameter.shape)
    for name, parameter in build_model(CONFIG.model, CONFIG.optimizer, 8, 0).named_parameters()
}


def state(seed: int) -> State:
    """Draw a training state of the model of `CONFIG`."""
    generator = torch.Generator().manual_seed(seed)
    return {(name, kind): torch.randn(shape, generator=generator) for name, shape in SHAPES.items() for kind in KINDS}


def placement(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Placement:
    """Split a tensor over tensor-parallel ranks as the trainer does."""
    if name.endswith("qkv.weight"):
        return fused(shape, rank, ranks)
    if name.endswith(("out.weight", "down.weight")):
        return split_placement(shape, 1, rank, ranks)
    return split_placement(shape, 0, rank, ranks) if len(shape) == 2 else whole_placement(shape)


def fused(shape: tuple[int, ...], rank: int, ranks: int) -> Placement:
    """Split query rows; split key and value rows if there are enough heads, else put all of them on every rank."""
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    pieces = [Piece((rank * query // ranks, 0), (query // ranks, shape[1]))]
    for first in (query, query + kv):
        if ranks <= KV_HEADS:
            pieces.append(Piece((first + rank * kv // ranks, 0), (kv // ranks, shape[1])))
        else:
            pieces.append(Piece((first, 0), (kv, shape[1]), shared=True, partial=True))
    return Placement(shape, tuple(pieces))


def held_by(rank: int, shares: Shares, full_state: State, bucket: int = 700) -> list[Held]:
    """Return a rank's part: flat buckets of about `bucket` elements in backward order, cut into dp slices by ZeRO."""
    tp, dp, zero = shares
    names = list(SHAPES)[::-1]
    places = {name: placement(name, SHAPES[name], rank % tp, tp) for name in names}
    held, filled = [], 0
    buckets: list[list[str]] = [[]]
    for name in names:
        if filled > bucket:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += math.prod(places[name].local_shape)
    for bucket_names in buckets:
        sizes = [math.prod(places[name].local_shape) for name in bucket_names]
        share = -(-sum(sizes) // dp)
        low, high = (rank // tp * share, (rank // tp + 1) * share) if zero else (0, share * dp)
        first = 0
        for name, size in zip(bucket_names, sizes, strict=True):
            start, stop = max(low - first, 0), min(high - first, size)
            if start < stop:
                for kind in KINDS:
                    values = places[name].take(full_state[name, kind]).flatten()[start:stop].clone()
                    held.append(Held(name, kind, places[name], start, stop, values))
            first += size
    return held


def blank(held: list[Held]) -> list[Held]:
    return [Held(h.name, h.kind, h.placement, h.start, h.stop, torch.full_like(h.values, math.nan)) for h in held]


def assert_same(held: list[Held], expected: list[Held]) -> None:
    for ours, theirs in zip(held, expected, strict=True):
        assert torch.equal(ours.values, theirs.values), (ours.name, ours.kind)


def save_as(shares: Shares, root: Path, config: RunConfig = CONFIG, seed: int = 1, step: int = 5) -> None:
    """Save a state under a mesh and change it while it is being written; call this on every rank."""
    tp, dp, _ = shares
    mesh = build_mesh(dp, tp, CPU)
    saver = Saver(root, mesh, config, ByteTokenizer())
    held = held_by(mesh.rank, shares, state(seed))
    saver.save(step, held, {"seconds": 1.5, "updates": 4})
    for part in held:
        part.values.fill_(math.inf)
    saver.wait()
    saver.close()


WORLDS: dict[int, list[Shares]] = {
    1: [(1, 1, 0)],
    2: [(2, 1, 0), (1, 2, 0), (1, 2, 1)],
    4: [(4, 1, 0), (2, 2, 0), (2, 2, 2), (1, 4, 3), (1, 4, 0)],
}
ALL = [shares for group in WORLDS.values() for shares in group]


def folder(root: Path, shares: Shares) -> Path:
    return root / "tp{}-dp{}-zero{}".format(*shares)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the same state is saved under every mesh."""
    root = tmp_path_factory.mktemp("meshes")
    for ranks, meshes in WORLDS.items():

        def on_rank(meshes: list[Shares] = meshes) -> None:
            for shares in meshes:
                save_as(shares, folder(root, shares))

        run_ranks(ranks, on_rank)
    return root


def test_what_one_mesh_saved_others_load_bit_for_bit(saved: Path) -> None:
    """Load each of them on another mesh, and its weights for evaluation."""
    expected = state(1)
    for number, shares in enumerate(ALL):
        path = checkpoint.find(folder(saved, shares))
        assert (path / "shards").is_dir() == (shares[0] * shares[1] > 1)
        other = ALL[number - 4]
        for rank in range(other[0] * other[1]):
            held = blank(held_by(rank, other, expected))
            trainer = checkpoint.restore_state(path, held, CONFIG)
            assert trainer == {"step": 5, "seconds": 1.5, "updates": 4}
            assert_same(held, held_by(rank, other, expected))
        loaded = checkpoint.load_for_evaluation(folder(saved, shares))
        assert (loaded.step, loaded.tokenizer.vocab_size) == (5, 256)
        for name, parameter in loaded.model.named_parameters():
            assert torch.equal(parameter, expected[name, "weight"]), name


def test_ranks_resume_what_others_saved_and_report_damage_once(saved: Path, tmp_path: Path) -> None:
    shares = (1, 2, 1)
    newest = shutil.copytree(checkpoint.find(folder(saved, (2, 2, 2))), tmp_path / "step_5")
    shutil.copytree(checkpoint.find(folder(saved, (1, 1, 0))), tmp_path / "step_3")
    (newest / "shards" / "__3_0.distcp").unlink()

    def on_rank() -> tuple[list[str], list[str]]:
        mesh = build_mesh(shares[1], shares[0], CPU)
        expected = held_by(mesh.rank, shares, state(1))
        messages: list[str] = []
        refused = []
        held = blank(expected)
        assert checkpoint.resume_state(tmp_path, held, CONFIG, mesh, messages.append) is not None
        assert_same(held, expected)
        for config in (differing("width", 24), differing("hidden", 8)):
            with pytest.raises(UserError) as raised:
                checkpoint.resume_state(tmp_path, held, config, mesh, lambda line: None)
            refused.append(str(raised.value))
        assert checkpoint.resume_state(tmp_path / "nothing", held, CONFIG, mesh, messages.append) is None
        return messages, refused

    answers = run_ranks(2, on_rank)
    (message,), nothing = (messages for messages, _ in answers)
    assert "step_5 is damaged (shards/__3_0.distcp" in message
    assert nothing == []
    for _, (width, hidden) in answers:
        assert "model.width is 12 in the checkpoint and 24 in" in width
        assert "model.hidden is None in the checkpoint and 8 in" in hidden


def differing(field: str, value: int) -> RunConfig:
    config = config_of_run()
    setattr(config.model, field, value)
    return config


def test_a_checkpoint_that_does_not_cover_the_model_is_refused(saved: Path, tmp_path: Path) -> None:
    for shares in ((1, 1, 0), (2, 1, 0)):
        path = checkpoint.find(folder(saved, shares))
        values = torch.zeros(48)
        strange = Held("blocks.9.scale", "weight", whole_placement((48,)), 0, 48, values)
        with pytest.raises(UserError, match=r"step_5 does not fit the model: it has no blocks\.9\.scale"):
            checkpoint.read_tensors(path, [strange])
        larger = Held("norm.weight", "exp_avg", whole_placement((48,)), 0, 48, values)
        with pytest.raises(UserError, match=r"norm\.weight\.exp_avg is \(12,\) in the checkpoint and \(48,\) in"):
            checkpoint.read_tensors(path, [larger])
    # An index that lost a box: torch would silently leave the memory as it was.
    path = shutil.copytree(path, tmp_path / "step_5")
    index = pickle.loads((path / storage.SHARDS_INDEX).read_bytes())
    index.state_dict_metadata["embedding.weight"].chunks.pop()
    (path / storage.SHARDS_INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"is incomplete: a part of embedding\.weight is missing"):
        checkpoint.read_tensors(path, held_by(0, (1, 1, 0), state(2)))


def test_a_folder_that_nodes_do_not_share_is_no_place_for_a_checkpoint(tmp_path: Path) -> None:
    temporary = checkpoint.start(tmp_path / "checkpoints", 5)
    (temporary / "trainer.json").write_text("{}")
    other = {"shards/__8_0.distcp": {"bytes": 1, "sha256": "0"}}  # a file on another node's own disk
    with pytest.raises(UserError, match=r"checkpoints is not the same folder on every node: .* shards/__8_0\.distcp"):
        checkpoint.publish(temporary, tmp_path / "checkpoints" / "step_5", other)
    assert checkpoint.list_steps(tmp_path / "checkpoints") == []


def test_every_element_is_written_once_and_ranks_write_equal_shares(saved: Path) -> None:
    elements = sum(tensor.numel() for tensor in state(1).values())
    for shares in ALL[1:]:
        files = sorted((checkpoint.find(folder(saved, shares)) / "shards").glob("*.distcp"))
        assert len(files) == shares[0] * shares[1]
        index = pickle.loads(files[0].with_name(".metadata").read_bytes())
        index_boxes = [box for tensor in index.state_dict_metadata.values() for box in tensor.chunks]
        assert sum(math.prod(box.sizes) for box in index_boxes) == elements
    for ranks in (2, 3, 8):
        whole_state = storage.parts(held_by(0, (1, 1, 0), state(1)))
        loads = [sum(part.values.numel() for part in share) for share in storage.share_out(whole_state, ranks)]
        assert sum(loads) == elements
        assert max(loads) - min(loads) <= max(part.values.numel() for part in whole_state)


def test_torch_itself_reads_what_the_ranks_wrote(saved: Path) -> None:
    for shares in ((2, 1, 0), (1, 2, 1), (2, 2, 2)):
        loaded = {storage.Part(*key, (), (), tensor).key: torch.empty_like(tensor) for key, tensor in state(1).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it reads in one process, as we ask
            folder_of_shards = checkpoint.find(folder(saved, shares)) / "shards"
            dcp.load(loaded, checkpoint_id=folder_of_shards, no_dist=True)
        for (name, kind), tensor in state(1).items():
            assert torch.equal(loaded[storage.Part(name, kind, (), (), tensor).key], tensor)


def test_training_may_talk_while_the_ranks_save(tmp_path: Path) -> None:
    # If the saver's collectives used training's group, they would be mixed up: wrong sums, or a hang.
    def on_rank() -> list[float]:
        mesh = build_mesh(2, 1, CPU)
        saver = Saver(tmp_path, mesh, CONFIG, ByteTokenizer())
        held = held_by(mesh.rank, (1, 2, 1), state(1))
        sums = []
        for step in range(1, 13):
            if step % 3 == 0:
                saver.save(step, held, {})
            value = torch.tensor([float(step * (mesh.rank + 1))])
            dist.all_reduce(value)
            sums.append(value.item())
        saver.wait()
        saver.close()
        return sums

    assert run_ranks(2, on_rank) == [[3.0 * step for step in range(1, 13)]] * 2
    assert [step for step, _ in checkpoint.list_steps(tmp_path)] == [9, 12]
    for _, path in checkpoint.list_steps(tmp_path):
        assert checkpoint.damage(path) is None


def kill(*arguments: Any, **keywords: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def killed_stream(self: Any, path: Path, mode: str) -> Iterator[Any]:
    path.write_bytes(b"half")
    kill()
    yield


def kill_at_the_manifest(path: Path) -> None:
    if path.name == "manifest.json":
        kill()


MOMENTS: dict[str, tuple[Any, str, Any]] = {
    "shard": (shards._Files, "create_stream", killed_stream),
    "manifest": (checkpoint, "fsync_path", kill_at_the_manifest),
    "rename": (os, "replace", kill),
}


@pytest.mark.parametrize(("victim", "moment"), [(1, "shard"), (0, "manifest"), (0, "rename")])
def test_a_rank_killed_while_saving_leaves_the_older_checkpoint(victim: int, moment: str, tmp_path: Path) -> None:
    def on_rank() -> None:
        mesh = build_mesh(2, 1, CPU)
        saver = Saver(tmp_path, mesh, CONFIG, ByteTokenizer())
        held = held_by(mesh.rank, (1, 2, 1), state(1))
        saver.save(3, held, {})
        saver.wait()
        if mesh.rank == victim:
            setattr(*MOMENTS[moment])
        saver.save(5, held, {})
        saver.wait()

    with pytest.raises(RuntimeError) as raised:
        run_ranks(2, on_rank)
    assert f"rank {victim}: ended without a result" in str(raised.value)
    assert f"rank {1 - victim}: Traceback" in str(raised.value)  # the other one got an error and did not wait
    assert [step for step, _ in checkpoint.list_steps(tmp_path)] == [3]
    assert checkpoint.find(tmp_path).name == "step_3"
    run_ranks(2, save_as, (1, 2, 1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_5"]  # and the leftovers are gone
    assert checkpoint.find(tmp_path).name == "step_5"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_rank_is_an_error_of_all_and_the_run_can_go_on(victim: int, tmp_path: Path) -> None:
    def on_rank() -> tuple[int | None, str]:
        mesh = build_mesh(2, 1, CPU)
        saver = Saver(tmp_path, mesh, CONFIG, ByteTokenizer())
        held = held_by(mesh.rank, (1, 2, 1), state(1))
        saver.save(3, held, {})
        saver.wait()

        def save_twice() -> None:
            saver.save(5, held, {})
            saver.save(6, held, {})  # raises the error of the save before

        with disk_of(2000) if mesh.rank == victim else nullcontext():
            with pytest.raises(OSError) as raised:  # noqa: PT011, the number is checked below
                save_twice()
            dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
        dist.barrier()
        saver.save(7, held, {})
        saver.wait()
        saver.close()
        return raised.value.errno, str(raised.value)

    answers = run_ranks(2, on_rank)
    assert answers[0] == answers[1]
    assert answers[0][0] == errno.EFBIG
    assert checkpoint.find(tmp_path).name == "step_7"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_7"]
