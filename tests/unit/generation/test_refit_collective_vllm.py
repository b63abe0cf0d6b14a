"""Refit by collective into real vLLM engines on resources of their own: several replicas, several ranks, a death."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from nemo_rl.distributed.errors import WorkerError
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.refit.layout import RefitError, Rendezvous
from nemo_rl.refit.sync import Refit
from nemo_rl.types import SamplingParams
from tests.functional.faulty import processes_below
from tests.unit.generation.configs import generation_config, refitted_engines, requests_of
from tests.unit.generation.test_refit_vllm import (
    BUCKET_BYTES,
    AdapterPolicy,
    OneRankPolicy,
    assert_synced,
    change,
    expected_logprobs,
    logprob_difference,
    make_model,
)

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7, 8]


class LeavingPolicy(OneRankPolicy):
    """As `DTensorPolicyWorker`: it leaves the group before it makes another. Misstates bucket `flip`."""

    flip: int | None = None

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        if "sender" in vars(self):
            self.sender.close()
        return super().prepare_refit(settings)

    def pack(self, bucket: int) -> list[dict[str, Any]]:
        packed = super().pack(bucket)
        wrong = packed[0]["fingerprints"]
        return [packed[0] | {"fingerprints": bytes([wrong[0] ^ 1]) + wrong[1:]}] if bucket == self.flip else packed

    def check_health(self, timeout_s: float | None = None) -> None:
        """It is this process."""


class LeavingAdapterPolicy(LeavingPolicy, AdapterPolicy):
    """The same with adapters."""


@contextmanager
def engines_apart(
    directory: Path,
    *,
    replicas: int,
    kind: type[LeavingPolicy] = LeavingPolicy,
    recompute: bool = True,
    num_nodes: int = 1,
) -> Iterator[tuple[Any, VllmGeneration, Refit]]:
    policy = kind(make_model(directory, tied=True, dtype="float32"))
    config = generation_config(vllm_cfg={"pipeline_parallel_size": num_nodes})
    config = config.model_copy(update={"colocated": config.colocated.model_copy(update={"enabled": False})})
    num_receivers = replicas * config.vllm_cfg.engine_size
    with refitted_engines(
        policy,
        directory,
        config,
        {"replicas": replicas, "num_nodes": num_nodes},
        transport="packed_collective",
        bucket_bytes=BUCKET_BYTES,
        rendezvous=Rendezvous(address="127.0.0.1", num_receivers=num_receivers, timeout_s=100),
        recompute_kv_cache=recompute,
    ) as (generation, refit):
        yield policy, generation, refit
        policy.sender.close()


def worker_process(generation: VllmGeneration, replica: int) -> int:
    identity: Any = ray.get(generation.workers[replica].identity.remote(), timeout=60)
    return identity.pid


def test_two_replicas_and_one_that_dies_in_the_middle_of_a_sync(ray_local: None, tmp_path: Path) -> None:
    with engines_apart(tmp_path, replicas=2) as (policy, generation, refit):
        for version in (0, 1):
            assert_synced(policy, generation, refit, version)

        def kill(bucket: int, sender: Any) -> None:
            if bucket == 2:
                os.kill(worker_process(generation, 0), signal.SIGKILL)

        policy.damage = kill
        with pytest.raises(WorkerError) as error:
            refit.sync(2)
        assert error.value.engine_died and error.value.worker.startswith("generation-0")
        policy.damage = None
        assert generation.dead_workers() == [0]
        generation.restart_worker(0)
        assert_synced(policy, generation, refit, 2)

        # The second bucket may be on its way already: its announced fingerprint is changed instead.
        policy.flip = 1
        with pytest.raises(RefitError, match=r"packed_collective, version 3, bucket 1: tensor '.+' .*not what the pol"):
            refit.sync(3)
        policy.flip = None
        assert_synced(policy, generation, refit, 4)


def test_every_rank_of_an_engine_gets_its_part(ray_local: None, tmp_path: Path) -> None:
    """Adapters too, sent alone after the first sync. The nodes are two groups of processes on this one."""
    with engines_apart(tmp_path, replicas=1, kind=LeavingAdapterPolicy, num_nodes=2) as (policy, generation, refit):
        policy.train(0)
        everything = refit.sync(0)["bytes"]
        policy.train(1)
        assert refit.sync(1)["bytes"] < everything / 4
        assert logprob_difference(policy.model, generation, 1) < 1e-5

        worker = worker_process(generation, 0)
        (core,) = [pid for pid, (_, command) in processes_below(worker).items() if "EngineCore" in command]
        os.kill(worker, signal.SIGKILL)  # an engine of several ranks must not outlive it
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{core}") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{core}")


@pytest.mark.parametrize("recompute", [True, False])
def test_a_request_under_way_goes_on_after_a_sync(ray_local: None, tmp_path: Path, recompute: bool) -> None:
    """With the KV cache of the new or of the old weights; a later request with the new ones alone."""
    with engines_apart(tmp_path, replicas=1, recompute=recompute) as (policy, generation, refit):
        refit.sync(0)
        requests = requests_of([PROMPT] * 8, SamplingParams(max_new_tokens=100))
        calls = [generation.workers[0].call.remote("generate", request) for request in requests]
        time.sleep(0.1)  # of the time that 100 steps take
        change(policy.model, 1)
        refit.sync(1)
        completions: list[Any] = ray.get(calls, timeout=60)
        assert {completion.weight_version for completion in completions} == {0}
        whole = [completion for completion in completions if len(completion.token_ids) == 100]
        assert whole, "all found the end-of-sequence token"
        last = [
            float((expected_logprobs(policy.model, PROMPT, c.token_ids) - torch.tensor(c.logprobs))[-20:].abs().max())
            for c in whole
        ]
        assert (max(last) < 1e-5) if recompute else (min(last) > 1e-3), last
        assert logprob_difference(policy.model, generation, 1) < 1e-5
