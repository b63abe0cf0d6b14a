"""The shards of tensor-parallel ranks, and refused models. Losses and gradients are in test_layouts.py."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor.tensor_parallel import check_tensor_parallel, user_plan
from nemo_rl.models.policy.pretrained import build_on_meta
from tests.unit.policy.models import SHAPE, Models
from tests.unit.policy.steps import make_worker, policy_config
from tests.unit.policy.test_layouts import MATRICES
from tests.worlds import run_world


@pytest.mark.parametrize("family", ["qwen2-tied", "deepseek_v3"])
def test_every_matrix_is_shared_out_but_those_of_experts_and_tied_ones_stay_one(models: Models, family: str) -> None:
    path = models[family]
    cut = DTensorConfig(tensor_parallel_size=2, sequence_parallel=True)

    def rank_main(rank: int, world: int) -> tuple[bool, dict[str, float]]:
        hf, parts = make_worker(path, policy_config(dtensor_cfg=cut)).stages[0].hf, {}
        for name, parameter in hf.named_parameters():
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            parts[name] = held.numel() / parameter.numel()
        return hf.get_output_embeddings().weight is hf.get_input_embeddings().weight, parts

    ranks = run_world(rank_main, 2)
    for is_tied, parts in ranks:
        assert is_tied == (family == "qwen2-tied")
        for name in parts:
            is_whole = "norm" in name or ".mlp.experts." in name or ".mlp.gate." in name or "_a_" in name
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                is_whole = True
            assert sum(each[name] for _, each in ranks) == pytest.approx(2.0 if is_whole else 1.0), name


# -- refused before weights are read

NO_PLAN = {"model.layers.*.mlp.up_proj": 3}
MISSPELT = MATRICES | {"model.layers.*.mlp.gatee_proj": "colwise"}
UNKNOWN_WORD = MATRICES | {"model.layers.*.mlp.gate_proj": "colwize"}


def path_to(name: str, module: str = __name__) -> str:
    return f"{module}:{name}"


def check(family: str, size: int = 2, *, split: bool = False, plan: str | None = None, **changes: Any) -> None:
    settings = DTensorConfig(tensor_parallel_size=size, sequence_parallel=split, custom_parallel_plan=plan)
    check_tensor_parallel(AutoConfig.for_model(family, **SHAPE | changes), settings)


def test_a_model_that_can_be_cut_is_let_through_and_the_plan_in_the_examples_is_that_of_transformers() -> None:
    for family in ("llama", "qwen3", "olmo2"):
        check(family, split=True)
    check("gpt2", size=1)
    for family in ("llama", "qwen3"):
        hf = build_on_meta(AutoConfig.for_model(family, **SHAPE), torch.float32)
        own = user_plan(hf, "examples.custom_parallel:plan", "custom_parallel_plan")
        assert dict(own) == {name: word for name, word in dict(hf.tp_plan).items() if ".layers." in name}


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
        (r"is no plan but 97", {"plan": path_to("VOCAB", "tests.unit.policy.models")}),
        (r"LlamaForCausalLM has no modules model\.layers\.\*\.mlp\.gatee_proj", {"plan": path_to("MISSPELT")}),
        (r"mlp\.gate_proj \(Linear\).*is not known: its plan says 'colwize'", {"plan": path_to("UNKNOWN_WORD")}),
        (r"self_attn\.q_norm .* its plan does not name it", {"family": "qwen3", "plan": path_to("MATRICES")}),
        (r"has not one final norm with weights .* but none; set it to false", {"family": "olmo", "split": True}),
        (
            r"set policy\.dtensor_cfg\.sequence_parallel=false",
            {"plan": path_to("STYLES", "tests.unit.policy.test_layouts"), "split": True},
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_would_work(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        check(**{"family": "llama"} | arguments)
