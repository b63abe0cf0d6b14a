"""Which Hugging Face tensors a Megatron tensor is made of, per architecture, and which slices of them a rank holds.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import torch

from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT

Shape = tuple[int, ...]

Implementation = Literal["local", "transformer_engine"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


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
    """Where a checkpoint holds a Hugging Face tensor: in tensor `name` of `shape`, from `first_row` on.

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

    def candidates(self, prefix: str) -> Iterator[CheckpointTensor]:
        """Where it may be in a checkpoint whose names lack `prefix`, the most likely first."""
        yield CheckpointTensor(self.name.removeprefix(prefix), self.shape)
        if self.elsewhere is not None:
            yield replace(self.elsewhere, name=self.elsewhere.name.removeprefix(prefix))


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """One Megatron tensor of the whole model. `expert` counts through the model; None outside of experts.

    `is_buffer`: not trained by gradients and always float32 (the bias that chooses experts).
    """

    template: str
    sources: tuple[HFTensor, ...]
    layout: Layout
    expert: int | None = None
    num_experts: int = 0
    is_buffer: bool = False

    def name(self, ep_size: int = 1) -> str:
        """Its name in the modules of the ranks that hold it, with the layer number of the whole model."""
        if self.expert is None:
            return self.template
        return self.template.format(expert=self.expert % self.experts_per_rank(ep_size))

    def experts_per_rank(self, ep_size: int) -> int:
        """Number of experts on a rank. ValueError if they do not divide evenly."""
        if self.num_experts % ep_size:
            raise ValueError(f"{self.num_experts} experts cannot be shared by {ep_size} expert parallel ranks evenly")
        return self.num_experts // ep_size

    def ep_owner(self, ep_size: int) -> int | None:
        """The expert-parallel rank that holds it; None: all of them."""
        return None if self.expert is None else self.expert // self.experts_per_rank(ep_size)

    def rank_and_size(self, ranks: ParallelRanks) -> tuple[int, int]:
        """Rank and size in the tensor parallelism that splits it, which experts have their own of."""
        return (ranks.tp_rank, ranks.tp_size) if self.expert is None else (ranks.etp_rank, ranks.etp_size)

    def slices(self, rank: int, size: int) -> list[ShardSlice]:
        """The slices in shard `rank` of `size`. ValueError if the tensor does not divide evenly."""
        return self.layout.slices(self.shapes, rank, size)

    def shard_shape(self, size: int) -> Shape:
        """Shape of a shard. ValueError if the tensor does not divide evenly."""
        try:
            return self.layout.shard_shape(self.shapes, size)
        except ValueError as error:
            raise ValueError(f"{self.sources[0].name}: {error}") from None

    @property
    def shapes(self) -> list[Shape]:
        """Of `sources`."""
        return [source.shape for source in self.sources]

    def shard(self, sources: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Shard `rank` of `size`, copied from the whole Hugging Face tensors. Padding rows are zeros."""
        shard = sources[0].new_zeros(self.shard_shape(size))
        for part in self.slices(rank, size):
            source = sources[part.source].narrow(part.dim, part.start, part.length)
            shard.narrow(part.dim, part.at, part.length).copy_(source)
        return shard

    def unshard(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole Hugging Face tensors, contiguous, from the shards of all ranks."""
        whole = [shards[0].new_empty(shape) for shape in self.shapes]
        for rank, shard in enumerate(shards):
            for part in self.slices(rank, len(shards)):
                target = whole[part.source].narrow(part.dim, part.start, part.length)
                target.copy_(shard.narrow(part.dim, part.at, part.length))
        return whole


@dataclass(frozen=True)
class WeightMap:
    """Every Megatron tensor of a model, once, in the order of the model.

    `is_tied`: the output layer is the embedding; the last pipeline stage may hold a copy of it.
    """

    model_type: str
    entries: tuple[MappedTensor, ...]
    is_tied: bool
    extra: re.Pattern[str] = field(repr=False)  # other names that checkpoints may hold

    def on_rank(self, ranks: ParallelRanks) -> dict[str, MappedTensor]:
        """Megatron name -> tensor, over all pipeline stages, with the experts of `ranks` and a tied output layer."""
        named = {
            entry.name(ranks.ep_size): entry
            for entry in self.entries
            if entry.ep_owner(ranks.ep_size) in (None, ranks.ep_rank)
        }
        if self.is_tied:
            named[OUTPUT_LAYER] = named[EMBEDDING]
        return named

    def body(self) -> WeightMap:
        """Without output layer: what the checkpoints of a language model and its classifiers have in common."""
        entries = tuple(entry for entry in self.entries if entry.template != OUTPUT_LAYER)
        extra = re.compile(rf"{self.extra.pattern}|^lm_head\.weight$|^{re.escape(HEAD_WEIGHT)}$")
        return replace(self, entries=entries, is_tied=False, extra=extra)

    @cached_property
    def hf_tensors(self) -> tuple[HFTensor, ...]:
        """All Hugging Face tensors of the model."""
        return tuple(source for entry in self.entries for source in entry.sources)

    def locate(self, stored_names: Iterable[str]) -> dict[str, CheckpointTensor]:
        """Hugging Face name -> where a checkpoint with these tensors holds it.

        Raises:
            ValueError: the names that are missing, and those that have no mapping.
        """
        stored = set(stored_names)
        prefix = "" if any(name.startswith("model.") for name in stored) else "model."  # the base model saved alone
        located, missing = {}, []
        for tensor in self.hf_tensors:
            found = next((candidate for candidate in tensor.candidates(prefix) if candidate.name in stored), None)
            if found is None:
                missing.append(tensor.name)
            else:
                located[tensor.name] = found
        used = {found.name for found in located.values()}
        unknown = sorted(name for name in stored - used if not self.extra.search(name))
        if missing or unknown:
            raise ValueError(
                f"the checkpoint's tensors are not those of a {self.model_type} model of this config.json: "
                f"missing are {_some(missing)}; unknown are {_some(unknown)}"
            )
        return located


def weight_map(hf_config: Any, *, implementation: Implementation, grouped_experts: bool = False) -> WeightMap:
    """The mapping of a model with this configuration of transformers. `grouped_experts`: Megatron's moe_grouped_gemm.

    Raises:
        ValueError: the architecture, or a setting of it, has no mapping.
    """
    if grouped_experts and implementation == "local":
        raise ValueError(
            "policy.megatron_cfg.moe_grouped_gemm=true needs Transformer Engine, which is not in use; set it to false"
        )
    family = _FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ValueError(
            f"model_type {hf_config.model_type!r} has no mapping to Megatron Core; known are "
            f"{', '.join(sorted(_FAMILIES))}. Add one in models/policy/megatron/mapping.py "
            "(docs/adding-a-model.md), or train it with policy.dtensor_cfg"
        )
    family.refuse(hf_config)
    tables = _Tables(hf_config, family, fuses_norms=implementation == "transformer_engine", is_grouped=grouped_experts)
    extra = r"rotary_emb\.inv_freq$"
    if hf_config.tie_word_embeddings:
        extra += r"|^lm_head\.weight$"
    if hf_config.model_type == "deepseek_v3":  # layers for multi-token prediction follow the model's own
        first, count = hf_config.num_hidden_layers, hf_config.num_nextn_predict_layers or 0
        extra += rf"|^(model\.)?layers\.({'|'.join(map(str, range(first, first + count)))})\."
    return WeightMap(
        model_type=hf_config.model_type,
        entries=tuple(tables.all()),
        is_tied=hf_config.tie_word_embeddings,
        extra=re.compile(extra),
    )


def scalar_map(language: WeightMap, hidden_size: int) -> WeightMap:
    """The mapping of the reward or value model on top of a language model with mapping `language`."""
    score = _mapped(OUTPUT_LAYER, Replicated(), HFTensor(HEAD_WEIGHT, (1, hidden_size)))
    body = language.body()
    return replace(body, entries=(*body.entries, score))


def is_moe_layer(hf_config: Any, layer: int) -> bool:
    """Whether layer `layer` of the model has experts."""
    family = _FAMILIES[hf_config.model_type]
    return family.experts is not None and family.experts.in_layer(hf_config, layer)


def is_latent(hf_config: Any) -> bool:
    """Whether the model's attention is multi-head latent attention."""
    return _FAMILIES[hf_config.model_type].is_latent


def known_model_types() -> list[str]:
    """`model_type` of all architectures with a mapping, sorted."""
    return sorted(_FAMILIES)


@dataclass(frozen=True, kw_only=True)
class _Experts:
    """How an architecture names its experts, and which layers have them."""

    in_layer: Callable[[Any, int], bool]
    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    block: str = "mlp"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_choice_bias: bool = False
    has_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How an architecture differs from Llama. `plain`: settings that must be false or absent, `needs`: true."""

    qkv_bias: bool = False
    qk_norm: bool = False
    is_latent: bool = False
    experts: _Experts | None = None
    plain: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def refuse(self, hf_config: Any) -> None:
        for wanted, settings in ((False, self.plain), (True, self.needs)):
            for setting in settings:
                if bool(getattr(hf_config, setting)) is not wanted:
                    raise ValueError(
                        f"config.json: {setting}: {getattr(hf_config, setting)} of a {hf_config.model_type} model has "
                        f"no mapping to Megatron Core, which needs {wanted}; train it with policy.dtensor_cfg"
                    )


def _qwen_moe_layer(hf_config: Any, layer: int) -> bool:
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0


def _deepseek_moe_layer(hf_config: Any, layer: int) -> bool:
    return layer >= hf_config.first_k_dense_replace


_FAMILIES = {
    "llama": _Family(plain=("attention_bias", "mlp_bias")),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True, plain=("attention_bias",)),
    "qwen3_moe": _Family(qk_norm=True, plain=("attention_bias",), experts=_Experts(in_layer=_qwen_moe_layer)),
    "mixtral": _Family(
        experts=_Experts(
            in_layer=lambda hf_config, layer: True,
            count="num_local_experts",
            width="intermediate_size",
            block="block_sparse_moe",
            gate_up_down=("w1", "w3", "w2"),
        )
    ),
    "deepseek_v2": _Family(
        is_latent=True,
        plain=("attention_bias", "mlp_bias"),
        experts=_Experts(in_layer=_deepseek_moe_layer, count="n_routed_experts", has_shared=True),
    ),
    "deepseek_v3": _Family(
        is_latent=True,
        plain=("attention_bias",),
        needs=("rope_interleave",),
        experts=_Experts(in_layer=_deepseek_moe_layer, count="n_routed_experts", has_shared=True, has_choice_bias=True),
    ),
}


class _Tables:
    """The entries of one model."""

    def __init__(self, hf_config: Any, family: _Family, *, fuses_norms: bool, is_grouped: bool) -> None:
        self.config = hf_config
        self.family = family
        self.fuses_norms = fuses_norms
        self.is_grouped = is_grouped

    def all(self) -> Iterator[MappedTensor]:
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        yield _mapped(EMBEDDING, Vocabulary(), HFTensor("model.embed_tokens.weight", vocabulary))
        for layer in range(self.config.num_hidden_layers):
            yield from self.layer(layer)
        yield _mapped("decoder.final_layernorm.weight", Replicated(), self.norm("model.norm.weight"))
        if not self.config.tie_word_embeddings:
            yield _mapped(OUTPUT_LAYER, Vocabulary(), HFTensor("lm_head.weight", vocabulary))

    def norm(self, name: str, width: int | None = None) -> HFTensor:
        return HFTensor(name, (self.config.hidden_size if width is None else width,))

    def layer(self, layer: int) -> Iterator[MappedTensor]:
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        latent = self.family.is_latent
        norm = "self_attention.linear_qkv.layer_norm_weight" if self.fuses_norms else "input_layernorm.weight"
        norm = "input_layernorm.weight" if latent else norm  # two layers follow this norm: it is not fused
        yield _mapped(ours + norm, Replicated(), self.norm(theirs + "input_layernorm.weight"))
        attention = self.latent_attention if latent else self.attention
        yield from attention(ours + "self_attention.", theirs + "self_attn.")
        has_experts = is_moe_layer(self.config, layer)
        fused = self.fuses_norms and not has_experts
        norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
        yield _mapped(ours + norm, Replicated(), self.norm(theirs + "post_attention_layernorm.weight"))
        if has_experts:
            assert self.family.experts is not None
            yield from self.moe(ours + "mlp.", theirs, self.family.experts)
        else:
            yield from self.mlp(ours + "mlp.", theirs + "mlp.", self.config.intermediate_size)

    def attention(self, ours: str, theirs: str) -> Iterator[MappedTensor]:
        config = self.config
        heads, groups, head_dim = heads_of(config)
        layout = QueryGroups(heads, groups, head_dim)
        rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
        weights = [HFTensor(f"{theirs}{x}_proj.weight", (rows[x], config.hidden_size)) for x in "qkv"]
        yield _mapped(ours + "linear_qkv.weight", layout, *weights)
        if self.family.qkv_bias:
            biases = [HFTensor(f"{theirs}{x}_proj.bias", (rows[x],)) for x in "qkv"]
            yield _mapped(ours + "linear_qkv.bias", layout, *biases)
        if self.family.qk_norm:
            for x in "qk":
                norm = self.norm(f"{theirs}{x}_norm.weight", head_dim)
                yield _mapped(f"{ours}{x}_layernorm.weight", Replicated(), norm)
        output = HFTensor(theirs + "o_proj.weight", (config.hidden_size, rows["q"]))
        yield _mapped(ours + "linear_proj.weight", Row(), output)

    def latent_attention(self, ours: str, theirs: str) -> Iterator[MappedTensor]:
        """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

        Both sides rotate adjacent features of the rotary part, so rows keep their order.
        """
        config = self.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        down = Replicated() if self.fuses_norms else Column()  # Transformer Engine has no parallel layer for it
        norm = "linear_{}_up_proj.layer_norm_weight" if self.fuses_norms else "{}_layernorm.weight"
        if config.q_lora_rank is None:
            query = HFTensor(theirs + "q_proj.weight", (queries, hidden))
            yield _mapped(ours + "linear_q_proj.weight", Column(), query)
        else:
            rank = config.q_lora_rank
            compress = HFTensor(theirs + "q_a_proj.weight", (rank, hidden))
            yield _mapped(ours + "linear_q_down_proj.weight", down, compress)
            yield _mapped(ours + norm.format("q"), Replicated(), self.norm(theirs + "q_a_layernorm.weight", rank))
            expand = HFTensor(theirs + "q_b_proj.weight", (queries, rank))
            yield _mapped(ours + "linear_q_up_proj.weight", Column(), expand)
        rank, values = config.kv_lora_rank, heads * config.v_head_dim
        compress = HFTensor(theirs + "kv_a_proj_with_mqa.weight", (rank + config.qk_rope_head_dim, hidden))
        yield _mapped(ours + "linear_kv_down_proj.weight", down, compress)
        yield _mapped(ours + norm.format("kv"), Replicated(), self.norm(theirs + "kv_a_layernorm.weight", rank))
        expand = HFTensor(theirs + "kv_b_proj.weight", (heads * config.qk_nope_head_dim + values, rank))
        yield _mapped(ours + "linear_kv_up_proj.weight", Column(), expand)
        yield _mapped(ours + "linear_proj.weight", Row(), HFTensor(theirs + "o_proj.weight", (hidden, values)))

    def mlp(self, ours: str, theirs: str, width: int) -> Iterator[MappedTensor]:
        hidden = self.config.hidden_size
        gate_up = [HFTensor(f"{theirs}{x}_proj.weight", (width, hidden)) for x in ("gate", "up")]
        yield _mapped(ours + "linear_fc1.weight", Column(), *gate_up)
        yield _mapped(ours + "linear_fc2.weight", Row(), HFTensor(theirs + "down_proj.weight", (hidden, width)))

    def moe(self, ours: str, layer: str, names: _Experts) -> Iterator[MappedTensor]:
        config = self.config
        count, width = getattr(config, names.count), getattr(config, names.width)
        theirs, fused = f"{layer}{names.block}.", f"{layer}mlp."
        shape = (count, config.hidden_size)
        router = HFTensor(theirs + "gate.weight", shape, CheckpointTensor(fused + "gate.weight", shape))
        yield _mapped(ours + "router.weight", Replicated(), router)
        if names.has_choice_bias:
            bias = HFTensor(theirs + "gate.e_score_correction_bias", (count,))
            yield MappedTensor(
                template=ours + "router.expert_bias", sources=(bias,), layout=Replicated(), is_buffer=True
            )
        for expert in range(count):
            yield from self.expert(ours + "experts.", f"{theirs}experts.{expert}.", fused + "experts.", expert, names)
        if names.has_shared and config.n_shared_experts:
            shared = width * config.n_shared_experts
            yield from self.mlp(ours + "shared_experts.", theirs + "shared_experts.", shared)

    def expert(self, ours: str, theirs: str, fused: str, expert: int, names: _Experts) -> Iterator[MappedTensor]:
        hidden = self.config.hidden_size
        count, width = getattr(self.config, names.count), getattr(self.config, names.width)
        gate, up, down = (f"{theirs}{part}.weight" for part in names.gate_up_down)
        template = "linear_fc{}.weight{{expert}}" if self.is_grouped else "local_experts.{{expert}}.linear_fc{}.weight"
        both = CheckpointTensor(fused + "gate_up_proj", (count, 2 * width, hidden), expert)
        shape = (width, hidden)
        first = (HFTensor(gate, shape, both), HFTensor(up, shape, replace(both, first_row=width)))
        second = (
            HFTensor(down, (hidden, width), CheckpointTensor(fused + "down_proj", (count, hidden, width), expert)),
        )
        for number, layout, sources in ((1, Column(), first), (2, Row(), second)):
            yield MappedTensor(
                template=ours + template.format(number),
                sources=sources,
                layout=layout,
                expert=expert,
                num_experts=count,
            )


def heads_of(hf_config: Any) -> tuple[int, int, int]:
    """(query heads, query groups, which share a key and a value head, features per head)."""
    heads = hf_config.num_attention_heads
    head_dim = hf_config.head_dim if hasattr(hf_config, "head_dim") else None
    return heads, hf_config.num_key_value_heads, head_dim or hf_config.hidden_size // heads


def _mapped(name: str, layout: Layout, *sources: HFTensor) -> MappedTensor:
    return MappedTensor(template=name, sources=sources, layout=layout)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"


# -- how ranks share a Megatron tensor
#
#     linear_fc1.weight of rank 1 of 2  =  rows I/2..I of gate_proj.weight, then rows I/2..I of up_proj.weight
#
# A layout lists such slices. `MappedTensor.shard` copies them one way and `unshard` the other way, so each undoes the
# other to the bit.


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
        """What rank `rank` holds, in the order of its shard."""

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        """Shape of every rank's shard. ValueError if the tensor does not divide evenly."""
        whole = sum(shape[self.dim] for shape in shapes)
        return _with_dim(shapes[0], self.dim, _even_share(whole, size))


class Replicated(Layout):
    """Every rank holds the whole of one tensor."""

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        return [ShardSlice(0, 0, 0, shapes[0][0], 0)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return shapes[0]


class Column(Layout):
    """A column-parallel linear layer: ranks share its output features, which are rows of the weight.

    With several tensors (the gate and up projections of an MLP) a rank holds its rows of the first, then of the next.
    """

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        slices, at = [], 0
        for source, shape in enumerate(shapes):
            rows = _even_share(shape[0], size)
            slices.append(ShardSlice(source, 0, rank * rows, (rank + 1) * rows, at))
            at += rows
        return slices


class Row(Layout):
    """A row-parallel linear layer: ranks share its input features, which are columns of the weight."""

    dim = 1

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        columns = _even_share(shapes[0][1], size)
        return [ShardSlice(0, 1, rank * columns, (rank + 1) * columns, 0)]


class Vocabulary(Layout):
    """Ranks share rows, one per token, after padding with zeros to a multiple of the ranks (`padded_vocabulary`)."""

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        vocabulary = shapes[0][0]
        rows = padded_vocabulary(vocabulary, size) // size
        return [ShardSlice(0, 0, rank * rows, min((rank + 1) * rows, vocabulary), 0)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return _with_dim(shapes[0], 0, padded_vocabulary(shapes[0][0], size) // size)


@dataclass(frozen=True)
class QueryGroups(Layout):
    """Query, key and value projections in Megatron's order: per group its query heads, its key head, its value head.

    The rows of a rank are a range of that order even with more ranks than groups (Megatron then gathers the
    projections).
    """

    heads: int
    groups: int
    head_dim: int

    def slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[ShardSlice]:
        rows = self.shard_shape(shapes, size)[0]
        first, last = rank * rows, (rank + 1) * rows
        slices, offset = [], 0
        queries = self.heads // self.groups * self.head_dim
        for group, (source, length) in product(range(self.groups), enumerate((queries, self.head_dim, self.head_dim))):
            low, high = max(first, offset), min(last, offset + length)
            if low < high:
                start = group * length - offset
                slices.append(ShardSlice(source, 0, start + low, start + high, low - first))
            offset += length
        return slices


def padded_vocabulary(vocabulary: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that holds `vocabulary` tokens.

    Raises:
        ValueError: all rows of the last rank would be padding, which only happens below `tp_size` squared tokens.
    """
    rows = -(-vocabulary // tp_size)
    if rows * (tp_size - 1) >= vocabulary:
        raise ValueError(
            f"a vocabulary of {vocabulary} tokens leaves the last of {tp_size} tensor-parallel ranks none; lower "
            "policy.megatron_cfg.tensor_model_parallel_size"
        )
    return rows * tp_size


def _even_share(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} rows or columns cannot be shared by {size} ranks evenly")
    return length // size


def _with_dim(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])
