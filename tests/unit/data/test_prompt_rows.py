"""Rows of a conversation become a prompt and its answer, and no message of them disappears."""

from typing import Any

import pytest

from nemo_rl.data.config import DataConfig, DatasetConfig
from nemo_rl.data.rows.setup import PromptProcessor, setup_data
from nemo_rl.environments.judge import LLMJudgeEnvironment
from tests.conversations import assistant, sampled, user
from tests.tables import named
from tests.unit.data.templates import TEMPLATES, tokenizer_with

S: dict[str, Any] = {"role": "system", "content": "s"}
U, A, V, B = user("1+1="), assistant("2"), user("3+4="), assistant("7")
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
C, T = assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "8"}
OF_QUESTION = {
    "math_hf_data_processor": "3+4=",
    "math_data_processor": "3+4=",
    "math_gdpo_data_processor": "3+4=",
    "retrieval_data_processor": "3+4=",
    "code_data_processor": "3+4=",
    "multichoice_qa_processor": "3+4=\n\nA) six\nB) seven",
    "episode_processor": "3+4=",
}
MORE = {"options": {"A": "six", "B": "seven"}, "extra_env_info": {"x": 1}}


def datum(write: Any, row: dict[str, Any], processor: str = "math_hf_data_processor", **keys: Any) -> Any:
    section = DatasetConfig(data_path=write([row]), processor=processor, env_name="math", **keys)
    setup = setup_data(DataConfig(train=[section], max_input_seq_length=2000))
    return PromptProcessor(setup.tasks, tokenizer_with(TEMPLATES["thinking"]), 2000)(setup.train[0])


def asks(datum_dict: Any, task_data_spec: Any, tokenizer: Any, max_seq_length: int | None, idx: int) -> Any:
    """A processor of one's own, as for NeMo RL."""
    known = {key: datum_dict[key] for key in ("task_name", "question", "answer")}
    message = {**datum_dict["messages"][0], "token_ids": [1]}
    return {"message_log": [message], "length": 1, "extra_env_info": known, "loss_multiplier": 1.0, "idx": idx}


def test_a_processor_of_ones_own_gets_the_forms_and_the_name_of_nemo_rl(write):
    own = f"{__name__}:asks"
    for row in ({"input": "3+4=", "output": "B", **MORE}, {"messages": [V, assistant("B")], **MORE}):
        made = datum(write, row, own)
        assert made["message_log"][0]["content"] == "3+4="
        assert made["extra_env_info"] == {"task_name": made["task_name"], "question": "3+4=", "answer": "B"}
    made = datum(write, {"input": "a", "output": "b", "task_name": "algebra", **MORE}, own)
    assert made["extra_env_info"]["task_name"] == "algebra" != made["task_name"]


def prompt(made: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["unrendered"]) for message in made["message_log"]]


@pytest.mark.parametrize("processor", OF_QUESTION)
def test_the_messages_before_the_last_question_are_in_the_prompt(write, processor):
    made = datum(write, {"messages": [S, U, A, V, B], **MORE}, processor)
    (role, system), *said = prompt(made)
    assert role == "system" and system.startswith("s")
    assert said == [("user", "1+1="), ("assistant", "2"), ("user", OF_QUESTION[processor])]
    assert made["extra_env_info"].get("ground_truth", "7") == "7" and "earlier_messages" not in made["extra_env_info"]


def test_the_system_message_of_a_row_comes_before_the_form_that_a_processor_asks_for(write, tmp_path):
    (tmp_path / "system.txt").write_text("of the task")
    keys = {"processor": "math_gdpo_data_processor", "system_prompt_file": str(tmp_path / "system.txt")}
    for messages, begins in (([S, U, A], "s\n\nThink"), ([U, A], "of the task\n\nThink")):
        said = prompt(datum(write, {"messages": messages}, **keys))
        assert [role for role, _ in said] == ["system", "user"] and said[0][1].startswith(begins)


ASK = {"problem": "1+1=", "expected_answer": "2", "messages": [S, U, A]}
QUESTION = {"question": "1+1=", "answer": "A", "messages": [S, U, A], **MORE}


def test_a_column_and_a_conversation_ask_one_question(write):
    assert prompt(datum(write, ASK)) == [("system", "s"), ("user", "1+1=")]
    assert len(prompt(datum(write, QUESTION, "multichoice_qa_processor"))) == 2


