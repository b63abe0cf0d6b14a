"""docs/adding-an-environment.md, as it is written: its files and their output."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.config.metric_names import TASK
from nemo_rl.config.loader import load_config
from nemo_rl.data.rows.setup import PromptProcessor, setup_data
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.interfaces import EnvironmentReturn

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adding-an-environment.md").read_text()


def files() -> dict[str, str]:
    """Name -> text; blocks of the same file follow one another."""
    found: dict[str, str] = {}
    for name, body in re.findall(r"<!-- (\w+\.\w+) -->\n```\w+\n(.*?)^```", PAGE, re.M | re.S):
        found[name] = found.get(name, "") + ("\n\n" if name in found else "") + body
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with the files of the page, as the root of the repository is for its reader."""
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    sys.modules.pop("second_chance", None)


def test_the_episode_by_hand_goes_as_the_page_says(folder, capsys):
    exec(compile(files()["try_second_chance.py"], "try_second_chance.py", "exec"), {})
    told = re.search(r"^prints\n\n```text\n(.*?)```", PAGE, re.M | re.S)
    assert told is not None
    assert capsys.readouterr().out == told[1]


def test_the_table_of_fields_is_that_of_the_interface():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## Try it")[0], re.M)
    assert tuple(rows) == EnvironmentReturn._fields


def test_dataset_processor_and_configuration_fit_together(folder):
    config = load_config(GRPOMasterConfig, folder / "second_chance.yaml", ["policy.tokenizer.name=tiny:arithmetic"])
    setup = setup_data(config.data)
    assert setup.validation is not None
    process = PromptProcessor(setup.tasks, build_tiny_tokenizer(), config.data.max_input_seq_length)
    datum = process(setup.train[0])
    metadata = datum["extra_env_info"]
    assert metadata is not None and set(metadata) == {"problem", "answer", "tries"} and metadata["tries"] == 0
    assert datum["message_log"][0]["content"].count(metadata["problem"]) == 1
    trained = {setup.train[i].row["problem"] for i in range(len(setup.train))}
    held_out = {setup.validation[i].row["problem"] for i in range(len(setup.validation))}
    assert len(trained) + len(held_out) == 100 and not trained & held_out
    assert f"(sample 12/3/{setup.train[41].prompt_id}/0)" in PAGE


def test_several_datasets_with_weights_load_and_have_the_metrics_that_are_named(folder):
    [block] = [body for body in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S) if "weight" in body]
    piece = yaml.safe_load(block)
    (folder / "piece.yaml").write_text(f"defaults: second_chance.yaml\n{block}")
    config = load_config(GRPOMasterConfig, folder / "piece.yaml", ["+env.math.type=math"])
    assert [dataset.weight for dataset in config.data.train] == [3.0, 1.0] and len(piece["data"]["train"]) == 2
    named = PAGE.split("metrics, e.g. ")[1].split(" in training;")[0]
    assert {*TASK, "num_samples"} <= set(re.findall(r"`(\w+)`", named))
    assert "arithmetic/reward" in config.train_metrics
