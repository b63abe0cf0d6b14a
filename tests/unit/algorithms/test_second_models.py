"""Steps and configurations of runs with models beside the policy: PPO's critic, and the teachers of distillation."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig, TeacherConfig
from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.distillation import DistillationTrainer, Teacher, plan_teacher
from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.placement import describe_placement
from nemo_rl.algorithms.parts.teachers import check_teacher, tasks_by_teacher
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.algorithms.ppo import PPOTrainer
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.models.policy.head.distillation import TopKLogits, TopKLogprobs
from nemo_rl.types import TrainResult
from tests.fakes import FakePolicy, handle, keys_of_plan, sample
from tests.tables import cases, pattern
from tests.unit.algorithms.fake_runs import FLOPS, FakeRun, small
from tests.unit.config.run_configs import MINIMAL

PPO_BASE = ("ppo.ppo_epochs=2", "ppo.max_num_steps=2", "value.train_micro_batch_size=1")
VALUE_METRICS = {"loss": 0.25, "global_valid_toks": 24.0, "returns_mean": 0.5, "returns_square_mean": 0.5}
VALUE_METRICS |= {"value_error_mean": 0.0, "value_error_square_mean": 0.0625}


def build_ppo(*overrides: str) -> PPOMasterConfig:
    return build_config(PPOMasterConfig, copy.deepcopy(MINIMAL), overrides)


class PPORun(FakeRun):
    def __init__(self, folder: Path, *overrides: str, value_ranks: int = 1, **more: Any) -> None:
        calls: list[str] = []
        config = build_ppo(*small(folder, "ppo"), *PPO_BASE, *overrides)
        result = TrainResult(losses=[0.25], grad_norms=[2.0], learning_rates=[0.1], metrics=VALUE_METRICS)
        self.value = FakePolicy([result], calls, name_prefix="value", data_parallel_size=value_ranks)
        make: Any = partial(PPOTrainer, config, value=self.value, value_flops=FLOPS)
        super().__init__(folder, config, make, calls=calls, **more)


def test_dynamic_sampling_of_ppo_trains_both_models_on_groups_that_differ(tmp_path):
    def of_odd_prompts(request: Any, index: int) -> float:
        return float(index) if int(request.prompt.prompt_id.split(":")[1]) % 2 else 1.0

    run = PPORun(tmp_path, "ppo.use_dynamic_sampling=true", "ppo.max_num_steps=1", reward=of_odd_prompts)
    row = run.go()[0]
    assert row["train/dynamic_sampling_num_gen_batches"] == run.policy.calls.count("collect") > 1
    for policy in (run.policy, run.value):
        [plan] = policy.plans
        rows = [one for batch in plan.ranks[0].logprobs for one in batch]
        assert len(rows) == 4 and {one.reward for one in rows} == {0.0, 1.0}


def test_a_mask_by_logprobs_takes_the_sample_from_both_models(tmp_path):
    run = PPORun(tmp_path, "ppo.seq_logprob_error_threshold=2.0", "ppo.max_num_steps=1")
    row = run.go()[0]
    assert set(run.value.attached["prev_logprobs"].values()) == {"prev_logprobs of policy"}
    assert [call for call in run.policy.calls if "mask" in call or "values" in call][:2] == ["value.mask", "mask"]
    assert row["train/max_seq_mult_prob_error"] == 1.0


def test_the_first_steps_train_the_value_model_alone(tmp_path):
    run = PPORun(tmp_path, "ppo.policy_training_start_step=1")
    rows = run.go()
    syncs = [i for i, call in enumerate(run.policy.calls) if call == "sync"]
    first, second = run.policy.calls[syncs[0] : syncs[1]], run.policy.calls[syncs[1] : syncs[2]]
    assert (first.count("value.train"), first.count("train")) == (1, 0)
    assert (second.count("value.train"), second.count("train")) == (1, 1)
    assert "train/loss" not in rows[0] and "train/loss" in rows[1] and rows[0]["train/value/loss"] == 0.25


def test_a_step_of_ppo_runs_its_phases_in_order(tmp_path):
    run = PPORun(tmp_path)
    rows = run.go()
    loading = ["collect", "value.load", "load"]
    scoring = ["logprobs", "reference", "value.values", "attach values"]
    learning = ["token_advantages", "value.attach returns", "value.pass", "value.train", "pass", "train"]
    step = [*loading, *scoring, *learning, "sync"]
    assert run.policy.calls == ["sync", *step, *step, "save", "value.save"]
    assert set(run.policy.attached["values"].values()) == {"values of value"}
    assert set(run.value.attached["returns"].values()) == {"returns of policy"} and rows[0]["train/reward"] == 0.5
    assert rows[0]["train/value/loss"] == 0.25 and rows[0]["train/value/grad_norm"] == 2.0
    assert rows[0]["train/value/explained_variance"] == 0.75
    assert rows[0]["train/global_valid_toks"] == 48  # both passes


def test_both_models_plan_the_same_samples_in_layouts_of_their_own(tmp_path):
    run = PPORun(tmp_path, "value.train_global_batch_size=2", value_ranks=2)
    run.go()
    policy, value = run.policy.plans[0], run.value.plans[0]
    assert len(policy.ranks) == 1 and len(value.ranks) == 2
    assert len(policy.ranks[0].train) == 1 and len(value.ranks[0].train) == 2
    assert policy.groups is not value.groups and sorted(keys_of_plan(policy)) == sorted(keys_of_plan(value))
    rewards = {(s.group, s.index): s.reward for rank in value.ranks for batch in rank.logprobs for s in batch}
    assert rewards == {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 1.0}


def test_the_value_model_takes_after_the_policy():
    policy = ("precision=float32", "train_micro_batch_size=2", "max_total_sequence_length=64")
    value = build_ppo(*(f"policy.{key}" for key in policy)).value
    assert (value.model_name, value.tokenizer.name) == ("m", "m")
    assert (value.precision, value.train_micro_batch_size, value.logprob_batch_size) == ("float32", 2, 2)
    assert value.max_total_sequence_length == 64 and build_ppo("value.model_name=other").value.tokenizer.name == "other"
    # A section copied from `policy` may have its `generation`.
    build_ppo("+value.generation={max_new_tokens: 4}")


# -- distillation

COLUMN = "teacher_topk"
ONE = {"teacher": {"model_name": "big"}}
TWO = {
    "teachers": {"algebra": {"model_name": "a"}, "algebra_2": {"model_name": "b"}},  # one name begins like the other
    "distillation": {"task_to_teacher": {"sums": "algebra", "circles": "algebra_2"}},
}
LOOP = ("num_prompts_per_step=4", "num_generations_per_prompt=1", "max_num_steps=2")
BASE = (*(f"distillation.{key}" for key in LOOP), "policy.logprob_batch_size=4")


def build(*overrides: str, sections: dict[str, Any] = ONE) -> DistillationMasterConfig:
    small = {"policy": {"model_name": "m", "train_global_batch_size": 128}}
    return build_config(DistillationMasterConfig, copy.deepcopy(MINIMAL | small | sections), overrides)


def make_teacher(config: TeacherConfig, policy: Any, *tasks: str) -> Teacher:
    batching = Batching.of(config, quadratic_weight=0.0).of_scoring()
    return Teacher(policy=policy, batching=batching, task=TopKLogits(2, 8), tasks=frozenset(tasks))


class Run(FakeRun):
    def __init__(self, folder: Path, *, sections: dict[str, Any] = ONE) -> None:
        calls: list[str] = []
        tasks = ("t",) if sections is ONE else ("sums", "circles")
        config = build(*small(folder, "distillation"), *BASE, sections=sections)
        taught = tasks_by_teacher(config, tasks)
        names = {model.key: model.key.replace("teachers.", "teacher-") for model in config.further_models}
        policies = [FakePolicy(calls=calls, name_prefix=name) for name in names.values()]
        own: Any = [model.config for model in config.further_models]
        teachers = [make_teacher(cfg, p, *taught[key]) for cfg, p, key in zip(own, policies, names, strict=True)]
        make = partial(DistillationTrainer, config, student_task=TopKLogprobs(2), teachers=teachers)
        super().__init__(folder, config, make, calls=calls, tasks=tasks)


def test_a_step_of_distillation_runs_its_phases_in_order(tmp_path):
    run = Run(tmp_path)
    rows = run.go()
    step = ["collect", "load", "teacher.load", f"teacher.{COLUMN}", f"attach {COLUMN}", "train", "sync"]
    assert run.policy.calls == ["sync", *step, *step, "save"]
    assert set(run.policy.attached[COLUMN].values()) == {"teacher_topk of teacher"}
    assert rows[0]["train/loss"] == 0.5 and "timing/train/teacher_logprob_inference" in rows[0]
    assert rows[0]["train/reward"] == 0.0


def test_samples_of_other_tasks_fill_up_the_ranks_of_a_teacher_and_are_not_listened_to():
    groups = [handle(sample(generated=10 - i), task=("sums", "circles")[i % 2], ref=i) for i in range(10)]
    config: Any = build().teacher
    policy = FakePolicy(data_parallel_size=2)
    teacher = make_teacher(config, policy, "sums")
    teacher = replace(teacher, batching=replace(teacher.batching, micro_batch_multiple=2))
    plan, mine = plan_teacher(teacher, groups)
    assert plan is not None and mine == {(i, 0) for i in (0, 2, 4, 6, 8)}
    assert sorted(keys_of_plan(plan)) == sorted([*mine, (5, 0), (7, 0), (9, 0)]), "the shortest ones"
    assert plan_teacher(make_teacher(config, policy, "absent"), groups) == (None, set())


def test_a_teachers_plan_knows_prompts_and_images():
    groups = [handle(sample(prompt=7, images={"a": 64}), sample(prompt=7), task="sums", ref=0)]
    config: Any = build().teacher
    plan: Any = plan_teacher(make_teacher(config, FakePolicy(), "sums"), groups)[0]
    rows = {row.index: row for micro_batch in plan.ranks[0].logprobs for row in micro_batch}
    assert [(rows[i].prompt, rows[i].num_pixels) for i in (0, 1)] == [(7, 64), (7, 0)]


def test_students_get_the_outputs_of_each_tasks_teacher_and_only_a_dead_teacher_is_replaced(tmp_path):
    run = Run(tmp_path, sections=TWO)
    run.go()
    tasks = [request.prompt.task_name for request in run.rollouts.requests[4:]]
    assert set(tasks) == {"sums", "circles"}, "the seed of the data gives both tasks in each step"
    name = TWO["distillation"]["task_to_teacher"]
    said = {(group, 0): f"teacher_topk of teacher-{name[task]}" for group, task in enumerate(tasks)}
    assert run.policy.attached[COLUMN] == said
    run.policy.calls.clear()
    run.trainer.recovery.replace_dead(WorkerDied("gone", worker="teacher-algebra_2-0", rank=0, method="compute"))
    assert run.policy.calls == ["teacher-algebra_2.restart"]


def test_every_task_has_one_teacher():
    nobody = r"nobody teaches proofs; name one of algebra, algebra_2 .*\{proofs: algebra\}"
    absent = "no training dataset is called circles; there are: sums"
    for tasks, told in (("sums circles proofs", nobody), ("sums", absent)):
        with pytest.raises(ValueError, match=told):
            tasks_by_teacher(build(sections=TWO), tasks.split())


REFUSED = """
ppo & value.train_global_batch_size=3 -> value.train_global_batch_size=3: 3 does not divide the 512 samples
ppo & value.dtensor_cfg.tensor_parallel_size=2 -> value.dtensor_cfg.tensor_parallel_size
ppo & value.reward_model_cfg.enabled=false -> value.reward_model_cfg ... reward_model_type: regression
ppo & value.max_total_sequence_length=100 -> value.max_total_sequence_length=100: 100 is less than policy
ppo & value.sequence_packing={enabled: true, train_mb_tokens: 100}
    -> value.sequence_packing.train_mb_tokens ... too little for value.max_total_sequence_length=512
