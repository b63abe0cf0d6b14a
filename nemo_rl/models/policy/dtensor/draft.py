"""A draft that trains beside the policy, an EAGLE-3 draft or a prediction head, and the policy worker that has one.

    hidden states of the policy after some blocks [R, W, H] each -> fc -> one block over (embedding of the next token,
    state) -> norm -> the policy's own head -> the token after the next

Source: Li et al. 2025, "EAGLE-3" (arXiv:2503.01840). Layout and names follow vLLM's `LlamaForCausalLMEagle3`. A
prediction head (multi-token prediction, DeepSeek-AI 2024, arXiv:2412.19437) is one more block of the policy's own kind
over its last hidden states; it comes from the policy's checkpoint, of which transformers reads the other blocks. A
draft has neither embeddings nor an output head of its own: it reads the policy's, which therefore always fit.

The draft learns inside the training pass (`LearningTask`) from states that are cut off from the policy's graph, with an
optimizer of its own. So losses and gradients of the policy are the same bits with and without it.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from nemo_rl.config.rules import remedy
from nemo_rl.models.policy import checkpoint
from nemo_rl.models.policy.attention import ATTENTION, CuSeqlens
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.checkpoint import PolicyState, SavedState
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.dtensor import moe
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.model import exported_of, materialize, shard
from nemo_rl.models.policy.dtensor.optimizer import clip_grad_norm
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.head.logit_tiles import OutputHead, whole_logits
from nemo_rl.models.policy.head.tasks import HeadModel, HeadTask
from nemo_rl.models.policy.pretrained import DTYPES, build_on_meta, load_config
from nemo_rl.models.policy.settings import PolicyWorkerSettings
from nemo_rl.models.policy.weight_loading import checkpoint_files, load_weights, local_part, named_tensors
from nemo_rl.refit.layout import DRAFT_PREFIX, ExportedTensor, in_sending_order
from nemo_rl.types import LossFunction, TrainResult
from nemo_rl.utils.checkpoint.save import ModelSaveFormat
from nemo_rl.utils.checkpoint.tensors import load_tensors

logger = logging.getLogger(__name__)

FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
"""`model_type` of the policies that training and vLLM show to a draft alike: blocks, embeddings and head."""
_ONE_MORE_LAYER = ("", "enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_APART = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding.", "mtp.pre_fc_norm_hidden.", "mtp.fc.", "mtp.norm.")
WITH_PREDICTION = {
    **dict.fromkeys(("glm4_moe", "deepseek_v3"), _ONE_MORE_LAYER),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), _APART),
}
"""`model_type` of the policies whose prediction head is `PredictionHead` -> names of its parts on disk."""

_INDICES = "eagle_aux_hidden_state_layer_ids"  # in config.json
_OF_POLICY = (  # the keys of config.json that a draft shares with its policy
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rope_parameters", "rms_norm_eps", "vocab_size"),
)
_FOLDER = "draft"  # in the policy's folder of a checkpoint
_ROWS = 256  # whose logits over the whole vocabulary are in memory at a time


# -- config.json


def draft_config(config: RolloutPolicyConfig, policy: PretrainedConfig) -> dict[str, Any]:
    """config.json of the draft, as vLLM reads it: of `policy.draft.model_name`, or of a new draft for `policy`.

    It is empty for a prediction head, which the policy's config.json describes.

    Raises:
        ValueError: naming the key to change, if there is no draft for such a policy.
    """
    settings, key = config.draft, config.draft.key
    if config.generation.speculation.get("method") == "mtp":
        return _stored_prediction(config, policy)
    if policy.model_type not in FAMILIES:
        raise ValueError(
            f"{key('enabled')}=true: no draft can be trained for a {policy.model_type!r} model such as "
            f"{config.model_name!r}, but for {', '.join(sorted(FAMILIES))}; {_none(config)}"
        )
    if settings.model_name is not None:
        return _stored_config(config, policy)
    blocks = policy.num_hidden_layers
    indices = settings.aux_layer_indices or default_indices(blocks)
    if max(indices) > blocks:
        raise ValueError(f"{key('aux_layer_indices')}: {max(indices)} is beyond the {blocks} blocks of the policy")
    if len(set(indices)) < len(indices):
        raise ValueError(f"{key('aux_layer_indices')}={indices}: every number may come once; remove the others")
    width, known = policy.hidden_size // policy.num_attention_heads, policy.to_dict()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        **{name: known[name] for name in _OF_POLICY},
        "head_dim": known.get("head_dim") or width,
        "draft_vocab_size": policy.vocab_size,
        "tie_word_embeddings": False,
        _INDICES: sorted(indices),
        "num_aux_hidden_states": len(indices),
    }


def _none(config: RolloutPolicyConfig) -> str:
    """The remedy for a policy without a draft."""
    speculation = config.generation.key(config.generation.speculation_path)
    return remedy(f"{config.draft.key('enabled')}=false and {speculation}=null")


def _stored_prediction(config: RolloutPolicyConfig, policy: PretrainedConfig) -> dict[str, Any]:
    key, stored = config.draft.key, policy.to_dict()
    count = stored.get("num_nextn_predict_layers") or stored.get("mtp_num_hidden_layers") or 0
    if policy.model_type not in WITH_PREDICTION or count != 1:
        raise ValueError(
            f"{key('enabled')}=true with method mtp trains the one prediction head of {', '.join(WITH_PREDICTION)} "
            f"models, and {config.model_name!r} is a {policy.model_type!r} model with {count}; "
            f"{_none(config)}"
        )
    if config.draft.model_name is not None or config.draft.aux_layer_indices is not None:
        fix = remedy(f"{key('model_name')}=null and {key('aux_layer_indices')}=null")
        raise ValueError(f"{key('model_name')}, aux_layer_indices: the policy has a prediction head; {fix}")
    name = prediction_names(policy)["eh_proj"]
    if Path(config.model_name).is_dir() and f"{name}weight" not in (checkpoint_files(config.model_name) or {}):
        raise ValueError(
            f"{key('enabled')}=true with method mtp: {config.model_name!r} was saved without its prediction head "
            f"({name}weight); name the original model, or a checkpoint of a run that trained the head"
        )
    return {}


def default_indices(blocks: int) -> list[int]:
    """Blocks after which the draft reads the policy: EAGLE-3's early, middle and late one; 0 is the embeddings."""
    return sorted({2, blocks // 2, blocks - 3} if blocks >= 8 else {0, blocks // 2, blocks})


def _stored_config(config: RolloutPolicyConfig, policy: PretrainedConfig) -> dict[str, Any]:
    name = config.draft.model_name
    assert name is not None
    folder, key = Path(name), config.draft.key("model_name")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {name!r} has no config.json; give the folder of a draft, or null for a new one")
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = {"hidden_size": policy.hidden_size, "num_hidden_layers": 1}
    wanted |= dict.fromkeys(("vocab_size", "draft_vocab_size"), policy.vocab_size)
    wrong = [f"{name}={stored.get(name)}, not {value}" for name, value in wanted.items() if stored.get(name) != value]
    indices, blocks = stored.get(_INDICES), policy.num_hidden_layers
    if not indices or indices != sorted({index for index in indices if 0 <= index <= blocks}):
        wrong.append(f"{_INDICES}={indices}, not increasing numbers up to {blocks}, its blocks")
    if wrong:
        raise ValueError(f"{key}: the draft {name!r} does not fit the policy: {', '.join(wrong)}; name another or null")
    expected = set(DraftHead(LlamaConfig(**stored)).state_dict())
    if different := sorted(expected ^ set(_stored_tensors(folder))):
        raise ValueError(
            f"{key}: the tensors of {name!r} do not match a draft with the policy's embeddings and head: "
            f"{', '.join(different[:4])}; name a draft that this library saved, or null"
        )
    return stored


def _stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# -- the model


class DraftBlock(nn.Module):
    """A block of Llama whose attention reads two vectors per token: an embedding and a state."""

    input_layernorm: LlamaRMSNorm
    hidden_norm: LlamaRMSNorm
    post_attention_layernorm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * width, out, bias=False))
        self.mlp = LlamaMLP(config)
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, norm, LlamaRMSNorm(width, eps=config.rms_norm_eps))

    def forward(self, embeddings: torch.Tensor, states: torch.Tensor, **attention: Any) -> torch.Tensor:
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(both, attention_mask=None, **attention)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class DraftHead(nn.Module):
    """The part of the draft that learns. `config` is `draft_config`."""

    reshard: Callable[[], None]  # of FSDP

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        config._attn_implementation = ATTENTION
        self.indices: list[int] = config.to_dict()[_INDICES]
        self.fc = nn.Linear(config.hidden_size * len(self.indices), config.hidden_size, bias=False)
        self.midlayer = DraftBlock(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.config = config

    stored_name = staticmethod(str)  # the names on disk and in the engine are its own

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: CuSeqlens | None
    ) -> torch.Tensor:
        """Embeddings of the next tokens [R, W, H], states [R, W, H * indices] -> inputs of the head [R, W, H]."""
        states = self.fc(states)
        rotary = self.rotary(states, position_ids)
        return self.norm(self.midlayer(embeddings, states, position_embeddings=rotary, cu_seqlens=cu_seqlens))

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """New weights. Norms begin at 1."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02, generator=generator)


def prediction_names(policy: PretrainedConfig) -> dict[str, str]:
    """Part of a `PredictionHead` -> how its names begin on disk and in the engine."""
    names = WITH_PREDICTION[policy.model_type]
    layer = f"model.layers.{policy.num_hidden_layers}." if names is _ONE_MORE_LAYER else ""
    parts = ("block", "enorm", "hnorm", "eh_proj", "norm")
    return {part: layer + name for part, name in zip(parts, names, strict=True)}


class PredictionHead(nn.Module):
    """The prediction head of `policy`, on the meta device.

    As in vLLM, the embedding beside the first state of a sequence counts as zero if the head is one more layer.
    """

    reshard: Callable[[], None]  # of FSDP
    indices = (1,)  # of `PolicyStates` with only the policy's last norm

    def __init__(self, policy: PretrainedConfig, dtype: torch.dtype, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config, self.names = policy, prediction_names(policy)
        self.masks_first = WITH_PREDICTION[policy.model_type] is _ONE_MORE_LAYER
        longer = copy.deepcopy(policy)
        longer.num_hidden_layers += 1
        if "layer_types" in longer.to_dict():
            longer.layer_types = [*longer.layer_types, "full_attention"]
        model = build_on_meta(longer, dtype)
        moe.apply_expert_parallel(model, mesh)
        base: Any = model.base_model
        self.rotary, self.block = base.rotary_emb, base.layers[-1]
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(base.norm) for _ in range(3))
        width = policy.hidden_size
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta", dtype=dtype)

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: CuSeqlens | None
    ) -> torch.Tensor:
        """Embeddings of the next tokens [R, W, H], states [R, W, H] -> inputs of the head [R, W, H]."""
        if self.masks_first:
            embeddings = embeddings * (position_ids > 0)[..., None]
        states = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(states)], dim=-1))
        kwargs = {"position_ids": position_ids, "position_embeddings": self.rotary(states, position_ids)}
        return self.norm(self.block(states, attention_mask=None, cu_seqlens=cu_seqlens, **kwargs))

    def stored_name(self, name: str) -> str:
        """The name on disk and in the engine."""
        part, _, rest = name.partition(".")
        return self.names[part] + rest


class PolicyStates:
    """The states [R, W, H] of the last pass after the first i blocks of the policy, without gradient, by i.

    Nothing is kept unless `is_wanted`.
    """

    def __init__(self, layers: Sequence[nn.Module], indices: Sequence[int]) -> None:
        self.is_wanted = False
        self.found: dict[int, torch.Tensor] = {}
        for index in indices:
            if index == 0:
                layers[0].register_forward_pre_hook(lambda _, args: self._keep(0, args[0]))
            else:
                layers[index - 1].register_forward_hook(lambda _, args, out, index=index: self._keep(index, out))

    def _keep(self, index: int, states: torch.Tensor) -> None:
        if self.is_wanted:
            self.found[index] = states.detach()


# -- training


class LearningTask(HeadTask):
    """A task of the policy. After it, in the same pass, the draft learns from the policy's states."""

    def __init__(self, task: HeadTask, draft: DraftTrainer) -> None:
        self.task, self.draft = task, draft
        self.num_values, self.dtype, self.columns = task.num_values, task.dtype, task.columns

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        outputs = self.task(model, states, batch)
        self.draft.learn(model.output_head(), states.detach(), batch)
        return outputs


