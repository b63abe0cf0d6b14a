"""What `--dry-run` looks up without loading it."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.config.supervised import DPOMasterConfig, SFTMasterConfig
from nemo_rl.algorithms.parts.inputs import Inputs
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.data.datasets import registry
from nemo_rl.evals.config import EvalMasterConfig

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
FILES = {
    GRPOMasterConfig: "grpo_math_cpu.yaml",
    SFTMasterConfig: "sft_cpu.yaml",
    DPOMasterConfig: "dpo_cpu.yaml",
    EvalMasterConfig: "evals/eval_cpu.yaml",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inputs(model: type[Any], *overrides: str) -> Inputs:
    return Inputs.of(load_config(model, CONFIGS / FILES[model], overrides))


@pytest.mark.parametrize("model", FILES)
def test_a_configuration_without_mistakes_has_nothing_to_tell(model) -> None:
    assert inputs(model).lines() == []


@pytest.mark.parametrize(
    ("model", "override", "told"),
    [
        (SFTMasterConfig, "data.train.dataset_name=arithmetics", "data.train.dataset_name: unknown dataset 'arithm"),
        (SFTMasterConfig, "data.train.dataset_name=rows.jsonl", "data.train.dataset_name: dataset file 'rows.jsonl'"),
        (SFTMasterConfig, "+data.train.kwargs.max_operandd=9", "arithmetic: kwargs takes num_samples, max_operand"),
        (SFTMasterConfig, "data.train.split=trian", "split must be one of train, validation, all, got 'trian'"),
        (SFTMasterConfig, "data.train.dataset_name=GSM8K", "dataset 'GSM8K' takes no kwargs, got max_operand"),
        (SFTMasterConfig, "data.train.dataset_name=./rows", "dataset './rows' does not exist (looked in "),
        (SFTMasterConfig, "data.train.dataset_name=lost.rows.Riddles", "dataset_name 'lost.rows.Riddles': no module"),
        (SFTMasterConfig, "+data.train.processor=sft_procesor", "did you mean sft_processor?"),
        (SFTMasterConfig, "+data.custom_dataloader=lost:load", "data.custom_dataloader: data loader 'lost:load': no m"),
        (DPOMasterConfig, "+data.val_data_paths.hard=h.jsonl", "data.val_data_paths.hard: dataset file 'h.jsonl' does"),
        (GRPOMasterConfig, "+data.default.prompt_file=no.txt", "data.default.prompt_file: prompt_file 'no.txt' does n"),
        (GRPOMasterConfig, "+data.train.system_prompt_file=no.txt", "data.train.system_prompt_file: system_prompt_f"),
        (GRPOMasterConfig, "+policy.tokenizer.chat_template=no.jinja", "chat_template: 'no.jinja' does not exist"),
        (GRPOMasterConfig, "policy.optimizer.name=torch.optim.Adamm", "policy.optimizer.name: optimizer 'torch.optim."),
        (GRPOMasterConfig, "policy.model_name=tiny:arithmetics", "policy.model_name: "),
        (EvalMasterConfig, "data.dataset_name=arithmetics", "data.dataset_name: unknown dataset 'arithmetics'; did y"),
        (EvalMasterConfig, "data.dataset_name='https://a.b/c.csv'", "is an address, and addresses are not re"),
        (EvalMasterConfig, "data.dataset_name=rows.csv", "data.dataset_name: dataset file 'rows.csv' does not exist"),
    ],
)  # fmt: skip
def test_what_would_stop_the_run_is_refused_under_its_key(model, override, told) -> None:
    with pytest.raises(ConfigError) as error:
        inputs(model, override).lines()
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("{type: lost.envs:Mine}", "env.math.type: environment 'lost.envs:Mine': no module 'lost' can be imported"),
        ("{type: python_tools, tools: [lost:add]}", "env.math.tools: "),
        ("{type: composite, reward_functions: [{name: mine, reward: 'lost:f'}]}", "env.math.reward_functions.0: "),
        ("{type: retrieval, dataset_name: no.jsonl}", "env.math.dataset_name: dataset file 'no.jsonl' does not exist"),
    ],
)
def test_environments_are_looked_up_too(env, told) -> None:
    with pytest.raises(ConfigError) as error:
        inputs(GRPOMasterConfig, "~env.math", f"+env.math={env}", "grpo.max_rollout_turns=5").lines()
    assert told in str(error.value)


def test_an_environment_that_no_dataset_names_is_not_looked_up() -> None:
    assert inputs(GRPOMasterConfig, "+env.unused={type: lost.envs:Mine}").lines() == []


def test_a_model_that_is_not_here_and_names_on_a_hub_are_told() -> None:
    given = ("policy.model_name=results/sft/step_1/weights", "data.train.dataset_name=some/where")
    missing, unknown = inputs(SFTMasterConfig, *given).lines()
    assert missing.startswith("policy.model_name: results/sft/step_1/weights ")
    assert unknown.startswith("not checked") and unknown.endswith(": data.train.dataset_name=some/where")
    Path("models").mkdir()
    [missing] = inputs(GRPOMasterConfig, "policy.model_name=models/mine").lines()
    assert missing.startswith("policy.model_name: models/mine ")
    # A name of the table is known, and so is everything that lies here.
    Path("models/mine").mkdir()
    Path("rows.jsonl").write_text(json.dumps({"input": "a", "output": "b"}))
    for name in ("openai/gsm8k", "gsm8k", "rows.jsonl", "models"):
        given = ("~data.train.kwargs", f"data.train.dataset_name={name}", "policy.model_name=models/mine")
        assert inputs(SFTMasterConfig, *given).lines() == []


def test_a_copy_may_have_the_format_of_its_own_reader() -> None:
    Path("tests.jsonl.gz").write_text("x")
    given = ("+env.code={type: code}", "data.dataset_name=HumanEval", "data.data_path=tests.jsonl.gz")
    assert inputs(EvalMasterConfig, *given).lines() == []
    (problem,) = inputs(SFTMasterConfig, "data.train.dataset_name=tests.jsonl.gz").problems
    assert "unknown" in problem.message


def test_a_module_that_lacks_a_package_is_told_and_not_refused(monkeypatch) -> None:
    Path("my_rows_of_inputs.py").write_text("import package_that_is_lost\n")
    monkeypatch.syspath_prepend(".")
    (line,) = inputs(SFTMasterConfig, "data.train.dataset_name='my_rows_of_inputs:load'").lines()
    assert line.endswith("'my_rows_of_inputs:load' imports package_that_is_lost, which is not installed here")


def never(**section: Any) -> None:
    pytest.fail("rows are read")


def test_no_rows_are_read(monkeypatch) -> None:
    monkeypatch.setitem(registry.DATASET_REGISTRY, "never", lambda cfg: never())
    for name in ("never", f"{__name__}.never"):
        assert inputs(SFTMasterConfig, f"data.train.dataset_name={name}").lines() == []
