"""The Hugging Face tensors that make up a Megatron tensor, per architecture, and the slices that a rank holds.

    decoder.layers.3.self_attention.linear_qkv.weight  <->  model.layers.3.self_attn.{q,k,v}_proj.weight
    decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight
                                           <->  model.layers.3.mlp.experts.5.{gate,up}_proj.weight   (4 experts a rank)

Layer numbers of Megatron names count through the whole model; expert numbers count through the experts of a rank, as in
its modules. Hugging Face names are the names in checkpoints on disk and in generation engines, with one tensor per
expert. The two module implementations name tensors differently: "local" (plain torch modules) and "transformer_engine"
(norms fused into the next linear layer; the experts of a rank optionally in one grouped layer).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from nemo_rl.config.errors import some_of
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, is_scalar
from nemo_rl.models.policy.token_mixers import mixer_class

Shape = tuple[int, ...]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
_TEXT = "model.language_model."


@dataclass(frozen=True, kw_only=True)
class ParallelRanks:
    """A rank's coordinates in tensor, expert, and expert tensor parallelism, which split single tensors."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class CheckpointTensor:
    """The place of a Hugging Face tensor in a checkpoint: in tensor `name` of `shape`, from `first_row` on.

    `expert`: its index, if `name` holds the tensors of all experts.
    """

    name: str
    shape: Shape
    expert: int | None = None
    first_row: int = 0

    def index(self, part: ShardSlice) -> tuple[int | slice, ...]:
        """Selects `part` of the Hugging Face tensor from the stored tensor."""
        shift = self.first_row if part.dim == 0 else 0
        selected = slice(part.start + shift, part.stop + shift)
        rows = (selected,) if part.dim == 0 else (slice(None), selected)
        return rows if self.expert is None else (self.expert, *rows)