@named(
    "row, column, processor",
    {
        "math": ({**ASK, "problem": "5+5="}, "problem", "math_hf_data_processor"),
        "conversation": ({**ASK, "messages": [U, A, V, B]}, "problem", "conversation_processor"),
        "multiple choice": ({**QUESTION, "question": "Which?"}, "question", "multichoice_qa_processor"),
    },
)
def test_a_row_that_asks_two_questions_is_refused(row, column, processor, write):
    with pytest.raises(ValueError, match=f"row rows:0: column '{column}' is not the last question of the user in "):
        datum(write, row, processor)


@pytest.mark.parametrize("processor", ["math_hf_data_processor", "conversation_processor"])
def test_input_key_chooses_between_a_column_and_conversations(write, processor):
    row = {"input": "5+5=", "output": "10", "messages": [S, U, A]}
    with pytest.raises(ValueError, match="'input' and 'messages', and each could be the prompt: choose with input_key"):
        datum(write, row, processor)
    made = datum(write, row, processor, input_key="input")
    assert prompt(made) == [("user", "5+5=")] and made["extra_env_info"]["ground_truth"] == "10"
    made = datum(write, row, processor, input_key="messages")
    assert prompt(made) == [("system", "s"), ("user", "1+1=")] and made["extra_env_info"]["ground_truth"] == "2"


REFUSED = [
    (
        [S, U, A, V],
        "'messages' end with the user, and there is no column 'expected_answer': add it, or the assistant's",
    ),
    ([U, A, B], "the last message of the user in 'messages' is followed by assistant, assistant; one message of the"),
    ([U, C, T], "is followed by assistant, tool; one message of the assistant may follow, its answer. Longer"),
    ([U, C, T, B], "is followed by assistant, tool, assistant; one"),
    ([U, A, S], "is followed by assistant, system; one"),
    ([U, C], "the answer at the end of 'messages' has no text: write it, or add a column 'expected_answer'"),
    ([S, A], "'messages' have no message of the user that could be answered, but system, assistant"),
]


@pytest.mark.parametrize("processor", [*list(OF_QUESTION)[:4], "multichoice_qa_processor"])
@pytest.mark.parametrize(("messages", "told"), REFUSED)
def test_a_conversation_without_one_answer_at_its_end_is_refused(write, messages, told, processor):
    with pytest.raises(ValueError) as error:
        datum(write, {"messages": messages, **MORE}, processor)
    assert str(error.value).startswith("row rows:0: ") and told in str(error.value)
    if messages[-1] not in (V, C):
        with pytest.raises(ValueError, match="messages"):
            datum(write, {"messages": messages, "expected_answer": "7", **MORE}, processor)
    else:
        assert datum(write, {"messages": messages, "expected_answer": "7", **MORE}, processor)["length"]


CALLED = [("user", "1+1="), ("assistant", ""), ("tool", "8")]


@named(
    "messages, said, truth",
    {
        "with an answer": (
            [S, U, A, V, B],
            [("system", "s"), ("user", "1+1="), ("assistant", "2"), ("user", "3+4=")],
            "7",
        ),
        "without an answer": ([U, A, V], [("user", "1+1="), ("assistant", "2"), ("user", "3+4=")], None),
        "tool call with an answer": ([U, C, T, B], CALLED, "7"),
        "tool call without an answer": ([U, C, T], CALLED, None),
    },
)
def test_environments_that_read_the_conversation_get_all_of_it(messages, said, truth, write):
    """With tool calls, whose arguments are an object, as templates take them."""
    made = datum(write, {"messages": messages}, "conversation_processor")
    known = made["extra_env_info"]
    assert [(m["role"], m["content"]) for m in known["messages"]] == prompt(made) == said
    assert known.get("ground_truth") == truth
    if C in messages:
        assert known["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3}}
        assert '"a": 3' in made["message_log"][1]["content"]
        judge = LLMJudgeEnvironment({"base_url": "http://127.0.0.1:1/v1", "model": "j"})
        assert '"name": "add"' in judge._prompt([sampled("7")], known)


def test_a_conversation_ends_with_one_answer(write):
    with pytest.raises(ValueError, match="row rows:0: 'messages' end with 2 messages of the assistant, and only"):
        datum(write, {"messages": [U, A, B]}, "conversation_processor")
