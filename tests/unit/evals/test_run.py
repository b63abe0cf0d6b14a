"""The configuration of an evaluation, records of finished groups, treatment of failures, and several datasets."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl.algorithms.trainers.group_sources import TooManyFailures
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config, load_config
from nemo_rl.distributed.errors import WorkerDied, WorkerError, WorkerHang
from nemo_rl.evals.config import EvalMasterConfig, describe_evaluation
from nemo_rl.evals.metrics import show_results
from nemo_rl.evals.run import WRITE_EVERY_S, Inputs, _Writer, load_eval_data, make_results, outcomes_by_dataset
from nemo_rl.evals.samples import SampleFolder, open_folder
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle, SampleMeta, SampleStatus, SamplingParams
from nemo_rl.utils.console import RunConsole
from tests.fakes import handle, sample
from tests.tables import cases, pattern
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
eval.k_value=9 -> eval.k_value ... 9 is more than num_tests_per_prompt=8
generation.temperature=0 -> generation.temperature ... 0 gives 8 equal samples of each prompt
generation.val_temperature=0.5 -> generation.val_temperature ... for validation during training
generation.num_prompts_per_step=0 -> num_prompts_per_step ... must be 1 or more, or -1
eval.k_valu=2 -> the nearest valid key is eval.k_value
eval.metric=maj@k -> eval.metric ... must be 'pass@k' or 'cons@k'
data.dataset_name=null -> data.dataset_name ... name a dataset
data.datasets=[{dataset_name: gsm8k}] -> data.datasets ... both set
data.dataset_name=null & data.datasets=[{dataset_name: gsm8k}] & data.env_name=math
    -> data.env_name ... counts for dataset_name alone
data.dataset_name=gsm8k & data.solution_key=a -> data.solution_key ... gsm8k has columns of its own
data.env_name=mth -> data.env_name ... no section env.mth; did you mean math?
data.dataset_name=mmlu & ~env.multichoice -> no math environment judges the answers of mmlu: add
data.max_input_seq_length=99 -> more than generation.vllm_cfg.max_model_len=48
generation.vllm_cfg.tensor_parallel_size=2 -> engines of 2 do not fill nodes of 1 CPU workers
eval.metric=cons@k & +env.rm={type: reward_model, model_name: m} & data.env_name=rm
    -> cons@k takes a vote on answers, and env.rm (reward_model) finds none
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_what_cannot_work_is_refused(given, told):
    with pytest.raises(ConfigError, match=pattern(told)):
        load(*given)


def test_each_dataset_has_its_processor_and_its_judge():
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
        return [[spoken(sample) for sample in handle.samples] for handle in handles]


def spoken(sample: SampleMeta) -> list[dict[str, str]]:
    if not sample.has_reward:
        return []
    texts = {"user": "1+1", "assistant": f"\\boxed{{{sample.answer}}}", "environment": "well"}
    return [{"role": role, "content": text} for role, text in texts.items()]


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
    data = load_eval_data(config)
    nothing: Any = None
    inputs = Inputs(model=nothing, data=data, process=nothing, identity={}, folder=folder.folder)
    prompts = {prompt.prompt_id: prompt for prompt in data.prompts}
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


AGAIN_AND_AGAIN = {n: lost(WorkerDied) for n in range(2, 99)}


@pytest.mark.parametrize("failures", [{2: lost(WorkerError, "KeyError")}, {2: lost(WorkerHang)}, AGAIN_AND_AGAIN])
def test_what_asking_again_does_not_help_against_ends_it(folder, failures):
    collector = FakeCollector(failures)
    with pytest.raises(WorkerError):
        writer(folder, collector=collector).ask_all(SAMPLING, 2)
    assert collector.num_asked < 6


@pytest.mark.parametrize("has_answers", [False, True])
def test_a_vote_needs_answers(folder, has_answers):
    chosen = writer(folder)
    chosen.config = load(*SMALL, "+env.mine={type: 'my:Env'}", "data.env_name=mine", "eval.metric=cons@k")
    tasks = chosen.inputs.data.tasks
    tasks["arithmetic"] = replace(tasks["arithmetic"], env_name="mine")
    chosen.written_at = -WRITE_EVERY_S  # the next call of `take` may write
    chosen.take([played("arithmetic:0", 1.0, 1.0, answer=None)])
    assert not folder.outcomes, "not before one of the samples has an answer"
    if has_answers:
        chosen.written_at = -WRITE_EVERY_S
        chosen.take([played("arithmetic:1", 1.0, 0.0)])
        assert sorted(folder.outcomes) == ["arithmetic:0", "arithmetic:1"]
        chosen.take([played("arithmetic:2", 1.0, 1.0, answer=None)])
        chosen.finish()
        assert "arithmetic:2" in folder.outcomes
        return
    with pytest.raises(
        ValueError, match=r"cons@k takes a vote on answers, and env.mine found none in the samples of 1"
    ):
        chosen.finish()


def test_the_mean_on_the_way_leaves_out_prompts_that_were_not_asked(folder):
    chosen = writer(folder)
    too_long = handle(sample(0.0, status=SampleStatus.PROMPT_TOO_LONG), name="arithmetic:0", prompt="arithmetic:0")
    too_long.samples *= 2
    chosen.take([too_long, played("arithmetic:1", 1.0, 0.5)])
    chosen.finish()
    shown = io.StringIO()
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
    several = f"[{{dataset_name: arithmetic, split: validation}}, {{dataset_name: '{tmp_path}/rows.csv'}}, "
    several += "{dataset_name: arithmetic, split: train, kwargs: {num_samples: 3}}]"
    config = load("data.dataset_name=null", "data.kwargs={}", "data.split=null", f"data.datasets={several}")
    data = load_eval_data(config)
    assert list(data.tasks) == ["arithmetic", "rows", "arithmetic#2"]
    ids = [prompt.prompt_id for prompt in data.prompts]
    assert len(set(ids)) == len(ids) and "rows:0" in ids and ids[-1] == "arithmetic#2:2"
    assert data.environments == ["math"] and data.identity(config)["data"].keys() == data.tasks.keys()
