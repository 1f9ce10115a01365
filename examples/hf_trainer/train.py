"""Train a tiny Llama with Hugging Face's Trainer, which logs and resumes by itself."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
for name in ("width", "depth", "heads", "hidden", "batch", "length", "steps", "seed"):
    parser.add_argument(f"--{name}", type=int, required=True)
for name in ("lr", "text", "out", "resume"):
    parser.add_argument(f"--{name}", type=float if name == "lr" else str)
args = parser.parse_args()

with open(args.text, "rb") as file:
    windows = torch.tensor(list(file.read())).unfold(0, args.length, args.length)
samples = [{"input_ids": window, "labels": window} for window in windows]
config = LlamaConfig(
    vocab_size=256, hidden_size=args.width, intermediate_size=args.hidden, num_hidden_layers=args.depth,
    num_attention_heads=args.heads, max_position_embeddings=args.length, tie_word_embeddings=True,
)  # fmt: skip
torch.manual_seed(args.seed)
training = TrainingArguments(
    args.out, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=args.lr, seed=args.seed,
    logging_steps=5, eval_strategy="steps", eval_steps=args.steps, save_steps=20, report_to=[], use_cpu=True,
)  # fmt: skip
trainer = Trainer(LlamaForCausalLM(config), training, train_dataset=samples[:-16], eval_dataset=samples[-16:])
trainer.train(resume_from_checkpoint=args.resume)
trainer.save_state()
