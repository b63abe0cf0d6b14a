import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from nemo_rl.data.chat.images import read_image
from nemo_rl.data.config import DataConfig, DatasetConfig, ExampleDatasetConfig
from nemo_rl.data.datasets.registry import DATASET_REGISTRY, load_rows, register_dataset
from nemo_rl.data.interfaces import BAD_ROW, TaskDataSpec
from nemo_rl.data.rows.processors import episode_processor, math_hf_data_processor
from nemo_rl.data.rows.setup import PromptProcessor, setup_data
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.utils.tables import load_table
from tests.conversations import assistant, user
from tests.tables import named
from tests.unit.data.test_examples import prompt

COLUMNS = {"input_key": "question", "output_key": "solution"}


def dataset(**keys):
    return DatasetConfig(**{"processor": "math_hf_data_processor", "env_name": "math", **keys})


ROWS = [{"question": f"{i}+{i}", "solution": str(2 * i), "level": i % 3} for i in range(20)]


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_local_files_of_every_format_give_the_same_rows(tmp_path, suffix):
    path = str(tmp_path / f"rows.{suffix}")
    getattr(datasets.Dataset.from_list(ROWS), f"to_{suffix}")(path)
    loaded, held_out = load_rows(dataset(data_path=path, **COLUMNS))
    assert held_out is None and loaded[1]["level"] == 1
    assert [(row["problem"], row["expected_answer"]) for row in loaded] == [(f"{i}+{i}", str(2 * i)) for i in range(20)]


