"""The constants of published laws, a record each: fields of `published.PublishedLaw`.

Special here:
- A number is here only as its source prints it (as a logarithm, or in PF-days, where the source does). Where a paper
  prints an exponent and a table but no coefficient, the record is anchored at one row of the table (C_0, k); the notes
  say which.
- `intervals` are the paper's own, at the record's `level`.
- A field that the paper leaves open is None, not guessed.
- `fitted` is the range of the runs behind the fit: C in FLOPs, N in parameters, D in tokens, M = D / N.
"""

from __future__ import annotations

from math import exp
from typing import Any

Record = dict[str, Any]
PF_DAY = 8.64e19  # FLOPs of 1e15 a second for a day

KAPLAN: Record = {
    "authors": "Kaplan et al.",
    "year": 2020,
    "arxiv": "2001.08361",
    "N_convention": "N_kaplan",
    "flops_convention": "6 N_kaplan D",
    "tokenizer": "GPT-2 BPE, 50,257",
    "data": "WebText2",
    "fitted": {"N": (768, 1.5e9), "D": (2.2e7, 2.3e10)},
}
KAPLAN_COMPUTE = KAPLAN | {
    "flops_convention": "6 N_kaplan D; C_min = C / 2 at the critical batch size",
    "inputs": ("C_min",),
    "fitted": {"N": (768, 1.5e9)},
}
HOFFMANN: Record = {
    "authors": "Hoffmann et al.",
    "year": 2022,
    "arxiv": "2203.15556",
    "N_convention": "N_total",
    "flops_convention": "exact (appendix F)",
    "tokenizer": "SentencePiece, 32,000",
    "data": "MassiveText",
    "level": 0.8,
}
APPROACH_3 = HOFFMANN | {
    "kind": "loss",
    "form": "chinchilla",
    "inputs": ("N", "D"),
    "flops_convention": "6ND",
    "fitted": {"N": (7e7, 1.6e10), "D": (5e9, 5e11), "C": (6e18, 3e21)},
}
MUENNIGHOFF: Record = {
    "authors": "Muennighoff et al.",
    "year": 2023,
    "arxiv": "2305.16264",
    "kind": "loss",
    "flops_convention": "6ND",
    "tokenizer": "GPT-2 BPE, 50,257",
    "data": "C4",
}
MUENNIGHOFF_C4 = {
    "E": exp(0.6254804),
    "A": exp(6.255414),
    "B": exp(7.3049974),
    "alpha": 0.3526596,
    "beta": 0.3526596,
}
GADRE: Record = {
    "authors": "Gadre et al.",
    "year": 2024,
    "arxiv": "2403.08540",
    "where": "table 6",
    "N_convention": "N_total",
    "flops_convention": "6ND",
    "tokenizer": "GPT-NeoX-20B BPE, 50k",
}
GADRE_LOSS = GADRE | {
    "kind": "loss",
    "form": "overtraining",
    "inputs": ("N", "D"),
    "unit": "nats/token on C4's validation set",
    "fitted": {"N": (1.1e7, 4.11e8), "M": (20, 320)},
    "notes": "Fitted to 5 runs at M = D/N of 20 and more, so the authors do not trust the M that minimises it. "
    "Versions of the paper print a, b and eta differently; these are the ones that reproduce the released runs, to "
    "about 1 %.",
}
GADRE_ERROR = GADRE | {
    "kind": "error",
    "form": "exponential",
    "inputs": ("L",),
    "unit": "top-1 error, mean of 17 tasks",
    "notes": "L is the loss on C4's validation set, in nats per token.",
}
PORIAN: Record = {
    "authors": "Porian et al.",
    "year": 2024,
    "arxiv": "2406.19146",
    "kind": "optimal N",
    "form": "power",
    "inputs": ("C",),
    "where": "table 1; coefficients from the released fits (weighted)",
    "level": 0.95,
    "N_convention": "N_kaplan + output head",
    "flops_convention": "6 (N_kaplan + output head) D",
    "tokenizer": "GPT-NeoX-20B BPE, 50k",
    "data": "RefinedWeb",
    "fitted": {"C": (1.25e16, 2.56e19), "N": (5e6, 9.01e8)},
}
DEEPSEEK: Record = {
    "authors": "DeepSeek-AI (Bi et al.)",
    "year": 2024,
    "arxiv": "2401.02954",
    "form": "power",
    "inputs": ("C",),
    "N_convention": "M / 6, M non-embedding FLOPs/token with attention",
    "flops_convention": "M D",
    "tokenizer": "byte-level BPE, 102,400",
    "data": "DeepSeek in-house, Chinese and English",
}
MINICPM: Record = {
    "authors": "Hu et al. (MiniCPM)",
    "year": 2024,
    "arxiv": "2404.06395",
    "form": "power",
    "N_convention": "N_non_embedding",
    "flops_convention": "6ND",
    "tokenizer": "BPE, 122,753",
}

