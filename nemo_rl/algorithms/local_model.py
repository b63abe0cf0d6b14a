"""The configuration of a policy's model as far as this machine has it, for checks that fetch and make nothing."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.data.tiny_model import TINY_MODEL_PREFIX, tiny_model_config
from nemo_rl.models.policy.config import PolicyConfig


def local_model_config(policy: PolicyConfig) -> PretrainedConfig | None:
    """config.json with `policy.hf_config_overrides`: of a directory, a `tiny:` model, or one of the hub in the cache.

    None where it is not on this machine.

    Raises:
        ValueError, OSError, TypeError: it cannot be read, or there is no such tiny model.
    """
    name = policy.model_name
    if name.startswith(TINY_MODEL_PREFIX):
        tiny = tiny_model_config(name)
        return type(tiny).from_dict({**tiny.to_dict(), **policy.hf_config_overrides})
    directory = Path(name)
    if not (directory / "config.json").is_file():
        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # the path of another machine
            return None
        if not isinstance(cached, str):
            return None
        directory = Path(cached).parent
    return AutoConfig.from_pretrained(directory, **policy.hf_config_overrides)
