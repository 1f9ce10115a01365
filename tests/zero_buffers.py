"""What a rank's ZeRO engine keeps in memory from step to step."""

from __future__ import annotations

from isoflop.train.parallel.zero import Zero


def bytes_held(zero: Zero) -> dict[str, int]:
    """Bytes of this rank's lasting buffers."""
    gradients = zero.gradients
    tensors = {
        "weights": zero.weights.full if zero.stage < 3 else zero.weights.own,
        "gradients": [b.shard if gradients.freed or b.full is None else b.full for b in gradients.buckets],
        "master": zero.master if zero.dtype != zero.wide else [],
        "exp_avg": zero.exp_avg,
        "exp_avg_sq": zero.exp_avg_sq,
    }
    return {kind: sum(t.numel() * t.element_size() for t in held) for kind, held in tensors.items()}
