"""The tasks whose data are staged from the wheel: which file of rows, and whose definition.

Special here:
- Where lm-eval's own definition has the form that is wanted, it is read from the installed lm-eval: prompts, choices,
  filters and metrics are then lm-eval's. Ours (`definitions/`) are lm-eval YAML too, under names that lm-eval has not.
- Ours ask for the *text* of the right answer where lm-eval asks for its letter (`_cloze`) or generates (`_gold`): what
  small models give to it falls smoothly with compute. acc of a `_gold` task is whether greedy decoding would write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .staged_rows import BENCHMARKS

DEFINITIONS = Path(__file__).parent / "definitions"


@dataclass(frozen=True)
class StagedTask:
    """One task.

    Attributes:
        data: name of the staged file.
        yaml: definition: a path inside lm-eval's tasks, or the name of a file in `definitions/`.
        examples: staged file of the examples; empty: they are drawn from the scored split.
        group: column that examples must share with the item, where `examples` is given.
    """

    data: str
    yaml: str
    examples: str = ""
    group: str = ""

    @property
    def files(self) -> set[str]:
        """The staged files that it reads."""
        return {self.data, self.examples} - {""}


_LM_EVAL = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "sciq": "sciq/sciq.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "copa": "super_glue/copa/default.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "cb": "super_glue/cb/default.yaml",
    "rte": "glue/rte/default.yaml",
    "sst2": "glue/sst2/default.yaml",
    "mrpc": "glue/mrpc/default.yaml",
    "nq_open": "nq_open/nq_open.yaml",
    "triviaqa": "triviaqa/default.yaml",
}
_GOLD = ("gsm8k", "humaneval", "mbpp", "minerva", "jeopardy", "squad", "coqa", "drop", "nq_open", "triviaqa")

STAGED: dict[str, StagedTask] = {
    **{name: StagedTask(name, path) for name, path in _LM_EVAL.items()},
    "commonsense_qa_cloze": StagedTask("commonsense_qa", "commonsense_qa_cloze"),
    "mmlu_cloze": StagedTask("mmlu", "mmlu_cloze", examples="mmlu_examples", group="subject"),
    **{f"{name}_gold": StagedTask(name, f"{name}_gold") for name in _GOLD},
    **{name: StagedTask(name, "text") for name in BENCHMARKS if name.startswith("text_")},
}


def definition(task: StagedTask) -> Path:
    """The file that defines it."""
    if "/" not in task.yaml:
        return DEFINITIONS / f"{task.yaml}.yaml"
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tasks" / task.yaml
