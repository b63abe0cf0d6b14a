"""Tensor parallelism: the matrices of every layer, the embeddings and the head shared out over neighbouring ranks.

    tokens -> embeddings (rows of the vocabulary) -> blocks -> final norm -> hidden states, whole on every rank
                                                                               -> head (its rows are the vocabulary)

All ranks of the axis see the same tokens and end with the same hidden states; the gradient that comes back must be
complete on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.rules import divisors
from nemo_rl.models.policy.dtensor.parallelize import build_on_meta, decoder_layers
from nemo_rl.models.policy.dtensor.tp_styles import (
    SEQUENCE,
    Colwise,
    FusedColwise,
    Region,
    Replicated,
    Rowwise,
    SharedKeys,
    SplitSequence,
    VocabularyParallelEmbedding,
    WholeSequence,
)
from nemo_rl.models.policy.head.scalar import is_scalar, output_module
from nemo_rl.utils.registry import import_object

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
