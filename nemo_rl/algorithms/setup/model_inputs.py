"""A model and its tokenizer, found and checked before any worker starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from nemo_rl.algorithms.setup.preflight import check_metric_name, check_optimizer
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.models.policy.config import LoRAConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.model import check_layout
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.megatron.checks import check_megatron
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.utils.config import CheckpointingConfig
from nemo_rl.utils.tokenizer import get_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What the workers of a policy are made from, checked."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    config: PretrainedConfig
    identity: dict[str, Any]  # what a checkpoint must share with a run that continues it
    flops: ModelFlops


def prepare_model(policy: PolicyConfig, checkpointing: CheckpointingConfig, key: str = "policy") -> ModelInputs:
    """Find the model of the section `key` and what is wrong with it.

    Raises:
        ValueError: with what to change.
    """
    try:
        return _prepare(policy, checkpointing, key)
    except ValueError as error:
        if key == "policy":
            raise
        # A critic or a teacher has the keys of `policy`, and the checks name those.
        raise ValueError(rename_section(str(error), "policy", key, type(policy).model_fields)) from error


def rename_section(message: str, old: str, new: str, keys: Iterable[str]) -> str:
    """`message` with every dotted key `old.<one of keys>` below `new`; paths and quoted text stay as they are."""
    names = "|".join(map(re.escape, keys))
    # An apostrophe within a word opens no quotation.
    quoted = r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*\""""
    found = re.compile(rf"{quoted}|(?<![\w./-]){re.escape(old)}(?=\.(?:{names})(?![\w/-]))")
    return found.sub(lambda match: new if match[0] == old else match[0], message)


def _prepare(policy: PolicyConfig, checkpointing: CheckpointingConfig, key: str) -> ModelInputs:
    model_path = resolve_model(policy.model_name)
    model = read_model_config(policy, model_path)
    tokenizer_path = resolve_model(policy.tokenizer.name)
    tokenizer = get_tokenizer(policy.tokenizer.model_copy(update={"name": tokenizer_path}))
    check_fit(policy, model, tokenizer)
    check_model_layout(policy, model, model_path)
    if key == "policy":  # metrics of experts are the policy's
        check_metric_name(checkpointing, model)
    check_optimizer(policy)
    return ModelInputs(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        config=model,
        identity=_identity(policy, model, tokenizer, key),
        flops=ModelFlops.of(model),
    )


def check_model_layout(policy: PolicyConfig, model: PretrainedConfig, model_path: str) -> None:
    """Whether the backend that trains can cut the model as asked. ValueError with what would work."""
    if policy.megatron_cfg.enabled:
        check_megatron(policy, model, model_path)
    else:
        check_layout(policy, model)


def _identity(
    policy: PolicyConfig, model: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, key: str
) -> dict[str, Any]:
    lora_cfg = policy.adapters
    adapters = {
        "enabled": True,
        "dim": lora_cfg.dim,
        "alpha": lora_cfg.alpha,
        "target_modules": sorted(lora_cfg.target_modules) or "all",
        "exclude_modules": sorted(lora_cfg.exclude_modules),
    }
    if isinstance(lora_cfg, LoRAConfig):
        adapters["adapter_path"] = lora_cfg.adapter_path
    return {
        f"{key}.model": {"name": policy.model_name, "config_hash": digest(model.to_json_string())},
        f"{key}.{policy.backend_key}.{'peft' if policy.megatron_cfg.enabled else 'lora_cfg'}": (
            adapters if lora_cfg.enabled else {}
        ),
        f"{key}.tokenizer": {
            "vocabulary_hash": digest(repr(sorted(tokenizer.get_vocab().items()))),
            "chat_template_hash": digest(str(tokenizer.chat_template)),
        },
    }


def digest(text: str) -> str:
    """16 hexadecimal digits of a text, to tell it from others."""
    return xxhash.xxh3_64_hexdigest(text.encode())
