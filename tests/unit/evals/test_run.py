"""The configuration of an evaluation, records of finished groups and their folder, failures, datasets, and numbers."""

import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.parts.placement import describe_evaluation
from nemo_rl.algorithms.trainers.group_sources import TooManyFailures
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config, load_config
from nemo_rl.distributed.errors import WorkerDied, WorkerError, WorkerHang
from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.evals.metrics import Outcome, clustered_interval, cons_at_k, show_results, summarize
from nemo_rl.evals.run import WRITE_EVERY_S, _Writer, load_eval_data, make_results, outcomes_by_dataset
from nemo_rl.evals.samples import SampleFolder, SampleRecord, open_folder
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle, SampleStatus, SamplingParams
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import LogError
from tests.conversations import sampled
from tests.fakes import handle, sample
from tests.tables import cases, named, pattern
from tests.unit.config.run_configs import CONFIGS

CPU = CONFIGS / "evals" / "eval_cpu.yaml"


def load(*overrides: str) -> EvalMasterConfig:
    return load_config(EvalMasterConfig, CPU, list(overrides))


def test_what_follows_from_what():
    """NeMo RL's own keys, with what they leave out."""
    generation = {"model_name": "m", "vllm_cfg": {"max_model_len": 512}, "top_k": -1}
    sections = {"generation": generation, "data": {"dataset_name": "math500"}, "env": {"math": {}}}
    config = build_config(EvalMasterConfig, sections)
    assert (config.generation.max_new_tokens, config.data.max_input_seq_length) == (512, 512)
    assert (config.generation.temperature, config.generation.val_temperature) == (0.0, 0.0)
    assert (config.tokenizer.name, config.generation.num_prompts_per_step) == ("m", -1)
    assert config.generation.vllm_cfg.gpu_memory_utilization == 0.9


