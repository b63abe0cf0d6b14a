"""Tasks of reasoning-gym: rows of the dataset, and the environment that scores answers.

A stand-in for the package, with the classes that ours calls, is a folder on the path of the Python that runs; the slow
test installs the package.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.data.config import DatasetConfig, ExampleDatasetConfig
from nemo_rl.data.datasets.arithmetic import in_split
from nemo_rl.data.datasets.reasoning_gym import check_tasks
from nemo_rl.data.datasets.registry import load_rows
from nemo_rl.distributed.own_python import python_of
from nemo_rl.environments.config import ReasoningGymEnvironmentConfig, check_sections
from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironment
from nemo_rl.environments.section_parts import SandboxConfig
from nemo_rl.utils.registry import MissingPackage
from nemo_rl.utils.task_formats import REASONING_GYM
from tests.conversations import answered, sampled, user

PACKAGE = """
from dataclasses import dataclass
from random import Random

@dataclass
class Config:
    largest: int = 99
    seed: int | None = None
    size: int = 500
    def validate(self):
        assert self.largest > 0, "largest must be positive"

class Double:
    def __init__(self, config):
        config.validate()
        self.config = config
    def __getitem__(self, index):
        assert 0 <= index < self.config.size
        number = Random(self.config.seed + index).randint(1, self.config.largest)
        print("made", number)
        return {"question": f"2*{number}", "answer": str(2 * number), "metadata": {"pair": (number, number)}}
    def score_answer(self, answer, entry):
        first, second = entry["metadata"]["pair"]
        if type(entry["metadata"]["pair"]) is not tuple:
            return 0.1
        return 1.0 if eval(answer) == first + second else 0.25

class Open(Double):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "question": f"open {index}", "answer": None}

