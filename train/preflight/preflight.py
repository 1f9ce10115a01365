"""All checks of a device, in a process of their own: one that crashes or hangs is a finding, and the rest go on."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import RunConfig, from_dict, to_dict
from .finding import FAILED, INSTEAD, REPLACED, Finding

OF_NODE = ("gpus", "disk", "shared memory", "network")  # which need no PyTorch
OF_KIND = ("ranks", "software", "attention", "loss", "step", "memory")  # ranks before this process takes a GPU


@dataclass(frozen=True)
class Request:
    """What is to be checked for."""

    runs: list[RunConfig]
    folder: Path  # that checkpoints go to
    device: str = "auto"
    ranks: int = 1  # of a run, on this node
    grace: float = 30.0  # seconds that a preempted job has to save
    bandwidth: float | None = None  # bytes a second between ranks of a node, as the cluster's group says
    hosts: list[str] = field(default_factory=list)  # NAME:PORT that runs will want
    timeout: float = 90.0  # seconds that one check may take


def findings(request: Request, checks: Sequence[str] = (*OF_NODE, *OF_KIND)) -> Iterator[Finding]:
    """What the checks find, as they find it."""
    left = list(checks)
    while left:
        at = left[0]
        with tempfile.TemporaryFile("w+") as errors:
            child = _start(request, left, errors)
            try:
                for message in _messages(child, request.timeout):
                    if "begin" in message:
                        at = message["begin"]
                        left = left[left.index(at) :]
                    else:
                        yield Finding(**message)
                hung = child.poll() is None
            finally:
                child.kill()
                code = child.wait()
            if code == 0 and not hung:
                return
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
        said = f"no answer within {request.timeout:g} s" if hung else f"its process ended with code {code} ({last})"
        left = left[1:]
        decides: dict[str, Any] = INSTEAD.get(at, {})
        if decides and any(decides.items() - vars(run.parallel).items() for run in request.runs):
            plain = [replace(run, parallel=replace(run.parallel, **decides)) for run in request.runs]
            request, left = replace(request, runs=plain), [at, *left]
            yield Finding(at, REPLACED, f"{at}: {said}; PyTorch's kernel takes the place of ours", decides)
        else:
            yield Finding(at, FAILED, f"{at}: {said}")


def _start(request: Request, checks: Sequence[str], errors: Any) -> subprocess.Popen[bytes]:
    wanted = to_dict(request) | {"folder": str(request.folder), "checks": list(checks)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(wanted).encode())
    child.stdin.close()
    return child


def _messages(child: subprocess.Popen[bytes], timeout: float) -> Iterator[dict[str, Any]]:
    """Lines of JSON until the process ends, or says nothing for too long."""
    assert child.stdout is not None
    deadline, unread = time.monotonic() + timeout, b""
    while select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        read = os.read(child.stdout.fileno(), 2**16)
        if not read:
            child.wait(timeout)
            return
        *lines, unread = (unread + read).split(b"\n")
        for line in lines:
            yield json.loads(line)
            deadline = time.monotonic() + timeout


def main() -> None:
    """The process of its own: reads a request, writes what it finds."""
    wanted = json.loads(sys.stdin.read())
    checks, out = wanted.pop("checks"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no message
    runs = [from_dict(RunConfig, run) for run in wanted.pop("runs")]
    request = Request(runs=runs, folder=Path(wanted.pop("folder")), **wanted)
    for check in checks:
        print(json.dumps({"begin": check}), file=out)
        for finding in _run(check, request):
            print(json.dumps(asdict(finding)), file=out)


def _run(check: str, request: Request) -> Iterator[Finding]:
    from . import machine

    match check:
        case "gpus":
            return machine.check_gpus(request.device)
        case "disk":
            return machine.check_disk(request.runs, request.folder, request.grace)
        case "shared memory":
            return machine.check_shared_memory(request.ranks)
        case "network":
            return machine.check_network(request.ranks, request.hosts)
    from ..hardware import pick_device
    from . import numerics, ranks

    device = pick_device(request.device)
    match check:
        case "ranks":
            return ranks.check_ranks(request.ranks, device.type, request.timeout / 2, request.bandwidth)
        case "speed":
            return ranks.check_speed(device)
        case "software":
            return machine.check_software(device)
        case "attention":
            return numerics.check_attention(request.runs, device)
        case "loss":
            return numerics.check_loss(request.runs, device)
        case "step":
            return numerics.check_step(request.runs, device)
        case "memory":
            return numerics.check_memory(request.runs, device)
    raise ValueError(check)


if __name__ == "__main__":
    main()
