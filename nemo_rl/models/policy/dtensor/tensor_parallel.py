"""Tensor parallelism: the matrices of every layer, the embeddings and the head are split over neighboring ranks.

    tokens -> embeddings (rows of the vocabulary) -> blocks -> final norm -> hidden states, whole on every rank
                                                                               -> head (its rows are the vocabulary)

All ranks of the axis see the same tokens and end with the same hidden states; the gradient that comes back must be
complete on each of them. Column- and row-parallel matrices: Shoeybi et al. 2019, arXiv 1909.08053. Sequence
parallelism: Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.rules import divisors, remedy
from nemo_rl.models.policy.attention import STATEFUL
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.head.scalar import is_scalar, output_module
from nemo_rl.models.policy.pretrained import build_on_meta, decoder_layers
from nemo_rl.models.policy.vision.families import language_modules
from nemo_rl.models.policy.weight_loading import local_part
from nemo_rl.utils.registry import import_object

SEQUENCE = Shard(1)
"""Layout of hidden states [R, W, H] between the regions of sequence parallelism."""

Plan = dict[str, ParallelStyle]
"""Name of a module -> its style."""


def check_tensor_parallel(config: PretrainedConfig, settings: DTensorConfig) -> None:
    """Check that a model of `config` can be split as `settings` say. Loads no weights; needs no process group.

    Raises:
        ValueError: the ranks do not divide heads or matrices (says what would work); no plan is known for the
            architecture (says how to write one); the user's plan cannot be imported or is no plan.
    """
    size = settings.tensor_parallel_size
    if size == 1:
        return
    hf = build_on_meta(config, torch.bfloat16)
    config = hf.config.get_text_config()
    sizes = config.to_dict()
    heads = (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key/value heads"))
    asked = {f"{sizes[key]} {what}": sizes[key] for key, what in heads if sizes.get(key)}
    for name, style in styles(hf, settings).items():
        module = hf.get_submodule(name)
        if isinstance(module, nn.Linear) and module is not hf.get_output_embeddings():
            if isinstance(style, Colwise):
                asked[f"{module.out_features} output features of {name}"] = module.out_features
            elif isinstance(style, Rowwise):
                asked[f"{module.in_features} input features of {name}"] = module.in_features
    failing = [what for what, count in asked.items() if count % size]
    if failing:
        works = divisors(size, *asked.values())
        if settings.sequence_parallel:
            works = works.removeprefix("1").removeprefix(", ")  # one rank has nothing to split by position
        raise ValueError(
            f"{settings.key('tensor_parallel_size')}={size} does not divide the {failing[0]} of the "
            f"{config.model_type!r} model; {f'these would: {works}' if works else _uncut(settings)}"
        )


def apply_tensor_parallel(hf: PreTrainedModel, mesh: DeviceMesh, settings: DTensorConfig) -> None:
    """Split `hf`, on the meta device, over the 1-D `mesh`, in place.

    Afterwards its parameters are DTensors (except in experts and routers) under unchanged names, and
    `hf.base_model(...)` returns plain hidden states [R, W, H], equal on every rank. The head must not be called: its
    weight is Shard(0), split by vocabulary. With sequence parallelism, W must be a multiple of the ranks, and a
    pipeline stage without embeddings takes, one without final norm returns, this rank's positions only:
    [R, W / size, H]. `check_tensor_parallel` says what cannot be split.
    """
    embeddings, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = embeddings is not None and head is not None and head.weight is embeddings.weight
    parallelize_module(hf, mesh, dict(styles(hf, settings)), src_data_rank=None)
    if is_tied:  # each module got a DTensor of its own
        assert embeddings is not None and head is not None
        head.weight = embeddings.weight


# -- Styles: how one module is split.
#
# Modules exchange plain local tensors, with one exception: `Region` passes hidden states to its module as a replicated
# DTensor, so that the gradients of all projections that read them are reduced once, not one by one. Parameters become
# DTensors with the same name, shape and `requires_grad`; buffers do not change.


def place_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Turn the module's own parameters into DTensors. Nothing is sent: every rank cuts its part from its copy."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        assert name in placements, f"{type(module).__name__}.{name} has no placement in tensor parallelism"
        placed = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [layout], run_check=False)


def _relayout(tensor: torch.Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> torch.Tensor:
    """A DTensor, or a local tensor in the layout `now`, as a local tensor in another; its gradient comes back so."""
    return _as_dtensor(tensor, mesh, now).redistribute(placements=[then]).to_local()


class _Style(ParallelStyle):
    """Hooks around a module. Subclasses define what happens to its parameters, first input and output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if args:
                return (self.read(module, args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self.read(module, kwargs["hidden_states"], device_mesh)}

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):  # a layer with experts may return what its router chose too
                return self.write(module, output[0], device_mesh), *output[1:]
            return self.write(module, output, device_mesh)

        self.place(module, device_mesh)
        module.register_forward_pre_hook(before, with_kwargs=True)
        if type(self).write is not _Style.write:
            module.register_forward_hook(after)
        return module

    placements: ClassVar[Mapping[str, Placement]] = {}
    """The placements of the module's own parameters, by name."""

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Split the parameters."""
        if self.placements:
            place_parameters(module, mesh, self.placements)

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The first argument, or the keyword `hidden_states`, as the module gets it."""
        return tensor

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The output as the caller gets it."""
        return output


class Colwise(_Style):
    """A linear layer split by output features. Replicated input [..., in] -> local [..., out / size].

    With `gather_output` the output is replicated [..., out]. An adapter (`lora_A` [r, in], `lora_B` [out, r]) is split
    alike.
    """

    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}

    def __init__(self, *, gather_output: bool = False) -> None:
        self.gather_output = gather_output

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, Replicate())

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(output, mesh, Shard(-1), Replicate() if self.gather_output else Shard(-1))


class FusedColwise(Colwise):
    """Several column-parallel matrices stored as one, `blocks` output features each, one block after the other.

    The weight is split as it is stored, in consecutive rows, so that checkpoints see one ordinary tensor. An all-to-all
    of the outputs then gives each rank its share of every block: [..., out / size], block after block.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.blocks = tuple(blocks)

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        local = super().write(module, output, mesh)
        size, rank = mesh.size(), mesh.get_local_rank()
        features = local.movedim(-1, 0)  # all-to-all splits dimension 0
        parts = [list(_overlaps(self.blocks, size, rank, to)) for to in range(size)]
        sent = [torch.cat([features[part] for part in own] or [features[:0]]) for own in parts]
        received_sizes = [
            sum(part.stop - part.start for part in _overlaps(self.blocks, size, source, rank)) for source in range(size)
        ]
        sent_sizes = [len(part) for part in sent]
        received = funcol.all_to_all_single_autograd(torch.cat(sent), received_sizes, sent_sizes, mesh.get_group())
        return received.movedim(0, -1).contiguous()


