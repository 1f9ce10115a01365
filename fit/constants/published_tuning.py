"""Published laws of learning rate and batch size: records like those of `published_constants`, and their rules hold."""

from __future__ import annotations

from .published_constants import DEEPSEEK, KAPLAN, MINICPM, PORIAN, Record

TUNED = "the fits of the tuned learning rate and batch size"
STEP_LAW: Record = {
    "authors": "Li et al. (Step Law)",
    "year": 2025,
    "arxiv": "2503.04715",
    "form": "power",
    "where": "equation 1",
    "N_convention": "N_non_embedding",
    "tokenizer": "BPE, 65,536",
    "data": "web text, mostly English",
    "fitted": {"N": (2.15e8, 1.07e9), "D": (4e9, 1e11)},
}

TUNING: dict[str, Record] = {
    "kaplan2020_critical_batch": KAPLAN
    | {
        "kind": "critical batch size",
        "form": "power",
        "inputs": ("L",),
        "constants": {"k": 2.1e8, "p_L": -1 / 0.21},
        "where": "equation 1.4, table 5",
        "notes": "L is the loss in nats per token.",
    },
    "kaplan2020_learning_rate": KAPLAN
    | {
        "kind": "learning rate",
        "form": "logarithm",
        "inputs": ("N",),
        "unit": "peak learning rate of Adam",
        "constants": {"a": 0.003239, "b": -0.0001395},
        "where": "equation D.1",
        "notes": "A rule of thumb, which falls to zero near 1e10 parameters.",
    },
    "porian2024_learning_rate": PORIAN
    | {
        "kind": "learning rate",
        "inputs": ("N",),
        "constants": {"k": 3.7, "p_N": -0.36},
        "where": TUNED,
    },
    "porian2024_batch": PORIAN
    | {
        "kind": "batch size",
        "inputs": ("N",),
        "constants": {"k": 0.7576, "p_N": 0.703},
        "where": TUNED + "; there in sequences of 2,048 tokens",
    },
    "deepseek2024_learning_rate": DEEPSEEK
    | {
        "kind": "learning rate",
        "constants": {"k": 0.3118, "p_C": -0.1250},
        "where": "equation 1",
        "fitted": {"C": (1e17, 2e19)},
    },
    "deepseek2024_batch": DEEPSEEK
    | {
        "kind": "batch size",
        "constants": {"k": 0.2920, "p_C": 0.3271},
        "where": "equation 1",
        "fitted": {"C": (1e17, 2e19)},
    },
    "minicpm2024_batch": MINICPM
    | {
        "kind": "batch size",
        "inputs": ("L",),
        "constants": {"k": 1.21e9, "p_L": -6.24},
        "where": "section 3.2",
        "data": "C4",
        "fitted": {"N": (9e6, 1.7e8)},
        "notes": "L is the loss on C4 in nats per token; the batch needs the fewest tokens to reach it.",
    },
    "steplaw2025_learning_rate": STEP_LAW
    | {
        "kind": "learning rate",
        "inputs": ("N", "D"),
        "constants": {"k": 1.79, "p_N": -0.713, "p_D": 0.307},
    },
    "steplaw2025_batch": STEP_LAW | {"kind": "batch size", "inputs": ("D",), "constants": {"k": 0.58, "p_D": 0.571}},
    "bergsma2025_batch": {
        "kind": "batch size",
        "form": "power",
        "inputs": ("D",),
        "unit": "sequences of 2,048 tokens",
        "constants": {"k": 0.0306, "p_D": 0.383},
        "authors": "Bergsma et al. (Power Lines)",
        "year": 2025,
        "arxiv": "2505.13738",
        "where": "figure 1",
        "tokenizer": "GPT-2 BPE, 50,257",
        "data": "SlimPajama",
        "fitted": {"N": (1.11e8, 3.3e9)},
        "notes": "The batch of lowest loss, under muP.",
    },
}
