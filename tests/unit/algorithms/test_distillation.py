"""The step of on-policy distillation, who teaches what, its configuration, and teachers that do not fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig, TeacherConfig
from nemo_rl.algorithms.distillation import DistillationTrainer, Teacher, plan_teacher
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.algorithms.setup.distillation import check_teacher, tasks_by_teacher
from nemo_rl.algorithms.setup.hardware import check_hardware
from nemo_rl.algorithms.setup.placement import describe_placement
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.models.policy.head.distillation import TopKLogits, TopKLogprobs
from tests.fakes import FakePolicy, handle, keys_of_plan, sample
from tests.tables import cases, pattern
from tests.unit.algorithms.fake_runs import FakeRun, small
from tests.unit.config.run_configs import MINIMAL

COLUMN = "teacher_topk"
ONE = {"teacher": {"model_name": "big"}}
TWO = {
    "teachers": {"algebra": {"model_name": "a"}, "geometry": {"model_name": "g"}},
    "distillation": {"task_to_teacher": {"sums": "algebra", "circles": "geometry"}},
}

BASE = (
    "distillation.num_prompts_per_step=4",
    "distillation.num_generations_per_prompt=1",
    "distillation.max_num_steps=2",
    "policy.logprob_batch_size=4",
)


def build(*overrides: str, sections: dict[str, Any] = ONE) -> DistillationMasterConfig:
    small = {"policy": {"model_name": "m", "train_global_batch_size": 128}}
    return build_config(DistillationMasterConfig, copy.deepcopy(MINIMAL | small | sections), overrides)


def make_teacher(config: TeacherConfig, policy: FakePolicy, *tasks: str) -> Teacher:
    return Teacher(
        policy=policy,  # type: ignore[arg-type]
        batching=Batching.of(config, quadratic_weight=0.0).of_scoring(),
        task=TopKLogits(2, 8),
        tasks=frozenset(tasks),
    )


class Run(FakeRun):
    def __init__(self, folder: Path, *, sections: dict[str, Any] = ONE) -> None:
        calls: list[str] = []
        tasks = ("t",) if sections is ONE else ("sums", "circles")
        config = build(*small(folder, "distillation"), *BASE, sections=sections)
        taught = tasks_by_teacher(config, tasks)
        names = {model.key: model.key.replace("teachers.", "teacher-") for model in config.further_models}
        teachers = [
            make_teacher(
                model.config,  # type: ignore[arg-type]
                FakePolicy(calls=calls, name_prefix=names[model.key]),
                *taught[model.key],
            )
            for model in config.further_models
        ]
        super().__init__(
            folder,
            config,
            lambda tools, parts: DistillationTrainer(
                config, tools, parts, teachers, student_task=TopKLogprobs(2), column=COLUMN
            ),
            calls=calls,
            tasks=tasks,
        )


def test_a_step_runs_its_phases_in_order(tmp_path):
    run = Run(tmp_path)
    rows = run.go()
    step = ["collect", "load", "teacher.load", f"teacher.{COLUMN}", f"attach {COLUMN}", "train", "sync"]
    assert run.policy.calls == ["sync", *step, *step, "save"]
    assert set(run.policy.attached[COLUMN].values()) == {"teacher_topk of teacher"}
    assert rows[0]["train/loss"] == 0.5 and "timing/train/teacher_logprob_inference" in rows[0]
    assert rows[0]["train/reward"] == 0.0


@settings(max_examples=25, deadline=None)
@given(
    tasks=st.lists(st.sampled_from(["sums", "circles"]), min_size=4, max_size=12).filter(lambda t: len(t) % 4 == 0),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_every_sample_hears_the_teacher_of_its_task_once(tasks, ranks):
    """Samples of other tasks fill up the ranks of a teacher, and are not listened to."""
    groups = [handle(sample(), name=str(i), task=task, ref=i) for i, task in enumerate(tasks)]
    config = build().teacher
    assert config is not None
    for task in ("sums", "circles"):
        plan, mine = plan_teacher(make_teacher(config, FakePolicy(data_parallel_size=ranks), task), groups)
        assert mine == {(i, 0) for i, of in enumerate(tasks) if of == task}
        if plan is not None:
            keys = keys_of_plan(plan)
            assert len(keys) == len(set(keys)) and len(keys) % ranks == 0 and mine <= set(keys)
            assert len(keys) < len(mine) + ranks


def test_students_get_the_outputs_of_each_tasks_teacher_and_only_a_dead_teacher_is_replaced(tmp_path):
    """The name of one teacher begins like the name of the other."""
    sections = {
        "teachers": {"a": {"model_name": "a"}, "ab": {"model_name": "ab"}},
        "distillation": {"task_to_teacher": {"sums": "a", "circles": "ab"}},
    }
    run = Run(tmp_path, sections=sections)
    run.go()
    tasks = [request.prompt.task_name for request in run.rollouts.requests[4:]]
    assert set(tasks) == {"sums", "circles"}, "the seed of the data gives both tasks in each step"
    name = sections["distillation"]["task_to_teacher"]
    said = {(group, 0): f"teacher_topk of teacher-{name[task]}" for group, task in enumerate(tasks)}
    assert run.policy.attached[COLUMN] == said
    run.policy.calls.clear()
    run.trainer.replace_dead(WorkerDied("gone", worker="teacher-ab-0", rank=0, method="compute"))
    assert run.policy.calls == ["teacher-ab.restart"]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["sums", "circles", "proofs"], r"nobody teaches proofs; name one of algebra, geometry .*\{proofs: algebra\}"),
        (["sums"], r"no training dataset is called circles; there are: sums"),
    ],
)
def test_every_task_has_one_teacher(tasks, message):
    with pytest.raises(ValueError, match=message):
        tasks_by_teacher(build(sections=TWO), tasks)


REFUSED = """
nobody -> teacher: is required, e.g. ... or name several in `teachers`
both -> teacher.model_name: there is one teacher, or several
one & +distillation.task_to_teacher={a: b} -> `teacher` teaches everything
two & distillation.task_to_teacher.sums=algebr -> no section teachers.algebr; did you mean algebra?
two & distillation.task_to_teacher.sums=geometry -> teachers.algebra.model_name: teaches nothing
two & distillation.topk_logits_k=null -> null with several teachers; use 64
one & distillation.topk_logits_k=null & loss_fn.zero_outside_topk=true -> nothing is outside
one & policy.generation.top_p=0.9 -> policy.generation.top_p ... set top_p=1 and top_k=null
one & teacher.max_total_sequence_length=100 -> 100 is less than policy.max_total_sequence_length=512
one & teacher.reward_model_cfg.enabled=true -> a teacher has the head of a language model
one & teacher.sequence_packing={enabled: true, logprob_mb_tokens: 100}
    -> teacher.sequence_packing.logprob_mb_tokens ... too little for teacher.max_total_sequence_length=512