ppo & value.nonfinite_action=skip -> must equal policy.nonfinite_action; set value.nonfinite_action=stop
ppo & loss_fn.force_on_policy_ratio=true -> force_on_policy_ratio ... there are 4; ... ppo.ppo_epochs=1
ppo & ppo.skip_reference_policy_logprobs_calculation=true
    -> ppo.skip_reference_policy_logprobs_calculation=true: the KL penalty needs them
ppo & ppo.use_dynamic_sampling=true & ppo.num_generations_per_prompt=1 & policy.train_global_batch_size=32
    & value.train_global_batch_size=32 -> every group of 1 would be dropped
ppo & ppo.seq_logprob_error_threshold=0.5 -> must be greater than 1
ppo & checkpointing.metric_name=train:value/los -> did you mean train:value/loss?
nobody -> teacher: is required, e.g. ... or name several in `teachers`
both -> teacher.model_name: there is one teacher, or several
one & +distillation.task_to_teacher={a: b} -> `teacher` teaches everything
two & distillation.task_to_teacher.sums=algebr -> no section teachers.algebr; did you mean algebra?
two & distillation.task_to_teacher.sums=algebra_2 -> teachers.algebra.model_name: teaches nothing
two & distillation.topk_logits_k=null -> null with several teachers; set distillation.topk_logits_k=64
one & distillation.topk_logits_k=null & loss_fn.zero_outside_topk=true -> nothing is outside
one & policy.generation.top_p=0.9 -> set policy.generation.top_p=1 and policy.generation.top_k=null
one & teacher.reward_model_cfg.enabled=true -> a teacher has the head of a language model
two & teachers.algebra.dynamic_batching={enabled: true, logprob_mb_tokens: 100}
    -> teachers.algebra.dynamic_batching.logprob_mb_tokens ... logprob_mb_tokens=512
