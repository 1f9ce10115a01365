"""The two collectives on flat buffers that torch renamed: 2.13 warns of the old names, and 2.11 lacks the new ones."""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
