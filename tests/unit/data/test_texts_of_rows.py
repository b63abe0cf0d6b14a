"""Values of rows that are no text: refused by data set, row and column, or taken where an environment takes a list."""

import pytest

from nemo_rl.data.config import DataConfig, DatasetConfig, ExampleDataConfig, PreferenceDataConfig
from nemo_rl.data.rows.examples import ExampleMaker, check_examples
from nemo_rl.data.rows.setup import PromptProcessor, setup_data, setup_examples
from nemo_rl.environments.code.environment import read_tests
from nemo_rl.environments.rewards import box_overlap, exact_answer, vqa_agreement
from tests.conversations import assistant, sampled, user
from tests.tables import named
from tests.unit.data.templates import TEMPLATES, tokenizer_with

TOKENIZER = tokenizer_with(TEMPLATES["chatml"])
TWO = ["2", "two"]


def metadata(path, row_number=0, **keys):
    """What the environment gets of a row of a file."""
    keys = {"processor": "math_hf_data_processor", "env_name": "math", **keys}
    setup = setup_data(DataConfig(train=[DatasetConfig(data_path=path, **keys)], max_input_seq_length=256))
    return PromptProcessor(setup.tasks, TOKENIZER, 256)(setup.train[row_number])["extra_env_info"]


MATH = "row rows:1: has a list in column 'solution', where one text or number belongs: ['2', 'two']"
PROMPTS = [  # (processor, column, value, what is said)
    ("math_hf", "solution", TWO, MATH),
    ("math_gdpo", "solution", TWO, MATH),
    ("math", "solution", TWO, MATH),
    ("code", "solution", TWO, MATH),
    ("math_hf", "solution", {"a": "2"}, "has an object in column 'solution', where"),
    (
        "math_hf",
        "solution",
        None,
        "dataset 'rows': row 1 has nothing in column 'solution'; fill it in or",
    ),
    ("math_hf", "question", {"a": "2"}, "has an object in column 'question', where"),
    ("math_hf", "question", TWO, "row rows:1: has a list in column 'question'"),
    ("math_hf", "question", [user("1+1")], "has a list in column 'question', where one text or number belongs: [{'"),
    ("math_hf", "question", None, "has nothing in column 'question'"),
    ("retrieval", "solution", [TWO], "has a list in the list of column 'solution'"),
    ("retrieval", "solution", [], "has a list in column 'solution'"),
    ("retrieval", "solution", {"a": "2"}, "has an object in column 'solution'"),
]


@pytest.mark.parametrize(("processor", "column", "value", "told"), PROMPTS)
def test_a_prompt_and_its_answer_are_texts(write, processor, column, value, told):
    row = {"question": "1+1", "solution": "2"}
    keys = {"input_key": "question", "output_key": "solution", "processor": f"{processor}_data_processor"}
    good = row if not isinstance(value, list | dict) else row | {column: value}  # a column holds values of one kind
    path = write([good, row | {column: value}])
    with pytest.raises(ValueError) as error:
        metadata(path, 1, **keys)
    assert told in str(error.value)


RETRIEVAL = {"processor": "retrieval_data_processor"}


@named(
    "row, keys, truth",
    {
        "integer": ({"input": "1+1", "output": 2}, {}, "2"),
        "float": ({"input": 7, "output": 2.5}, {}, "2.5"),
        "list": ({"input": "a", "output": TWO}, RETRIEVAL, TWO),
        "list of a column": ({"input": "a", "answers": [2, "two"]}, RETRIEVAL | {"output_key": "answers"}, TWO),
        "text of a column": ({"input": "a", "answers": "12", "output": "x"}, RETRIEVAL, "12"),
        "nothing in a column": ({"input": "a", "answers": None, "output": "x"}, RETRIEVAL, "x"),
    },
)
def test_numbers_are_answers_and_retrieval_takes_a_list(row, keys, truth, write):
    assert metadata(write([row]), **keys) == {"ground_truth": truth}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"input": "1+1", "output": TWO},
            "row rows:0: has a list in column 'output', where one text or number belongs",
        ),
        ({"input": {"a": 1}, "output": "2"}, "has an object in column 'input'"),
        ({"input": "1+1", "output": "2", "system": ["a"]}, "has a list in column 'system'"),
        ({"messages": [user("a"), assistant({"a": 1})]}, "has an object as the content of message 1 (from 0)"),
        (
            {"messages": [user([{"type": "text", "text": ["a"]}]), assistant("b")]},
            "has a list as a text in column 'mess",
        ),
        ({"prompt": "a", "chosen": [assistant({"a": 1})], "rejected": "c"}, "an object as the content of message 1"),
        ({"prompt": "a", "chosen": [assistant(["b"])], "rejected": "c"}, "a list as the content of message 1"),
    ],
)
def test_examples_are_texts(write, row, told):
    section = PreferenceDataConfig if "chosen" in row else ExampleDataConfig
    processor = "preference_processor" if "chosen" in row else "sft_processor"
    train = {"data_path": write([row]), "processor": processor}
    train |= {"system_key": "system"} if "system" in row else {}
    setup = setup_examples(section(train=[train], max_input_seq_length=64))
    with pytest.raises(ValueError) as error:
        check_examples(ExampleMaker(setup.tasks, TOKENIZER, 64), setup.train, "data.train")
    assert told in str(error.value)


def test_parts_become_one_text_where_the_template_takes_texts_alone(write):
    def tokens(content):
        path = write([{"prompt": "a", "chosen": [assistant(content)], "rejected": "c"}])
        train = {"data_path": path, "processor": "preference_processor"}
        setup = setup_examples(PreferenceDataConfig(train=[train], max_input_seq_length=64))
        return ExampleMaker(setup.tasks, TOKENIZER, 64).make(setup.train[0])[0][0].token_ids.tolist()

    assert tokens([{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]) == tokens("two parts")


def test_environments_take_one_text_where_their_rewards_read_one():
    for wrong in ({"input": [["1"]], "output": "2"}, {"input": "1", "output": None}):
        with pytest.raises(ValueError, match=r"has (a list|nothing) as (input|output) of a test"):
            read_tests({"tests": [wrong]})
    said = [sampled("[0, 0, 2, 2]")]
    with pytest.raises(ValueError, match="has a list as box, where one text or number belongs"):
        exact_answer(said, {"box": [0, 0, 2, 2]}, key="box")
    assert box_overlap(said, {"box": [0, 0, 2, 2]}, key="box") == 1
    assert vqa_agreement([sampled("two")], {"ground_truth": ["two"] * 3}) == 1
