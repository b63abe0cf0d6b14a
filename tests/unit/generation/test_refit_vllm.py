"""Refit into real vLLM engines: afterwards their logprobs are those of the model whose weights were sent."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from transformers import PreTrainedModel

from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.config import LoRAConfig
from nemo_rl.models.policy.dtensor import lora
from nemo_rl.models.policy.dtensor.model import export_weights
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.peft_format import adapter_tensors
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.refit.layout import ExportedTensor, RefitError, Rendezvous, exported
from nemo_rl.refit.sync import Refit
from nemo_rl.refit.transfer import WeightSender
from nemo_rl.types import SamplingParams
from tests.functional.faulty import engine_processes
from tests.unit.distributed.test_worker_groups import alive, eventually
from tests.unit.generation.configs import ask, generation_config, refitted_engines, requests_of
from tests.unit.policy.families import save_random_model
from tests.unit.policy.filter_reference import filter_logits

pytestmark = pytest.mark.slow  # a whole run in bfloat16 is among the default tests: tests/gpu/test_runs.py
BUCKET_BYTES = 64 << 10  # the embedding is larger


class OneRankPolicy:
    """The refit side of a policy, in this process. `on_packed` is called with each bucket that was packed.

    As `DTensorPolicyWorker` it leaves its group before it makes another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.leave_out: set[str] = set()
        self.backwards = False
        self.on_packed: Callable[[int], None] | None = None
        self.sender: WeightSender | None = None

    def weights(self) -> list[ExportedTensor]:
        names = [name for name, _ in self.model.named_parameters() if name not in self.leave_out]
        names = names[::-1] if self.backwards else names
        return [exported(name, lambda name=name: self.model.get_parameter(name)) for name in names]

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(self.weights(), device=torch.device("cpu"), rank=0, local_rank=0, **settings)
        return [self.sender.describe()]

    def pack(self, bucket: int) -> list[dict[str, Any]]:
        packed = [self.sender.pack(bucket)]
        if self.on_packed is not None:
            self.on_packed(bucket)
        return packed