def test_a_folder_has_splits_and_a_file_has_none(tmp_path, write):
    for split in ("train", "test"):
        write(ROWS, f"copy/{split}.jsonl")
    folder = {"data_path": str(tmp_path / "copy"), **COLUMNS}
    assert len(load_rows(dataset(**folder, split="test"))[0]) == 20
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
        load_rows(dataset(**folder, split="dev"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "train.parquet").write_bytes(b"PAR1" + bytes(60))
    with pytest.raises(ValueError, match="damaged' cannot be read: "):
        load_rows(dataset(data_path=str(tmp_path / "damaged")))
    with pytest.raises(ValueError, match=r"empty\.jsonl' is empty$"):
        load_rows(dataset(data_path=write([], "empty.jsonl")))
    path = write([{"input": "a", "output": "b"}])
    for make in (dataset, partial(ExampleDatasetConfig, processor="p")):
        assert len(load_rows(make(data_path=path, split="train"))[0]) == 1
        with pytest.raises(ValueError, match=r"jsonl' has no split 'validation'.*another file.*split_validation_s"):
            load_rows(make(data_path=path, split="validation"))
        with pytest.raises(ValueError, match=r"has no subset 'main'.*subset=null"):
            load_rows(make(data_path=path, subset="main"))


JSON, CSV = '{"input": "1", "output": "2"}\n', "input,output\n3,4\n"
CARD = "---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n---\n"
FOLDERS: list[tuple[dict[str, str], str | int]] = [  # (name -> content, what is said of the folder or its rows)
    ({"a.jsonl": JSON, "b.csv": CSV}, "has files of several formats, such as a.jsonl and b.csv, of which only one"),
    ({"train.jsonl": JSON, "test.csv": CSV}, "has files of several formats, such as test.csv and train.jsonl"),
    ({"x/a.csv": CSV, "b.tsv": CSV}, "has files of several formats, such as b.tsv and x/a.csv"),
    ({"train.jsonl": JSON, "more.jsonl": JSON}, "has the splits train, and files that belong to none: more.jsonl;"),
    ({"a.jsonl": "", "b.jsonl": ""}, "is empty: its files hold no byte"),
    ({"a.jsonl": JSON, "b.json": JSON, "README.md": "rows", "notes.txt": "b", "metadata.csv": CSV, ".c.csv": CSV}, 2),
    ({"a.jsonl": JSON, "b.csv": CSV, "README.md": CARD}, 1),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("files", "told"), FOLDERS)
def test_every_row_of_a_folder_is_read_or_the_folder_is_refused(write, tmp_path, files, told, streaming):
    write([])  # and has its own caches
    for name, content in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    if isinstance(told, int):
        assert len(list(load_table(str(tmp_path / "folder"), streaming=streaming))) == told
        return
    with pytest.raises(ValueError, match=re.escape(f"folder' {told}")):
        load_table(str(tmp_path / "folder"), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_save_to_disk_wrote_is_a_table_or_its_splits(tmp_path, streaming):
    one, other = (datasets.Dataset.from_list(ROWS[:number]) for number in (3, 5))
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=other).save_to_disk(str(tmp_path / "both"))

    def num_rows(name: str, **keys: str) -> int:
        return len(list(load_table(str(tmp_path / name), streaming=streaming, **keys)))

    assert [num_rows("one"), num_rows("both"), num_rows("both", split="test")] == [3, 3, 5]
    for name, keys, told in (
        ("one", {"split": "test"}, "has no split 'test'; it has train"),
        ("both", {"split": "dev"}, "has no split 'dev'; it has train, test"),
        ("both", {"subset": "main"}, "has no subset 'main'; set subset=null"),
    ):
        with pytest.raises(ValueError, match=told):
            num_rows(name, **keys)
    loaded, _ = load_rows(dataset(data_path=str(tmp_path / "one"), **COLUMNS))
    assert [loaded[i]["expected_answer"] for i in range(3)] == ["0", "2", "4"]


def without_rows(path):
    table = pyarrow.table({"input": ["1"]})
    if "groups" in path.name:
        parquet.ParquetWriter(path, table.schema).close()
    elif "rows" in path.name:
        parquet.write_table(table.slice(0, 0), path)
    else:
        path.write_text({"blank": "\n \n", "header": "input,output\n", "list": "[]"}.get(path.stem, ""))


EMPTY = ("no_groups.parquet", "no_rows.parquet", "no_bytes.parquet", "no_bytes.jsonl", "blank.jsonl", "list.json")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", [*EMPTY, "no_bytes.csv", "blank.csv", "header.csv"])
def test_a_file_without_rows_is_empty(write, tmp_path, name, streaming):
    write([])
    without_rows(tmp_path / name)
    with pytest.raises(ValueError, match=rf"dataset (file )?'.*{name}' is empty(: it has no rows)?$"):
        load_table(str(tmp_path / name), streaming=streaming)


def test_the_validation_split_is_disjoint_whole_and_seeded(write):
    path = write(ROWS)

    def texts(**keys):
        tables = load_rows(dataset(data_path=path, **COLUMNS, **keys))
        return [rows and [row["problem"] for row in rows] for rows in tables]

    train, held_out = texts(split_validation_size=0.25, seed=3)
    assert len(held_out) == 5 and sorted(train + held_out) == sorted(row["question"] for row in ROWS)
    assert [train, held_out] == texts(split_validation_size=0.25, seed=3)
    assert held_out != texts(split_validation_size=0.25, seed=4)[1]
    train, held_out = texts(max_samples=7, split_validation_size=3)
    assert len(train) == 4 and sorted(train + held_out) == [f"{i}+{i}" for i in range(7)]
    assert len(texts(max_samples=100)[0]) == 20


@named(
    "keys, message",
    {
        "column": ({"input_key": "input"}, r"no column 'input' \(input_key\); its .* are: question, solution"),
        "file type": ({"dataset_name": "json:nothing"}, "has no 'nothing'"),
        "keyword argument": ({"dataset_name": "gsm8k", "kwargs": {"n": 1}}, "takes no kwargs"),
        "two paths": (
            {"dataset_name": "o/set"},
            r"dataset_name='o/set' is a path itself, and data_path='.*' is another",
        ),
        "all rows to validation": ({"split_validation_size": 20}, "of 20 rows leaves 20 for validation and 0"),
        "no row to validation": ({"split_validation_size": 0.01}, "leaves 0 for validation"),
        "more than a fraction": ({"split_validation_size": 1.5}, "a fraction below 1, or a whole number of rows"),
    },
)
def test_mistakes_are_named_with_what_there_is(keys, message, write):
    with pytest.raises(ValueError, match=message):
        load_rows(dataset(data_path=write(ROWS), **{**COLUMNS, **keys}))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("DAPOMath17K", {"prompt": [user("Q")], "reward_model": {"ground_truth": "34"}, "x": 1}),
        ("DAPOMathAIME2024", {"prompt": [user("Q")], "reward_model": {"ground_truth": "34"}, "x": 1}),
        ("GSM8K", {"question": "Q", "answer": "30 + 4 #### 34"}),
        ("AIME2026", {"problem": "Q", "answer": 34}),
        ("OpenR1-Math-220k", {"problem": "Q", "answer": "34", "solution": "30 + 4"}),
    ],
)
def test_a_local_copy_of_a_named_dataset(write, name, row):
    (read,) = load_rows(dataset(dataset_name=name, data_path=write([row])))[0]
    assert (read["problem"], read["expected_answer"]) == ("Q", "34")


def test_a_local_copy_of_named_conversations(write):
    said = [user("Q"), {"role": "assistant", "content": "34"}]
    name = "Nemotron-Cascade-2-SFT-Math"
    (read,) = load_rows(dataset(dataset_name=name, data_path=write([{"messages": said}])))[0]
    assert read["messages"] == said
    rows = write([{"messages": [user(str(number))]} for number in range(40)])
    drawn = load_rows(dataset(dataset_name=name, data_path=rows, max_samples=5))[0]
    numbers = [int(row["messages"][0]["content"]) for row in drawn]
    assert len(set(numbers)) == 5 and max(numbers) > 4, (
        "rows of one kind stand together, so the first ones are no sample"
    )


