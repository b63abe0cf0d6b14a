"""Outputs of teacher and student in distillation, on every backend and layout, against whole logits."""

import functools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.algorithms.config.distillation import DistillationLossConfig
from nemo_rl.algorithms.losses.distillation import DistillationLoss
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head.distillation import FullKL, LastStates, StoredHead, TopKLogits, TopKLogprobs
from nemo_rl.models.policy.head.tasks import HeadTask
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import PACKED, load_step, make_groups, make_worker, megatron_policy, policy_config
from tests.unit.policy.test_layouts import ALIKE, CP, PP, TP, cut
from tests.worlds import run_world

K, COMMON = 5, 90  # tokens that both know; the heads have more
HIDDEN = 48
TEMPERATURE = 0.8  # of `make_worker`


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model("llama", folder / "student")
    for name, tied in (("tied", True), ("untied", False)):
        save_model("qwen2-tied", folder / name, seed=1, vocab_size=103, hidden_size=HIDDEN, tie_word_embeddings=tied)
    return folder


Columns = dict[str, dict[str, torch.Tensor]]
"""Sample id -> name -> values."""


def distill(config: PolicyConfig, teacher_path: Path, student_path: Path, *, trains: bool) -> tuple[Columns, list]:
    """Columns of one rank; losses and norms of gradients of a step of each kind of distillation."""
    is_megatron = config.megatron_cfg.enabled
    how = {"init_reference_model": False, "init_optimizer": not is_megatron}
    teacher = make_worker(teacher_path, config, **how)
    if is_megatron:
        assert not any(chunk.buffers for chunk in teacher.chunks), "without an optimizer no gradients are kept"
        teacher.residency.offload()
        teacher.residency.onload(with_optimizer=False)
    load_step(teacher)
    teacher.compute(TopKLogits(K, COMMON), "teacher_topk")
    teacher.compute(LastStates(HIDDEN, config.precision), "teacher_states")
    if is_megatron:
        teacher.mesh.close()
    stored = StoredHead.of(AutoConfig.from_pretrained(teacher_path), str(teacher_path), config.precision)
    tasks: dict[str, HeadTask] = {"topk": TopKLogprobs(K), "kl": FullKL(stored, COMMON)}
    student = make_worker(student_path, config, **how)
    load_step(student)
    for name in ("teacher_topk", "teacher_states"):
        keys = list(teacher.rows)
        student.attach(name, keys, *(teacher.rows[key].columns[name].numpy() for key in keys))
    for name, task in tasks.items():
        student.compute(task, name)
    found, trained = {row.sample_id: {**row.columns} for row in student.rows.values()}, []
    for name, task in tasks.items() if trains else ():
        if name == "kl":
            for row in student.rows.values():
                del row.columns["teacher_topk"]
        result = student.train(DistillationLoss(DistillationLossConfig()), task)
        trained += result.losses + result.grad_norms
    return found, trained


@functools.cache
def expected_columns(teacher_path: Path, student_path: Path) -> Columns:
    teacher, student = (AutoModelForCausalLM.from_pretrained(path).double() for path in (teacher_path, student_path))
    expected = {}
    for group in make_groups()[1]:
        for sample in group.samples:
            ids = torch.from_numpy(sample.token_ids)[None]
            with torch.no_grad():
                states = teacher.base_model(ids).last_hidden_state[0, :-1]
                logits, own = teacher.lm_head(states) / TEMPERATURE, student(ids).logits[0, :-1] / TEMPERATURE
            top = logits[:, :COMMON].topk(K, dim=-1)
            log_p = own.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
            p, q = own[:, :COMMON].log_softmax(-1), logits[:, :COMMON].log_softmax(-1)
            columns = {
                "teacher_states": states,
                "teacher_topk": torch.cat([top.values, top.indices.double()], dim=-1),
                "topk": torch.cat([log_p.gather(-1, top.indices), entropy], dim=-1),
                "kl": torch.stack([(q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)], dim=-1),
            }
            mask = torch.from_numpy(sample.token_mask)[1:, None]
            expected[sample.sample_id] = {
                name: torch.nn.functional.pad(values * mask, (0, 0, 1, 0)) for name, values in columns.items()
            }
    return expected