REFUSED = """
eval.k_value=9 -> eval.k_value ... 9 is more than eval.num_tests_per_prompt=8
generation.temperature=0 -> generation.temperature ... 0 gives 8 equal samples of each prompt
generation.val_temperature=0.5 -> generation.val_temperature ... for validation during training
generation.num_prompts_per_step=0 -> num_prompts_per_step ... must be 1 or more, or -1
data.dataset_name=null -> data.dataset_name ... name a dataset
data.datasets=[{dataset_name: gsm8k}] -> data.datasets ... both set
data.dataset_name=null & data.datasets=[{dataset_name: gsm8k}] & data.env_name=math
    -> data.env_name ... counts only for dataset_name
data.dataset_name=gsm8k & data.solution_key=a -> data.solution_key ... gsm8k has columns of its own
data.dataset_name=null & data.datasets=[{dataset_name: gsm8k}] & data.repeat=2
    -> data.repeat ... counts only for dataset_name
data.env_name=mth -> data.env_name ... no section env.mth; did you mean math?
data.dataset_name=HumanEval -> no environment judges the answers of HumanEval: ... '+env.code={type: code}'
data.dataset_name=mmlu & ~env.multichoice -> no environment judges the answers of mmlu: add
data.max_input_seq_length=99 -> more than generation.vllm_cfg.max_model_len=48
+generation.vllm_cfg.env_vars.OMP_NUM_THREADS='4' -> the library decides it on CPUs
generation.vllm_cfg.tensor_parallel_size=2 -> 2 does not divide the 1 CPU workers of the cluster; these would: 1
eval.metric=cons@k & +env.rm={type: reward_model, model_name: m} & data.env_name=rm
    -> cons@k takes a vote on answers, and env.rm (reward_model) finds none
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_what_cannot_work_is_refused(given, told):
    with pytest.raises(ConfigError, match=pattern(told)):
        load(*given)


def test_each_dataset_has_its_processor_and_its_judge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("all.txt", "own.txt"):
        Path(name).write_text("{}")
    several = "[{dataset_name: gsm8k}, {dataset_name: mmlu_pro}, {dataset_name: mmlu_DE-DE, prompt_file: own.txt}]"
    config = load("data.dataset_name=null", "data.prompt_file=all.txt", f"data.datasets={several}")
    found = [(config.processor_of(d), config.environment_of(d), d.prompt_file) for d in config.data.chosen]
    assert found == [
        ("math_hf_data_processor", "math", "all.txt"),
        ("multichoice_qa_processor", "multichoice", "all.txt"),
        ("multichoice_qa_processor", "multilingual", "own.txt"),
    ]
    assert "mmlu_pro: multichoice_qa_processor, judged by env.multichoice" in describe_evaluation(config)
    one = load("data.dataset_name=gpqa", "env.math.verifier_type=english_multichoice", "~env.multichoice")
    assert one.environment_of(one.data.chosen[0]) == "math"


SAMPLING = SamplingParams(max_new_tokens=1)
SMALL = ("data.kwargs.num_samples=6", "eval.num_tests_per_prompt=2", "eval.k_value=2")
GIVEN = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
SPOKEN = [*GIVEN, sampled("first"), {"role": "environment", "content": "no"}, sampled("second")]


class FakeCollector:
    """Plays at once, with the answers of the metas. `failures`: number of a call of `conversations` -> its error."""

    def __init__(self, failures: dict[int, WorkerError] | None = None) -> None:
        self.failures = failures or {}
        self.num_asked = 0
        self.played: list[str] = []

    def stream(self, requests: Iterable[GroupRequest], max_in_flight: int) -> Iterator[list[GroupHandle]]:
        for request in requests:
            self.played.append(request.prompt.prompt_id)
            yield [played(request.prompt.prompt_id, 1.0, 0.0)]

    def conversations(self, handles: list[GroupHandle]) -> list[list[list[dict[str, str]]]]:
        self.num_asked += 1
        if self.num_asked in self.failures:
            raise self.failures[self.num_asked]
        return [[SPOKEN if one.has_reward else [] for one in handle.samples] for handle in handles]


def played(prompt_id: str, *rewards: float | None, answer: str | None = "2") -> GroupHandle:
    """None: the sample failed."""
    failed: dict[str, Any] = {"status": SampleStatus.FAILED, "failure": "the judge was out"}
    samples = [
        sample(reward or 0.0, sample_id=f"{prompt_id}/{index}", answer=answer, **failed if reward is None else {})
        for index, reward in enumerate(rewards)
    ]
    return handle(*samples, name=prompt_id, prompt=prompt_id, task="arithmetic")


def writer(folder: SampleFolder, *overrides: str, collector: Any = None) -> _Writer:
    config = load(*SMALL, *overrides)
    inputs: Any = SimpleNamespace(data=load_eval_data(config))
    prompts = {prompt.prompt_id: prompt for prompt in inputs.data.prompts}
    console = RunConsole(num_steps=1, file=io.StringIO())
    return _Writer(config, inputs, folder, console, collector or FakeCollector(), prompts)


@pytest.fixture
def folder(tmp_path):
    with open_folder(tmp_path / "e", {}, "", 2) as samples:
        yield samples


def test_too_many_failures_end_it_and_are_not_written(folder):
    chosen = writer(folder, "eval.max_failed_sample_fraction=0.1")
    chosen.take([played("arithmetic:0", None, None), played("arithmetic:1", 1.0, 1.0)])
    with pytest.raises(TooManyFailures, match=r"2 of 12 samples failed already.*\n2x the judge was out"):
        chosen.finish()
    assert list(folder.outcomes) == ["arithmetic:1"]


def lost(kind: type[WorkerError], exception_type: str = "") -> WorkerError:
    return kind("rollout-0 died", worker="rollout-0", rank=0, method="conversations", exception_type=exception_type)


def test_groups_that_end_with_their_worker_are_asked_again(folder):
    collector = FakeCollector({2: lost(WorkerDied), 6: lost(WorkerError), 7: lost(WorkerDied)})
    writer(folder, collector=collector).ask_all(SAMPLING, 2)
    assert collector.played == [*(f"arithmetic:{n}" for n in range(6)), "arithmetic:1", "arithmetic:5", "arithmetic:1"]
    assert sorted(folder.outcomes) == [f"arithmetic:{n}" for n in range(6)]


@named(
    "failures",
    {
        "an error": {2: lost(WorkerError, "KeyError")},
        "a hang": {2: lost(WorkerHang)},
        "death after death": {n: lost(WorkerDied) for n in range(2, 99)},
    },
)
def test_what_asking_again_does_not_help_against_ends_it(failures, folder):
    collector = FakeCollector(failures)
    with pytest.raises(WorkerError):
        writer(folder, collector=collector).ask_all(SAMPLING, 2)
    assert collector.num_asked < 6


def test_a_vote_needs_answers(folder):
    chosen = writer(folder)
    chosen.config = load(*SMALL, "+env.mine={type: 'my:Env'}", "data.env_name=mine", "eval.metric=cons@k")
    tasks = chosen.inputs.data.tasks
    tasks["arithmetic"] = replace(tasks["arithmetic"], env_name="mine")

    def take(number: int, answer: str | None) -> None:
        chosen.written_at = -WRITE_EVERY_S  # it may write
        chosen.take([played(f"arithmetic:{number}", 1.0, 1.0, answer=answer)])

    take(0, None)
    assert not folder.outcomes, "not before one of the samples has an answer"
    told = r"cons@k takes a vote on answers, and env.mine found none in the samples of 1"
    with pytest.raises(ValueError, match=told):
        chosen.finish()
    take(1, "2")
    assert sorted(folder.outcomes) == ["arithmetic:0", "arithmetic:1"]
    take(2, None)
    assert "arithmetic:2" in folder.outcomes


def test_the_mean_on_the_way_leaves_out_prompts_that_were_not_asked(folder):
    chosen, shown = writer(folder), io.StringIO()
    too_long = [sample(0.0, status=SampleStatus.PROMPT_TOO_LONG)] * 2
    chosen.take([handle(*too_long, prompt="arithmetic:0"), played("arithmetic:1", 1.0, 0.5)])
    chosen.finish()
    chosen.console = RunConsole(num_steps=1, file=shown)
    chosen._show(chosen.started + 60.0)
    assert "mean reward 0.7500" in shown.getvalue()


def test_results_and_table(folder):
    chosen = writer(folder)
    chosen.take([played(f"arithmetic:{n}", 1.0, 0.0) for n in range(5, -1, -1)])
    chosen.finish()
    model: Any = type("Model", (), {"name": "tiny\x1b[31m", "identity": {}})
    results = make_results(chosen.config, model, outcomes_by_dataset(chosen.inputs.data, folder))
    assert results["metric"] == "pass@2" and results["overall"]["score"] == 1.0 and results["overall"]["mean"] == 0.5
    assert results["overall"] == results["datasets"]["arithmetic"]
    record = json.loads((folder.folder / "samples.jsonl").read_text().splitlines()[0])
    assert (record["prompt"], record["response"]) == ("system\nuser\nassistant\nuser", "first\nsecond")
    shown = io.StringIO()
    show_results(results, shown)
    assert "pass@2" in shown.getvalue() and "0.5000" in shown.getvalue() and "\x1b" not in shown.getvalue()


def test_samples_belong_to_the_sections_that_a_composite_names():
    composite = "{type: composite, reward_functions: [{name: right, env: math, weight: 1.0}]}"
    config = load(f"+env.both={composite}", "data.env_name=both")
    judges = load_eval_data(config).identity(config)["env"]
    assert judges.keys() == {"both", "math"} and judges["math"]["verifier_type"] == "math"


def test_several_datasets_keep_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "rows.csv").write_text("problem,answer\n1+1,2\n")
    several = f"[{{dataset_name: arithmetic, split: validation}}, {{dataset_name: '{tmp_path}/rows.csv', repeat: 2}}, "
    several += "{dataset_name: arithmetic, split: train, kwargs: {num_samples: 3}}]"
    config = load("data.dataset_name=null", "data.kwargs={}", "data.split=null", f"data.datasets={several}")
    data = load_eval_data(config)
    assert list(data.tasks) == ["arithmetic", "rows", "arithmetic#2"]
    ids = [prompt.prompt_id for prompt in data.prompts]
    assert (
        len(set(ids)) == len(ids)
        and [name for name in ids if "rows" in name] == ["rows:0", "rows:0/1"]
        and ids[-1] == "arithmetic#2:2"
    )
    assert data.environments == ["math"] and data.identity(config)["data"].keys() == data.tasks.keys()


# -- the folder of an evaluation that is continued

IDENTITY = {"model": {"weights": "a"}, "eval": {"seed": 1}}


def group(prompt_id: str, num: int = 2) -> list[SampleRecord]:
    texts: Any = {"prompt": "1+1", "response": "zwei\n\u2028 \U0001f600", "answer": "2", "expected_answer": "2"}
    numbers: Any = {"reward": 1.0, "num_prompt_tokens": 3, "num_tokens": 4, "num_turns": 1, "seed": 2**62}
    same = {"dataset": "d", "prompt_id": prompt_id, "status": "completed"} | texts | numbers
    return [SampleRecord(sample_index=index, **same) for index in range(num)]


def opened(folder: Path) -> AbstractContextManager[SampleFolder]:
    return open_folder(folder, IDENTITY, "config", 2)


@pytest.fixture
def written(tmp_path) -> Path:
    with opened(tmp_path / "e") as samples:
        samples.append([group("d:0"), group("d:1")])
    return tmp_path / "e"


def test_whole_groups_come_back(written):
    with opened(written) as samples:
        assert samples.num_bytes_dropped == 0
        assert samples.outcomes == {name: [record.outcome for record in group(name)] for name in ("d:0", "d:1")}
    lines = [json.loads(line) for line in (written / "samples.jsonl").read_bytes().splitlines()]
    assert lines == [asdict(record) for name in ("d:0", "d:1") for record in group(name)]


@pytest.mark.parametrize(("num_lines", "less"), [(4, 1), (3, 0), (3, 9)])
def test_an_unfinished_end_is_cut_off(written, num_lines, less):
    path = written / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:num_lines])
    path.write_bytes(kept[: len(kept) - less])
    with opened(written) as samples:
        assert list(samples.outcomes) == ["d:0"] and samples.num_bytes_dropped > 0
        samples.append([group("d:2")])
    with opened(written) as samples:
        assert list(samples.outcomes) == ["d:0", "d:2"]
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_damage_in_the_middle_is_not_guessed_away(written, line):
    """Half of a line, the line before once more, and another's."""
    path = written / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = (b'{"torn\n', lines[0], b'{"prompt_id": "d:9"}\n')[line]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"samples.jsonl: line {line + 1} is damaged"), opened(written):
        pass