class DraftTrainer:
    """The draft of one rank's policy: sharded like the policy, with its own optimizer."""

    def __init__(self, worker: DraftingPolicyWorker) -> None:
        config, own, mesh, device = worker.config, worker.settings, worker.mesh, worker.device
        [stage] = worker.stages
        policy = load_config(own.model_path, dict(config.hf_config_overrides))
        self.config, self.mesh, self.settings = config, mesh, draft_config(config, policy)
        self._embeddings = cast(nn.Embedding, stage.hf.get_input_embeddings())
        dtype, base = DTYPES[config.master_precision], cast(Any, stage.hf.base_model)
        host = torch.device("cpu") if config.dtensor_cfg.cpu_offload else device
        if self.settings:
            with torch.random.fork_rng(devices=[]):  # the policy's draws stay what they are without a draft
                self.head = DraftHead(LlamaConfig(**self.settings)).to(dtype)
            if config.draft.model_name is None:
                self.head.draw(own.seed)
            else:
                self.head.load_state_dict(_stored_tensors(Path(config.draft.model_name)))
            self.head.to(host)
            self.head.rotary.to(device)
        else:
            self.head = PredictionHead(policy, dtype, mesh)
        shard(self.head, [], mesh, config)
        if isinstance(self.head, PredictionHead):
            materialize(self.head, host, device)
            load_weights(self.tensors(), own.model_path, ExpertNames(policy.model_type).read)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.draft.lr, weight_decay=0.0)
        self._states = PolicyStates(list(base.layers) if self.settings else [base.norm], self.head.indices)
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._is_finite = True

    @torch.enable_grad()
    def learn(self, head: OutputHead, states: torch.Tensor, batch: ModelBatch) -> None:
        """Add the gradients of one micro-batch: the draft's distribution towards the policy's, of every scored token
        from the third of its sequence on. `states` [N, H] are the policy's last ones before each scored token.
        """
        read = torch.cat([self._states.found.pop(index) for index in self.head.indices], dim=-1)
        next_ids = batch.input_ids.roll(-1, dims=1)  # wrong for the last token of a sequence, which predicts nothing
        embeddings = nn.functional.embedding(next_ids, local_part(self._embeddings.weight).detach())
        output = self.head(embeddings, read, batch.position_ids, batch.cu_seqlens)
        has_both = batch.position_ids.flatten()[batch.states] >= 1
        predicted, slots = output.detach().flatten(0, 1), batch.states[has_both] - 1
        gradient = torch.zeros_like(predicted)
        for chosen, policy in zip(slots.split(_ROWS), states[has_both].split(_ROWS), strict=True):
            found, slope = against(head, predicted[chosen], policy)
            gradient[chosen] = slope.to(gradient.dtype)
            self._sums += found
        output.backward(gradient.view_as(output))

    @contextmanager
    def learning(self) -> Generator[None]:
        """Around the passes of an optimizer step: the policy's states are kept."""
        self._states.is_wanted = True
        try:
            yield
        finally:
            self._states.is_wanted = False
            self._states.found.clear()

    def metrics(self) -> dict[str, float]:
        """Finish the gradients of an optimizer step. Collective."""
        dist.all_reduce(self._sums, group=self.mesh.data_group)
        loss, accepted, count = self._sums.tolist()
        count = max(count, 1.0)
        parameters = list(self.head.parameters())
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= count
        norm = clip_grad_norm(parameters, self.config.max_grad_norm).item()
        self._is_finite = math.isfinite(norm)
        return {"draft_loss": loss / count, "draft_acceptance": accepted / count, "draft_grad_norm": norm}

    def step(self) -> None:
        """Update the weights, unless the gradient is not finite."""
        if self._is_finite:
            self.optimizer.step()
        else:
            logger.warning("the draft's gradient is not finite: it keeps its weights in this step")

    def zero_gradients(self) -> None:
        """Begin the next optimizer step."""
        self._sums.zero_()
        self.optimizer.zero_grad()

    # -- checkpoints and refit

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's shards by name."""
        self.head.reshard()
        return {self.head.stored_name(name): tensor for name, tensor in named_tensors(self.head)}

    def exported(self) -> list[ExportedTensor]:
        """Every weight, under the name in the engine's draft."""
        self.head.reshard()
        return [replace(tensor, name=self.head.stored_name(tensor.name)) for tensor in exported_of(self.head)]

    def save_model(self, directory: Path) -> None:
        """A model directory that vLLM and `policy.draft.model_name` read."""
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.json").write_text(json.dumps(self.settings, indent=2))
        checkpoint.save_consolidated_tensors(self.exported(), directory)

    def load(self, directory: Path, *, load_optimizer: bool, rate: float | None) -> None:
        """Restore the weights and, if requested, the optimizer from a checkpoint.

        `rate`: the learning rate from here on; None: the checkpoint's.
        """
        load_tensors(self.tensors(), directory / "weights")
        if load_optimizer:
            checkpoint.load_optimizer(self.tensors(), self.optimizer, None, directory)
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate


