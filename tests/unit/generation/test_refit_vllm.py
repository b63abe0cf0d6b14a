"""Refit into a real vLLM engine: afterwards its logprobs are those of the model whose weights were sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.exported_tensor import exported
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer import RefitError, WeightSender
from nemo_rl.models.generation.vllm_generation import VllmGeneration
from nemo_rl.models.refit import TENANT, Refit
from nemo_rl.types import SamplingParams
from tests.unit.generation.configs import generation_config

BUCKET_BYTES = 64 << 10  # the embedding is larger


class OneRankPolicy:
    """The refit side of a policy, in this process. `damage` may tamper with what was packed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.leave_out: set[str] = set()
        self.backwards = False
        self.damage: Callable[[int, WeightSender], None] = lambda bucket, sender: None
        self.sender: WeightSender

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        names = [name for name, _ in self.model.named_parameters() if name not in self.leave_out]
        weights = [
            exported(name, lambda name=name: self.model.get_parameter(name))
            for name in (names[::-1] if self.backwards else names)
        ]
        self.sender = WeightSender(weights, device=torch.device("cpu"), rank=0, local_rank=0, **settings)
        return [self.sender.describe()]

    def start_pack(self, bucket: int) -> list[dict[str, Any]]:
        packed = [self.sender.pack(bucket)]
        self.damage(bucket, self.sender)
        return packed

    def finish_pack(self, future: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return future


def make_model(directory: Path, *, tied: bool, dtype: str) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        dtype=dtype,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    return model


@contextmanager
def refit_into_engine(directory: Path, *, tied: bool, dtype: str) -> Iterator[tuple[OneRankPolicy, Any, Refit]]:
    from nemo_rl.data.tiny_model import build_tiny_tokenizer

    policy = OneRankPolicy(make_model(directory, tied=tied, dtype=dtype))
    build_tiny_tokenizer().save_pretrained(directory)
    accelerator = Accelerator(exclusive=False)
    accelerator.register(TENANT, lambda: None, lambda: None)
    config = generation_config()
    config = config.model_copy(update={"vllm_cfg": config.vllm_cfg.model_copy(update={"precision": dtype})})
    with RayVirtualCluster([1], use_gpus=False, name=f"refit-{tied}-{dtype}") as cluster:
        generation = VllmGeneration(
            cluster,
            config,
            model=str(directory),
            tokenizer=str(directory),
            seed=0,
            accelerator=accelerator,
            load_format="dummy",
            timeout_s=120,
        )
        refit = Refit(
            policy,  # type: ignore[arg-type]
            generation,
            accelerator,
            transport="packed_shm",
            wire_dtype=dtype,
            bucket_bytes=BUCKET_BYTES,
        )
        yield policy, generation, refit
        generation.shutdown()


def logprob_difference(model: PreTrainedModel, generation: VllmGeneration, version: int) -> float:
    """Largest difference between the engine's logprobs of what it samples and the model's."""
    prompts = [[5, 6, 7, 8 + i] for i in range(6)]
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=())
    calls = [generation.workers[0].call.remote("generate", p, sampling, i) for i, p in enumerate(prompts)]
    worst = 0.0
    for prompt, completion in zip(prompts, ray.get(calls, timeout=60), strict=True):
        assert completion.weight_version == version
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return worst


def change(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.dtype))


def test_tied_float32(ray_local: None, tmp_path: Path) -> None:
    with refit_into_engine(tmp_path, tied=True, dtype="float32") as (policy, generation, refit):
        figures = refit.sync(0)
        assert refit.layout is not None
        assert figures["bytes"] == sum(p.nbytes for p in policy.model.parameters())
        assert any(len({p.tensor for p in b}) == 1 and b[0].start > 0 for b in refit.layout.buckets), (
            "nothing was split"
        )
        assert logprob_difference(policy.model, generation, 0) < 1e-5
        for version in (1, 2):
            change(policy.model, version)
            assert logprob_difference(policy.model, generation, version - 1) > 0.1, "this test would see stale weights"
            refit.sync(version)
            assert logprob_difference(policy.model, generation, version) < 1e-5


def test_untied_float32_and_what_must_be_refused(ray_local: None, tmp_path: Path) -> None:
    with refit_into_engine(tmp_path, tied=False, dtype="float32") as (policy, generation, refit):
        policy.leave_out = {"lm_head.weight"}
        with pytest.raises(RefitError, match=r"packed_shm: the policy does not send .* 1 of .*: lm_head\.weight"):
            refit.sync(0)
        policy.leave_out = set()
        refit.prepare()
        refit.sync(1)
        assert logprob_difference(policy.model, generation, 1) < 1e-5

        victim = "model.layers.1.mlp.up_proj.weight"
        names = [meta.name for meta in policy.sender.layout.tensors]
        bucket, piece = next(
            (b, p) for b, pieces in enumerate(policy.sender.layout.buckets) for p in pieces if names[p.tensor] == victim
        )

        def flip(at: int, sender: WeightSender) -> None:
            if at == bucket:
                assert sender._buffer is not None
                sender._buffer.bytes[sender.layout.half_offset(bucket) + piece.offset + 1] ^= 4

        policy.damage = flip
        with pytest.raises(RefitError, match=rf"version 2, bucket {bucket}: tensor '{victim}'"):
            refit.sync(2)
        policy.damage = lambda at, sender: None
        change(policy.model, 3)
        refit.sync(3)
        assert logprob_difference(policy.model, generation, 3) < 1e-5

        policy.backwards = True  # another layout: what was prepared for the first must not be used
        refit.prepare()
        change(policy.model, 4)
        refit.sync(4)
        assert logprob_difference(policy.model, generation, 4) < 1e-5

        generation.start_weight_update()
        with pytest.raises(RuntimeError, match="no bucket has arrived since the start of the sync"):
            generation.finish_weight_update(5)


def test_repacked_layers_are_reloaded(ray_local: None, tmp_path: Path) -> None:
    """bfloat16 on a CPU: linear layers keep a repacked copy only, the tied head a copy beside its weight."""
    with refit_into_engine(tmp_path, tied=True, dtype="bfloat16") as (policy, generation, refit):
        for version in (0, 1):
            change(policy.model, version)
            refit.sync(version)
            assert logprob_difference(policy.model, generation, version) < 0.2
        change(policy.model, 2)
        assert logprob_difference(policy.model, generation, 1) > 0.6, "this test would see stale weights"