one & distillation.teacher_resources={gpus_per_node: 3}
    -> the 128 samples of a step cannot be shared by the 3 data ranks of teacher; make them a multiple of 3
one & checkpointing.metric_name=train:reverse_k -> did you mean train:reverse_kl?
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_what_cannot_work_is_named(given, told):
    """A case begins with the algorithm or the teachers; the overrides follow."""
    who, *overrides = given
    sections = {"nobody": {}, "one": ONE, "two": TWO, "both": ONE | TWO}
    with pytest.raises(ConfigError, match=pattern(told)):
        build_ppo(*overrides) if who == "ppo" else build(*overrides, sections=sections[who])


def test_a_teacher_takes_after_the_student_and_has_a_layout_of_its_own():
    four = ("distillation.teacher_resources={gpus_per_node: 4}", "teacher.dtensor_cfg.tensor_parallel_size=4")
    config = build("policy.precision=float32", *four)
    assert config.teacher is not None and config.teacher.precision == "float32"
    assert config.teacher.tokenizer.name == "big"
    assert config.teacher_cluster.num_workers == 4 and config.cluster.num_workers == 1
    text = describe_placement(config)
    assert "big on 4 ranks: 1 data x 4 tensor, on 4 GPUs on 1 node of its own" in text
    with pytest.raises(ConfigError, match=r"5 GPUs wanted .*, 4 found"):
        check_hardware(config, num_gpus=4, environment={})


