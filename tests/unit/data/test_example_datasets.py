"""Datasets of conversations and preferences, from rows in their real columns."""

import json
import os

import datasets
import pytest

from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig
from nemo_rl.data.datasets.examples import chat_row, helpsteer3_row, squad_row, trees_of_messages
from nemo_rl.data.datasets.registry import load_rows
from nemo_rl.data.interfaces import BAD_ROW
from tests.conversations import assistant, user
from tests.tables import named


def sft(**kwargs):
    return ExampleDatasetConfig(**{"processor": "sft_processor", **kwargs})


def dpo(**kwargs):
    return PreferenceDatasetConfig(**{"processor": "preference_processor", **kwargs})


def rows_of(path, section=sft, **keys):
    return list(load_rows(section(data_path=path, **keys))[0])


def test_squad():
    row = {"id": "57", "context": "In Normandy.", "question": "Where?", "answers": {"text": ["Normandy", "there"]}}
    context = {"role": "system", "content": "In Normandy."}
    assert squad_row(row) == {"messages": [context, user("Where?"), assistant("Normandy")]}
    assert squad_row({**row, "answers": {"text": []}})["messages"][2] == assistant("")


def test_mathematics_has_the_answer_and_the_solution(write):
    path = write([MATH])
    (found,) = rows_of(path, dataset_name="OpenMathInstruct-2")
    assert (found["problem"], found["expected_answer"]) == ("1+1?", "2")
    assert found["messages"] == [user("1+1?"), assistant("It is 2.")]
    (found,) = rows_of(path, dataset_name="OpenMathInstruct-2", output_key="expected_answer")
    assert found["messages"][1] == assistant("2")
    (found,) = rows_of(write([{"question": "How many?", "answer": "Many.\n#### 1,024"}]), dataset_name="gsm8k")
    assert (found["expected_answer"], found["messages"][1]) == ("1024", assistant("Many.\n#### 1,024"))


KEYS = ("message_id", "parent_id", "role", "text", "rank")
TREE_MESSAGES = [  # as OpenAssistant's table lists them
    ("q", None, "prompter", "question", None),
    ("a2", "q", "assistant", "second best", 1),
    ("a1", "q", "assistant", "best", 0),
    ("f", "a1", "prompter", "further", 0),
    ("fa", "f", "assistant", "final", None),
    ("g", "a2", "prompter", "nobody answered", None),
    ("p", None, "prompter", "another tree", None),
    ("pa", "p", "assistant", "its answer", None),
    ("u", None, "prompter", "a tree without an answer", None),
]
TREES = [dict(zip(KEYS, row, strict=True), lang="en", deleted=False) for row in TREE_MESSAGES]


def test_open_assistant_trees(write):
    best = [user("question"), assistant("best"), user("further"), assistant("final")]
    other = [user("another tree"), assistant("its answer")]
    table = write(TREES)
    assert [row["messages"] for row in rows_of(table, dataset_name="open_assistant")] == [best, other]
    everything = [row["messages"] for row in rows_of(table, dataset_name="open_assistant", kwargs={"paths": "all"})]
    assert everything == [best, [user("question"), assistant("second best")], other]
    nested = [{"message_tree_id": tree["message_id"], "prompt": tree} for tree in trees_of_messages(TREES)]
    found = rows_of(write(nested[:2], "trees.jsonl"), dataset_name="open_assistant")
    assert [row["messages"] for row in found] == [best, other]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}


def test_openai_format_keeps_tools_and_calls():
    tools, result = [{"type": "function", "function": {"name": "add"}}], {"role": "tool", "tool_call_id": "c1"}
    called = [assistant(None, tool_calls=[CALL], name=None), {**result, "content": [{"type": "text", "text": "2"}]}]
    row = {"messages": [user("1+1"), *called, assistant("It is 2.")], "tools": json.dumps(tools)}
    found = chat_row({**row, "system": "Be brief.", "id": 7}, system_key="system")
    assert found["messages"] == [
        {"role": "system", "content": "Be brief."},
        user("1+1"),
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]},
        {**result, "content": "2"},
        assistant("It is 2."),
    ]
    assert (found["tools"], found["id"]) == (tools, 7)
    own_system = chat_row({"messages": [{"role": "system", "content": "x"}, user("a")], "s": "y"}, system_key="s")
    assert [message["content"] for message in own_system["messages"]] == ["x", "a"]


