"""Rows of evaluation sets in the columns they have on the hub, through a local copy of each."""

from functools import partial

import pytest

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets.hub import EVAL_DATASETS, answer_kind, load_problem_table

GPQA = {"Record ID": "rec1", "Question": "Which one?", "Correct Answer": "right\n", "Explanation": "because"}
GPQA |= {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)}
MMLU = {"question": "2+2?", "subject": "algebra", "choices": ["3", "4", "5", "6"], "answer": 1}
MMLU_PRO = {"question_id": 7, "question": "Which?", "options": [f"o{n}" for n in range(10)], "answer": "J"}
MMLU_PRO |= {"answer_index": 9, "cot_content": "", "category": "law", "src": "x"}
MMMLU = {"Unnamed: 0": 0, "Question": "Was?", "A": "a", "B": "b", "C": "c", "D": "d", "Answer": "C", "Subject": "law"}
AIME = {"id": 60, "problem": "Find n.", "solution": "So 204.", "answer": "204", "url": "u", "year": "2024"}
MATH = {"problem": "Half of one?", "level": "Level 1", "type": "Algebra", "solution": r"It is \boxed{\frac{1}{2}}."}


def rows_of(name, path, seed=42):
    cfg = DatasetConfig(dataset_name=name, data_path=path, seed=seed, processor="", env_name="")
    return EVAL_DATASETS[name].load(cfg)


@pytest.mark.parametrize(
    ("name", "row", "asked", "answer", "kind"),
    [
        ("aime2024", AIME, "Find n.", "204", "math"),
        ("aime2025", {"question": "Find m.", "answer": "70"}, "Find m.", "70", "math"),
        ("math500", {**MATH, "answer": r"\frac{1}{2}", "unique_id": "t/1"}, "Half of one?", r"\frac{1}{2}", "math"),
        ("math", MATH, "Half of one?", r"\frac{1}{2}", "math"),
        ("gsm8k", {"question": "How many?", "answer": "2*512 = 1,024\n#### 1,024"}, "How many?", "1024", "math"),
        ("mmlu", MMLU, {"A": "3", "B": "4", "C": "5", "D": "6"}, "B", "english_multichoice"),
        ("mmlu", MMLU | {"answer": 0}, {"A": "3", "B": "4", "C": "5", "D": "6"}, "A", "english_multichoice"),
        ("mmlu_pro", MMLU_PRO, dict(zip("ABCDEFGHIJ", MMLU_PRO["options"], strict=True)), "J", "english_multichoice"),
        ("mmlu_DE-DE", MMMLU, {"A": "a", "B": "b", "C": "c", "D": "d"}, "C", "multilingual_multichoice"),
    ],
)
def test_problems_and_options(name, row, asked, answer, kind, write):
    (found,) = rows_of(name, write([row]))
    assert (found["problem" if kind == "math" else "options"], found["expected_answer"]) == (asked, answer)
    assert answer_kind(name) == EVAL_DATASETS[name].kind == kind


def test_gpqa_options_are_shuffled_row_by_row_and_always_the_same(write):
    questions = [GPQA | {"Question": f"Which of {n}?"} for n in range(60)]

    def answers(questions, **seed):
        rows = list(rows_of("gpqa_diamond", write(questions), **seed))
        for options, answer in ((row["options"], row["expected_answer"]) for row in rows):
            assert options[answer] == "right" and list(options) == list("ABCD")
            assert sorted(options.values()) == ["right", "w1", "w2", "w3"]
        return [row["expected_answer"] for row in rows]

    first = answers(questions)
    assert len(set(first)) == 4, "no letter is always right"
    assert answers(questions[::-1]) == first[::-1], "place in the file plays no part"
    assert answers(questions, seed=1) != first


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "told"),
    [
        ("aime2024", AIME, "answer", None, "has no answer: column 'answer' is empty"),
        ("aime2024", AIME, "problem", "  ", "has no problem: column 'problem' is empty"),
        ("math", MATH, "solution", "It is one half.", "has no answer: none is found in column 'solution'"),
        ("gpqa", GPQA, "Correct Answer", None, "has no answer: column 'Correct Answer' is empty"),
        ("gpqa", GPQA, "Incorrect Answer 2", None, "has no option: column 'Incorrect Answer 2' is empty"),
        ("mmlu", MMLU, "answer", 4, "has the answer 'E' in column 'answer'; its options are A, B, C, D"),
        ("mmlu_DE-DE", MMMLU, "Answer", "E", "has the answer 'E' in column 'Answer'"),
    ],
)
def test_a_row_without_an_answer_is_named(name, row, column, value, told, write):
    rows = rows_of(name, write([row, row | {column: value}]))
    assert rows[0]["expected_answer"]
    with pytest.raises(ValueError, match=f"'{name}': row 1 {told}"):
        rows[1]


def test_a_file_of_another_name_and_what_is_wrong_with_files(tmp_path):
    (tmp_path / "rows.txt").write_text("problem,answer\n1+1,2\n")
    load = partial(load_problem_table, str(tmp_path / "rows.txt"), problem_key="problem")
    assert load(solution_key="answer", file_format="csv")[0]["expected_answer"] == "2"
    with pytest.raises(ValueError, match=r"no column 'loesung' \(data.solution_key\)"):
        load(solution_key="loesung", file_format="csv")
    with pytest.raises(ValueError, match=r"data.file_format='xml'.*one of jsonl, json, csv, parquet"):
        load(solution_key="answer", file_format="xml")