def _overlaps(blocks: Sequence[int], size: int, owner: int, wanted_by: int) -> Iterator[slice]:
    """Slices of the consecutive features of rank `owner` that belong to the share of rank `wanted_by` in each block."""
    share = sum(blocks) // size
    begin = 0
    for block in blocks:
        first = max(begin + wanted_by * block // size, owner * share)
        last = min(begin + (wanted_by + 1) * block // size, (owner + 1) * share)
        if first < last:
            yield slice(first - owner * share, last - owner * share)
        begin += block


class Rowwise(_Style):
    """A linear layer split by input features. Local [..., in / size] -> [..., out] in layout `output`.

    Each rank computes a summand of the output. With `is_split=False` the input is replicated [..., in], and each rank
    takes its share.
    """

    placements: ClassVar = {"weight": Shard(1), "bias": Replicate(), "lora_A": Shard(1), "lora_B": Replicate()}

    def __init__(self, *, output: Placement, is_split: bool = True) -> None:
        self.output = output
        self.input = Shard(-1) if is_split else Replicate()

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.input).redistribute(placements=[Shard(-1)])

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(output, mesh, Partial(), self.output)


class Replicated(_Style):
    """A module whose parameters are whole on every rank, while its input and output have `layout`.

    If ranks see different positions or heads, each has a part of the gradient of its parameters; DTensor sums them.
    `gather_output` returns the whole output on every rank.
    """

    def __init__(self, layout: Placement, *, gather_output: bool = False) -> None:
        self.layout = layout
        self.gather_output = gather_output

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        place_parameters(module, mesh, {name: Replicate() for name, _ in module.named_parameters(recurse=False)})

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.layout)

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(output, mesh, self.layout, Replicate()) if self.gather_output else local_part(output)