LAYOUTS: dict[str, tuple[int, str, PolicyConfig]] = {
    "tp": (2, "tied", policy_config(**ALIKE | cut(**{TP: 2}))),
    "cp": (2, "tied", policy_config(**PACKED | cut(**{CP: 2}))),
    "pp": (2, "untied", policy_config(**PACKED | cut(**{PP: 2}))),
    "megatron tp": (2, "tied", megatron_policy(tensor_model_parallel_size=2, sequence_parallel=True)),
    "megatron pp": (2, "untied", megatron_policy(pipeline_model_parallel_size=2)),
    "megatron cp": (2, "tied", megatron_policy(context_parallel_size=2)),
}
SLOW = ("megatron pp", "megatron cp")


@functools.cache
def trained_alone(teacher_path: Path, student_path: Path) -> list[float]:
    """What one process finds."""
    return run_world(lambda *_: distill(policy_config(), teacher_path, student_path, trains=True)[1], 1)[0]


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_every_layout_says_what_whole_logits_say(layout: str, folder: Path) -> None:
    """And half-precision states pass from all ranks to a student."""
    world, teacher, config = LAYOUTS[layout]
    paths, trains = (folder / teacher, folder / "student"), not config.megatron_cfg.enabled
    want, half = expected_columns(*paths), config.model_copy(update={"precision": "bfloat16"})

    def rank_main(rank: int, world: int) -> tuple[Columns, list[float], Columns]:
        found = distill(config, *paths, trains=trains)
        return *found, distill(half, *paths, trains=False)[0] if layout in ("pp", "cp") else {}

    ranks = run_world(rank_main, world)
    assert set().union(*(found for found, *_ in ranks)) == set(want)
    for found, trained, rounded in ranks:
        for sample_id, columns in found.items():
            for name, values in want[sample_id].items():
                assert columns[name].dtype == torch.float32
                assert (columns[name] - values).abs().max() < (1e-5 if trains else 2e-5), (name, sample_id)
        if trains:
            assert trained == pytest.approx(trained_alone(*paths), rel=1e-5)
        for sample_id, columns in rounded.items():
            exact = want[sample_id]
            assert columns["teacher_states"].dtype == torch.int32
            states = columns["teacher_states"].view(torch.bfloat16).float()
            assert (states - exact["teacher_states"]).norm() <= 0.02 * exact["teacher_states"].norm()
            assert (columns["kl"] - exact["kl"]).norm() <= 0.03 * exact["kl"].norm()


def test_a_teacher_without_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "tied")
    config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors file with model\.embed_tokens\.weight"):
        StoredHead.of(config, str(tmp_path), "float32")


def test_what_takes_much_room_leaves_the_device(folder: Path) -> None:
    """Micro-batch by micro-batch; and an offloaded student keeps nothing of the teacher's head."""

    def rank_main(rank: int, world: int) -> None:
        worker = make_worker(folder / "tied", policy_config(logprob_batch_size=2))
        load_step(worker)
        forward, num_held = worker.runner.forward, []

        def watched(batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
            given: list[weakref.ref[torch.Tensor]] = []
            for values in forward(batches, task):
                given.append(weakref.ref(values))
                num_held.append(sum(one() is not None for one in given))
                yield values

        worker.runner.forward = watched
        worker.compute(LastStates(HIDDEN, "float32"), "states")
        assert len(num_held) == 8 and max(num_held) <= 2, "the present one, and the one before it"
        for row in worker.rows.values():
            size = row.columns["states"].untyped_storage().nbytes()
            assert size == len(row.token_ids) * HIDDEN * 4, "a row keeps the padded micro-batch alive"

        head = StoredHead.of(AutoConfig.from_pretrained(folder / "untied"), str(folder / "untied"), "float32")
        weight = weakref.ref(head.rows(0, COMMON, worker.device)[0])
        assert weight() is not None
        worker.offload()
        assert weight() is None

    run_world(rank_main, 1)
