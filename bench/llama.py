"""The peer of `isoflop bench train`: transformers' LlamaForCausalLM with SDPA, fused AdamW and torch's clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..train.config import ModelConfig, RunConfig


class LlamaStep:
    """A training step of a Llama of our model's shape, on one batch over and over, which it gets for free.

    `batch`: (rows, T + 1) token ids; `weights`: what they are held in, fp32 ones of a bf16 run computed with by
    autocast; `compiled`: forward and loss as one.
    """

    def __init__(self, config: RunConfig, batch: Tensor, weights: torch.dtype, compiled: bool = False) -> None:
        from transformers import LlamaForCausalLM

        with torch.device(batch.device):
            llama: Any = LlamaForCausalLM(_shape(config.model, batch.shape[1] - 1))
        self.llama = llama.to(weights).train()
        optimizer = config.optimizer
        self.adamw = torch.optim.AdamW(
            llama.parameters(),
            optimizer.learning_rate,
            (optimizer.beta1, optimizer.beta2),
            optimizer.eps,
            optimizer.weight_decay,
            fused=True,
        )
        self.clip = optimizer.gradient_clip
        self.batch, self.micro = batch, config.parallel.micro_batch_size or len(batch)
        self.autocast = config.precision == "bf16" and weights == torch.float32
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss

    def __call__(self) -> Tensor:
        """The batch's mean loss, before the update."""
        total = torch.zeros((), device=self.batch.device)
        for rows in self.batch.split(self.micro):
            with torch.autocast(self.batch.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.loss(rows) * (len(rows) / len(self.batch))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.llama.parameters(), self.clip)
        self.adamw.step()
        self.adamw.zero_grad()
        return total

    def _loss(self, rows: Tensor) -> Tensor:
        logits = self.llama(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def _shape(model: ModelConfig, length: int) -> Any:
    from transformers import LlamaConfig

    assert model.vocab_size is not None
    shape: dict[str, Any] = {
        "hidden_size": model.width,
        "intermediate_size": model.mlp_hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": length,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**shape)
