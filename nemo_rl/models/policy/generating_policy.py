"""A policy whose own workers draw completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig
from nemo_rl.models.policy.generate import GenerationSettings
from nemo_rl.models.policy.lm_policy import Policy


class GeneratingPolicy(Policy):
    """`prepare_generation`, then whoever holds `generating_workers` calls `generate` on all of them at once."""

    @staticmethod
    def worker_class_fqn(config: PolicyConfig) -> str:
        if config.megatron_cfg.enabled:
            return "nemo_rl.models.policy.megatron_generate_worker.MegatronGeneratingWorker"
        return "nemo_rl.models.policy.generate_worker.GeneratingPolicyWorker"

    @property
    def generating_workers(self) -> list[Any]:
        """Actor handles by rank."""
        return self.group.workers

    def prepare_generation(self) -> None:
        """Once, and again after the workers were replaced."""
        assert isinstance(self.config, RolloutPolicyConfig)
        generation = self.config.generation
        by_megatron = generation.backend == "megatron"
        size = (generation.mcore_generation_config if by_megatron else generation.hf_cfg).max_batch_size
        end: Any = self.tokenizer.eos_token_id  # a number, for a single token
        settings = GenerationSettings(
            max_model_len=generation.vllm_cfg.max_model_len,
            max_batch_size=size,
            end_token_id=end,
            special_token_ids=frozenset(self.tokenizer.all_special_ids),
            decode=partial(_decode, self.tokenizer),
        )
        self.group.call_all("prepare_generation", settings)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