@dataclass(frozen=True)
class HFTensor:
    """A tensor under its name on disk. `elsewhere`: its location in checkpoints with the names of transformers 5."""

    name: str
    shape: Shape
    elsewhere: CheckpointTensor | None = None


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """One Megatron tensor of the whole model. `expert` counts through the model; None outside of experts.

    `is_buffer`: not trained by gradients and always float32 (the bias that chooses experts). `stacks_experts`: it holds
    all experts, of which expert-parallel ranks have their share.
    """

    template: str
    sources: tuple[HFTensor, ...]
    layout: Layout
    expert: int | None = None
    num_experts: int = 0
    is_buffer: bool = False
    stacks_experts: bool = False

    def place(self, ep_size: int) -> tuple[str, int | None]:
        """Its name in the modules of a rank, with the layer number of the whole model, and the expert-parallel rank
        that holds it (None: all of them). ValueError if the experts do not divide evenly."""
        if self.expert is None:
            return self.template, None
        if self.num_experts % ep_size:
            raise ValueError(f"{self.num_experts} experts cannot be shared by {ep_size} expert parallel ranks evenly")
        owner, number = divmod(self.expert, self.num_experts // ep_size)
        return self.template.format(expert=number), owner

    def rank_and_size(self, ranks: ParallelRanks) -> tuple[int, int]:
        """Rank and size in the tensor parallelism that splits it, which experts have their own of."""
        if self.stacks_experts:
            return ranks.ep_rank, ranks.ep_size
        return (ranks.tp_rank, ranks.tp_size) if self.expert is None else (ranks.etp_rank, ranks.etp_size)

    def slices(self, rank: int, size: int) -> list[ShardSlice]:
        """The slices in shard `rank` of `size`. ValueError if the tensor does not divide evenly."""
        try:
            return self.layout.slices([source.shape for source in self.sources], rank, size)
        except ValueError as error:
            raise ValueError(f"{self.sources[0].name}: {error}") from None

    def shard_shape(self, size: int) -> Shape:
        """Shape of a shard. ValueError as `slices`."""
        # The first rank has no padding rows, so its slices fill its shard.
        length = sum(part.length for part in self.slices(0, size))
        whole, dim = self.sources[0].shape, self.layout.dim
        return (*whole[:dim], length, *whole[dim + 1 :])

    def shard(self, sources: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Shard `rank` of `size`, copied from the whole Hugging Face tensors. Padding rows are zeros."""
        shard = sources[0].new_zeros(self.shard_shape(size))
        for part in self.slices(rank, size):
            source = sources[part.source].narrow(part.dim, part.start, part.length)
            shard.narrow(part.dim, part.at, part.length).copy_(source)
        return shard


@dataclass(frozen=True)
class WeightMap:
    """Every Megatron tensor of a model, once, in the order of the model.

    `is_tied`: the output layer is the embedding; the last pipeline stage may hold a copy of it.
    """

    model_type: str
    entries: tuple[MappedTensor, ...]
    is_tied: bool
    extra: re.Pattern[str] = field(repr=False)  # other names that checkpoints may hold

    def on_rank(self, ranks: ParallelRanks, *, with_tied_output: bool = True) -> dict[str, MappedTensor]:
        """Megatron name -> tensor, over all pipeline stages, with the experts of `ranks` and a tied output layer."""
        named: dict[str, MappedTensor] = {}
        for entry in self.entries:
            name, owner = entry.place(ranks.ep_size)
            if owner in (None, ranks.ep_rank):
                named[name] = entry
        if self.is_tied and with_tied_output:
            # The last stage holds a copy under the name of the head; on a single stage the two are one parameter.
            named[OUTPUT_LAYER] = named[EMBEDDING]
        return named

    @cached_property
    def hf_tensors(self) -> tuple[HFTensor, ...]:
        """All Hugging Face tensors of the model."""
        return tuple(source for entry in self.entries for source in entry.sources)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name -> shape of `hf_tensors`."""
        return {tensor.name: tensor.shape for tensor in self.hf_tensors}

    def locate(self, stored_names: Iterable[str]) -> dict[str, CheckpointTensor]:
        """Hugging Face name -> where a checkpoint with these tensors holds it. The head of a reward or value model may
        be missing: the files of a language model have none.

        Raises:
            ValueError: the names that are missing, and those that have no mapping.
        """
        stored = set(stored_names)
        prefix = "" if any(name.startswith("model.") for name in stored) else "model."  # the base model saved alone
        # A text model that was saved alone lacks the prefix of its vision-language model.
        body = _TEXT if any(name.startswith(_TEXT) for name in stored) else "model."

        def own(name: str) -> str:
            return name.replace(_TEXT, body).removeprefix(prefix)

        located, missing = {}, []
        for tensor in self.hf_tensors:
            places = (CheckpointTensor(tensor.name, tensor.shape), tensor.elsewhere)
            found = [place for place in places if place is not None and own(place.name) in stored]
            if found:
                located[tensor.name] = replace(found[0], name=own(found[0].name))
            elif tensor.name != HEAD_WEIGHT:
                missing.append(tensor.name)
        used = {found.name for found in located.values()}
        unknown = sorted(name for name in stored - used if not self.extra.search(name))
        if missing or unknown:
            raise ValueError(
                f"the checkpoint's tensors do not match a {self.model_type} model of this config.json: "
                f"missing are {some_of(missing)}; unknown are {some_of(unknown)}"
            )
        return located


def weight_map(
    model: PretrainedConfig, *, use_transformer_engine: bool = False, grouped_experts: bool = False
) -> WeightMap:
    """The mapping of a model with this configuration of transformers.

    `grouped_experts`: Megatron's moe_grouped_gemm, which needs Transformer Engine.

    Raises:
        ValueError: the architecture, or a setting of it, has no mapping.
    """
    assert use_transformer_engine or not grouped_experts, "`checks` refuses it"
    hf_config: Any = model.get_text_config()
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ValueError(unmapped_reason(hf_config.model_type))
    for setting, needed in family.needs.items():
        if (given := getattr(hf_config, setting)) not in needed and bool(given) not in needed:
            raise ValueError(
                f"config.json: {setting}: {given} of a {hf_config.model_type} model has no mapping to Megatron Core, "
                f"which needs {' or '.join(map(str, needed))}; train it with dtensor_cfg"
            )
    has_score = is_scalar(model)
    tables = _Tables(hf_config, family, use_transformer_engine, grouped_experts, has_score)
    extra = r"rotary_emb\.inv_freq$"
    if family.has_mixers:
        extra += r"|^mtp\."
    if hf_config.tie_word_embeddings or has_score:  # a classifier is often made from the files of a language model
        extra += r"|^lm_head\.weight$"
    if count := hf_config.to_dict().get("num_nextn_predict_layers"):  # which follow the model's own layers
        first = hf_config.num_hidden_layers
        extra += rf"|^(model\.)?layers\.({'|'.join(map(str, range(first, first + count)))})\."
    return WeightMap(
        model_type=hf_config.model_type,
        entries=tuple(tables.all()),
        is_tied=hf_config.tie_word_embeddings and not has_score,
        extra=re.compile(extra),
    )


def is_moe_layer(hf_config: Any, layer: int) -> bool:
    """Whether layer `layer` of the model has experts."""
    experts = FAMILIES[hf_config.model_type].experts
    return experts is not None and experts.in_layer(hf_config, layer)


def is_latent(hf_config: Any) -> bool:
    """Whether the model's attention is multi-head latent attention."""
    return FAMILIES[hf_config.model_type].is_latent


def unmapped_reason(model_type: str, instead: str = "dtensor_cfg") -> str | None:
    """Why an architecture has no mapping, and what to do: train it with `instead`. None if it has one."""
    if model_type in FAMILIES:
        return None
    if reason := _IMPOSSIBLE.get(model_type):
        return f"model_type {model_type!r} has no mapping to Megatron Core 0.19, {reason}; train it with {instead}"
    return (
        f"model_type {model_type!r} has no mapping to Megatron Core; known are {', '.join(sorted(FAMILIES))}. Add one "
        f"in models/policy/megatron/mapping.py (docs/adding-a-model.md), or train it with {instead}"
    )


_IMPOSSIBLE = {
    "nemotron_h": "whose Mamba layers need the GPU kernels of the package mamba_ssm",
    "llama4_text": "which has no chunked attention",
}
"""`model_type` -> what Megatron Core lacks for it."""


@dataclass(frozen=True, kw_only=True)
class _Experts:
    """How an architecture names its experts, and which layers have them (default: all)."""

    in_layer: Callable[[Any, int], bool] = lambda hf_config, layer: True
    block: str = "mlp"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_choice_bias: bool = False
    is_stacked: bool = False
    gated_shared_expert: bool = False

    def shared_width(self, hf_config: Any) -> int:
        """Hidden features of the experts that every token goes through; 0 without any."""
        if self.gated_shared_expert:
            return hf_config.shared_expert_intermediate_size
        return (hf_config.to_dict().get("n_shared_experts") or 0) * expert_width(hf_config)


def expert_width(hf_config: Any) -> int:
    """Hidden features of a routed expert."""
    return hf_config.to_dict().get("moe_intermediate_size") or hf_config.intermediate_size


@dataclass(frozen=True, kw_only=True)
class Family:
    """How an architecture differs from Llama. `needs`: the values of a setting that have a mapping.

    Queries, keys and values have a bias, and queries and keys a norm, if the field is True, or names a setting that is.

    Attributes:
        has_output_gate: each feature of attention is multiplied by a gate, which the projection of queries computes.
        has_mixers: layers of type "linear_attention" come from transformers.
        body: the beginning of all names on disk except the head's.
        has_biases: attention, routers and experts have biases everywhere.
        has_sinks: every head of attention has a score for a key without a value.
        has_post_norms: the outputs of attention and feed-forward layers have a norm too.
        is_local: it has layers of this library, which do not go with Transformer Engine's layers.
    """

    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    partial_rotary: bool = False
    has_output_gate: bool = False
    has_mixers: bool = False
    body: str = "model."
    zero_centered_norms: bool = False
    is_latent: bool = False
    has_post_norms: bool = False
    has_biases: bool = False
    has_sinks: bool = False
    is_local: bool = False
    experts: _Experts | None = None
    needs: Mapping[str, tuple[bool | str, ...]] = field(default_factory=dict)

    def has(self, hf_config: Any, part: Literal["qkv_bias", "qk_norm"]) -> bool:
        """Whether the attention of a model has the part."""
        given = self.qkv_bias if part == "qkv_bias" else self.qk_norm
        return getattr(hf_config, given) if isinstance(given, str) else given


def _qwen_moe_layer(hf_config: Any, layer: int) -> bool:
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0


def _deepseek_moe_layer(hf_config: Any, layer: int) -> bool:
    return layer >= hf_config.first_k_dense_replace


_QWEN_NEXT = Family(
    qk_norm=True,
    partial_rotary=True,
    has_output_gate=True,
    has_mixers=True,
    zero_centered_norms=True,
    is_local=True,
    needs={"attention_bias": (False,)},
)

FAMILIES = {
    "qwen3_5_text": replace(_QWEN_NEXT, body=_TEXT),
    "qwen3_5_moe_text": replace(_QWEN_NEXT, body=_TEXT, experts=_Experts(gated_shared_expert=True)),
    "qwen3_next": replace(_QWEN_NEXT, experts=_Experts(in_layer=_qwen_moe_layer, gated_shared_expert=True)),
    "llama": Family(needs={"attention_bias": (False,), "mlp_bias": (False,)}),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, needs={"attention_bias": (False,)}),
    "qwen3_moe": Family(qk_norm=True, needs={"attention_bias": (False,)}, experts=_Experts(in_layer=_qwen_moe_layer)),
    "mixtral": Family(experts=_Experts(block="block_sparse_moe", gate_up_down=("w1", "w3", "w2"))),
    "deepseek_v2": Family(
        is_latent=True,
        needs={"attention_bias": (False,), "mlp_bias": (False,), "topk_method": ("greedy", "group_limited_greedy")},
        experts=_Experts(in_layer=_deepseek_moe_layer),
    ),
    "deepseek_v3": Family(
        is_latent=True,
        needs={"attention_bias": (False,), "rope_interleave": (True,), "norm_topk_prob": (True,)},
        experts=_Experts(in_layer=_deepseek_moe_layer, has_choice_bias=True),
    ),
    "gemma3_text": Family(
        qk_norm=True,
        has_post_norms=True,
        zero_centered_norms=True,
        is_local=True,
        needs={"attention_bias": (False,), "attn_logit_softcapping": (False,), "use_bidirectional_attention": (False,)},
    ),
    "gpt_oss": Family(
        qkv_bias=True,
        has_biases=True,
        has_sinks=True,
        is_local=True,
        needs={"attention_bias": (True,)},
        experts=_Experts(is_stacked=True),
    ),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        partial_rotary=True,
        needs={"norm_topk_prob": (True,)},
        experts=_Experts(in_layer=_deepseek_moe_layer, has_choice_bias=True),
    ),
}