@named(
    "messages, message",
    {
        "text": ("hello", "must hold a list of messages"),
        "no role": ([{"content": "a"}], "message without a role"),
        "picture": ([{"role": "user", "content": [{"type": "image_url"}]}], "only text can be used"),
        "arguments": (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "no JSON",
        ),
        "tool call": ([{"role": "assistant", "tool_calls": ["f"]}], "no object"),
    },
)
def test_what_is_no_conversation_is_named_with_its_column(messages, message):
    with pytest.raises(ValueError, match=f"column 'chat'.*{message}"):
        chat_row({"chat": messages}, chat_key="chat")


def test_tools_of_one_row_leave_no_trace_in_another(write, tmp_path):
    """A table gives every object the keys of all; JSONL is read as it is written, and nulls are taken out elsewhere."""
    rows = []
    for name, argument in (("f", "p"), ("g", "q")):
        call = {"function": {"name": name, "arguments": {argument: "x"}}}
        tool = {"name": name, "parameters": {"properties": {argument: {"type": "string"}}}}
        rows.append({"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [tool]})
    parquet = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    assert rows_of(write(rows), dataset_name="openai_format") == rows
    assert rows_of(parquet, dataset_name="openai_format") == rows


def test_files_of_columns_conversations_and_tokens(write):
    columns = write([{"question": "1+1", "answer": 2, "sys": "s", "level": 3}])
    (row,) = rows_of(columns, input_key="question", output_key="answer", system_key="sys")
    assert (row["messages"], row["level"]) == ([{"role": "system", "content": "s"}, user("1+1"), assistant("2")], 3)
    (row,) = rows_of(write([{"chat": [user("a")]}]), dataset_name="ResponseDataset", chat_key="chat")
    assert row["messages"] == [user("a")]
    tokens = {"input_ids": [5, 6], "labels": [-100, 6]}
    assert rows_of(write([tokens])) == [tokens]


CHATS = [{"messages": [user("a"), assistant("b")]}, {"messages": [], "functions": []}]
SQUAD = [{"context": "c", "question": "q", "answers": {"text": ["a"]}}]
PAIRS = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
COLUMNS = [{"question": "1+1", "answer": 2}]
QUESTIONS = {"input_key": "question", "output_key": "answer"}
MATH = {"problem": "1+1?", "generated_solution": "It is 2.", "expected_answer": "2", "problem_source": "x"}
GENERATED = {"dataset_name": "arithmetic_preference", "data_path": None}
OASST, BINARY = {"dataset_name": "open_assistant"}, [{"q": "1+1", "good": "2", "bad": "3", "margin": 2}]


def test_plain_texts_are_said_by_the_assistant(write):
    path = write([{"said": text} for text in ("one", "two", "three")])
    texts = {"dataset_name": "arrow_text", "kwargs": {"text_key": "said"}}
    assert [row["messages"] for row in rows_of(path, **texts)] == [[assistant(t)] for t in ("one", "two", "three")]
    texts["kwargs"] = {"text_key": "said", "characters_per_sample": 6}
    assert [row["messages"] for row in rows_of(path, **texts)] == [[assistant("one\ntwo")], [assistant("three")]]


@pytest.mark.parametrize(
    ("section", "rows", "keys", "message"),
    [
        (sft, [MATH], {"dataset_name": "OpenMathInstruct-2", "output_key": "a"}, r"no column 'a' \(output_key\)"),
        (sft, TREES, OASST | {"kwargs": {"lang": "de"}}, "is empty"),
        (sft, TREES, OASST | {"kwargs": {"paths": "some"}}, "kwargs takes paths, lang; paths: Input should be 'best'"),
        (sft, CHATS, {"tool_key": "tool"}, r"no column 'tool' \(tool_key\)"),
        (sft, COLUMNS, {**QUESTIONS, "system_key": "nowhere"}, r"no column 'nowhere' \(system_key\)"),
        (sft, COLUMNS, {"dataset_name": "openai_format"}, r"no column 'messages' \(chat_key\)"),
        (sft, COLUMNS, {"dataset_name": "ResponseDataset", "data_path": None}, "needs data_path"),
        (sft, CHATS, {"output_key": "answer"}, r"output_key=answer is set but the rows have conversations"),
        (sft, [{"input": "a", "output": "b"}], {"chat_key": "chat"}, r"chat_key=chat is set but .*: input, output"),
        (sft, [{"prompt": "a", "completion": "b"}], {}, r"did you mean input_key=prompt output_key=completion\?"),
        (sft, SQUAD, {"dataset_name": "squad", "output_key": "a"}, "output_key=a is set but the dataset has columns"),
        (dpo, PAIRS, {"prompt_key": "question"}, r"no column 'question' \(prompt_key\)"),
        (dpo, BINARY, {}, r"no column 'chosen' \(chosen_key\); its columns are: q, good, bad, margin"),
        (sft, BINARY, {"dataset_name": "PreferenceDataset"}, "'PreferenceDataset' holds preferences"),
        (dpo, [], {"dataset_name": "squad", "data_path": None}, "'squad' holds no preferences"),
        (dpo, [], GENERATED | {"chosen_key": "good"}, "chosen_key=good is set but the dataset is generated"),
    ],
)
def test_keys_that_name_nothing_are_refused(section, rows, keys, message, write):
    with pytest.raises(ValueError, match=message):
        load_rows(section(**{"data_path": write(rows), **keys}))


def test_rows_that_cannot_be_converted_are_marked(write):
    assert len(rows_of(write(CHATS[:1] * 40 + CHATS[1:]), tool_key="functions")) == 41, "a key of a few rows will do"
    good = {"input": "a", "output": "b"}
    path = write([good, {"input": "a"}, {"input": 1, "output": None}, *[good] * 32])
    with open(path, "a") as file:
        file.write('\n{"input": "cut')
    rows, _ = load_rows(sft(data_path=path))
    assert BAD_ROW not in rows[0] and rows[1] == {BAD_ROW: "has no column 'output'; it has: input"}
    assert rows[2] == {BAD_ROW: "has nothing in column 'output'; fill it in or remove the row"}
    assert "row 35 (from 0) is no JSON" in rows[35][BAD_ROW]
    rows, _ = load_rows(sft(dataset_name="squad", data_path=write([{**SQUAD[0], "answers": None}])))
    assert "has columns context, question, answers, which do not have the layout" in rows[0][BAD_ROW]
    asked = {"file_name": "a.png", "problem": "a", "answer": "b"}
    folder = os.path.dirname(write([asked, asked | {"answer": None}, asked | {"problem": None}], "metadata.jsonl"))
    whole, *bad = rows_of(folder, dataset_name="image_folder")
    assert whole["expected_answer"] == "b"
    assert "nothing in column 'answer'" in bad[0][BAD_ROW] and "nothing in column 'problem'" in bad[1][BAD_ROW]


@pytest.mark.parametrize(("preference", "chosen"), [(-3, "one"), (-1, "one"), (2, "two")])
def test_helpsteer3(preference, chosen, write):
    context = [user("q"), assistant("a"), user("q2")]
    row = {"context": context, "response1": "one", "response2": "two", "overall_preference": preference}
    found = helpsteer3_row(row)
    assert (found["prompt"], found["chosen"], found["margin"]) == (context, chosen, float(abs(preference)))
    assert {found["chosen"], found["rejected"]} == {"one", "two"} and "tie" not in found
    assert helpsteer3_row({**row, "overall_preference": 0})["tie"] == "overall_preference"
    plain = {"messages": [*context, assistant(chosen)], "expected_answer": chosen}
    assert rows_of(write([row]), dataset_name="HelpSteer3") == [plain]


def test_preference_files(write):
    completions = [{"rank": rank, "completion": [assistant(text)]} for rank, text in enumerate("gb")]
    ranked = {"context": [user("q")], "completions": completions}
    pair = {"prompt": [user("q")], "chosen": [assistant("g")], "rejected": [assistant("b")]}
    assert rows_of(write([ranked]), dpo, dataset_name="PreferenceDataset") == [pair]
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "3", "margin": 2}
    assert rows_of(write(BINARY), dpo, dataset_name="BinaryPreferenceDataset", **keys) == [pair]
