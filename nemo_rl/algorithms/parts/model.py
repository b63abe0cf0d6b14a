"""The model of a policy, a critic or a teacher: found and checked, then started on its workers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.parts.devices import Devices
from nemo_rl.algorithms.run import Run
from nemo_rl.config.rules import remedy
from nemo_rl.data.chat.images import ImageReader, blank_image
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.distributed.worker_groups import require_shared
from nemo_rl.models.policy.attention import can_share_prompts
from nemo_rl.models.policy.config import LoRAConfig, PolicyConfig, RolloutPolicyConfig, SecondModelConfig
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.models.policy.settings import PolicyWorkerSettings
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.types import Pixels, SamplingParams
from nemo_rl.utils.checkpoint.foreign import MEGATRON, find_foreign
from nemo_rl.utils.checkpoint.manager import CONFIG_NAME
from nemo_rl.utils.config import CheckpointingConfig
from nemo_rl.utils.files import digest
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.tokenizer import get_tokenizer

logger = logging.getLogger(__name__)

MODEL_CHECKS = {  # only the backend that trains is imported
    "dtensor_cfg": "nemo_rl.models.policy.dtensor.checks:check_policy",
    "megatron_cfg": "nemo_rl.models.policy.megatron.checks:check_megatron",
}
PREDICTION_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # keys of config.json


@dataclass(frozen=True, kw_only=True)
class Model:
    """The checked model, from which the workers of a policy start."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    config: PretrainedConfig
    identity: dict[str, Any]  # a run that continues a checkpoint must have the same
    flops: ModelFlops
    processor_path: str | None = None  # of a vision-language model: where its image processor is
    blank_image: Pixels | None = None  # and a small image as it makes it

    @classmethod
    def prepare(cls, policy: PolicyConfig, checkpointing: CheckpointingConfig) -> Self:
        """Find and check the model of `policy`, `value`, `teacher` or one of `teachers`.

        Raises:
            ValueError: naming the key to change.
        """
        model_path = _model_path(policy)
        is_own = policy.tokenizer.name == policy.model_name
        tokenizer_path = model_path if is_own else resolve_model(policy.tokenizer.name)
        model = read_model_config(policy, model_path)
        tokenizer = get_tokenizer(policy.tokenizer.model_copy(update={"name": tokenizer_path}))
        check_fit(policy, model, tokenizer)
        import_object(MODEL_CHECKS[policy.backend_key], "check")(policy, model, model_path)
        if isinstance(policy, RolloutPolicyConfig) and policy.draft.enabled:
            from nemo_rl.models.policy.dtensor.draft import draft_config

            draft_config(policy, model)
        if isinstance(policy, RolloutPolicyConfig) and policy.generation.speculation.get("method") == "mtp":
            counts = (model.get_text_config().to_dict().get(name) for name in PREDICTION_HEADS)
            if not any(counts):
                raise ValueError(
                    f"{policy.generation.key(policy.generation.speculation_path)}.method=mtp: config.json of "
                    f"{policy.model_name!r} names no prediction heads ({' or '.join(PREDICTION_HEADS)}); set ngram"
                )
        metric = checkpointing.metric_name if checkpointing.enabled else None
        has_metrics = not isinstance(policy, SecondModelConfig)
        if has_metrics and metric is not None and metric.startswith("train:moe/") and num_experts(model) == 0:
            key = checkpointing.key("metric_name")
            raise ValueError(
                f"{key}={metric}: {model.model_type!r} is a dense model and has no metrics of experts; "
                f"{remedy(f'{key}=train:loss', f'{key}=null')}"
            )
        adapters = "peft" if policy.megatron_cfg.enabled else "lora_cfg"
        processor_path = tokenizer_path if sees_images(model) else None
        frozen: Sequence[str] = ()
        if sees_images(model):
            from nemo_rl.models.policy.dtensor.lora import frozen_parts

            frozen = frozen_parts(policy, model)
        return cls(
            model_path=model_path,
            tokenizer_path=tokenizer_path,
            tokenizer=tokenizer,
            config=model,
            identity={
                policy.key("model"): {"name": policy.model_name, "config_hash": digest(model.to_json_string())},
                policy.key(f"{policy.backend_key}.{adapters}"): _adapters(policy),
                policy.key("tokenizer"): tokenizer_identity(tokenizer),
            },
            flops=ModelFlops.of(model, frozen, shares_prompts=policy.shares_prompts and can_share_prompts(model)),
            processor_path=processor_path,
            blank_image=blank_image(processor_path) if processor_path is not None else None,
        )

    def start(
        self,
        run: Run[RunConfig],
        config: PolicyConfig,
        devices: Devices,
        *,
        sampling: SamplingParams | None = None,
        name: str = "policy",
        init_optimizer: bool = True,
        init_reference_model: bool = False,
        policy_class: type[Policy] = Policy,
    ) -> Policy:
        """Start the workers of a policy, of a critic (`value`) or of a teacher. They end with the run.

        `config`: the section as it applies, which may be a checkpoint's and not the one that `prepare` got.
        `sampling`: logprobs are computed with its temperature, top-p and top-k; None: with temperature 1.
        """
        machines, accelerator = devices.machines, devices.accelerator
        if accelerator.awake is not None:
            accelerator.release(accelerator.awake)  # the new workers need the memory
        policy = policy_class(
            devices.cluster,
            config,
            self.tokenizer,
            accelerator,
            PolicyWorkerSettings(
                model_path=self.model_path,
                sampling=sampling or SamplingParams(max_new_tokens=1),
                seed=run.config.loop.seed,
                use_gpu=machines.use_gpus,
                workers_per_node=machines.workers_per_node,
                folder=name,
                init_optimizer=init_optimizer,
                init_reference_model=init_reference_model,
                pad_token_id=cast(int | None, self.tokenizer.pad_token_id),
                blank_image=self.blank_image,
            ),
            timeout_s=machines.worker_timeout_s,
            processor_path=self.processor_path,
        )
        run.stack.callback(policy.shutdown)
        if init_optimizer and run.config.checkpointing.enabled:
            folder = Path(run.config.checkpointing.checkpoint_dir).absolute()
            require_shared(policy.group, folder, "checkpointing.checkpoint_dir")
        if config.megatron_cfg.enabled and not machines.use_gpus:
            logger.info("%s: Megatron Core on the CPU, with host stand-ins for torch.cuda", name)
        return policy