two & teachers.algebra.dynamic_batching={enabled: true, logprob_mb_tokens: 100}
    -> teachers.algebra.dynamic_batching.logprob_mb_tokens ... use at least 512
one & teacher.dtensor_cfg.tensor_parallel_size=2 -> teacher.dtensor_cfg.tensor_parallel_size
one & distillation.teacher_resources={gpus_per_node: 3}
    -> the 128 samples of a step cannot be shared by the 3 data ranks of teacher; make them a multiple of 3
one & checkpointing.metric_name=train:reverse_k -> did you mean train:reverse_kl?
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_what_cannot_work_is_named(given, told):
    """A case begins with the teachers; the overrides follow."""
    who, *overrides = given
    sections = {"nobody": {}, "one": ONE, "two": TWO, "both": ONE | TWO}[who]
    with pytest.raises(ConfigError, match=pattern(told)):
        build(*overrides, sections=sections)


def test_a_teacher_takes_after_the_student_and_has_a_layout_of_its_own():
    config = build(
        "policy.precision=float32",
        "distillation.teacher_resources={gpus_per_node: 4}",
        "teacher.dtensor_cfg.tensor_parallel_size=4",
    )
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
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template="{{ messages }}"
    )


def words() -> PreTrainedTokenizerFast:
    model = models.WordLevel({token: number for number, token in enumerate(TOKENS)})
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


SWAPPED = """teacher.tokenizer.name: 2 of the student's 7 tokens are others for the teacher, so the two distributions \
are not of the same things:
  token 2: student 'a', teacher 'b'
  token 3: student 'b', teacher 'a'
set teacher.model_name to a model with the student's tokenizer, such as a larger one of its family"""


def test_a_teacher_that_does_not_fit_is_explained_by_its_first_differences():
    with pytest.raises(ValueError) as error:
        check_teacher(tokenizer_of(), tokenizer_of(["<pad>", "<eos>", "b", "a", "c", "ab", "bc"]), 4)
    assert str(error.value) == SWAPPED
    tiny = build_tiny_tokenizer()
    with pytest.raises(ValueError, match=rf"{len(tiny) - 2} of the student's {len(tiny)} tokens") as error:
        check_teacher(tiny, tokenizer_of(), 4)
    assert str(error.value).count("\n  token ") == 3
    for teacher, topk, told in (
        (tokenizer_of(merges=MERGES[::-1]), 4, "2 of 2 merges differ ... \n  merge 0: student 'a b', teacher 'b c'"),
        (tokenizer_of(merges=MERGES[:1]), 4, "1 of 2 merges differ ... \n  merge 1: student 'b c', teacher None"),
        (words(), 4, "the student's tokenizer is a BPE and the teacher's a WordLevel"),
        (tokenizer_of(), 8, "distillation.topk_logits_k=8: set it to 1 to 7, the size"),
    ):
        with pytest.raises(ValueError, match=pattern(told)):
            check_teacher(tokenizer_of(), teacher, topk)


def test_tokens_that_the_teacher_does_not_have_are_refused_and_those_it_has_more_are_left_out(caplog):
    more = tokenizer_of()
    more.add_tokens(["<think>", "</think>"])
    told = "2 of the student's 9 tokens ... (2 of them the teacher does not have) ... '<think>', teacher none"
    with pytest.raises(ValueError, match=pattern(told)):
        check_teacher(more, tokenizer_of(), 4)
    assert check_teacher(tokenizer_of(), more, 4) == 7
    assert "the teacher has 2 tokens more" in caplog.text