def test_samples_that_are_deleted_under_the_evaluation_end_it(written):
    with opened(written) as samples:
        (written / "samples.jsonl").unlink()
        for write in (lambda: samples.append([group("d:2")]), lambda: samples.write_results({})):
            with pytest.raises(LogError, match=r"samples\.jsonl was deleted or moved during the evaluation, with the"):
                write()
        assert not (written / "results.json").exists()


def test_one_process_at_a_time(written):
    with opened(written), pytest.raises(CheckpointError, match="another process writes"), opened(written):
        pass


# -- numbers against their definitions


def outcome(reward: float, answer: str | None = None, status: SampleStatus = SampleStatus.COMPLETED) -> Outcome:
    return Outcome(status=status, reward=reward, answer=answer, num_tokens=5)


def majority_over_all_draws(answers: list[str | None], correct: list[float], k: int) -> float:
    """The definition: every draw of k, the most frequent answer, ties by lot."""
    value = {answer: correct[answers.index(answer)] for answer in answers if answer is not None}
    total, draws = 0.0, 0
    for drawn in combinations(answers, k):
        votes = Counter(answer for answer in drawn if answer is not None)
        winners = [answer for answer, number in votes.items() if number == max(votes.values())]
        total += sum(value[answer] for answer in winners) / len(winners) if winners else 0.0
        draws += 1
    return total / draws


