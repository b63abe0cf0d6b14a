"""From rows to tokens and loss masks, and the message about a row that cannot be trained on."""

import pickle
import re
from dataclasses import replace

import numpy as np
import pytest

from nemo_rl.data.config import ExampleDataConfig
from nemo_rl.data.datasets.examples import both_preference_forms
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.data.rows.examples import ExampleMaker, check_examples
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.rows.setup import Task, setup_examples
from nemo_rl.types import Prompt
from tests.conversations import assistant, user
from tests.tables import named
from tests.unit.data.templates import TEMPLATES, tokenizer_with

TOKENIZER = tokenizer_with(TEMPLATES["chatml"])
SYSTEM, USER, ANSWER = {"role": "system", "content": "sys"}, user("a"), assistant("b")
CONVERSATION = [SYSTEM, USER, ANSWER, user("c"), assistant("d")]


def maker(processor="sft_processor", *, tokenizer=TOKENIZER, max_length=256, columns=None, spec=None, **kwargs):
    how = {"spec": spec or TaskDataSpec("t"), "processor_name": processor, "columns": columns or {}}
    how["sequences_per_row"] = 2 if processor == "preference_processor" else 1
    task = Task(processor=find_processor(processor, of_examples=True), **how)
    return ExampleMaker({"t": task}, tokenizer, max_length, **{"add_eos": False, **kwargs})


def prompt(row, task_name="t"):
    return Prompt(prompt_id="rows:7", row=row, idx=7, task_name=task_name)


def learned(example, tokenizer=TOKENIZER):
    """The runs of text whose tokens carry loss."""
    at = np.flatnonzero(example.token_mask)
    runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    return [tokenizer.decode(example.token_ids[run]) for run in runs]


@named(
    "options, expected",
    {
        "default": ({}, ["b<|im_end|>", "d<|im_end|>"]),
        "final answer": ({"only_unmask_final": True}, ["d<|im_end|>"]),
        "without generation prompt": (
            {"add_generation_prompt": False},
            [f"<|im_start|>assistant\n{text}<|im_end|>" for text in "bd"],
        ),
        "user": ({"roles_to_train_on": ["user"]}, [f"<|im_start|>user\n{text}<|im_end|>" for text in "ac"]),
    },
)
def test_the_loss_mask_follows_the_roles(options, expected):
    (example,), meta = maker(**options)(prompt({"messages": CONVERSATION}))
    assert learned(example) == expected and meta.problem is None
    assert (example.sample_id, meta.prompt_id, meta.index) == ("rows:7", "rows:7", 0)
    assert (meta.lengths, meta.num_loss_tokens) == ((len(example.token_ids),), example.token_mask.sum())
    assert (example.token_ids.dtype, example.token_mask.dtype) == (np.int32, np.bool_)
    assert TOKENIZER.decode(example.token_ids) == TOKENIZER.apply_chat_template(CONVERSATION, tokenize=False)


def test_begin_and_end_tokens_system_prompt_and_prompt_file(tmp_path):
    (tmp_path / "p.txt").write_text("Solve {}.")
    spec = TaskDataSpec("t", tmp_path / "p.txt")
    spec.system_prompt = "Be brief."
    tokenizer = tokenizer_with("{%- for m in messages -%}{{- m.content + '|' -}}{%- endfor -%}")
    tokenizer.bos_token = "<|begin_of_text|>"
    row = {"problem": "1+1", "expected_answer": "2"}
    (example,), _ = maker(tokenizer=tokenizer, spec=spec, add_eos=True)(prompt(row))
    assert tokenizer.decode(example.token_ids) == "<|begin_of_text|>Be brief.|Solve 1+1.|2|<eos>"
    assert learned(example, tokenizer) == ["2|<eos>"]
    (bare,), _ = maker(tokenizer=tokenizer, add_bos=False)(prompt(row))
    assert tokenizer.decode(bare.token_ids) == "1+1|2|"


PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
ASKED, TWO, THREE = user("1+1"), assistant("2"), assistant("3")