@named(
    "kwargs, problems",
    {
        "default": ({}, ["Q"]),
        "unverifiable too": ({"verifiable_only": False}, ["Q", "unanswered", "proven"]),
        "invalid too": ({"require_valid": False}, ["Q", "invalid"]),
    },
)
def test_numina_math_is_what_can_be_verified(kwargs, problems, write):
    good = {"question_type": "math-word-problem", "problem_is_valid": "Yes", "solution_is_valid": "Yes"}
    rows = [
        {"problem": "Q", "answer": "34", "solution": "30 + 4", **good},
        {"problem": "unanswered", "answer": "notfound", "solution": "s", **good},
        {"problem": "proven", "answer": "1", "solution": "s", **good, "question_type": "proof"},
        {"problem": "invalid", "answer": "1", "solution": "s", **good, "solution_is_valid": "Incomplete"},
    ]
    read, _ = load_rows(dataset(dataset_name="NuminaMath-1.5", data_path=write(rows), kwargs=kwargs))
    assert [row["problem"] for row in read] == problems
    assert read[0]["expected_answer"] == "34"


def picture(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png")
    return file.getvalue()


def test_boxes_of_refcoco_are_in_thousandths(tmp_path, write):
    box, (width, height) = [20.0, 50.0, 40.0, 100.0], (200, 500)
    (tmp_path / "coco" / "train2014").mkdir(parents=True)
    (tmp_path / "coco" / "train2014" / "COCO_7.jpg").write_bytes(picture(width, height))
    row = {
        "captions": ["the cat", "a cat"],
        "image_path": "coco/train2014/COCO_7.jpg",
        "raw_anns": json.dumps({"bbox": box}),
        "raw_image_info": json.dumps({"width": width, "height": height}),
    }
    named = dataset(dataset_name="refcoco", data_path=write([row]), kwargs={"pictures": str(tmp_path / "coco")})
    whole = datasets.Features(
        {"image": datasets.Image(), "answer": [datasets.Value("string")], "bbox": [datasets.Value("float64")]}
    )
    data = {"image": [{"bytes": picture(width, height), "path": None}], "answer": [["the cat"]], "bbox": [box]}
    datasets.Dataset.from_dict(data, features=whole).to_parquet(str(tmp_path / "whole.parquet"))
    for cfg in (named, dataset(dataset_name="refcoco", data_path=str(tmp_path / "whole.parquet"))):
        [read] = load_rows(cfg)[0]
        assert json.loads(read["expected_answer"]) == [100, 100, 300, 300]
        part, asked = read["problem"]
        assert "the cat" in asked["text"] and read_image(part["image"]).size == (width, height)
    with pytest.raises(ValueError, match=r"name the folder that has its train2014 with kwargs\.pictures"):
        load_rows(dataset(dataset_name="refcoco", data_path=write([row])))


def test_mmpr_tiny_has_images_where_the_question_has_marks(write):
    row = {"images": ["a.png", "b.png"], "question": "<image> or <image>?", "answer": "a"}
    [read] = load_rows(dataset(dataset_name="mmpr-tiny", data_path=write([row])))[0]
    assert [part["type"] for part in read["problem"]] == ["image", "text", "image", "text"]
    assert read["expected_answer"] == "a"


class Riddles:
    """A dataset class as users of NeMo RL write it."""

    def __init__(self, data_path, number=1, **section):
        said = [user(f"{data_path}{number}"), assistant(section["dataset_name"].rpartition(".")[2])]
        self.dataset = datasets.Dataset.from_list([{"messages": said, "task_name": "riddles"}] * 4)


def test_a_class_by_its_dotted_path_is_called_with_the_section():
    cfg = dataset(dataset_name=f"{__name__}.Riddles", data_path="p", kwargs={"number": 7}, split_validation_size=1)
    train, held_out = load_rows(cfg)
    assert (len(train), len(held_out)) == (3, 1)
    assert train[0]["messages"] == [user("p7"), assistant("Riddles")]
    datum = math_hf_data_processor(train[0], TaskDataSpec(task_name="riddles"), build_tiny_tokenizer(), 64, 0)
    assert datum["extra_env_info"] == {"ground_truth": "Riddles"}
    with pytest.raises(ValueError, match=r"is called with dataset_name, .* missing 1 required .* 'data_path'"):
        load_rows(dataset(dataset_name=f"{__name__}.Riddles"))


def test_every_prompt_file_of_ours_can_be_used():
    folder = Path(__file__).parents[3] / "examples" / "prompts"
    alone = {"gsm8k.txt", "judge_tiny.txt"}  # a system prompt, and a judge's
    for file in folder.glob("*.txt"):
        key = "system_prompt_file" if file.name in alone else "prompt_file"
        assert "{{" not in TaskDataSpec(**{key: file}).fill("Q"), file


def test_datasets_by_registration(monkeypatch):
    monkeypatch.setitem(DATASET_REGISTRY, "of this test", "")  # and takes it out again
    del DATASET_REGISTRY["of this test"]
    register_dataset("of this test", lambda cfg: [{"problem": cfg.kwargs["word"]}])
    assert load_rows(dataset(dataset_name="of this test", kwargs={"word": "hello"}))[0] == [{"problem": "hello"}]
    with pytest.raises(ValueError, match="already"):
        register_dataset("of this test", list)


def test_setup_joins_datasets_and_maps_tasks_to_environments(write):
    keys = {"data_path": write(ROWS), **COLUMNS}
    sums, twice = {"num_samples": 5}, {"repeat": 2, "env_name": "other", "split_validation_size": 0.1}
    train = [dataset(dataset_name="arithmetic", kwargs=sums), dataset(**keys, **twice), dataset(**keys)]
    validation = [dataset(dataset_name="arithmetic", split="validation", kwargs=sums, repeat=3)]
    setup = setup_data(DataConfig(train=train, validation=validation, max_input_seq_length=64))
    assert setup.task_to_env == {"arithmetic": "math", "rows": "other", "rows#2": "math"}
    ids = [prompt.prompt_id for prompt in setup.train]
    assert len(setup.train) == len(ids) == 5 + 2 * 18 + 20
    assert [ids[i] for i in (0, 5, 5 + 18, -1)] == ["arithmetic:0", "rows:0", "rows:0/1", "rows#2:19"]
    assert setup.train[len(ids) - 1].task_name == "rows#2"
    assert [prompt.task_name for prompt in setup.validation] == ["rows"] * 2 + ["arithmetic"] * 3 * 5
    assert setup.validation[2 + 3 * 5 - 1].prompt_id == "arithmetic/validation:4/2"
    assert not {prompt.prompt_id for prompt in setup.validation} & set(ids)


@named(
    "text, message",
    {
        "none": ("Solve it", "exactly one"),
        "braces of LaTeX": ("\\boxed{x}: {}", "braces twice"),
        "two": ("{}: {}", "braces twice"),
    },
)
def test_a_prompt_file_has_one_place_for_the_problem(text, message, tmp_path):
    (tmp_path / "prompt.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        TaskDataSpec(prompt_file=tmp_path / "prompt.txt")


def test_the_prompt_processor_makes_tokens_and_counts_what_is_too_long():
    sums = dataset(dataset_name="arithmetic", kwargs={"num_samples": 3})
    setup, tokenizer = setup_data(DataConfig(train=[sums], max_input_seq_length=64)), build_tiny_tokenizer()
    process = PromptProcessor(setup.tasks, tokenizer, 64)
    ask = partial(prompt, task_name="arithmetic")
    asked = ask({"problem": "5+7", "expected_answer": "12"})
    datum = process(asked)
    assert tokenizer.decode(datum["message_log"][0]["token_ids"]) == "<|user|>5+7<eos><|assistant|>"
    assert datum["extra_env_info"] == {"ground_truth": "12"}
    assert (datum["length"], datum["loss_multiplier"], datum["idx"], datum["task_name"]) == (6, 1.0, 7, "arithmetic")
    stub = PromptProcessor(setup.tasks, tokenizer, 5)(asked)
    assert (stub["length"], stub["loss_multiplier"]) == (6, 0.0) and len(stub["message_log"][0]["token_ids"]) <= 5
    for content in ("5+7", [{"type": "text", "text": "5+"}, {"type": "text", "text": "7"}]):
        same = process(ask({"messages": [user(content), assistant("12")]}))
        assert same["message_log"][0]["token_ids"].tolist() == datum["message_log"][0]["token_ids"].tolist()
        assert same["extra_env_info"] == datum["extra_env_info"]
    with pytest.raises(ValueError, match="row rows:7: has no JSON"):
        process(ask({BAD_ROW: "has no JSON"}))
    with pytest.raises(ValueError, match=r"row rows:7 has no column 'problem', which processor 'math_hf_.*has: text"):
        process(ask({"text": "a"}))
    setup.tasks["arithmetic"] = replace(setup.tasks["arithmetic"], processor=episode_processor)
    with pytest.raises(ValueError, match="row rows:7: stop_strings must be a list of texts, got '</a>'"):
        process(ask({"problem": "5+7", "extra_env_info": {}, "stop_strings": "</a>"}))
