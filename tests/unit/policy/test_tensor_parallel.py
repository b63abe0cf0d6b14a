"""Models cut over tensor-parallel ranks, against the plain Hugging Face model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig
from nemo_rl.models.policy.dtensor.lora import apply_lora
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.model import materialize
from nemo_rl.models.policy.dtensor.optimizer import clip_grad_norm
from nemo_rl.models.policy.dtensor.tensor_parallel import apply_tensor_parallel, check_tensor_parallel, user_plan
from nemo_rl.models.policy.layout import ParallelSizes
from nemo_rl.models.policy.pretrained import build_on_meta
from nemo_rl.models.policy.weight_loading import local_index
from tests.unit.policy.models import ALL_FAMILIES, VOCAB, save_random_model
from tests.worlds import run_world

WIDTH = 12  # beyond the sliding windows


class Scored(nn.Module):
    """Sum of the logprobs of the next tokens; the head is used as it is used in training, by its weight."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        states = self.hf.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        assert not isinstance(states, DTensor)
        head = self.hf.get_output_embeddings()
        weight, bias = (whole(parameter) for parameter in (head.weight, head.bias))
        logprobs = F.linear(states[:, :-1], weight, bias).log_softmax(dim=-1)
        return logprobs.gather(-1, ids[:, 1:, None]).sum(), states.detach()


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def token_ids() -> torch.Tensor:
    ids = torch.randint(2, VOCAB, (4, WIDTH), generator=torch.Generator().manual_seed(1))
    ids[0, 3] = ids[1, 7] = 0  # padding has an embedding, but no gradient
    return ids


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)  # eps: tiny gradients are rounding errors


Outcome = dict[str, torch.Tensor]
"""Loss, hidden states, norm, "gradient of NAME" (clipped), "NAME after the step" and the loss after it."""

Parameters = Callable[[], Iterator[tuple[str, nn.Parameter]]]


def step(model: Scored, ids: torch.Tensor, parameters: Parameters, clip: Callable[..., torch.Tensor]) -> Outcome:
    loss, states = model(ids)
    loss.backward()
    outcome = {"loss": loss.detach(), "states": states, "norm": clip(model.parameters(), 5.0)}
    assert outcome["norm"] > 10, "clipping changes something"
    outcome |= {f"gradient of {name}": whole(p.grad) for name, p in parameters() if p.grad is not None}
    optimizer(model).step()
    outcome |= {f"{name} after the step": whole(p.detach()) for name, p in parameters()}
    outcome["loss after the step"] = model(ids)[0].detach()
    return outcome