class LatentKvA(Replicated):
    """`kv_a_proj`, the down-projection of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), whole.

    The last `rope_features` outputs are one key that all heads share. Each rank's heads contribute a part of its
    gradient, which must be summed here. The latent goes on through a column-parallel matrix, which sums its gradient.
    """

    def __init__(self, rope_features: int) -> None:
        super().__init__(Replicate())
        self.rope_features = rope_features

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        local = super().write(module, output, mesh)
        latent, key = local.split([local.shape[-1] - self.rope_features, self.rope_features], dim=-1)
        key = _as_dtensor(key, mesh, Replicate()).to_local(grad_placements=[Partial()])
        return torch.cat([latent, key], dim=-1)


class Region(_Style):
    """An attention or MLP whose matrices are split: it gets the hidden states whole, as a DTensor.

    Args:
        hidden: layout in which the hidden states arrive.
        fused_heads: the module computes head boundaries in a fused projection from its head counts, which are divided.
    """

    def __init__(self, hidden: Placement, *, fused_heads: bool = False) -> None:
        self.hidden = hidden
        self.fused_heads = fused_heads

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        place_parameters(module, mesh, dict.fromkeys(_OF_HEADS, Shard(0)))
        if not self.fused_heads:
            return
        attention = cast(Any, module)
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads //= mesh.size()
        attention.num_key_value_heads //= mesh.size()

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.hidden).redistribute(placements=[Replicate()])


class WholeSequence(_Style):
    """A module that does not support sequence parallelism: it gets all positions, and each rank keeps its own.

    It may return them as [R * W, H].
    """

    shape: torch.Size

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        whole = _relayout(tensor, mesh, SEQUENCE, Replicate())
        self.shape = whole.shape
        return whole

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(output.view(self.shape), mesh, Replicate(), SEQUENCE)


class SplitSequence(_Style):
    """The first transformer block: each rank keeps W / size positions of whole hidden states [R, W, H]."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert tensor.shape[1] % mesh.size() == 0, f"{tensor.shape[1]} positions on {mesh.size()} ranks"
        return _relayout(tensor, mesh, Replicate(), SEQUENCE)


class VocabularyParallelEmbedding(_Style):
    """Each rank holds some rows of the embedding and looks up the tokens it has: int64 [R, W] -> replicated [R, W, H].

    DTensor's own embedding is not used, because its gradient is whole on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        whole = module.weight.shape
        place_parameters(module, device_mesh, {"weight": Shard(0)})
        (rows, _), (first, _) = compute_local_shape_and_global_offset(whole, device_mesh, [Shard(0)])
        assert rows > 0, f"{whole[0]} embeddings on {device_mesh.size()} ranks"
        padding, forward = module.padding_idx, module.forward
        if padding is not None:
            module.padding_idx = padding - first if first <= padding < first + rows else None

        def lookup(input_ids: torch.Tensor) -> torch.Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            ids = input_ids - first
            is_elsewhere = (ids < 0) | (ids >= rows)
            # The family's own forward may scale the result, so it runs, on the local rows.
            module._parameters["weight"] = cast(nn.Parameter, weight.to_local())
            try:
                found = forward(ids.masked_fill(is_elsewhere, 0))
            finally:
                module._parameters["weight"] = cast(nn.Parameter, weight)
            # Exactly one rank has each token, so the sum over ranks is the lookup.
            return _relayout(found.masked_fill(is_elsewhere[..., None], 0), device_mesh, Partial(), Replicate())

        cast(Any, module).forward = lookup
        return module


# -- Plans: which style each module gets, from transformers' plan for the architecture or from the user's.
#
# A plan names what happens to the matrices of attention and MLP, `{"model.layers.*.mlp.up_proj": "colwise"}`. The rest
# follows from the place of a module in the model:
#
#     embeddings    split by rows of the vocabulary
#     blocks        norms and other modules between the regions: whole parameters
#       layers with a state from token to token: unchanged
#       regions     attention and MLPs that the plan names: input whole, output reduced by their row-parallel matrix
#       experts     unchanged, routers too
#     final norm    whole parameters, whole output
#     vision tower  unchanged: whole parameters
#     head          split by vocabulary, logits never gathered; a head with one output is whole
#
# With sequence parallelism hidden states are split by position from the first block to the final norm, outside regions.