def _model_path(policy: PolicyConfig) -> str:
    """The folder of the model; of a checkpoint of NeMo RL it is made once, beside it. ValueError naming the key."""
    path = Path(policy.model_name).expanduser()
    foreign = None if (path / "config.json").is_file() else find_foreign(path)
    if foreign is None or foreign.kind == MEGATRON or not (foreign.policy.parent / CONFIG_NAME).is_file():
        return resolve_model(policy.model_name)
    from nemo_rl.models.policy.convert import model_of_checkpoint  # which imports what few runs need

    try:
        found = model_of_checkpoint(foreign.policy.parent, dtype=None, cache=cache_root(), resolve_base=resolve_model)
    except (ValueError, OSError) as error:
        raise ValueError(f"{policy.key('model_name')}: {error}") from error
    return str(found.model)


def image_reader(processor_path: str | None, max_images: int) -> ImageReader | None:
    """The reader of the images of rows, at most `max_images` each; None for a model of text."""
    return ImageReader(processor_path, max_images) if processor_path is not None else None


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests that tell a vocabulary and a chat template from others."""
    return {
        "vocabulary_hash": digest(repr(sorted(tokenizer.get_vocab().items()))),
        "chat_template_hash": digest(str(tokenizer.chat_template)),
    }


def _adapters(policy: PolicyConfig) -> dict[str, Any]:
    lora_cfg = policy.adapters
    if not lora_cfg.enabled:
        return {}
    return {
        "enabled": True,
        "dim": lora_cfg.dim,
        "alpha": lora_cfg.alpha,
        "target_modules": sorted(lora_cfg.target_modules) or "all",
        "exclude_modules": sorted(lora_cfg.exclude_modules),
        **({"adapter_path": lora_cfg.adapter_path} if isinstance(lora_cfg, LoRAConfig) else {}),
    }