class AdapterPolicy(OneRankPolicy):
    """The same with adapters, sent by themselves or merged."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        cfg = LoRAConfig(enabled=True, dim=4, alpha=6.0)
        lora.apply_lora(model, cfg)
        lora.init_adapters(model, cfg, seed=0)

    def weights(self) -> list[ExportedTensor]:
        return export_weights([self.model], SimpleNamespace(pipeline=None), torch.device("cpu"), merged=False)

    def train(self, seed: int) -> int:
        """Give the adapters other values; returns their bytes in float32."""
        generator = torch.Generator().manual_seed(seed)
        parts = [tensor for _, tensor in adapter_tensors([self.model])]
        for tensor in parts:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        return sum(4 * tensor.numel() for tensor in parts)


class ExpertsPolicy(OneRankPolicy):
    """Fused in training, one tensor per expert on the way."""

    def weights(self) -> list[ExportedTensor]:
        names = ExpertNames(self.model.config.model_type)
        return [
            exported(part, lambda name=name, tensor=tensor, i=i: names.split(name, tensor)[i][1])
            for name, tensor in named_tensors(self.model)
            for i, (part, _) in enumerate(names.split(name, tensor))
        ]


@contextmanager
def refit_into_engine(
    directory: Path, *, tied: bool, dtype: str, kind: type[OneRankPolicy] = OneRankPolicy, num_ranks: int = 1
) -> Iterator[tuple[Any, Any, Refit]]:
    policy = kind(save_random_model("qwen2", directory, getattr(torch, dtype), tie_word_embeddings=tied))
    config = generation_config(vllm_cfg={"precision": dtype, "tensor_parallel_size": num_ranks})
    with refitted_engines(policy, directory, config, bucket_bytes=BUCKET_BYTES) as (generation, refit):
        yield policy, generation, refit


def logprob_difference(model: PreTrainedModel, generation: VllmGeneration, version: int, replica: int = 0) -> float:
    """Largest difference between engine and model in the logprobs of sampled tokens."""
    requests = requests_of([[5, 6, 7, 8 + i] for i in range(6)], SamplingParams(max_new_tokens=12))
    completions = ask(generation.workers[replica], requests)
    assert {completion.weight_version for completion in completions} == {version}
    return float(logprob_errors(model, requests, completions).abs().max())


def logprob_errors(model: Any, requests: Any, completions: Any) -> torch.Tensor:
    """What the model says of every sampled token, less what the engine said."""
    errors = []
    for request, completion in zip(requests, completions, strict=True):
        everything = distribution(model, request.prompt_token_ids, completion.token_ids, request.sampling)
        said = everything.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        errors.append(said - torch.tensor(completion.logprobs))
    return torch.cat(errors)


def distribution(model: Any, prompt: list[int], completion: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Logprobs of the vocabulary at each place of a completion, as they are to be drawn from: [T, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    return filter_logits(logits, logits.argmax(-1), sampling.top_k, sampling.top_p).log_softmax(-1)


def change(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.dtype))


def assert_synced(policy: Any, generation: VllmGeneration, refit: Refit, version: int, limit: float = 1e-5) -> None:
    """A sync of other weights reaches all replicas."""
    change(policy.model, version)
    refit.sync(version)
    for replica in range(len(generation.workers)):
        assert logprob_difference(policy.model, generation, version, replica) < limit


def test_untied_float32_and_what_must_be_refused(ray_local: None, tmp_path: Path) -> None:
    with refit_into_engine(tmp_path, tied=False, dtype="float32") as (policy, generation, refit):
        policy.leave_out = {"lm_head.weight"}
        with pytest.raises(RefitError, match=r"packed_shm: the policy does not send .* 1 of .*: lm_head\.weight"):
            refit.sync(0)
        policy.leave_out = set()
        refit.prepare()
        figures = refit.sync(0)
        assert figures["bytes"] == sum(p.nbytes for p in policy.model.parameters())
        assert any(len({p.tensor for p in b}) == 1 and b[0].start > 0 for b in refit.layout.buckets), "none is split"
        assert logprob_difference(policy.model, generation, 0) < 1e-5
        change(policy.model, 1)
        assert logprob_difference(policy.model, generation, 0) > 0.1, "this test would see stale weights"
        changed = refit.compare()
        assert len(changed.different) == changed.num_tensors == len(refit.layout.tensors)
        refit.sync(1)
        assert logprob_difference(policy.model, generation, 1) < 1e-5
        assert refit.compare().different == {}
        with torch.no_grad():
            policy.model.get_parameter("model.layers.0.self_attn.k_proj.weight")[3, 5] += 0.5
        assert refit.compare().different == {"model.layers.0.self_attn.k_proj.weight": pytest.approx(0.5, rel=1e-5)}
        assert generation.describe_model()["vocab_size"] == 300

        policy.backwards = True  # another layout: the plan for the first must not be used
        refit.prepare()
        assert_synced(policy, generation, refit, 2)

        generation.wait(generation.start_weight_update())
        with pytest.raises(RuntimeError, match="no bucket has arrived since the start of the sync"):
            generation.finish_weight_update(3)


def test_repacked_layers_are_reloaded(ray_local: None, tmp_path: Path) -> None:
    """bfloat16 on a CPU: linear layers keep a repacked copy only, the tied head a copy beside its weight."""
    with refit_into_engine(tmp_path, tied=True, dtype="bfloat16") as (policy, generation, refit):
        for version in (0, 1):
            assert_synced(policy, generation, refit, version, 0.2)
        change(policy.model, 2)
        assert logprob_difference(policy.model, generation, 1) > 0.6, "this test would see stale weights"

        def fail(at: int) -> None:
            if at == 3:
                raise RuntimeError("the sender dies")

        policy.on_packed = fail  # the first buckets, which the engine kept, must not reach the next sync
        with pytest.raises(RefitError, match="the sender dies"):
            refit.sync(2)
        policy.on_packed = None
        assert_synced(policy, generation, refit, 3, 0.2)

        refit.policy = AdapterPolicy(policy.model)  # type: ignore[assignment]
        refit.prepare()
        told = r"refit=adapter needs .* and model\.\S+ keeps a repacked copy .*to merged"
        with pytest.raises(RefitError, match=told):
            refit.sync(3)


def test_adapters_alone_make_the_engine_sample_as_the_adapted_model_does(ray_local: None, tmp_path: Path) -> None:
    """Each rank of a tensor-parallel engine adds its own part."""
    parts = refit_into_engine(tmp_path, tied=True, dtype="float32", kind=AdapterPolicy, num_ranks=2)
    with parts as (policy, generation, refit):
        adapter_bytes = policy.train(0)
        assert refit.sync(0)["bytes"] == adapter_bytes + sum(
            parameter.nbytes for name, parameter in policy.model.named_parameters() if not lora.is_adapter(name)
        )
        assert logprob_difference(policy.model, generation, 0) < 1e-5
        for version in (1, 2):
            policy.train(version)
            assert logprob_difference(policy.model, generation, version - 1) > 0.05, "this test would see stale weights"
            assert refit.sync(version)["bytes"] == adapter_bytes
            assert logprob_difference(policy.model, generation, version) < 1e-5
        generation.restart_worker(0)
        policy.train(5)
        assert refit.sync(3)["bytes"] == refit.layout.total_bytes, "a new engine has no base weights"
        policy.train(6)
        assert refit.sync(4)["bytes"] == adapter_bytes
        assert logprob_difference(policy.model, generation, 4) < 1e-5


# -- by collective, into an engine on resources of its own


@contextmanager
def engine_apart(
    directory: Path,
    *,
    kind: type[OneRankPolicy] = OneRankPolicy,
    num_nodes: int = 1,
    over_nodes: str = "pipeline_parallel_size",
    **settings: Any,
) -> Iterator[tuple[Any, VllmGeneration, Refit]]:
    policy = kind(save_random_model("qwen2", directory))
    config = generation_config(vllm_cfg={over_nodes: num_nodes})
    config = config.model_copy(update={"colocated": config.colocated.model_copy(update={"enabled": False})})
    settings["rendezvous"] = lambda: Rendezvous(address="127.0.0.1", num_receivers=num_nodes, timeout_s=100)
    settings |= {"transport": "packed_collective", "bucket_bytes": BUCKET_BYTES}
    with refitted_engines(policy, directory, config, {"num_nodes": num_nodes}, **settings) as (generation, refit):
        yield policy, generation, refit
        policy.sender.close()


@pytest.mark.parametrize("over_nodes", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_every_rank_of_an_engine_gets_its_part(ray_local: None, tmp_path: Path, over_nodes: str) -> None:
    """Adapters too, sent alone after the first sync. The nodes are two groups of processes on this one."""
    with engine_apart(tmp_path, kind=AdapterPolicy, num_nodes=2, over_nodes=over_nodes) as (policy, generation, refit):
        policy.train(0)
        everything = refit.sync(0)["bytes"]
        policy.train(1)
        assert refit.sync(1)["bytes"] < everything / 4
        assert logprob_difference(policy.model, generation, 1) < 1e-5

        worker = ray.get(generation.workers[0].identity.remote(), timeout=800).pid
        core = engine_processes(worker)[0]
        os.kill(worker, signal.SIGKILL)  # an engine of several ranks must not outlive it
        assert eventually(lambda: not alive(core))


@pytest.mark.parametrize("recompute", [True, False])
def test_a_request_under_way_goes_on_after_a_sync(ray_local: None, tmp_path: Path, recompute: bool) -> None:
    """With the KV cache of the new or of the old weights; a later request with the new ones alone."""
    with engine_apart(tmp_path, recompute_kv_cache=recompute) as (policy, generation, refit):
        refit.sync(0)
        requests = requests_of([[5, 6, 7, 8]] * 8, SamplingParams(max_new_tokens=100))
        calls = [generation.workers[0].call.remote("generate", request) for request in requests]
        time.sleep(0.1)  # of the time that 100 steps take
        change(policy.model, 1)
        refit.sync(1)
        completions: list[Any] = ray.get(calls, timeout=800)
        assert {completion.weight_version for completion in completions} == {0}
        whole = [completion for completion in completions if len(completion.token_ids) == 100]
        assert whole, "all found the end-of-sequence token"
        last = [float(logprob_errors(policy.model, requests[:1], [one])[-20:].abs().max()) for one in whole]
        # On a busy machine the engine may not have begun all of them before the sync.
        assert (max(last) < 1e-5) if recompute else (max(last) > 1e-3), last
        assert logprob_difference(policy.model, generation, 1) < 1e-5