HOW_TO_WRITE = (
    "write one and set {}=my_package.plans:plan. `plan` is a dict, or a function of the model that returns "
    'one, from names of modules, layer numbers as *, to words: {{"model.layers.*.self_attn.q_proj": "colwise", '
    '"model.layers.*.self_attn.o_proj": "rowwise", ...}}, or to torch.distributed.tensor.parallel.ParallelStyle objects'
)


def _words(prefix: str, **names: str) -> dict[str, str]:
    """Part of a plan, given the ends of the names for each word."""
    return {prefix + name: word for word, ends in names.items() for name in ends.split()}


# Added to transformers' own plans, which leave attention whole where heads are fused or compressed.
_LAYER = "model.layers.*."
_ATTENTION = f"{_LAYER}self_attn."
_WHOLE = "whole"  # takes a module out of transformers' plan
_OWN_WORDS: dict[str, dict[str, str]] = {
    "phi3": _words(
        _LAYER,
        fused_qkv="self_attn.qkv_proj",
        fused_gate_up="mlp.gate_up_proj",
        rowwise="self_attn.o_proj mlp.down_proj",
    ),
    "phi": _words(_ATTENTION, replicated_with_grad_allreduce="q_layernorm k_layernorm"),
    "deepseek_v3": _words(
        _ATTENTION,
        colwise="q_proj q_b_proj kv_b_proj",
        replicated="q_a_proj q_a_layernorm kv_a_layernorm",
        mla_kv_a_proj="kv_a_proj_with_mqa",
        rowwise="o_proj",
    ),
    "glm4_moe": _words(_ATTENTION, replicated_with_grad_allreduce="q_norm k_norm"),
    "gpt_oss": _words(_ATTENTION, colwise="q_proj k_proj v_proj", rowwise="o_proj"),
    # The layer adds to the output of its shared expert in place.
    "llama4_text": _words(f"{_LAYER}feed_forward.shared_expert.", whole="gate_proj up_proj down_proj"),
    "qwen3_vl_text": _words(
        "model.language_model.layers.*.",
        colwise="self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
        rowwise="self_attn.o_proj mlp.down_proj",
        replicated_with_grad_allreduce="self_attn.q_norm self_attn.k_norm",
    ),
    "nemotron_h": _words(
        f"{_LAYER}mixer.",
        colwise="q_proj k_proj v_proj up_proj shared_experts.up_proj",
        rowwise="o_proj down_proj shared_experts.down_proj",
    ),
}
_OF_HEADS = {"sinks"}
"""Parameters of attention itself that have one number for each head."""

_ROWWISE = {"rowwise", "rowwise_split_input"}
_MATRICES = {"colwise", "colwise_gather_output", "fused_qkv", "fused_gate_up", "mla_kv_a_proj"} | _ROWWISE
# A region with these words only holds whole activations throughout, so any other module in it is simply replicated.
_WHOLE_ACTIVATIONS = {"colwise_gather_output", "rowwise_split_input", "replicated"}
WORDS = _MATRICES | {"replicated", "replicated_with_grad_allreduce"}


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern part by part: `*` does not match dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def user_plan(hf: PreTrainedModel, path: str, key: str) -> Mapping[str, str] | Mapping[str, ParallelStyle]:
    """The user's plan for `hf`, all words or all styles; `path`, the value of `key`, is `package.module:name`.

    Raises:
        ValueError: it cannot be imported, is no plan, mixes the two, or names modules that do not exist.
    """
    try:
        found: Any = import_object(path, key)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{error}; it must be importable where the job is started and on every node") from error
    plan: Any = found(hf) if callable(found) else found
    is_mapping = isinstance(plan, Mapping) and bool(plan) and all(isinstance(name, str) for name in plan)
    kinds = (str, ParallelStyle)
    if not is_mapping or not any(all(isinstance(value, kind) for value in plan.values()) for kind in kinds):
        raise ValueError(
            f"{key}={path!r} is no plan but {plan!r:.200}; a plan is a dict that is not empty, or a function of "
            'the model that returns one, from names of modules ("model.layers.*.mlp.up_proj") either all to words '
            f"({', '.join(sorted(WORDS))}) or all to ParallelStyle objects"
        )
    names = [name for name, _ in hf.named_modules()]
    unmatched = [pattern for pattern in plan if not any(matches(name, pattern) for name in names)]
    if unmatched:
        raise ValueError(
            f"{key}={path!r}: {type(hf).__name__} has no modules {', '.join(unmatched)}; names come from "
            f"model.named_modules(), for example {names[-1]}"
        )
    return plan