@dataclass(frozen=True)
class _Tables:
    """The entries of one model. `fuses_norms`: Transformer Engine keeps a norm in the linear layer behind it.
    `has_score`: it is a reward or value model.
    """

    config: Any
    family: Family
    fuses_norms: bool
    is_grouped: bool
    has_score: bool

    def all(self) -> Iterator[MappedTensor]:
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        body = self.family.body
        yield _mapped(EMBEDDING, Vocabulary(), (f"{body}embed_tokens.weight", vocabulary))
        for layer in range(self.config.num_hidden_layers):
            yield from self.layer(f"decoder.layers.{layer}.", f"{body}layers.{layer}.", layer)
        yield self.norm("decoder.final_layernorm.weight", f"{body}norm.weight")
        if self.has_score:
            yield _mapped(OUTPUT_LAYER, Replicated(), (HEAD_WEIGHT, (1, self.config.hidden_size)))
        elif not self.config.tie_word_embeddings:
            yield _mapped(OUTPUT_LAYER, Vocabulary(), ("lm_head.weight", vocabulary))

    def norm(self, module: str, stored: str, width: int | None = None) -> MappedTensor:
        return _mapped(module, Replicated(), (stored, (self.config.hidden_size if width is None else width,)))

    def layer(self, module: str, stored: str, number: int) -> Iterator[MappedTensor]:
        # Two layers follow the norm of latent attention, so it is in neither of them.
        fused = self.fuses_norms and not self.family.is_latent
        norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
        yield self.norm(module + norm, stored + "input_layernorm.weight")
        if self.family.has_mixers and self.config.layer_types[number] == "linear_attention":
            with torch.device("meta"):
                mixer = mixer_class(self.config)(self.config, number)
            for name, parameter in mixer.named_parameters():
                tensor = (f"{stored}linear_attn.{name}", tuple(parameter.shape))
                yield _mapped(f"{module}self_attention.mixer.{name}", Replicated(), tensor)
        else:
            attention = self.latent_attention if self.family.is_latent else self.attention
            yield from attention(module + "self_attention.", stored + "self_attn.")
        has_experts = is_moe_layer(self.config, number)
        fused = self.fuses_norms and not has_experts  # the router and the experts read the norm's output
        norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
        before = "post_attention_layernorm"
        if self.family.has_post_norms:
            yield self.norm(module + "self_attn_bda.weight", f"{stored}{before}.weight")
            yield self.norm(module + "mlp_bda.weight", stored + "post_feedforward_layernorm.weight")
            before = "pre_feedforward_layernorm"
        yield self.norm(module + norm, f"{stored}{before}.weight")
        if has_experts:
            yield from self.experts(module + "mlp.", stored)
        else:
            yield from self.mlp(module + "mlp.", stored + "mlp.", self.config.intermediate_size)

    def attention(self, module: str, stored: str) -> Iterator[MappedTensor]:
        heads, groups, head_dim = heads_of(self.config)
        gates = self.family.has_output_gate
        layout, hidden = QueryGroups(heads, groups, head_dim, gates), self.config.hidden_size
        rows = {"q": (1 + gates) * heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
        weights = [(f"{stored}{x}_proj.weight", (rows[x], hidden)) for x in "qkv"]
        yield _mapped(module + "linear_qkv.weight", layout, *weights)
        if self.family.has(self.config, "qkv_bias"):
            yield _mapped(module + "linear_qkv.bias", layout, *((f"{stored}{x}_proj.bias", (rows[x],)) for x in "qkv"))
        for x in "qk" if self.family.has(self.config, "qk_norm") else ():
            yield self.norm(f"{module}{x}_layernorm.weight", f"{stored}{x}_norm.weight", head_dim)
        yield _mapped(
            module + "linear_proj.weight", RowParallel(), (stored + "o_proj.weight", (hidden, heads * head_dim))
        )
        if self.family.has_biases:
            yield self.norm(module + "linear_proj.bias", stored + "o_proj.bias")
        if self.family.has_sinks:
            yield _mapped(module + "core_attention.softmax_offset", ColumnParallel(), (stored + "sinks", (heads,)))

    def latent_attention(self, module: str, stored: str) -> Iterator[MappedTensor]:
        """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

        Both sides rotate adjacent features of the rotary part, so rows keep their order.
        """
        config, hidden, heads = self.config, self.config.hidden_size, self.config.num_attention_heads
        plain, rotary, values = config.qk_nope_head_dim, config.qk_rope_head_dim, heads * config.v_head_dim
        queries = heads * (plain + rotary)
        # One rotary key serves all heads, so it leaves the down projection beside the latent.
        latents = [("kv", "kv_a_proj_with_mqa", config.kv_lora_rank, rotary, heads * plain + values)]
        if config.q_lora_rank is None:
            yield _mapped(
                module + "linear_q_proj.weight", ColumnParallel(), (stored + "q_proj.weight", (queries, hidden))
            )
        else:
            latents.insert(0, ("q", "q_a_proj", config.q_lora_rank, 0, queries))
        down = Replicated() if self.fuses_norms else ColumnParallel()  # Transformer Engine has no parallel layer for it
        norm = "linear_{}_up_proj.layer_norm_weight" if self.fuses_norms else "{}_layernorm.weight"
        for x, compress, rank, beside, expanded in latents:
            narrow = (f"{stored}{compress}.weight", (rank + beside, hidden))
            wide = (f"{stored}{x}_b_proj.weight", (expanded, rank))
            yield _mapped(f"{module}linear_{x}_down_proj.weight", down, narrow)
            yield self.norm(module + norm.format(x), f"{stored}{x}_a_layernorm.weight", rank)
            yield _mapped(f"{module}linear_{x}_up_proj.weight", ColumnParallel(), wide)
        yield _mapped(module + "linear_proj.weight", RowParallel(), (stored + "o_proj.weight", (hidden, values)))

    def mlp(self, module: str, stored: str, width: int) -> Iterator[MappedTensor]:
        hidden = self.config.hidden_size
        gate_up = [(f"{stored}{x}_proj.weight", (width, hidden)) for x in ("gate", "up")]
        yield _mapped(module + "linear_fc1.weight", ColumnParallel(), *gate_up)
        yield _mapped(module + "linear_fc2.weight", RowParallel(), (stored + "down_proj.weight", (hidden, width)))

    def stacked_experts(self, module: str, stored: str, count: int, width: int) -> Iterator[MappedTensor]:
        """GPT-OSS's, whose layer is ours: it has the parameters of files."""
        hidden = self.config.hidden_size
        for name, shape in ((".weight", (count, hidden)), (".bias", (count,))):
            yield _mapped(module + "router" + name, Replicated(), (stored + "router" + name, shape))
        for name, shape in (("gate_up_proj", (hidden, 2 * width)), ("down_proj", (width, hidden))):
            for ending, whole in (("", (count, *shape)), ("_bias", (count, shape[-1]))):
                tensor = (f"{stored}experts.{name}{ending}", whole)
                yield _mapped(f"{module}experts.{name}{ending}", ColumnParallel(), tensor, stacks_experts=True)

    def experts(self, module: str, layer: str) -> Iterator[MappedTensor]:
        config, names = self.config, self.family.experts
        assert names is not None
        count, width, hidden = num_experts(config), expert_width(config), config.hidden_size
        if names.is_stacked:
            yield from self.stacked_experts(module, f"{layer}{names.block}.", count, width)
            return
        stored, fused = f"{layer}{names.block}.", f"{layer}mlp."
        router = (stored + "gate.weight", (count, hidden), CheckpointTensor(fused + "gate.weight", (count, hidden)))
        yield _mapped(module + "router.weight", Replicated(), router)
        if names.has_choice_bias:
            bias = (stored + "gate.e_score_correction_bias", (count,))
            yield _mapped(module + "router.expert_bias", Replicated(), bias, is_buffer=True)
        template = "linear_fc{}.weight{{expert}}" if self.is_grouped else "local_experts.{{expert}}.linear_fc{}.weight"
        template = f"{module}experts.{template}"
        for expert in range(count):
            gate, up, down = (f"{stored}experts.{expert}.{part}.weight" for part in names.gate_up_down)
            first = CheckpointTensor(fused + "experts.gate_up_proj", (count, 2 * width, hidden), expert)
            both = (gate, (width, hidden), first), (up, (width, hidden), replace(first, first_row=width))
            last = down, (hidden, width), CheckpointTensor(fused + "experts.down_proj", (count, hidden, width), expert)
            yield _mapped(template.format(1), ColumnParallel(), *both, expert=expert, num_experts=count)
            yield _mapped(template.format(2), RowParallel(), last, expert=expert, num_experts=count)
        if shared := names.shared_width(config):
            name = "shared_expert" if names.gated_shared_expert else "shared_experts"
            yield from self.mlp(module + "shared_experts.", f"{stored}{name}.", shared)
        if names.gated_shared_expert:
            gate = (stored + "shared_expert_gate.weight", (1, hidden))
            yield _mapped(module + "shared_experts.gate_weight", Replicated(), gate)


def heads_of(hf_config: Any) -> tuple[int, int, int]:
    """(query heads, query groups, which share a key and a value head, features per head)."""
    heads = hf_config.num_attention_heads
    head_dim = hf_config.head_dim if hasattr(hf_config, "head_dim") else None
    return heads, hf_config.num_key_value_heads, head_dim or hf_config.hidden_size // heads


def _mapped(name: str, layout: Layout, *sources: tuple[Any, ...], **others: Any) -> MappedTensor:
    return MappedTensor(template=name, sources=tuple(HFTensor(*source) for source in sources), layout=layout, **others)


# -- how ranks share a Megatron tensor
#
#     linear_fc1.weight of rank 1 of 2  =  rows I/2..I of gate_proj.weight, then rows I/2..I of up_proj.weight
#
# A layout lists such slices, from which loading, saving and refits copy.


@dataclass(frozen=True)
class ShardSlice:
    """`start` to `stop` of dimension `dim` of Hugging Face tensor number `source`; it lies at `at` of a shard."""

    source: int
    dim: int
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """Size along `dim`."""
        return self.stop - self.start


class Layout(ABC):
    """How `size` ranks share a Megatron tensor, as a function of the shapes of its Hugging Face tensors."""

    dim = 0

    @abstractmethod
    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        """The slices of rank `rank`, in the order of its shard. ValueError if the tensor does not divide evenly."""


class Replicated(Layout):
    """Every rank holds the whole of one tensor."""

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        return [ShardSlice(0, 0, 0, shapes[0][0], 0)]


class ColumnParallel(Layout):
    """A column-parallel linear layer: ranks share its output features, which are rows of the weight.

    With several tensors (the gate and up projections of an MLP) a rank holds its rows of the first, then of the next.
    """

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        slices, at = [], 0
        for source, shape in enumerate(shapes):
            length = _even_share(shape[self.dim], size)
            slices.append(ShardSlice(source, self.dim, rank * length, (rank + 1) * length, at))
            at += length
        return slices


class RowParallel(ColumnParallel):
    """A row-parallel linear layer: ranks share its input features, which are columns of the weight."""

    dim = 1


class Vocabulary(Layout):
    """Ranks share rows, one per token, after padding with zeros to a multiple of the ranks.

    `slices` raises ValueError if a rank would have only padding, which happens below `size` squared tokens.
    """

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        vocabulary = shapes[0][0]
        # Padding keeps the shards equal, so that ranks can gather them in one collective.
        rows = -(-vocabulary // size)
        if rows * (size - 1) >= vocabulary:
            raise ValueError(
                f"a vocabulary of {vocabulary} tokens leaves the last of {size} tensor-parallel ranks none; lower "
                "megatron_cfg.tensor_model_parallel_size"
            )
        return [ShardSlice(0, 0, rank * rows, min((rank + 1) * rows, vocabulary), 0)]


@dataclass(frozen=True)
class QueryGroups(Layout):
    """Query, key and value projections in Megatron's order: per group its query heads, its key head, its value head.

    The rows of a rank are a range of that order even with more ranks than groups (Megatron then gathers the
    projections). `has_gates`: the gate of a head follows its query on disk, and here the queries of its group.
    """

    heads: int
    groups: int
    head_dim: int
    has_gates: bool = False

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        rows = _even_share(sum(shape[0] for shape in shapes), size)
        first, last = rank * rows, (rank + 1) * rows
        # The query heads of a group use the same key and value head (Ainslie et al. 2023, arXiv 2305.13245).
        dim, own = self.head_dim, self.heads // self.groups
        pieces: list[tuple[int, int, int]] = []  # source, first row, rows
        for group in range(self.groups):
            heads = range(group * own, (group + 1) * own)
            if self.has_gates:
                pieces += [(0, (2 * head + part) * dim, dim) for part, head in product((0, 1), heads)]
            else:
                pieces.append((0, heads.start * dim, own * dim))
            pieces += [(source, group * dim, dim) for source in (1, 2)]
        slices, offset = [], 0
        for source, start, length in pieces:
            # Megatron cuts by rows, with more ranks than groups also inside of a group.
            low, high = max(first, offset), min(last, offset + length)
            if low < high:
                slices.append(ShardSlice(source, 0, start + low - offset, start + high - offset, low - first))
            offset += length
        return slices


def _even_share(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} rows or columns cannot be shared by {size} ranks evenly")
    return length // size
