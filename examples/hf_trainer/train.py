"""Train a tiny Llama with Hugging Face's Trainer, which logs and resumes by itself."""

import argparse

import torch
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
for name in ("width", "depth", "heads", "hidden", "batch", "length", "steps", "seed"):
    parser.add_argument(f"--{name}", type=int, required=True)
for name in ("lr", "text", "out", "resume"):
    parser.add_argument(f"--{name}", type=float if name == "lr" else str)
args = parser.parse_args()

# A token per byte, and one that ends a document.
symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytewise = ByteLevelBPETokenizer({symbol: number for number, symbol in enumerate(symbols)}, [])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise._tokenizer, eos_token="<end>")
with open(args.text, encoding="utf-8", errors="replace") as file:
    windows = torch.tensor(bytewise.encode(file.read()).ids).unfold(0, args.length, args.length)
samples = [{"input_ids": window, "labels": window} for window in windows]
config = LlamaConfig(
    vocab_size=len(symbols), hidden_size=args.width, intermediate_size=args.hidden, num_hidden_layers=args.depth,
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
trainer.save_model(f"{args.out}/hf")  # isoflop scores it
tokenizer.save_pretrained(f"{args.out}/hf")