def _by_position(settings: DTensorConfig) -> str:
    return remedy(f"{settings.key('sequence_parallel')}=false")


def _uncut(settings: DTensorConfig) -> str:
    """The remedy for a model that ranks cannot share, and which then has nothing to split by position either."""
    by_position = [f"{settings.key('sequence_parallel')}=false"] * settings.sequence_parallel
    return remedy(" and ".join([*by_position, f"{settings.key('tensor_parallel_size')}=1"]))


def styles(hf: PreTrainedModel, settings: DTensorConfig) -> Plan:
    """The style of every module that needs one. `hf` may be a pipeline stage, which lacks some of its modules.

    Raises:
        ValueError: no plan is known for this architecture or for one of its modules, or the user's is invalid.
    """
    path, key = settings.custom_parallel_plan, settings.key("custom_parallel_plan")
    if path is None:
        plan = dict(hf.tp_plan) | _OWN_WORDS.get(hf.config.get_text_config().model_type, {})
        if not any(word in _MATRICES for pattern, word in plan.items() if "*" in pattern):
            raise ValueError(
                f"{settings.key('tensor_parallel_size')}: no tensor-parallel plan is known for {type(hf).__name__}; "
                f"{HOW_TO_WRITE.format(key)}. Or {_uncut(settings)}"
            )
    else:
        plan = user_plan(hf, path, key)
    if words := {pattern: value for pattern, value in plan.items() if isinstance(value, str) and value != _WHOLE}:
        return _Planner(hf, words, settings).plan()
    if settings.sequence_parallel:
        raise ValueError(
            f"{key}={path!r} gives ParallelStyle objects, which must split the hidden states themselves; "
            f"{_by_position(settings)}, or write the plan in words "
            f"({', '.join(sorted(WORDS))}), which work with both"
        )
    given: Plan = {}
    for name, module in hf.named_modules():
        if module is hf.get_input_embeddings():
            given[name] = VocabularyParallelEmbedding()
        elif module is output_module(hf):
            given[name] = _head_style(hf)
        for pattern, style in plan.items():
            if matches(name, pattern):
                given[name] = cast(ParallelStyle, style)
    return given


def _head_style(hf: PreTrainedModel) -> ParallelStyle:
    return Replicated(Replicate()) if is_scalar(hf.config) else Colwise()