TOKENS = ["<pad>", "<eos>", "a", "b", "c", "ab", "bc"]
MERGES = [("a", "b"), ("b", "c")]


def tokenizer_of(tokens: list[str] = TOKENS, merges: list[tuple[str, str]] = MERGES) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": "{{ messages }}"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_of_tokens_that_differ_a_message_has_the_first_ones():
    tiny = build_tiny_tokenizer()
    with pytest.raises(ValueError, match=rf"{len(tiny) - 2} of the student's {len(tiny)} tokens") as error:
        check_teacher(tiny, tokenizer_of(), 4)
    assert str(error.value).count("\n  token ") == 3
    swapped = """teacher.tokenizer.name: 2 of the student's 7 tokens differ for the teacher, so the two \
distributions are not of the same things:
  token 2: student 'a', teacher 'b'
  token 3: student 'b', teacher 'a'
set teacher.model_name to a model with the student's tokenizer, such as a larger one of its family"""
    with pytest.raises(ValueError) as error:
        check_teacher(tokenizer_of(), tokenizer_of(["<pad>", "<eos>", "b", "a", "c", "ab", "bc"]), 4)
    assert str(error.value) == swapped, "nothing else is said"


WORDS = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}))


@pytest.mark.parametrize(
    ("teacher", "topk", "told"),
    [
        (tokenizer_of(merges=MERGES[::-1]), 4, "2 of 2 merges differ ... \n  merge 0: student 'a b', teacher 'b c'"),
        (tokenizer_of(merges=MERGES[:1]), 4, "1 of 2 merges differ ... \n  merge 1: student 'b c', teacher None"),
        (PreTrainedTokenizerFast(tokenizer_object=WORDS), 4, "tokenizer is a BPE and the teacher's a WordLevel"),
        (tokenizer_of(), 8, "distillation.topk_logits_k=8: set it to 1 to 7, the size"),
    ],
)
def test_a_teacher_that_does_not_fit_is_explained_by_its_first_differences(teacher, topk, told):
    with pytest.raises(ValueError, match=pattern(told)):
        check_teacher(tokenizer_of(), teacher, topk)


def test_tokens_that_a_teacher_has_more_are_left_out(caplog):
    more = tokenizer_of()
    more.add_tokens(["<think>", "</think>"])
    told = "2 of the student's 9 tokens ... (2 of them the teacher does not have) ... '<think>', teacher none"
    with pytest.raises(ValueError, match=pattern(told)):
        check_teacher(more, tokenizer_of(), 4)
    assert check_teacher(tokenizer_of(), more, 4) == 7 and "the teacher has 2 tokens more" in caplog.text