def load(family: str, directory: Path) -> PreTrainedModel:
    save_random_model(family, directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference(source: PreTrainedModel) -> Outcome:
    model = Scored(copy.deepcopy(source))
    return step(model, token_ids(), model.hf.named_parameters, torch.nn.utils.clip_grad_norm_)


def cut(
    source: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    custom_plan: str | None = None,
    adapters: LoRAConfig | None = None,
) -> PreTrainedModel:
    hf = build_on_meta(copy.deepcopy(source.config), torch.float32).eval()
    if adapters is not None:
        apply_lora(hf, adapters)
    settings = DTensorConfig(
        tensor_parallel_size=mesh.size(), sequence_parallel=sequence_parallel, custom_parallel_plan=custom_plan
    )
    apply_tensor_parallel(hf, mesh, settings)
    return hf


@torch.no_grad()
def fill(model: Scored, source: PreTrainedModel) -> None:
    materialize(model, torch.device("cpu"))
    for name, parameter in model.hf.named_parameters():
        values = source.get_parameter(name).detach()
        if not isinstance(parameter, DTensor):
            parameter.copy_(values)
            continue
        index = local_index(parameter)
        if index is not None:
            parameter.to_local().copy_(values[index])


def trained(source: PreTrainedModel, sizes: ParallelSizes, **how_to_cut: Any) -> Outcome:
    """One step."""
    mesh = ParallelMesh("cpu", sizes)
    assert mesh.tensor is not None
    hf = cut(source, mesh.tensor, **how_to_cut)
    model = Scored(hf)
    fill(model, source)
    return step(model, token_ids(), hf.named_parameters, clip_grad_norm)


def worst(outcome: Outcome, want: Outcome) -> dict[str, float]:
    """Relative differences above 1e-5, by name."""
    assert set(outcome) == set(want)
    differences = {
        name: ((outcome[name] - value).norm() / value.norm().clamp(min=1e-6)).item() for name, value in want.items()
    }
    return {name: difference for name, difference in differences.items() if not difference <= 1e-5}


TWO = ParallelSizes(tensor_parallel=2)


def marked(family: str) -> Any:
    """Slow, but for the families whose plans have the most to them."""
    return family if family in ("gemma3", "phi3") else pytest.param(family, marks=pytest.mark.slow)


@pytest.mark.parametrize("family", [marked(family) for family in ALL_FAMILIES])
def test_a_step_on_two_ranks_equals_one_process(tmp_path, family):
    source = load(family, tmp_path)

    def rank_main(rank: int, world: int) -> list[Outcome]:
        return [trained(source, TWO, sequence_parallel=sp) for sp in (False, True)]

    want = reference(source)
    for outcomes in run_world(rank_main, 2):
        assert [worst(outcome, want) for outcome in outcomes] == [{}, {}]


def test_tied_embeddings_stay_one_parameter_and_every_matrix_is_shared_out(tmp_path):
    source = load("qwen2-tied", tmp_path)

    def rank_main(rank: int, world: int) -> tuple[bool, dict[str, int], list[str]]:
        model = Scored(cut(source, init_device_mesh("cpu", (2,)), sequence_parallel=True))
        fill(model, source)
        hf = model.hf
        model(token_ids())[0].backward()
        sizes = {name: local(p).numel() for name, p in hf.named_parameters()}
        unlike = [name for name, p in hf.named_parameters() if p.ndim == 2 and local(p.grad).shape != local(p).shape]
        return hf.get_output_embeddings().weight is hf.get_input_embeddings().weight, sizes, unlike

    results = run_world(rank_main, 2)
    for is_tied, _, unlike in results:
        assert is_tied
        assert unlike == [], "gradients are as small as their parameters"
    for name, parameter in source.named_parameters():
        copies = sum(sizes[name] for _, sizes, _ in results) / parameter.numel()
        is_whole = parameter.ndim == 1 and not name.endswith("_proj.bias")
        assert copies == (2 if is_whole else 1), name


@pytest.mark.parametrize("family", [marked("phi"), "phi3"])
def test_adapters_are_cut_with_their_layers(tmp_path, family):
    source = load(family, tmp_path)
    adapters = LoRAConfig(enabled=True, dim=3, alpha=3.0)
    apply_lora(source, adapters)
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    want = reference(source)
    assert all("lora" in name for name in want if name.startswith("gradient of"))

    def rank_main(rank: int, world: int) -> list[Outcome]:
        return [trained(source, TWO, sequence_parallel=sp, adapters=adapters) for sp in (False, True)]

    for outcomes in run_world(rank_main, 2):
        assert [worst(outcome, want) for outcome in outcomes] == [{}, {}]


# -- layers of other kinds


def mixture(model_type: str) -> PreTrainedModel:
    """A dense and a mixture-of-experts layer, with shared experts and latent attention for DeepSeek-V3."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if model_type == "qwen3_moe":
        config = Qwen3MoeConfig(**shape, head_dim=32, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[0])
    elif model_type == "mixtral":
        config = MixtralConfig(**shape, num_local_experts=4)
    else:
        latent = {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        }
        experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
        config = DeepseekV3Config(
            **shape | latent | experts | {"v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1}
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "mixtral"))]
)
def test_experts_stay_whole_and_the_layers_around_them_are_cut(model_type):
    source = mixture(model_type)

    def rank_main(rank: int, world: int) -> tuple[list[Outcome], list[str]]:
        outcomes = [trained(source, TWO, sequence_parallel=sp) for sp in (False, True)]
        hf = cut(source, init_device_mesh("cpu", (2,)), sequence_parallel=True)
        return outcomes, [name for name, p in hf.named_parameters() if not isinstance(p, DTensor)]

    want = reference(source)
    for outcomes, plain in run_world(rank_main, 2):
        assert [worst(outcome, want) for outcome in outcomes] == [{}, {}]
        assert plain and all(".mlp.experts." in name or ".mlp.gate." in name for name in plain)


# -- plans of the user

_LAYER = "model.layers.*."
MATRICES = {_LAYER + f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    _LAYER + "self_attn.o_proj": "rowwise",
    _LAYER + "mlp.gate_proj": "colwise",
    _LAYER + "mlp.up_proj": "colwise",
    _LAYER + "mlp.down_proj": "rowwise",
}
HEAD_NORMS = [_LAYER + "self_attn.q_norm", _LAYER + "self_attn.k_norm"]
WRONG = MATRICES | dict.fromkeys(HEAD_NORMS, "replicated")
GATHERED = MATRICES | {
    _LAYER + "mlp.gate_proj": "colwise_gather_output",
    _LAYER + "mlp.up_proj": "colwise_gather_output",
    _LAYER + "mlp.down_proj": "rowwise_split_input",
}
NO_PLAN = {_LAYER + "mlp.up_proj": 3}
MISSPELT = MATRICES | {_LAYER + "mlp.gatee_proj": "colwise"}
UNKNOWN_WORD = MATRICES | {_LAYER + "mlp.gate_proj": "colwize"}
STYLES = {name: ColwiseParallel() if word == "colwise" else RowwiseParallel() for name, word in MATRICES.items()}


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    assert isinstance(model, Qwen3ForCausalLM)
    return MATRICES | dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce")


def path_to(name: str) -> str:
    return f"{__name__}:{name}"


def test_a_plan_of_the_user_in_words_or_styles_equals_one_process(tmp_path):
    plans = [("plan_of", True, "qwen3"), ("GATHERED", True, "llama"), ("STYLES", False, "llama")]
    sources = {family: load(family, tmp_path / family) for family in ("qwen3", "llama")}

    def rank_main(rank: int, world: int) -> list[Outcome]:
        return [
            trained(sources[family], TWO, sequence_parallel=split, custom_plan=path_to(name))
            for name, split, family in plans
        ]

    want = {family: reference(source) for family, source in sources.items()}
    for outcomes in run_world(rank_main, 2):
        for outcome, (name, _, family) in zip(outcomes, plans, strict=True):
            assert worst(outcome, want[family]) == {}, name


def test_a_norm_of_heads_whose_gradient_is_not_summed_is_found_out(tmp_path):
    source = load("qwen3", tmp_path)
    how = {"sequence_parallel": False, "custom_plan": path_to("WRONG")}
    (outcome, _) = run_world(lambda *_: trained(source, TWO, **how), 2)
    found = worst(outcome, reference(source))
    assert "states" not in found
    assert {f"gradient of model.layers.{layer}.self_attn.{norm}_norm.weight" for layer in (0, 1) for norm in "qk"} <= (
        found.keys()
    )


# -- refused before weights are read


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    return type(CONFIGS[family])(**CONFIGS[family].to_dict() | changes)


SMALL = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "gpt2": GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=VOCAB),
    "olmo": OlmoConfig(**SMALL, num_attention_heads=4),
    "olmo2": Olmo2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2),
}


def check(family: str, size: int = 2, *, split: bool = False, plan: str | None = None, **changes: Any) -> None:
    settings = DTensorConfig(tensor_parallel_size=size, sequence_parallel=split, custom_parallel_plan=plan)
    check_tensor_parallel(config_of(family, **changes), settings)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_plan_in_the_examples_is_the_one_of_transformers(family):
    hf = build_on_meta(config_of(family), torch.float32)
    own = user_plan(hf, "examples.custom_parallel:plan", "custom_parallel_plan")
    theirs = {name: word for name, word in dict(hf.tp_plan).items() if ".layers." in name}
    assert dict(own) == theirs


def test_a_model_that_can_be_cut_is_let_through():
    for family in ("llama", "qwen3", "olmo2"):
        check(family, split=True)
    check("gpt2", size=1)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"size=4 does not divide the 2 key/value heads of the 'llama' model; these would: 1, 2$", {"size": 4}),
        (r"size=3 does not divide the 4 attention heads", {"size": 3}),
        (r"size=2 does not divide the 95 output features of model\.layers\.0\.mlp\.gate", {"intermediate_size": 95}),
        (r"no tensor-parallel plan is known for GPT2LMHeadModel.*custom_parallel_plan=my_package", {"family": "gpt2"}),
        (r" 'plans' is not an import path; write package\.module:name", {"plan": "plans"}),
        (r"no module .nowhere. can be imported", {"plan": "nowhere.plans:plan"}),
        (r"has no 'nothing'", {"plan": path_to("nothing")}),
        (r"is no plan but \{.*: 3\}.*words \(colwise", {"plan": path_to("NO_PLAN")}),
        (r"is no plan but 97", {"plan": path_to("VOCAB")}),
        (r"LlamaForCausalLM has no modules model\.layers\.\*\.mlp\.gatee_proj", {"plan": path_to("MISSPELT")}),
        (r"mlp\.gate_proj \(Linear\).*is not known: its plan says 'colwize'", {"plan": path_to("UNKNOWN_WORD")}),
        (r"self_attn\.q_norm .* its plan does not name it", {"family": "qwen3", "plan": path_to("MATRICES")}),
        (r"has not one final norm with weights .* but none; set it to false", {"family": "olmo", "split": True}),
        (r"set policy\.dtensor_cfg\.sequence_parallel=false", {"plan": path_to("STYLES"), "split": True}),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_would_work(message, arguments):
    with pytest.raises(ValueError, match=message):
        check(**{"family": "llama"} | arguments)