@torch.no_grad()
def against(head: OutputHead, predicted: torch.Tensor, policy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the draft with the policy: sums [3] and the gradient [n, H] of the first for `predicted`.

    The sums over rows are the cross-entropy of the draft's distribution under the policy's, the policy's probability of
    the draft's likeliest token (how often it would be accepted), and the number of rows. Both distributions have the
    temperature of sampling. `predicted`, `policy`: [n, H], inputs of the head.
    """
    assert head.transform.softcap is None and head.transform.scale == 1.0 and head.group is None
    wanted = whole_logits(policy, head).softmax(dim=-1)
    logprobs = whole_logits(predicted, head).log_softmax(dim=-1)
    likeliest = logprobs.argmax(dim=-1, keepdim=True)
    sums = [-(wanted * logprobs).sum(), wanted.gather(1, likeliest).sum(), wanted.new_tensor(float(len(predicted)))]
    slope = (logprobs.exp_() - wanted) / head.temperature
    return torch.stack(sums).double(), slope.to(head.weight.dtype) @ head.weight


@dataclass(frozen=True)
class StateWithDraft:
    """The `SavedState` of a policy and its draft."""

    policy: SavedState
    draft: SavedState

    def on_host(self) -> StateWithDraft:
        return replace(self, policy=self.policy.on_host(), draft=self.draft.on_host())

    def save(self, directory: Path, model_save_format: ModelSaveFormat, group: dist.ProcessGroup | None = None) -> None:
        self.policy.save(directory, model_save_format, group)
        self.draft.save(directory / _FOLDER, model_save_format, group)


class DraftingPolicyWorker(DTensorPolicyWorker):
    """A `DTensorPolicyWorker` with a draft."""

    config: RolloutPolicyConfig

    def __init__(self, config: RolloutPolicyConfig, settings: PolicyWorkerSettings) -> None:
        super().__init__(config, settings)
        self.draft = DraftTrainer(self)

    def train(self, loss_fn: LossFunction, task: HeadTask, is_last_pass: bool = True) -> TrainResult:
        return super().train(loss_fn, LearningTask(task, self.draft), is_last_pass)

    @contextmanager
    def _training_mode(self) -> Generator[None]:
        with super()._training_mode(), self.draft.learning():
            yield

    def _model_metrics(self) -> dict[str, float]:
        return super()._model_metrics() | self.draft.metrics()

    def _take_step(self) -> None:
        super()._take_step()
        self.draft.step()

    def _zero_gradients(self) -> None:
        super()._zero_gradients()
        self.draft.zero_gradients()

    def _state(self, *, save_optimizer: bool) -> StateWithDraft:
        optimizer = self.draft.optimizer if save_optimizer else None
        draft = PolicyState.of(self.draft.tensors(), optimizer, None)
        return StateWithDraft(super()._state(save_optimizer=save_optimizer), draft)

    def _save_beside(self, directory: Path, *, save_consolidated: bool) -> None:
        super()._save_beside(directory, save_consolidated=save_consolidated)
        if save_consolidated and self.draft.settings:
            self.draft.save_model(directory / _FOLDER / "consolidated")

    def _consolidated(self) -> list[ExportedTensor]:
        return [*super()._consolidated(), *(() if self.draft.settings else self.draft.exported())]

    def _load_state(self, directory: Path, *, load_optimizer: bool) -> None:
        super()._load_state(directory, load_optimizer=load_optimizer)
        if (directory / _FOLDER).is_dir():
            rate = self.config.draft.lr if self.config.override_opt_param_scheduler else None
            self.draft.load(directory / _FOLDER, load_optimizer=load_optimizer, rate=rate)
        elif self.rank == 0:
            logger.warning("%s holds no draft: it begins as in a new run", directory)

    def _export(self) -> list[ExportedTensor]:
        drafts = [replace(tensor, name=DRAFT_PREFIX + tensor.name) for tensor in self.draft.exported()]
        return in_sending_order([*super()._export(), *drafts])

    def _weights(self) -> list[torch.Tensor]:
        local = [local_part(tensor).detach() for tensor in self.draft.tensors().values()]
        return [*super()._weights(), *local]

    def _optimizer_state(self) -> list[torch.Tensor]:
        states = [value for state in self.draft.optimizer.state.values() for value in state.values()]
        return [*super()._optimizer_state(), *(local_part(value) for value in states if value.ndim > 0)]