@named(
    "row",
    {
        "texts": {**PAIR, "margin": 2},
        "messages": {"prompt": [ASKED], "chosen": [{**TWO, "name": None}], "rejected": [THREE], "margin": 2},
        "whole conversations": {"chosen": [ASKED, TWO], "rejected": [ASKED, THREE], "margin": 2.0},
    },
)
def test_pairs_share_the_prompt_and_learn_the_answers(row):
    (chosen, rejected), meta = maker("preference_processor")(prompt(row))
    assert (chosen.sample_id, rejected.sample_id) == ("rows:7/chosen", "rows:7/rejected")
    assert (learned(chosen), learned(rejected)) == (["2<|im_end|>"], ["3<|im_end|>"])
    assert (chosen.margin, rejected.margin) == (2.0, 0.0)
    assert (meta.lengths, meta.num_loss_tokens) == ((len(chosen.token_ids), len(rejected.token_ids)), 4)
    shared = int(np.flatnonzero(chosen.token_mask)[0])
    assert chosen.token_ids[:shared].tolist() == rejected.token_ids[:shared].tolist()


SFT, PAIRS, TOKENS = "sft_processor", "preference_processor", "pretokenized"


@pytest.mark.parametrize(
    ("processor", "row", "kind", "text"),
    [
        (SFT, {"messages": [*CONVERSATION, USER]}, "ends_with_user", ", column 'messages': the conversation ends"),
        (SFT, {"messages": [USER, {**ANSWER, "content": " \n"}]}, "empty_answer", ", column 'mes.*message is empty"),
        (SFT, {"messages": [USER, assistant("2" * 39)]}, "too_long", ", column .* 61 tokens, more than data.max_in"),
        (SFT, {"input_ids": [8, 9], "labels": [-100, -100]}, "no_loss_tokens", ", column .* no token carries loss"),
        (SFT, {"input_ids": []}, "empty_answer", ", column 'input_ids': there is no token"),
        (PAIRS, {**PAIR, "rejected": " "}, "empty_answer", ", column 'bad': the answer is empty"),
        (PAIRS, {**PAIR, "tie": "rank"}, "tie", ", column 'rank': neither answer is preferred"),
        (PAIRS, {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER]}, "ends_with_user", ", column 'bad': "),
        (PAIRS, {"chosen": [USER, ANSWER], "rejected": [ASKED, TWO]}, "different_questions", ", column 'bad': it answ"),
        (
            PAIRS,
            {**PAIR, "rejected": [USER, TWO]},
            "different_questions",
            ", column 'bad': it answers another question",
        ),
        (PAIRS, {"chosen": [SYSTEM, USER, ANSWER], "rejected": [USER, TWO]}, "different_questions", ", column 'bad': "),
        (SFT, {"text": "a"}, "bad_row", " has no column 'messages', which processor 'sft_pr.*has: text"),
        (PAIRS, {"chosen": "a", "rejected": "b"}, "bad_row", " has no column 'prompt'"),
        (PAIRS, {"prompt": "a", "chosen": "b"}, "bad_row", " has no column 'bad'"),
        (PAIRS, {**PAIR, "rejected": 3}, "bad_row", ": column 'bad' must hold a text or a list of"),
        (SFT, {"messages": [USER, assistant("\ud83d")]}, "bad_row", r": a text has '\\ud83d', half of a character"),
        (SFT, {"messages": []}, "bad_row", ": column 'messages' is an empty list"),
        (SFT, {"messages": [{"content": "a"}]}, "bad_row", ": column 'messages' must hold"),
        (TOKENS, {"labels": [1]}, "bad_row", " has no column 'input_ids'"),
        (TOKENS, {"input_ids": [3, 400]}, "bad_row", ": column 'input_ids' has 400 at position 1, which is no"),
        (TOKENS, {"input_ids": [-1]}, "bad_row", ": column 'input_ids' has -1 at position 0"),
        (TOKENS, {"input_ids": [3, 4], "labels": [-100, -7]}, "bad_row", ": column 'labels' has -7 at position 1"),
        (TOKENS, {"input_ids": [3, 4], "labels": [3, 999]}, "bad_row", ": column 'labels' has 999 at position 1"),
        (TOKENS, {"input_ids": [3, 4], "labels": [4, -100]}, "bad_row", ": .*s' has 4 at position 0 where column 'inp"),
        (TOKENS, {"input_ids": [3, 4], "labels": [3]}, "bad_row", ": column 'labels' has 1 entries and column 'inp"),
        (TOKENS, {"input_ids": [0.5]}, "bad_row", ": column 'input_ids' must be a list of integers"),
    ],
)
def test_what_cannot_be_trained_on_is_named_by_row_and_column_and_cut_short(processor, row, kind, text):
    make = maker(processor, columns={"chosen": "good", "rejected": "bad"}, max_length=60)
    examples, meta = make(prompt(row))
    assert meta.problem_kind == kind and re.match(f"row rows:7{text}", meta.problem)
    if kind == "bad_row":  # perhaps every row is like this: an error where rows are tried
        with pytest.raises(ValueError, match=f"row rows:7{text}"):
            make.make(prompt(row))
    names = ["rows:7/chosen", "rows:7/rejected"] if processor == PAIRS else ["rows:7"]
    assert [example.sample_id for example in examples] == names
    assert meta.lengths == tuple(len(example.token_ids) for example in examples)
    assert meta.num_loss_tokens == 0 and not any(example.token_mask.any() for example in examples)
    assert all(1 <= length <= 4 for length in meta.lengths)


