"""Train a GRU on the bytes of a text. It saves its whole state, so a resumed run gives the same losses."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
for name in ("width", "depth", "lr", "batch", "length", "steps", "seed", "text", "out", "resume"):
    parser.add_argument(f"--{name}", type={"lr": float, "text": Path, "out": Path, "resume": Path}.get(name, int))
args = parser.parse_args()

data = torch.tensor(list(args.text.read_bytes()))
train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
torch.manual_seed(args.seed)
embed, head = nn.Embedding(256, args.width), nn.Linear(args.width, 256)
gru = nn.GRU(args.width, args.width, args.depth, batch_first=True)
model = nn.ModuleList([embed, gru, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
step, log = 0, (args.out / "log.jsonl").open("a", buffering=1)
if args.resume:
    state = torch.load(args.resume)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])


def loss_of(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    windows = torch.stack([text[start : start + args.length + 1] for start in starts])
    logits = head(gru(embed(windows[:, :-1]))[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


while step < args.steps:
    loss = loss_of(train, torch.randint(len(train) - args.length, (args.batch,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 10 == 0:
        log.write(json.dumps({"step": step, "train_loss": loss.item()}) + "\n")
    if step % 50 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state | {"rng": torch.get_rng_state()}, args.out / "saving.pt")
        os.replace(args.out / "saving.pt", args.out / "checkpoint.pt")  # whole, or not at all
with torch.no_grad():
    val_loss = loss_of(held_out, torch.arange(0, len(held_out) - args.length, args.length)).item()
log.write(json.dumps({"step": step, "val_loss": val_loss}) + "\n")