class _Planner:
    """Turns words into styles for one model."""

    def __init__(self, hf: PreTrainedModel, words: Mapping[str, str], settings: DTensorConfig) -> None:
        self.hf = hf
        self.settings = settings
        self.config = hf.config.get_text_config()
        # A tower and its projector, small beside the language model, are whole on every rank.
        self.modules = language_modules(hf, hf.config)
        self.ends = [hf.get_input_embeddings(), output_module(hf)]
        layers = {id(layer) for layer in decoder_layers(hf)}
        self.layers = [name for name, module in self.modules.items() if id(module) in layers]
        # Blocks with experts. Expert parallelism splits experts and routers; the plan may name modules beside them.
        self.moe_blocks = [name for name, module in self.modules.items() if "experts" in dict(module.named_children())]
        # Layers with a state from token to token: every rank computes them whole.
        self.stateful = [name for name, module in self.modules.items() if type(module).__name__ in STATEFUL]
        self.hidden = SEQUENCE if settings.sequence_parallel else Replicate()
        unchanged = [*(f"{block}.experts" for block in self.moe_blocks), *self.stateful]
        self.words = {
            name: word
            for name, module in self.modules.items()
            for pattern, word in words.items()
            if matches(name, pattern)
            and not self._is_in(f"{name}.", unchanged)
            and all(module is not end for end in self.ends)
        }
        # Name of an attention or MLP -> words of its modules.
        self.regions: dict[str, set[str]] = {
            name.rpartition(".")[0]: set() for name, word in self.words.items() if word in _MATRICES
        }
        for name, word in self.words.items():
            region = self._region(name)
            if region is not None:
                self.regions[region].add(word)

    def _region(self, name: str) -> str | None:
        """The innermost region that holds module `name`."""
        inside = [region for region in self.regions if self._is_in(f"{name}.", [region])]
        return max(inside, key=len, default=None)

    def _output(self, name: str) -> Placement:
        """Layout of the hidden states at a region. A block with experts gets and returns whole sequences."""
        return Replicate() if self._is_in(name, self.moe_blocks) else self.hidden

    @staticmethod
    def _is_in(name: str, blocks: list[str]) -> bool:
        return any(name.startswith(f"{block}.") for block in blocks)

    def plan(self) -> Plan:
        plan: Plan = {}
        for name, module in self.modules.items():
            if module is self.ends[0]:
                plan[name] = VocabularyParallelEmbedding()
            elif module is self.ends[1]:
                plan[name] = _head_style(self.hf)
            elif name in self.regions:
                plan[name] = self._region_style(name)
            elif name in self.words:
                plan[name] = self._style(name)
            elif name in self.moe_blocks + self.stateful and self.hidden is SEQUENCE:
                plan[name] = WholeSequence()
            elif next(module.parameters(recurse=False), None) is not None:
                plan |= self._unnamed(name)
        if self.hidden is SEQUENCE:
            self._check_final_norm(plan)
            if self.ends[0] is not None and self.layers:  # later pipeline stages receive split hidden states
                plan[self.layers[0]] = SplitSequence()
        return plan

    def _region_style(self, name: str) -> ParallelStyle:
        words = self.regions[name]
        own = {parameter for parameter, _ in self.modules[name].named_parameters(recurse=False)}
        if name in self.layers or not own <= _OF_HEADS:
            self._refuse(name)
        if self.hidden is SEQUENCE and not words & _ROWWISE:
            raise ValueError(
                f"{self.settings.key('sequence_parallel')}=true: the plan of {type(self.hf).__name__} has no "
                f"row-parallel module in {name}, whose output could be split by position; {_by_position(self.settings)}"
            )
        return Region(self._output(name), fused_heads="fused_qkv" in words)

    def _style(self, name: str) -> ParallelStyle:
        word, module = self.words[name], self.modules[name]
        if word not in WORDS or (word in _MATRICES and not isinstance(module, nn.Linear)):
            self._refuse(name)
        if word == "replicated":
            return Replicated(Replicate())
        if word == "replicated_with_grad_allreduce":
            return Replicated(Shard(2))  # heads or positions, whichever dimension 2 is: a norm treats them alike
        assert isinstance(module, nn.Linear)
        if word in _ROWWISE:
            return Rowwise(output=self._output(name), is_split=word == "rowwise")
        if word == "mla_kv_a_proj":
            return LatentKvA(self.config.qk_rope_head_dim)
        if word == "fused_gate_up":
            return FusedColwise([module.out_features // 2] * 2)
        if word == "fused_qkv":
            heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
            head = module.out_features // (heads + 2 * kv_heads)
            return FusedColwise([heads * head, kv_heads * head, kv_heads * head])
        return Colwise(gather_output=word == "colwise_gather_output")

    def _unnamed(self, name: str) -> Plan:
        """The style of a module with parameters that the plan does not name; none for experts and routers."""
        region = self._region(name)
        if region is not None:
            if not self.regions[region] <= _WHOLE_ACTIVATIONS:
                self._refuse(name)
            return {name: Replicated(Replicate())}
        if self._is_in(name, self.moe_blocks) or self._is_in(f"{name}.", self.stateful):
            return {}
        if name in self.layers:
            self._refuse(name)
        is_final_norm = not self._is_in(name, self.layers) and self.hidden is SEQUENCE
        return {name: Replicated(self.hidden, gather_output=is_final_norm)}

    def _check_final_norm(self, plan: Plan) -> None:
        joined = [name for name, style in plan.items() if isinstance(style, Replicated) and style.gather_output]
        if len(joined) > 1 or (not joined and self.ends[1] is not None):
            raise ValueError(
                f"{self.settings.key('sequence_parallel')}=true: {type(self.hf).__name__} has not one final norm with "
                f"weights after its blocks, where positions are joined, but {', '.join(joined) or 'none'}; "
                f"{_by_position(self.settings)}"
            )

    def _refuse(self, name: str) -> None:
        module = self.modules[name]
        said = f"its plan says {self.words[name]!r}" if name in self.words else "its plan does not name it"
        raise ValueError(
            f"{self.settings.key('tensor_parallel_size')}: how to cut {name} ({type(module).__name__}) of "
            f"{type(self.hf).__name__} is not known: {said}. Give a plan of your own: "
            f"{HOW_TO_WRITE.format(self.settings.key('custom_parallel_plan'))}. Known words: "
            f"{', '.join(sorted(WORDS))}. Or {_uncut(self.settings)}"
        )