def test_datasets_are_tried_before_the_run(caplog):
    good, bad = {"messages": [USER, ANSWER]}, {"messages": [USER]}

    def check(*rows):
        dataset = PromptDataset([NamedRows(name="rows", task_name="t", rows=list(rows))])
        check_examples(maker(), dataset, "data.train")

    check(*[good] * 100)
    assert not caplog.records
    check(*[good] * 50, *[bad] * 50)
    (record,) = caplog.records
    assert "data.train: 16 of the 32 rows tried are left out of training (16 ends_with_user): row" in record.message
    with pytest.raises(ValueError, match="row rows:99 has no column 'messages'"):
        check(*[good] * 99, {"x": 1})


def test_pairs_of_different_questions_stop_the_run():
    """Answers, and the results of tools, may differ."""
    call, result = assistant("call"), {"role": "tool", "content": "1"}
    sound = [
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, TWO]},
        {"chosen": [USER, call, result, TWO], "rejected": [USER, call, {**result, "content": "2"}, THREE]},
        {"chosen": [USER, TWO, ASKED, TWO], "rejected": [USER, THREE, USER, TWO]},
        {"prompt": [USER], "chosen": [TWO], "rejected": [USER, THREE]},  # an answer may repeat the prompt
        {"prompt": [USER], "chosen": [USER, TWO], "rejected": [THREE]},
    ]
    make = maker(PAIRS)
    check_examples(make, PromptDataset([NamedRows(name="rows", task_name="t", rows=sound)]), "data.train")
    rows = [*sound, *[{"chosen": [USER, TWO], "rejected": [ASKED, TWO]}] * 2]
    told = "data.train, rows tried: in 2 of 7 rows chosen and rejected answer different .*; the first: row rows:5, col"
    with pytest.raises(ValueError, match=told):
        check_examples(make, PromptDataset([NamedRows(name="rows", task_name="t", rows=rows)]), "data.train")