@given(answers=st.lists(st.sampled_from(["1", "2", "3", "4", None]), min_size=1, max_size=8), data=st.data())
@settings(max_examples=80, deadline=None)
def test_cons_at_k_is_the_mean_over_all_draws(answers, data):
    right = data.draw(st.sampled_from(["1", "2"]))
    correct = [float(answer == right) for answer in answers]
    k = data.draw(st.integers(1, len(answers)))
    assert cons_at_k(answers, correct, k) == pytest.approx(majority_over_all_draws(answers, correct, k), abs=1e-12)


def test_the_interval_is_clustered_by_prompt():
    values = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    low, high = clustered_interval(values) or (0, 0)
    means = [statistics.mean(value) for value in values]
    margin = 1.959964 * statistics.stdev(means) / math.sqrt(4)
    assert (low + high) / 2 == pytest.approx(0.625) and high - low == pytest.approx(2 * margin, rel=1e-6)
    repeated = clustered_interval([value * 10 for value in values]) or (0, 0)
    assert repeated[1] - repeated[0] == pytest.approx(high - low), "asking the same again tells nothing about prompts"
    assert clustered_interval([[1.0, 0.0]]) is None


def test_what_has_no_outcome_is_counted_apart():
    failed = outcome(0.0, status=SampleStatus.FAILED)
    too_long = outcome(0.0, status=SampleStatus.PROMPT_TOO_LONG)
    truncated = outcome(0.0, status=SampleStatus.TRUNCATED)
    prompts = [[outcome(1.0), outcome(1.0)], [truncated, failed], [too_long, too_long]]
    found = summarize(prompts, metric="pass@k", k=2)
    assert (found["num_prompts"], found["num_samples"], found["num_prompts_scored"]) == (3, 6, 1)
    assert found["score"] == 1.0 and found["pass_at"] == {"1": 0.5, "2": 1.0}
    assert found["mean"] == found["accuracy"] == pytest.approx(2 / 3)
    assert (found["truncated_rate"], found["failed_rate"]) == (pytest.approx(1 / 3), pytest.approx(1 / 6))
    assert (found["num_failed"], found["num_prompts_too_long"], found["mean_length"]) == (1, 1, 5.0)
