"""Tensor parallelism: the matrices of every layer, the embeddings and the head shared out over neighbouring ranks.

    tokens -> embeddings (rows of the vocabulary) -> blocks -> final norm -> hidden states, whole on every rank
                                                                               -> head (its rows are the vocabulary)

All ranks of the axis see the same tokens and end with the same hidden states; the gradient that comes back must be
complete on each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.rules import divisors
from nemo_rl.models.policy.head.scalar import is_scalar, output_module
from nemo_rl.models.policy.pretrained import build_on_meta, decoder_layers
from nemo_rl.utils.registry import import_object

SEQUENCE = Shard(1)
"""Layout of hidden states [R, W, H] between the regions of sequence parallelism."""


def place_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Turn the module's own parameters into DTensors. Nothing is sent: every rank cuts its part out of what it has."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        assert name in placements, f"{type(module).__name__}.{name} has no place in tensor parallelism"
        placed = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [layout], run_check=False)


def _relayout(tensor: torch.Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> torch.Tensor:
    """A local tensor in another layout; its gradient comes back in the first."""
    return _as_dtensor(tensor, mesh, now).redistribute(placements=[then]).to_local()


class _Style(ParallelStyle):
    """Hooks around a module; subclasses say what becomes of its parameters, first input and output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if args:
                return (self.read(module, args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self.read(module, kwargs["hidden_states"], device_mesh)}

        def after(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return self.write(module, output, device_mesh)

        self.place(module, device_mesh)
        module.register_forward_pre_hook(before, with_kwargs=True)
        if type(self).write is not _Style.write:
            module.register_forward_hook(after)
        return module

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Cut the parameters."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The first argument, or the keyword `hidden_states`, as the module is to see it."""
        return tensor

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The output as the caller is to see it."""
        return output


class Colwise(_Style):
    """A linear layer whose output features are shared out. Replicated input [..., in] -> local [..., out / size].

    With `gathered` the output is replicated [..., out]. An adapter (`lora_A` [r, in], `lora_B` [out, r]) is cut alike.
    """

    def __init__(self, *, gathered: bool = False) -> None:
        self.gathered = gathered

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        placements = {"weight": Shard(0), "bias": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}
        place_parameters(module, mesh, placements)

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, Replicate())

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert isinstance(output, DTensor)
        return output.redistribute(placements=[Replicate() if self.gathered else Shard(-1)]).to_local()


class FusedColwise(Colwise):
    """Several column-parallel matrices stored as one, `blocks` output features each, one block after the other.

    The weight is cut as it is stored, in consecutive rows, so that checkpoints see one ordinary tensor. An exchange of
    the outputs then gives each rank its share of every block: [..., out / size], block after block.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.blocks = tuple(blocks)

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        local = super().write(module, output, mesh)
        size, rank = mesh.size(), mesh.get_local_rank()
        parts = {to: list(_overlaps(self.blocks, size, rank, to)) for to in range(size)}
        features = local.movedim(-1, 0)
        sent = torch.cat([features[part] for to in range(size) for part in parts[to]])
        sent_sizes = [_length(parts[to]) for to in range(size)]
        received_sizes = [_length(list(_overlaps(self.blocks, size, source, rank))) for source in range(size)]
        received = funcol.all_to_all_single_autograd(sent, received_sizes, sent_sizes, mesh.get_group())
        return received.movedim(0, -1).contiguous()


def _overlaps(blocks: Sequence[int], size: int, owner: int, wanted_by: int) -> Iterator[slice]:
    """Where, in the consecutive features of rank `owner`, those lie that rank `wanted_by` has of each block."""
    share = sum(blocks) // size
    begin = 0
    for block in blocks:
        first = max(begin + wanted_by * block // size, owner * share)
        last = min(begin + (wanted_by + 1) * block // size, (owner + 1) * share)
        if first < last:
            yield slice(first - owner * share, last - owner * share)
        begin += block


def _length(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)


class Rowwise(_Style):
    """A linear layer whose input features are shared out. Local [..., in / size] -> [..., out] in layout `output`.

    With `is_split=False` the input is replicated [..., in], and each rank takes its share of it.
    """

    def __init__(self, *, output: Placement, is_split: bool = True) -> None:
        self.output = output
        self.input = Shard(-1) if is_split else Replicate()

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        placements = {"weight": Shard(1), "bias": Replicate(), "lora_A": Shard(1), "lora_B": Replicate()}
        place_parameters(module, mesh, placements)

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.input).redistribute(placements=[Shard(-1)])

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert isinstance(output, DTensor)
        return output.redistribute(placements=[self.output]).to_local()


class Replicated(_Style):
    """A module whose parameters are whole on every rank, while its input and output have `layout`.

    Where ranks see different positions or heads, the gradients of its parameters are summed over ranks. `joined` gives
    the output whole to every rank.
    """

    def __init__(self, layout: Placement, *, joined: bool = False) -> None:
        self.layout = layout
        self.joined = joined

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        place_parameters(module, mesh, {name: Replicate() for name, _ in module.named_parameters(recurse=False)})

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.layout)

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert isinstance(output, DTensor)
        return (output.redistribute(placements=[Replicate()]) if self.joined else output).to_local()


class SharedKeys(Replicated):
    """The down-projection of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), whole on every rank.

    The last `rope_features` outputs are one key that all heads share: each rank's heads give it a part of its gradient.
    The rest goes through a column-parallel matrix, which sums its gradient itself.
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
    """An attention or MLP whose matrices are shared out: it gets the hidden states whole, as a DTensor.

    Args:
        hidden: how the hidden states arrive.
        fused_heads: the module finds its heads in a fused projection by their numbers, which become this rank's.
    """

    def __init__(self, hidden: Placement, *, fused_heads: bool = False) -> None:
        self.hidden = hidden
        self.fused_heads = fused_heads

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not self.fused_heads:
            return
        attention = cast(Any, module)
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads //= mesh.size()
        attention.num_key_value_heads //= mesh.size()

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.hidden).redistribute(placements=[Replicate()])


class WholeSequence(_Style):
    """A module that knows nothing of sequence parallelism: it gets all positions, and each rank keeps its own."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(tensor, mesh, SEQUENCE, Replicate())

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(output, mesh, Replicate(), SEQUENCE)


class SplitSequence(_Style):
    """The first transformer block: of whole hidden states [R, W, H] each rank keeps W / size positions."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert tensor.shape[1] % mesh.size() == 0, f"{tensor.shape[1]} positions on {mesh.size()} ranks"
        return _relayout(tensor, mesh, Replicate(), SEQUENCE)


class VocabularyParallelEmbedding(_Style):
    """Each rank holds some rows of the embedding and looks up the tokens it has: int64 [R, W] -> replicated [R, W, H].

    Written without DTensor's own embedding, whose gradient is whole on every rank.
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
            module._parameters["weight"] = cast(nn.Parameter, weight.to_local())
            try:
                found = forward(ids.masked_fill(is_elsewhere, 0))
            finally:
                module._parameters["weight"] = cast(nn.Parameter, weight)
            return _relayout(found.masked_fill(is_elsewhere[..., None], 0), device_mesh, Partial(), Replicate())

        cast(Any, module).forward = lookup
        return module


# -- Which style each module of a model gets: from transformers' plan for the architecture, or from the user's.
#
# A plan says in words what becomes of the matrices of attention and MLP, `{"model.layers.*.mlp.up_proj": "colwise"}`.
# The rest follows from where a module stands:
#
#     embeddings    rows of the vocabulary shared out
#     blocks        norms and other modules between the regions: whole parameters
#       regions     attention and MLPs that the plan names: input whole, output reduced by their row-parallel matrix
#       experts     left alone, routers too
#     final norm    whole parameters, whole output
#     head          columns (the vocabulary) shared out, logits never gathered; one that gives one number is whole
#
# With sequence parallelism hidden states are split by position from the first block to the final norm, outside regions.

PLAN_KEY = "policy.dtensor_cfg.custom_parallel_plan"

HOW_TO_WRITE = (
    f"write one and set {PLAN_KEY}=my_package.plans:plan. `plan` is a dict, or a function of the model that returns "
    'one, from names of modules, layer numbers as *, to words: {"model.layers.*.self_attn.q_proj": "colwise", '
    '"model.layers.*.self_attn.o_proj": "rowwise", ...}, or to torch.distributed.tensor.parallel.ParallelStyle objects'
)

# Beside or instead of transformers' own words, whose plans leave attention whole where heads are fused or compressed.
_ATTENTION = "model.layers.*.self_attn."
_OWN_WORDS: dict[str, dict[str, str]] = {
    "phi3": {
        _ATTENTION + "qkv_proj": "fused_qkv",
        _ATTENTION + "o_proj": "rowwise",
        "model.layers.*.mlp.gate_up_proj": "fused_gate_up",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    "phi": {
        _ATTENTION + "q_layernorm": "replicated_with_grad_allreduce",
        _ATTENTION + "k_layernorm": "replicated_with_grad_allreduce",
    },
    "deepseek_v3": {
        _ATTENTION + "q_proj": "colwise",
        _ATTENTION + "q_a_proj": "replicated",
        _ATTENTION + "q_a_layernorm": "replicated",
        _ATTENTION + "q_b_proj": "colwise",
        _ATTENTION + "kv_a_proj_with_mqa": "mla_kv_a_proj",
        _ATTENTION + "kv_a_layernorm": "replicated",
        _ATTENTION + "kv_b_proj": "colwise",
        _ATTENTION + "o_proj": "rowwise",
    },
}

_EXITS = {"rowwise", "rowwise_split_input"}
_MATRICES = {"colwise", "colwise_gather_output", "fused_qkv", "fused_gate_up", "mla_kv_a_proj"} | _EXITS
# Words for modules whose region holds whole activations all the way: whatever else stands there is simply replicated.
_GATHERED = {"colwise_gather_output", "rowwise_split_input", "replicated"}
WORDS = _MATRICES | {"replicated", "replicated_with_grad_allreduce"}

Plan = dict[str, ParallelStyle]
"""Name of a module -> its style."""

UserPlan = Mapping[str, str] | Mapping[str, ParallelStyle]


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern part by part: `*` stands inside one part, not across dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def load_user_plan(path: str) -> UserPlan | Callable[[PreTrainedModel], UserPlan]:
    """The object at the import path `package.module:name`. ValueError when there is none."""
    try:
        return import_object(path, PLAN_KEY)
    except ImportError as error:
        raise ValueError(f"{PLAN_KEY} {path!r} cannot be imported: {error}") from error


def user_plan(hf: PreTrainedModel, path: str) -> UserPlan:
    """The user's plan for `hf`, all words or all styles.

    Raises:
        ValueError: it is no plan, mixes the two, or names modules that are not there.
    """
    found: Any = load_user_plan(path)
    plan: Any = found(hf) if callable(found) else found
    is_mapping = isinstance(plan, Mapping) and bool(plan) and all(isinstance(name, str) for name in plan)
    in_words = is_mapping and all(isinstance(value, str) for value in plan.values())
    in_styles = is_mapping and all(isinstance(value, ParallelStyle) for value in plan.values())
    if not in_words and not in_styles:
        raise ValueError(
            f"{PLAN_KEY}={path!r} is no plan but {plan!r:.200}; a plan is a dict that is not empty, or a function of "
            'the model that returns one, from names of modules ("model.layers.*.mlp.up_proj") either all to words '
            f"({', '.join(sorted(WORDS))}) or all to ParallelStyle objects"
        )
    names = [name for name, _ in hf.named_modules()]
    unmatched = [pattern for pattern in plan if not any(matches(name, pattern) for name in names)]
    if unmatched:
        raise ValueError(
            f"{PLAN_KEY}={path!r}: {type(hf).__name__} has no modules {', '.join(unmatched)}; names are those of "
            f"model.named_modules(), for example {names[-1]}"
        )
    return plan


def styles(hf: PreTrainedModel, *, sequence_parallel: bool, custom_plan: str | None) -> Plan:
    """The style of every module that needs one. `hf` may be a pipeline stage, which lacks some of its modules.

    Raises:
        ValueError: no plan is known for this architecture or for one of its modules, or the user's is none.
    """
    if custom_plan is None:
        words = dict(hf.tp_plan) | _OWN_WORDS.get(hf.config.get_text_config().model_type, {})
        if not any(word in _MATRICES for pattern, word in words.items() if "*" in pattern):
            raise ValueError(
                f"policy.dtensor_cfg.tensor_parallel_size: no tensor-parallel plan is known for {type(hf).__name__}; "
                f"{HOW_TO_WRITE}. Or set tensor_parallel_size=1"
            )
        return _Planner(hf, words, sequence_parallel=sequence_parallel).plan()
    plan = user_plan(hf, custom_plan)
    words = {pattern: value for pattern, value in plan.items() if isinstance(value, str)}
    if words:
        return _Planner(hf, words, sequence_parallel=sequence_parallel).plan()
    if sequence_parallel:
        raise ValueError(
            f"{PLAN_KEY}={custom_plan!r} gives ParallelStyle objects, which must say themselves how hidden states are "
            "split; set policy.dtensor_cfg.sequence_parallel=false, or write the plan in words "
            f"({', '.join(sorted(WORDS))}), which work with both"
        )
    given: Plan = {}
    for name, module in hf.named_modules():
        if module is hf.get_input_embeddings():
            given[name] = VocabularyParallelEmbedding()
        elif module is output_module(hf):
            given[name] = _head_style(hf)
        for pattern, style in plan.items():
            if isinstance(style, ParallelStyle) and matches(name, pattern):
                given[name] = style
    return given


def _head_style(hf: PreTrainedModel) -> ParallelStyle:
    return Replicated(Replicate()) if is_scalar(hf.config) else Colwise()


class _Planner:
    """Turns words into styles for one model."""

    def __init__(self, hf: PreTrainedModel, words: Mapping[str, str], *, sequence_parallel: bool) -> None:
        self.hf = hf
        self.config = hf.config.get_text_config()
        self.modules = dict(hf.named_modules())
        self.ends = [hf.get_input_embeddings(), output_module(hf)]
        layers = {id(layer) for layer in decoder_layers(hf)}
        self.layers = [name for name, module in self.modules.items() if id(module) in layers]
        # Experts and their routers are cut along their own axis; what stands beside them may be in the plan.
        self.experts = [name for name, module in self.modules.items() if "experts" in dict(module.named_children())]
        self.hidden = SEQUENCE if sequence_parallel else Replicate()
        self.words = self._find(words)
        self.regions: dict[str, set[str]] = {}  # name of an attention or MLP -> words of its modules
        for name, word in self.words.items():
            if word in _MATRICES:
                self.regions.setdefault(name.rpartition(".")[0], set())
        for name, word in self.words.items():
            region = self._region(name)
            if region is not None:
                self.regions[region].add(word)

    def _find(self, words: Mapping[str, str]) -> dict[str, str]:
        found = {}
        for name, module in self.modules.items():
            fits = [word for pattern, word in words.items() if matches(name, pattern)]
            if fits and not self._is_expert(name) and all(module is not end for end in self.ends):
                found[name] = fits[-1]
        return found

    def _is_expert(self, name: str) -> bool:
        return any(name == f"{block}.experts" or name.startswith(f"{block}.experts.") for block in self.experts)

    def _region(self, name: str) -> str | None:
        inside = [region for region in self.regions if name == region or name.startswith(f"{region}.")]
        return max(inside, key=len) if inside else None

    def plan(self) -> Plan:
        plan: Plan = {}
        has_embeddings = False
        for name, module in self.modules.items():
            if module is self.ends[0]:
                plan[name] = VocabularyParallelEmbedding()
                has_embeddings = True
            elif module is self.ends[1]:
                plan[name] = _head_style(self.hf)
            elif name in self.regions:
                plan[name] = self._region_style(name)
            elif name in self.words:
                plan[name] = self._style(name)
            elif name in self.experts and self.hidden is SEQUENCE:
                plan[name] = WholeSequence()
            elif next(module.parameters(recurse=False), None) is not None:
                plan |= self._unnamed(name)
        if self.hidden is SEQUENCE:
            self._check_final_norm(plan)
            if has_embeddings and self.layers:  # later stages of a pipeline get hidden states that are split
                plan[self.layers[0]] = SplitSequence()
        return plan

    def _region_style(self, name: str) -> ParallelStyle:
        words = self.regions[name]
        if name in self.layers or next(self.modules[name].parameters(recurse=False), None) is not None:
            self._refuse(name)
        if self.hidden is SEQUENCE and not words & _EXITS:
            raise ValueError(
                f"policy.dtensor_cfg.sequence_parallel=true: the plan of {type(self.hf).__name__} has no row-parallel "
                f"module in {name}, whose output could be split by position; set it to false"
            )
        is_beside_experts = any(name.startswith(f"{block}.") for block in self.experts)
        return Region(Replicate() if is_beside_experts else self.hidden, fused_heads="fused_qkv" in words)

    def _style(self, name: str) -> ParallelStyle:
        word, module = self.words[name], self.modules[name]
        if word not in WORDS or (word in _MATRICES and not isinstance(module, nn.Linear)):
            self._refuse(name)
        if word == "replicated":
            return Replicated(Replicate())
        if word == "replicated_with_grad_allreduce":
            return Replicated(Shard(2))  # heads or positions, whichever stands there: a norm treats them alike
        assert isinstance(module, nn.Linear)
        if word in _EXITS:
            is_beside_experts = any(name.startswith(f"{block}.") for block in self.experts)
            output = Replicate() if is_beside_experts else self.hidden
            return Rowwise(output=output, is_split=word == "rowwise")
        if word == "mla_kv_a_proj":
            return SharedKeys(self.config.qk_rope_head_dim)
        if word == "fused_gate_up":
            return FusedColwise([module.out_features // 2] * 2)
        if word == "fused_qkv":
            heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
            head = module.out_features // (heads + 2 * kv_heads)
            return FusedColwise([heads * head, kv_heads * head, kv_heads * head])
        return Colwise(gathered=word == "colwise_gather_output")

    def _unnamed(self, name: str) -> Plan:
        """The style of a module with parameters that the plan does not name; none for experts and routers."""
        region = self._region(name)
        if region is not None:
            if not self.regions[region] <= _GATHERED:
                self._refuse(name)
            return {name: Replicated(Replicate())}
        if any(name.startswith(f"{block}.") for block in self.experts):
            return {}
        if name in self.layers:
            self._refuse(name)
        is_in_layer = any(name.startswith(f"{layer}.") for layer in self.layers)
        return {name: Replicated(self.hidden, joined=not is_in_layer and self.hidden is SEQUENCE)}

    def _check_final_norm(self, plan: Plan) -> None:
        joined = [name for name, style in plan.items() if isinstance(style, Replicated) and style.joined]
        if len(joined) > 1 or (not joined and self.ends[1] is not None):
            raise ValueError(
                f"policy.dtensor_cfg.sequence_parallel=true: {type(self.hf).__name__} has not one final norm with "
                f"weights after its blocks, where positions are joined, but {', '.join(joined) or 'none'}; set it to "
                "false"
            )

    def _refuse(self, name: str) -> None:
        module = self.modules[name]
        said = f"its plan says {self.words[name]!r}" if name in self.words else "its plan does not name it"
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size: how to cut {name} ({type(module).__name__}) of "
            f"{type(self.hf).__name__} is not known: {said}. Give a plan of your own: {HOW_TO_WRITE}. Words that are "
            f"known: {', '.join(sorted(WORDS))}. Or set tensor_parallel_size=1"
        )


def check_tensor_parallel(
    config: PretrainedConfig, size: int, *, sequence_parallel: bool, custom_plan: str | None
) -> None:
    """Whether a model of `config` can be cut over `size` ranks. Loads no weights; needs no process group.

    Args:
        custom_plan: import path `package.module:name` of a plan, see `tp_plans`.

    Raises:
        ValueError: `size` does not divide heads or matrices (says what would work); no plan is known for the
            architecture (says how to write one); `custom_plan` cannot be imported or is no plan.
    """
    if size == 1:
        return
    hf = build_on_meta(config, torch.bfloat16)
    plan = styles(hf, sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    _check_divisible(hf, plan, size)


def apply_tensor_parallel(
    hf: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool, custom_plan: str | None
) -> None:
    """Cut `hf`, on the meta device, over the 1-D `mesh`, in place.

    Afterwards its parameters are DTensors (but those of experts and routers) under the names they had, and
    `hf.base_model(...)` gives plain hidden states [R, W, H], the same on every rank; with `sequence_parallel` W must be
    a multiple of the ranks. The head is not meant to be called: its weight is Shard(0), the vocabulary. With
    `sequence_parallel` a pipeline stage without embeddings takes, and one without final norm gives, hidden states of
    its own positions only, [R, W / size, H].

    Raises:
        ValueError: as `check_tensor_parallel`.
    """
    plan = styles(hf, sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    _check_divisible(hf, plan, mesh.size())
    embeddings, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = embeddings is not None and head is not None and head.weight is embeddings.weight
    parallelize_module(hf, mesh, dict(plan), src_data_rank=None)
    if is_tied:
        assert embeddings is not None and head is not None
        head.weight = embeddings.weight


def _check_divisible(hf: PreTrainedModel, plan: Plan, size: int) -> None:
    config = hf.config.get_text_config()
    sizes = config.to_dict()
    asked = {
        f"{sizes[key]} {what}": sizes[key]
        for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key/value heads"))
        if sizes.get(key)
    }
    for name, style in plan.items():
        module = hf.get_submodule(name)
        if not isinstance(module, nn.Linear) or module is hf.get_output_embeddings():
            continue
        if isinstance(style, Colwise):
            asked[f"{module.out_features} output features of {name}"] = module.out_features
        elif isinstance(style, Rowwise):
            asked[f"{module.in_features} input features of {name}"] = module.in_features
    failing = [what for what, count in asked.items() if count % size]
    if failing:
        works = divisors(*asked.values())
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size={size} does not divide the {failing[0]} of the "
            f"{config.model_type!r} model; these would: {works}"
        )