def test_the_fingerprint_follows_what_decides_the_tokens(tmp_path):
    make, spec, larger = maker(), TaskDataSpec("t"), tokenizer_with(TEMPLATES["chatml"])
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    with_tools = maker(spec=TaskDataSpec("t", tools_file=tmp_path / "tools.json"))
    larger.add_tokens(["more"])
    spec.system_prompt = "x"
    changes = {"add_bos": False, "add_eos": True, "add_generation_prompt": False, "only_unmask_final": True}
    changes |= {"max_input_seq_length": 7, "roles_to_train_on": "all"}
    variants = [make, maker(spec=spec), with_tools, maker("pretokenized"), maker(columns={"messages": "chat"})]
    variants += [replace(make, tokenizer=other) for other in (tokenizer_with(TEMPLATES["llama3"]), larger)]
    variants += [replace(make, **{key: value}) for key, value in changes.items()]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)
    assert pickle.loads(pickle.dumps(make)).fingerprint() == maker().fingerprint() == make.fingerprint()


def test_own_processors(tmp_path, monkeypatch):
    (tmp_path / "own_example_processor.py").write_text(
        "import torch\n"
        "def shout(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, **flags):\n"
        "    ids = tokenizer(datum_dict['text'].upper(), add_special_tokens=False)['input_ids']\n"
        "    log = [{'role': 'assistant', 'content': '', 'token_ids': torch.tensor(ids)}]\n"
        "    return {'message_log': log, 'length': len(ids), 'loss_multiplier': 1.0, 'idx': idx}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    make = maker("own_example_processor:shout")
    assert learned(make(prompt({"text": "abc"}))[0][0]) == ["BC"]
    before = make.fingerprint()
    (tmp_path / "own_example_processor.py").write_text("# changed\n")
    assert make.fingerprint() != before
    with pytest.raises(ValueError, match="makes prompts"):
        find_processor("nemo_rl.data.rows.processors:math_hf_data_processor", of_examples=True)


PREFERENCES = """
import torch
def best_and_worst(datum_dict, task_data_spec, tokenizer, max_seq_length, idx):
    assert datum_dict["task_name"] == "t"
    ranked = sorted(datum_dict["completions"], key=lambda one: one["rank"])
    made = {"loss_multiplier": 1.0, "idx": idx, "task_name": datum_dict["task_name"]}
    for name, one in (("chosen", ranked[0]), ("rejected", ranked[-1])):
        log = []
        for message in datum_dict["context"] + one["completion"]:
            ids = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            log.append({**message, "token_ids": torch.tensor(ids)})
        made |= {f"message_log_{name}": log, f"length_{name}": sum(len(said["token_ids"]) for said in log)}
    return made
"""


def test_a_processor_of_preferences_written_for_nemo_rl(tmp_path, monkeypatch):
    (tmp_path / "own_pairs.py").write_text(PREFERENCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    make = maker("own_pairs:best_and_worst")
    for row in (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [USER], "chosen": [USER, assistant("b")], "rejected": [assistant("c")], "task_name": "t"},
    ):
        (chosen, rejected), _ = make(prompt(row))
        assert (learned(chosen), learned(rejected)) == (["b"], ["c"])
    assert [one["rank"] for one in both_preference_forms({**row, "tie": "score"})["completions"]] == [0, 0]
    for row in ({"messages": [USER]}, {"chosen": "b", "rejected": "c"}, {"chosen": 1, "rejected": 2, "prompt": "p"}):
        assert both_preference_forms(row) == row


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_row_that_was_not_tried_is_left_out_and_counted(write, streaming):
    good = {"input": "a", "output": "b"}
    path = write([good] * 103 + [good | {"output": None}] + [good] * 96)
    train = {"data_path": path, "streaming": streaming, "processor": "sft_processor"}
    setup = setup_examples(ExampleDataConfig(train=[train], max_input_seq_length=64))
    make = ExampleMaker(setup.tasks, TOKENIZER, 64)
    check_examples(make, setup.train, "data.train")
    if streaming:
        row = setup.train[0].convert(list(setup.train[0].table)[103])
    else:
        row = setup.train[103].row
        assert setup.train.fingerprint()["rows"]["num_rows"] == 200
    _, meta = make(Prompt(prompt_id="rows:103", row=row, idx=103, task_name="rows"))
    said = "row rows:103: has nothing in column 'output'; fill it in or remove the row"
    assert (meta.problem_kind, meta.problem) == ("bad_row", said)