RECORDS: dict[str, Record] = {
    "kaplan2020_N": KAPLAN
    | {
        "kind": "loss",
        "form": "reciprocal",
        "inputs": ("N",),
        "constants": {"scale": 8.8e13, "alpha": 0.076},
        "where": "equation 1.1, table 5",
        "notes": "Trained to convergence on enough data.",
    },
    "kaplan2020_D": KAPLAN
    | {
        "kind": "loss",
        "form": "reciprocal",
        "inputs": ("D",),
        "constants": {"scale": 5.4e13, "alpha": 0.095},
        "where": "equation 1.2, table 5",
        "notes": "A large model, stopped early; D is the size of the data set.",
    },
    "kaplan2020_C": KAPLAN_COMPUTE
    | {
        "kind": "loss",
        "form": "reciprocal",
        "constants": {"scale": 3.1e8 * PF_DAY, "alpha": 0.050},
        "where": "equation 1.3, table 5",
        "notes": "Loss of the best model at each C_min, the compute at a batch far below the critical one; the "
        "paper states 3.1e8 PF-days.",
    },
    "kaplan2020_joint": KAPLAN
    | {
        "kind": "loss",
        "form": "kaplan",
        "inputs": ("N", "D"),
        "constants": {"N_c": 6.4e13, "D_c": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103},
        "where": "equation 1.5, table 2",
        "notes": "D is the size of a data set that is repeated until early stopping, so C = 6ND is not its cost.",
    },
    "kaplan2020_N_opt": KAPLAN_COMPUTE
    | {
        "kind": "optimal N",
        "form": "power",
        "constants": {"k": 1.3e9, "p_C_min": 0.73, "C_min_0": PF_DAY},
        "frontier": "kaplan2020_C",
        "where": "table 6",
        "notes": "At the critical batch size a run costs C = 2 C_min, which `optimal` takes into account; so do "
        "Hoffmann et al., who read 4.68e9 parameters at 1e21 FLOPs from it.",
    },
    "hoffmann2022_approach1": HOFFMANN
    | {
        "kind": "optimal N",
        "form": "power",
        "inputs": ("C",),
        "constants": {"k": 6.7e10, "p_C": 0.50, "C_0": 5.76e23},
        "intervals": {"p_C": (0.488, 0.502)},
        "where": "section 3.1, tables 2 and 3",
        "fitted": {"N": (7e7, 1e10)},
        "notes": "Anchored at the row of 67B parameters of table 3, as no coefficient is printed.",
    },
    "hoffmann2022_approach2": HOFFMANN
    | {
        "kind": "optimal N",
        "form": "power",
        "inputs": ("C",),
        "constants": {"k": 6.7e10, "p_C": 0.49, "C_0": 6.88e23},
        "intervals": {"p_C": (0.462, 0.534)},
        "where": "section 3.2, tables 2 and A3",
        "fitted": {"C": (6e18, 3e21), "N": (7e7, 1.6e10)},
        "notes": "Anchored at the row of 67B parameters of table A3, as no coefficient is printed.",
    },
    "hoffmann2022_approach3": APPROACH_3
    | {
        "constants": {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28},
        "where": "equation 10",
        "notes": "As printed, and inconsistent: rounded exponents give 32B parameters at Gopher's budget where "
        "the paper says 40B and its approach 1 says 67B, and the optimizer had not converged (Besiroglu et al. "
        "2024).",
    },
    "hoffmann2022_approach3_unrounded": APPROACH_3
    | {
        "constants": {"E": 1.6934, "A": 406.4, "B": 410.7, "alpha": 0.3392, "beta": 0.2849},
        "where": "the paper's TeX source, as quoted by Besiroglu et al. 2024",
        "notes": "Reproduces the paper's own table A3 and its 40B parameters at Gopher's budget. The published "
        "interval of the exponent of N*, 0.454 to 0.455, is far too narrow, as its optimizer had not converged.",
    },
    "besiroglu2024": APPROACH_3
    | {
        "authors": "Besiroglu et al.",
        "year": 2024,
        "arxiv": "2404.10102",
        "constants": {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658},
        "intervals": {"alpha": (0.317, 0.373), "beta": (0.331, 0.415)},
        "level": 0.95,
        "where": "the fit without outliers; intervals from the released bootstrap",
        "data": "MassiveText, 240 runs read from Hoffmann et al.'s figure 4",
        "notes": "Approach 3 fitted again to convergence, without the 5 highest losses.",
    },
    "muennighoff2023_c4": MUENNIGHOFF
    | {
        "form": "chinchilla",
        "inputs": ("N", "D"),
        "constants": MUENNIGHOFF_C4,
        "where": "appendix, equations 19 and 20",
        "notes": "One epoch, alpha = beta tied. The 41 released runs of one epoch lie 12 % above it (median).",
    },
    "muennighoff2023_repetition": MUENNIGHOFF
    | {
        "form": "repetition",
        "inputs": ("N", "D", "U"),
        "constants": MUENNIGHOFF_C4 | {"R_D": 15.387756, "R_N": 5.309743},
        "where": "equations 5, 6, 16 and 17",
        "fitted": {"N": (7e6, 9e9)},
        "notes": "U unique tokens, D tokens in all; fitted to 182 runs of 1 to 500 epochs. The losses of the 296 "
        "released runs lie 9 % above it (median).",
    },
    "gadre2024_c4": GADRE_LOSS | {"constants": {"E": 1.51, "a": 141.0, "b": 190.0, "eta": 0.121}, "data": "C4"},
    "gadre2024_redpajama": GADRE_LOSS
    | {"constants": {"E": 1.84, "a": 212.0, "b": 367.0, "eta": 0.136}, "data": "RedPajama"},
    "gadre2024_refinedweb": GADRE_LOSS
    | {"constants": {"E": 1.73, "a": 157.0, "b": 246.0, "eta": 0.127}, "data": "RefinedWeb"},
    "gadre2024_c4_error": GADRE_ERROR | {"constants": {"epsilon": 0.850, "k": 2.08, "gamma": 0.756}, "data": "C4"},
    "gadre2024_redpajama_error": GADRE_ERROR
    | {"constants": {"epsilon": 0.857, "k": 2.21, "gamma": 0.715}, "data": "RedPajama"},
    "gadre2024_refinedweb_error": GADRE_ERROR
    | {"constants": {"epsilon": 0.865, "k": 2.21, "gamma": 0.707}, "data": "RefinedWeb"},
    "porian2024_kaplan": PORIAN
    | {
        "constants": {"k": 4.2319659e-8, "p_C": 0.83530004},
        "intervals": {"p_C": (0.82351, 0.84596)},
        "N_convention": "N_kaplan",
        "flops_convention": "6 N_kaplan D",
        "notes": "Step 1 of 5: Kaplan et al.'s set-up, reproduced.",
    },
    "porian2024_head": PORIAN
    | {
        "constants": {"k": 1.2701848e-5, "p_C": 0.70646991},
        "intervals": {"p_C": (0.69149, 0.71693)},
        "notes": "Step 2 of 5: the output head counts, in parameters and in FLOPs.",
    },
    "porian2024_warmup": PORIAN
    | {
        "constants": {"k": 1.4309165e-3, "p_C": 0.60203753},
        "intervals": {"p_C": (0.59143, 0.61728)},
        "notes": "Step 3 of 5: a warm-up as long as the model is large.",
    },
    "porian2024_decay": PORIAN
    | {
        "constants": {"k": 4.7692868e-3, "p_C": 0.57149479},
        "intervals": {"p_C": (0.55980, 0.58852)},
        "notes": "Step 4 of 5: a cosine as long as the run.",
    },
    "porian2024_tuned": PORIAN
    | {
        "constants": {"k": 0.11892648, "p_C": 0.49689508},
        "intervals": {"p_C": (0.49068, 0.50452)},
        "notes": "Step 5 of 5: learning rate, batch size and beta_2 tuned for each size, constant learning rate.",
    },
    "deepseek2024": DEEPSEEK
    | {
        "kind": "optimal M",
        "constants": {"k": 0.1715, "p_C": 0.5243},
        "where": "equation 4",
        "fitted": {"C": (1e17, 3e20)},
        "notes": "M_opt; D_opt = 5.8316 C^0.4757 follows from C = M D. The exponent changed with the data: 0.450 "
        "on early in-house data, 0.578 on OpenWebText2.",
    },
    "minicpm2024": MINICPM
    | {
        "kind": "optimal D/N",
        "inputs": ("C",),
        "constants": {"k": 192.0},
        "where": "section 4, scaling law with WSD",
        "data": "mean of five held-out corpora",
        "fitted": {"N": (4e7, 2e9), "M": (10, 60)},
        "notes": "The mean ratio that the text states. Its mean constants (alpha 0.29, beta 0.23, K^2 0.01, eta "
        "-0.10) do not give it: means of exponents do not combine.",
    },
    "llama3": {
        "kind": "optimal D",
        "form": "power",
        "inputs": ("C",),
        "constants": {"k": 0.299, "p_C": 0.537},
        "authors": "Grattafiori et al. (Llama 3)",
        "year": 2024,
        "arxiv": "2407.21783",
        "where": "section 3.2.1, figure 3",
        "tokenizer": "BPE, 128,000",
        "data": "Llama 3 in-house",
        "fitted": {"C": (6e18, 1e22), "N": (4e7, 1.6e10)},
        "notes": "Tokens, though the paper writes N*(C). The text rounds to 0.29 C^0.53, and states 16.55T tokens "
        "and 402B parameters at 3.8e25 FLOPs, which is 5 % more than 6ND.",
    },
    "cerebras2023": {
        "kind": "loss",
        "form": "reciprocal",
        "inputs": ("C",),
        "unit": "nats/token on the Pile's test set",
        "constants": {"scale": 5.984e22, "alpha": 0.0737, "E": 0.5066},
        "authors": "Dey et al. (Cerebras-GPT)",
        "year": 2023,
        "arxiv": "2304.03208",
        "where": "equation 1",
        "N_convention": "N_total",
        "flops_convention": "exact, with attention and embeddings",
        "tokenizer": "GPT-2 BPE, 50,257",
        "data": "The Pile",
        "fitted": {"N": (1.11e8, 1.3e10), "C": (2.6e18, 2.3e22)},
        "notes": "Every model saw 20 tokens a parameter, so it says nothing of the split.",
    },
    "sardana2023": {
        "kind": "loss",
        "form": "chinchilla",
        "inputs": ("N", "D"),
        "constants": {"E": 1.45, "A": 33.66, "B": 138.9, "alpha": 0.18, "beta": 0.24},
        "authors": "Sardana et al.",
        "year": 2023,
        "arxiv": "2401.00448",
        "where": "table 1, all data",
        "flops_convention": "6ND",
        "fitted": {"N": (1.5e8, 6e9), "M": (10, 1e4)},
        "notes": "The authors show how far runs of up to 10,000 tokens a parameter move every constant. What "
        "two digits of such flat exponents say of the split is worth little.",
    },
    "kumar2024": {
        "kind": "loss",
        "form": "chinchilla",
        "inputs": ("N", "D"),
        "constants": {"E": 2.7648, "A": 4.299e3, "B": 1.806e4, "alpha": 0.4965, "beta": 0.4965},
        "authors": "Kumar et al.",
        "year": 2024,
        "arxiv": "2411.04330",
        "where": "appendix K, table 2",
        "N_convention": "N_non_embedding",
        "flops_convention": "6ND",
        "data": "Dolma",
        "fitted": {"N": (3e7, 2.2e8), "D": (1.5e9, 2.6e10)},
        "notes": "The limit of full precision, alpha = beta tied. The factors for few bits are left out: their "
        "printed constants come with offsets whose sign the paper does not fix.",
    },
}