DATASETS = {"double": (Double, Config), "open": (Open, Config), "composite": (None, None)}
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that has the stand-in; this process has it, too."""
    packages = tmp_path / "site-packages"
    (packages / "reasoning_gym").mkdir(parents=True)
    (packages / "reasoning_gym" / "__init__.py").touch()
    (packages / "reasoning_gym" / "factory.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(packages)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def section(python: str | None, *, kind=DatasetConfig, num_samples=None, seed=42, split="train", held_out=0.0, **tasks):
    own = {"env_name": "reasoning_gym"} if kind is DatasetConfig else {}
    options = {"tasks": tasks, "py_executable": python} | ({"num_samples": num_samples} if num_samples else {})
    common = {"dataset_name": "reasoning_gym", "processor": "episode_processor", "seed": seed, "split": split}
    return kind(**common, split_validation_size=held_out, kwargs=options, **own)


def test_training_and_validation_share_no_item_and_the_seed_decides(python):
    train, held_out = load_rows(section(python, num_samples=100, held_out=30, double={}))
    other = load_rows(section(python, num_samples=100, seed=43, double={}))[0]
    assert [len(train), len(held_out)] == [100, 30]
    assert {row["problem"] for row in [*train, *other]}.isdisjoint(row["problem"] for row in held_out)
    assert all(in_split(row["problem"], "validation") for row in held_out)
    assert train != other and train[:20] == load_rows(section(python, num_samples=20, double={}))[0]
    assert [eval(row["problem"]) for row in train] == [int(row["expected_answer"]) for row in train]
    with pytest.raises(ValueError, match=r"none of split 'train'.*has more items, or set split=all"):
        load_rows(section(python, double={"largest": 1}))


def test_a_dry_run_asks_the_package_where_it_is(python, monkeypatch, tmp_path):
    check_tasks(section(python, double={"largest": 9}, open={}))
    with pytest.raises(ValueError, match="reasoning_gym has no task 'duble'; did you mean double"):
        check_tasks(section(python, double={}, duble={}))
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "none"))
    with pytest.raises(MissingPackage, match="are not checked: the first run installs its package"):
        check_tasks(section(REASONING_GYM, duble={}))
    assert not (tmp_path / "none").exists()


def test_every_beginning_of_the_rows_has_the_tasks_by_their_weights(python):
    rows, _ = load_rows(section(python, num_samples=40, double={"weight": 3, "largest": 9}, open=None))
    names = [row["extra_env_info"]["task"] for row in rows]
    assert all(names[:count].count("open") == count // 4 for count in range(4, 41, 4))
    assert {tuple(row["extra_env_info"]["settings"].items()) for row in rows} == {(("largest", 9),), ()}
    assert all(("expected_answer" in row) == (name == "double") for row, name in zip(rows, names, strict=True))


def test_rows_to_learn_from_have_the_answer_in_its_tags(python):
    rows, _ = load_rows(section(python, kind=ExampleDatasetConfig, num_samples=3, double={}))
    question, reply = rows[0]["messages"]
    assert reply["content"] == f"<answer>{eval(question['content'])}</answer>"
    with pytest.raises(ValueError, match="open has items without an answer, only a scorer"):
        load_rows(section(python, kind=ExampleDatasetConfig, num_samples=3, open={}))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"duoble": {}}, "no task 'duoble'; did you mean double?"),
        ({"composite": {}}, "no task 'composite'; there are: double, open"),
        ({"double": {"larges": 9}}, "double has no setting 'larges'; did you mean largest?"),
        ({"double": {"wieght": 9}}, "double has no setting 'wieght'; did you mean weight?"),
        ({"double": {"largest": 0}}, "double refuses its settings: largest must be positive"),
        ({"double": {"weight": 0}}, "tasks.double.weight: Input should be greater than 0"),
    ],
)
def test_a_wrong_task_or_setting_is_refused_with_the_name_that_was_meant(python, tasks, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_rows(section(python, **tasks))


def test_a_missing_package_is_one_line():
    if subprocess.run([sys.executable, "-c", "import reasoning_gym"], capture_output=True).returncode == 0:
        pytest.skip("the package is installed here")
    remedy = "has no package reasoning-gym: install it there"
    with pytest.raises(ValueError, match=remedy) as of_rows:
        load_rows(section(None, double={}))
    with pytest.raises(ValueError, match=remedy) as of_scores:
        ReasoningGymEnvironment({"py_executable": None})
    assert "\n" not in f"{of_rows.value}{of_scores.value}"


def test_the_last_answer_in_tags_gets_the_score_of_its_task(python):
    row = load_rows(section(python, num_samples=1, double={}))[0][0]
    known, right = row["extra_env_info"], row["expected_answer"]
    environment = ReasoningGymEnvironment({"num_workers": 1, "sandbox": {"cpu_limit_s": 1}})
    try:
        turns = (
            f"<answer>1</answer> no, <answer> {right} </answer>",
            "<answer>1</answer>",
            right,
            "<answer>)</answer>",
        )
        result = environment.step([answered(turn) for turn in turns], [known] * 4)
        assert result.rewards.tolist() == [1.0, 0.25, 0.0, 0.0] and result.terminateds.all()
        assert result.answers == [right, "1", None, ")"] and result.failures == [None] * 4
        assert result.metrics and result.metrics[2] == {"score/double": 0.0, "answered": 0.0}
        # Scorers evaluate answers: one that reads a file has a score like any wrong one, one that hangs its limit.
        hostile = ("open('/etc/passwd').read()", "max(iter(int, 1))", "__import__('os')._exit(3)")
        result = environment.step([answered(f"<answer>{text}</answer>") for text in hostile], [known] * 3)
        assert result.rewards.tolist() == [0.0, 0.0, 0.0]
        assert result.failures and result.failures[:2] == [None, None] and "exit status 3" in str(result.failures[2])
        own_example = [user("2*1"), {"role": "assistant", "content": f"<answer>{right}</answer>"}, sampled("none")]
        assert environment.step([own_example], [known]).rewards.tolist() == [0.0], "only turns of the policy count"
        with pytest.raises(ValueError, match="set processor: episode_processor"):
            environment.step([answered("<answer>1</answer>")], [{"ground_truth": "1"}])
    finally:
        environment.shutdown()


def test_a_run_is_refused_if_a_scorer_may_take_as_long_as_a_step():
    cfg = ReasoningGymEnvironmentConfig(sandbox={"time_limit_s": 60.0})
    assert cfg.sandbox.memory_mib > SandboxConfig().memory_mib, "a section that names one limit keeps the others"
    assert [key for key, _ in check_sections({"gym": cfg}, step_timeout_s=60.0)] == ["env.gym.sandbox.time_limit_s"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_every_task_of_the_package_is_made_and_scored(tmp_path, monkeypatch):
    """Installs the package in a Python of its own; that Python scores."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    slow = {"boxnet", "futoshiki", "knight_swap"}  # one has no answer that could be scored, the others take minutes
    python = python_of(REASONING_GYM, "a test")
    program = """
import sys
from nemo_rl.data.datasets.reasoning_gym import item_maker
from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironment
from reasoning_gym.factory import DATASETS
environment = ReasoningGymEnvironment({"sandbox": {"time_limit_s": 30.0, "cpu_limit_s": 30}})
with item_maker(None) as items:
    for name in sorted(DATASETS.keys() - {"composite", *sys.argv[1:]}):
        item = next(items.of(name, {}, 7))
        texts = [item["answer"] or "", "nothing like it"]
        logs = [[{"role": "assistant", "content": f"<answer>{text}</answer>", "sampled": True}] for text in texts]
        result = environment.step(logs, [{"task": name, "settings": {}, "item": item["item"]}] * 2)
        right, wrong = result.rewards.tolist()
        assert (right == 1 or item["answer"] is None) and wrong < 0.2 and not any(result.failures), (name, result)
environment.shutdown()
print("all", len(DATASETS))
"""
    done = subprocess.run([python, "-W", "ignore", "-c", program, *slow], capture_output=True, text=True, timeout=840)
    assert done.returncode == 0 and "all 1" in done.stdout, done.stderr[-3000:]
