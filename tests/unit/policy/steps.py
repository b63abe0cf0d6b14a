"""One training step of a policy worker on made-up rollouts: what the tests of layouts, batching and exactness share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.batch import Batching, plan_batch
from nemo_rl.models.policy.config import DTensorConfig, OptimizerConfig, PolicyConfig, TokenizerConfig
from nemo_rl.models.policy.dtensor.model import export_weights
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.worker import PolicyWorkerSettings
from nemo_rl.types import GroupHandle, RolloutGroup, Sample, SampleMeta, SampleStatus, SamplingParams, TrainResult
from tests.unit.policy.models import ALL_FAMILIES, VOCAB, save_random_model

if TYPE_CHECKING:
    from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

NUM_GROUPS, NUM_GENERATIONS = 4, 4
LOSS = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)


def save_model(family: str, path: Path) -> None:
    """A random model of `ALL_FAMILIES`, or `deep`, a Llama of 4 layers, or `qwen3-moe`, 2 layers of 4 experts."""
    if family in ALL_FAMILIES:
        return save_random_model(family, path)
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "deep":
        config = LlamaConfig(**shape, num_hidden_layers=4)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**shape, **experts, num_hidden_layers=2, head_dim=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return None


def policy_config(**changes: Any) -> PolicyConfig:
    settings: dict[str, Any] = {
        "model_name": "unused",
        "tokenizer": TokenizerConfig(name="unused"),
        "train_global_batch_size": 8,
        "logprob_batch_size": 3,
        "precision": "float32",
        "logprob_chunk_size": 5,
        "optimizer": OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.1}),
        "dtensor_cfg": DTensorConfig(),
    }
    return PolicyConfig(**{**settings, **changes})


def make_groups() -> tuple[list[GroupHandle], list[RolloutGroup]]:
    generator = np.random.default_rng(0)
    handles, groups = [], []
    for g in range(NUM_GROUPS):
        samples = []
        for i in range(NUM_GENERATIONS):
            length, prompt = int(generator.integers(6, 24)), 4
            failed = g == 1 and i == 2
            mask = np.arange(length) >= (length if failed else prompt)
            samples.append(
                Sample(
                    meta=SampleMeta(
                        sample_id=f"{g}/{i}",
                        status=SampleStatus.FAILED if failed else SampleStatus.COMPLETED,
                        length=length,
                        num_prompt_tokens=prompt,
                        num_generated_tokens=int(mask.sum()),
                        num_turns=1,
                        reward=float(generator.integers(0, 2)),
                        weight_version=0,
                    ),
                    token_ids=generator.integers(2, VOCAB, length),
                    token_mask=mask,
                    generation_logprobs=np.where(mask, -4.0 + generator.normal(size=length), 0.0).astype(np.float32),
                )
            )
        groups.append(RolloutGroup(group_id=str(g), prompt_id="p", samples=samples))
        metas = [sample.meta for sample in samples]
        handles.append(GroupHandle(group_id=str(g), prompt_id="p", task_name="t", ref=g, samples=metas))
    return handles, groups


def worker_settings(path: Path | str, **changes: Any) -> PolicyWorkerSettings:
    """Of a rank on the CPU that trains the model in `path`."""
    settings: dict[str, Any] = {
        "sampling": SamplingParams(max_new_tokens=16, temperature=0.8),
        "use_gpu": False,
        "workers_per_node": 8,
        "init_reference_model": False,
        "init_optimizer": True,
        "seed": 0,
    }
    return PolicyWorkerSettings(model_path=str(path), **settings | changes)


def make_worker(path: Path, config: PolicyConfig, *, top_k: int | None = None) -> Any:
    """A worker of the backend that `config` enables."""
    sampling = SamplingParams(max_new_tokens=16, temperature=0.8, top_k=top_k)
    settings = worker_settings(path, sampling=sampling, init_reference_model=True)
    if config.megatron_cfg.enabled:
        from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

        return MegatronPolicyWorker(config, settings)
    return DTensorPolicyWorker(config, settings)


def load_step(worker: DTensorPolicyWorker | MegatronPolicyWorker, config: PolicyConfig) -> None:
    handles, groups = make_groups()
    advantages = [[math.sin(3 * g + i) for i in range(NUM_GENERATIONS)] for g in range(NUM_GROUPS)]
    masks = [[float(sample.has_reward) for sample in handle.samples] for handle in handles]
    plan = plan_batch(
        handles,
        advantages,
        masks,
        num_ranks=worker.mesh.sizes.data_parallel,
        global_batch_size=config.train_global_batch_size,
        batching=Batching.of(config, quadratic_weight=0.001),
    )
    worker.load(plan.ranks[worker.mesh.data_rank], list(range(NUM_GROUPS)), *groups)


@torch.no_grad()
def whole_weights(worker: DTensorPolicyWorker | MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    if isinstance(worker, DTensorPolicyWorker):  # merged, whatever a refit would send
        tensors = export_weights([stage.hf for stage in worker.stages], worker.mesh, worker.device)
    else:
        tensors = worker._export()
    return {tensor.name: tensor.gather(None).clone() for tensor in tensors}


def logprobs_of(worker: DTensorPolicyWorker | MegatronPolicyWorker) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(previous, reference) logprobs of the samples of this data-parallel rank, 0 where nothing was sampled."""
    found = {}
    for row in worker.rows.values():
        found[row.sample_id] = (row.columns["prev_logprobs"], row.columns["reference_policy_logprobs"])
    return found


@dataclass(kw_only=True)
class Step:
    """What a step came to on one rank."""

    result: TrainResult
    weights: dict[str, torch.Tensor]  # all of the model's, whole
    logprobs: dict[str, tuple[torch.Tensor, torch.Tensor]]


def one_step(rank: int, world: int, path: Path, config: PolicyConfig) -> Step:
    return step_of(make_worker(path, config), config)


def step_of(worker: DTensorPolicyWorker | MegatronPolicyWorker, config: PolicyConfig) -> Step:
    """The optimizer steps of `make_groups`, and the logprobs before them."""
    load_step(worker, config)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    logprobs = logprobs_of(worker)
    result = worker.train(ClippedPGLoss(LOSS), Logprobs())
    return Step(result=result, weights=whole_weights(worker), logprobs=logprobs)
