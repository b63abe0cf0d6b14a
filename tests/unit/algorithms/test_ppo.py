"""The PPO step and its configuration, with fakes in place of workers."""

import copy
from pathlib import Path

import pytest

from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.ppo import PPOTrainer
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.types import TrainResult
from tests.fakes import FakePolicy, keys_of_plan
from tests.tables import cases, pattern
from tests.unit.algorithms.fake_runs import FLOPS, FakeRun, small
from tests.unit.config.run_configs import MINIMAL

BASE = ("ppo.ppo_epochs=2", "ppo.max_num_steps=2", "value.train_micro_batch_size=1")
VALUE_METRICS = {
    "loss": 0.25,
    "global_valid_toks": 24.0,
    "returns_mean": 0.5,
    "returns_square_mean": 0.5,
    "value_error_mean": 0.0,
    "value_error_square_mean": 0.0625,
}


def build(*overrides: str) -> PPOMasterConfig:
    return build_config(PPOMasterConfig, copy.deepcopy(MINIMAL), overrides)


class Run(FakeRun):
    def __init__(self, folder: Path, *overrides: str, value_ranks: int = 1) -> None:
        calls: list[str] = []
        config = build(*small(folder, "ppo"), *BASE, *overrides)
        result = TrainResult(losses=[0.25], grad_norms=[2.0], learning_rates=[0.1], metrics=VALUE_METRICS)
        self.value = FakePolicy([result], calls, name_prefix="value", data_parallel_size=value_ranks)
        super().__init__(
            folder,
            config,
            lambda tools, parts: PPOTrainer(config, tools, parts, self.value, FLOPS),  # type: ignore[arg-type]
            calls=calls,
        )


def test_the_first_steps_train_the_value_model_alone(tmp_path):
    run = Run(tmp_path, "ppo.policy_training_start_step=1")
    rows = run.go()
    syncs = [i for i, call in enumerate(run.policy.calls) if call == "sync"]
    first, second = run.policy.calls[syncs[0] : syncs[1]], run.policy.calls[syncs[1] : syncs[2]]
    assert (first.count("value.train"), first.count("train")) == (2, 0)
    assert (second.count("value.train"), second.count("train")) == (2, 2)
    assert "train/loss" not in rows[0] and "train/loss" in rows[1]
    assert rows[0]["train/value/loss"] == 0.25


def test_a_step_runs_its_phases_in_order(tmp_path):
    run = Run(tmp_path)
    rows = run.go()
    loading = ["collect", "value.load", "load"]
    scoring = ["logprobs", "reference", "value.values", "attach values"]
    learning = ["token_advantages", "value.attach returns", *["value.train"] * 2, *["train"] * 2]
    step = [*loading, *scoring, *learning, "sync"]
    assert run.policy.calls == ["sync", *step, *step, "save", "value.save"]
    assert set(run.policy.attached["values"].values()) == {"values of value"}
    assert set(run.value.attached["returns"].values()) == {"returns of policy"}
    assert rows[0]["train/reward"] == 0.5
    assert rows[0]["train/value/loss"] == 0.25 and rows[0]["train/value/grad_norm"] == 2.0
    assert rows[0]["train/value/explained_variance"] == 0.75
    assert rows[0]["train/global_valid_toks"] == 48  # both passes


def test_both_models_plan_the_same_samples_in_layouts_of_their_own(tmp_path):
    run = Run(tmp_path, "value.train_global_batch_size=2", value_ranks=2)
    run.go()
    policy, value = run.policy.plans[0], run.value.plans[0]
    assert len(policy.ranks) == 1 and len(value.ranks) == 2
    assert len(policy.ranks[0].train) == 1 and len(value.ranks[0].train) == 2
    assert policy.groups is not value.groups and sorted(keys_of_plan(policy)) == sorted(keys_of_plan(value))
    rewards = {(s.group, s.index): s.advantage for rank in value.ranks for batch in rank.logprobs for s in batch}
    assert rewards == {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 1.0}


REFUSED = """
value.train_global_batch_size=3 -> value.train_global_batch_size=3: 3 does not divide the 512 samples
value.dtensor_cfg.tensor_parallel_size=2 -> value.dtensor_cfg.tensor_parallel_size
value.reward_model_cfg.enabled=false -> value.reward_model_cfg ... reward_model_type: regression
value.max_total_sequence_length=100 -> value.max_total_sequence_length=100: 100 is less than policy
value.sequence_packing={enabled: true, train_mb_tokens: 100}
    -> value.sequence_packing.train_mb_tokens ... too little for value.max_total_sequence_length=512
value.nonfinite_action=skip -> value.nonfinite_action=skip: must equal policy.nonfinite_action=stop
loss_fn.force_on_policy_ratio=true -> force_on_policy_ratio ... there are 4; ... ppo.ppo_epochs=1
ppo.skip_reference_policy_logprobs_calculation=true
    -> ppo.skip_reference_policy_logprobs_calculation=true: the KL penalty needs them
ppo.use_dynamic_sampling=true -> not supported yet: ppo.use_dynamic_sampling
checkpointing.metric_name=train:value/los -> did you mean train:value/loss?
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_what_cannot_work_is_named(given, told):
    with pytest.raises(ConfigError, match=pattern(told)):
        build(*given)


def test_the_value_model_takes_after_the_policy():
    config = build("policy.precision=float32", "policy.train_micro_batch_size=2", "policy.max_total_sequence_length=64")
    value = config.value
    assert (value.model_name, value.tokenizer.name) == ("m", "m")
    assert (value.precision, value.train_micro_batch_size, value.logprob_batch_size) == ("float32", 2, 2)
    assert value.max_total_sequence_length == 64
    assert build("value.model_name=other").value.tokenizer.name == "other"
    # A section copied from `policy` may have its `generation`.
    build("+value.generation={max_new_tokens: 4}")
