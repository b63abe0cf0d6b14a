"""The trace of a recipe over the stand-in for CUDA: what it compares, and that predictions agree with what it saw."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.parts.placement import phases_of
from nemo_rl.config.loader import load_config
from nemo_rl.config.sources import load_tree
from nemo_rl.models.policy.memory import Machine, ModelShape
from tests.tables import named
from tests.unit.config.run_configs import CONFIGS, MASTERS
from tools.standin.build import GPUS
from tools.standin.layouts import TOLERANCE, random_layouts
from tools.standin.layouts import main as layouts_main
from tools.standin.shapes import MODELS, published, shape
from tools.standin.trace.compare import differences
from tools.standin.trace.index_values import chosen_first, clear
from tools.standin.trace.phases import in_allocator
from tools.standin.trace.samples import batch_overrides
from tools.trace_recipe import ON_A_CPU, WITHOUT_ENGINE, kind_of, predicted_of, problems_of, section_of
from tools.trace_recipe import main as trace_main

BOTH, PAIR = (0, 1), (2, 3)
REDUCE, GATHER = "all_reduce of 8 float32", "all_gather of 4 bfloat16"


HALF = "all_reduce of 8 bfloat16"
SAME = {0: {BOTH: [REDUCE, GATHER]}, 1: {BOTH: [REDUCE, GATHER]}}


def test_equal_calls_of_a_group_have_no_difference():
    assert differences(SAME) == []


@named(
    "log, at, said",
    {
        "left out": ([REDUCE], 2, "nothing more"),
        "another order": ([GATHER, REDUCE], 1, GATHER),
        "another dtype": ([HALF, GATHER], 1, HALF),
    },
)
def test_the_first_difference_of_a_group_is_named(log, at, said):
    """A collective that one rank leaves out, enters in another order, or with another dtype."""
    [found] = differences(SAME | {1: {BOTH: log}})
    assert found.startswith(f"group 0 1: call {at} of 2") and found.endswith(f"rank 1 {said}")


def test_messages_are_compared_in_pairs_and_other_messages_between_them_do_not_matter():
    sent = ["send of 8 bfloat16 with rank 3", GATHER, "recv of 2 float32 with rank 3"]
    awaited = [GATHER, "recv of 8 bfloat16 with rank 2", "send of 2 float32 with rank 2"]
    assert differences({2: {PAIR: sent}, 3: {PAIR: awaited}}) == []
    [found] = differences({2: {PAIR: sent}, 3: {PAIR: [GATHER, "recv of 8 float32 with rank 2", awaited[2]]}})
    assert found == ("messages 2 -> 3: call 1 of 1 and 1: rank 2 sends 8 bfloat16, rank 3 awaits 8 float32")


def test_a_rank_above_its_gpus_memory_and_one_that_stops_are_problems():
    row = {"reserved": 79_000_000_000}
    report: dict[str, Any] = {"rank": 3, "stop": None, "memory": 80e9, "phases": {"policy train|2": row}}
    assert problems_of(report) == ["rank 3 needs 80.50 GB, and its GPU has 80.00 GB"]
    stop = {"error": "ValueError: no", "at": "worker.py:12"}
    assert problems_of(report | {"memory": 90e9, "stop": stop}) == ["rank 3 stopped at worker.py:12: ValueError: no"]


def test_a_recipe_that_continues_another_has_its_shape():
    name = "results/deepscaler-1.5b-16k/step_480/policy/weights/consolidated"
    assert published(name) == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    with pytest.raises(ValueError, match=r"nobody/knows: its shape is not known here; add its config.json to MODELS"):
        published("nobody/knows")


@pytest.mark.parametrize("first", (0, 3))
def test_memory_is_cleared_by_whole_pages_and_at_their_edges_and_nothing_beside_it(first):
    numbers = torch.ones(100_000)
    clear(numbers[first:90_001])
    assert not numbers[first:90_001].any() and numbers[:first].all() and numbers[90_001:].all()


def test_the_order_of_chosen_experts_is_that_of_a_stable_sort():
    mask = torch.arange(512) % 3 == 1
    expected = torch.sort(mask, descending=True, stable=True)
    values, index = chosen_first(tuple(map(torch.empty_like, expected)), mask)
    assert torch.equal(values, expected.values) and torch.equal(index, expected.indices)


@named(
    "arguments, said",
    {
        "a rank that is none": (["--config", "sft.yaml", "--rank", "0-3"], "'0-3' is no list of ranks; write 0"),
        "a table of one rank": (["--table", "sft.yaml", "--rank", "2"], "--table takes rank 0 of configurations"),
        "a table in a file": (["--table", "sft.yaml", "--json", "found.json"], "--config takes the other options"),
    },
)
def test_options_that_would_have_no_effect_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        trace_main(arguments)
    assert said in capsys.readouterr().err


def on_gpus(folder: str) -> list[Path]:
    """All recipes of a folder, or the configurations whose model has a name that is known here."""
    paths = sorted((CONFIGS / folder).glob("*.yaml"))
    return [path for path in paths if folder or load_tree(path).get(("policy", "model_name")) in MODELS]


FOLDERS = ("", "recipes/llm", "recipes/methods")


@pytest.mark.standin
def test_the_table_names_a_configuration_for_a_cpu_of_the_same_kind():
    assert {kind_of(path) for folder in FOLDERS for path in on_gpus(folder)} == set(ON_A_CPU)
    for (section, backend, sees_images), name in ON_A_CPU.items():
        config = load_config(MASTERS[section], CONFIGS / f"{name}.yaml", [])
        assert config.policy.megatron_cfg.enabled == (backend == "megatron")
        assert ("vlm" in name) == sees_images and config.training_cluster.gpus_per_node == 0


LOCAL = [f"++policy.megatron_cfg.{key}={value}" for key, value in WITHOUT_ENGINE.items()]

# GB in training, as tools/trace_recipe.py saw them: peak, and reserved by the allocator, without the CUDA context.
SEEN = {
    "sft": (28.3, 36.3),
    "dpo": (28.3, 36.4),
    "grpo_math_1B": (50.3, 60.2),
    "sft_megatron": (31.6, 32.2),
    "grpo_math_8B_megatron": (40.7, 42.7),
    "distillation_math": (18.3, 22.0),
    "grpo_vlm_3B": (58.2, 64.0),
    "grpo_vlm_qwen3_vl_4B": (41.2, 47.6),
    "grpo_vlm_smolvlm2": (38.7, 48.8),
    "sft_vlm_3B": (65.1, 72.7),
    "recipes/llm/grpo-qwen2.5-7b-instruct-1n8g": (26.9, 36.7),
    "recipes/llm/grpo-qwen3-8b-1n8g": (29.7, 40.8),
    "recipes/llm/grpo-qwen2.5-32b-instruct-4n8g": (27.0, 34.1),
    "recipes/llm/grpo-llama3.3-70b-instruct-8n8g": (26.5, 31.0),
    "recipes/llm/grpo-qwen3-30ba3b-4n8g": (23.1, 28.5),
    "recipes/methods/long-context-64k-llama3.1-8b-4n8g": (16.3, 24.2),
}


@pytest.mark.parametrize("name", SEEN)
def test_memory_on_a_gpu_is_predicted_within_fifteen_percent(name):
    """Dense models and experts, with tensor, sequence, context and expert parallelism, compiled and not."""
    path = CONFIGS / f"{name}.yaml"
    cfg = load_config(MASTERS[section_of(path)], path, LOCAL if "megatron" in name else [])
    model = ModelShape.of(MODELS[published(cfg.policy.model_name)])
    phases = phases_of(cfg, model, Machine(is_gpu=True, memory=GPUS["h100"].memory))
    found = predicted_of("policy train", {phase.name: in_allocator(phase) for phase in phases})
    assert found is not None
    assert (found["peak"] / 1e9, found["reserved"] / 1e9) == pytest.approx(SEEN[name], rel=0.15)


ADAPTERS = "lora_cfg={enabled: true, match_all_linear: true, dim: 32}"
PARTLY = "activation_checkpointing=selective"

# Of seed 1 of tools/standin/layouts.py, on one H200: configuration, model and layers, GPUs, longest sample, tokens of a
# micro-batch, layout, rank; GB as above.
DRAWN = (
    ("sft", "meta-llama/Llama-3.1-8B@6", 64, 4096, 8192, ("context_parallel_size=2", ADAPTERS), 0, 10.66, 13.43),
    ("sft", "meta-llama/Llama-3.2-1B@6", 16, 2048, 2048,
     ("tensor_parallel_size=4", "activation_checkpointing=full"), 0, 2.38, 2.92),
    ("dpo", "meta-llama/Llama-3.1-8B@6", 64, 8192, 16384,
     ("torch_compile=true", "dp_replicate_size=2"), 0, 32.02, 39.96),
    ("dpo", "Qwen/Qwen2.5-1.5B@6", 32, 4096, 8192, (PARTLY, "torch_compile=true"), 0, 5.24, 7.33),
    ("dpo", "Qwen/Qwen2.5-7B@6", 32, 2048, 4096,
     ("tensor_parallel_size=4", "sequence_parallel=true"), 0, 8.13, 9.94),
    ("sft", "Qwen/Qwen3-235B-A22B@6", 16, 2048, 2048, (PARTLY, ADAPTERS), 0, 42.26, 45.68),
    ("grpo_math_8B", "meta-llama/Llama-3.2-1B@6", 16, 2048, 4096, (PARTLY, ADAPTERS), 0, 5.02, 5.91),
    ("sft", "Qwen/Qwen3-235B-A22B@6", 64, 2048, 2048, (PARTLY, "pipeline_parallel_size=2"), 0, 58.90, 75.16),
    ("sft", "Qwen/Qwen3-235B-A22B@6", 64, 2048, 2048, (PARTLY, "pipeline_parallel_size=2"), 63, 59.11, 75.27),
    ("dpo", "Qwen/Qwen3-30B-A3B@8", 64, 2048, 4096, (PARTLY, "expert_parallel_size=4"), 0, 7.53, 12.69),
    ("dpo", "Qwen/Qwen3-30B-A3B@8", 32, 4096, 8192, ("expert_parallel_size=8", PARTLY), 0, 12.59, 18.34),
)  # fmt: skip


@pytest.mark.parametrize("drawn", DRAWN, ids=lambda drawn: f"{drawn[0]}-{drawn[1]}-{drawn[5]}-{drawn[6]}")
def test_memory_of_layouts_in_pairs_is_predicted_within_fifteen_percent(drawn):
    """Adapters, pipelines by rank, HSDP, experts over ranks, code that is compiled, layers that are recomputed."""
    name, model, gpus, longest, tokens, layout, rank, peak, reserved = drawn
    path, memory = CONFIGS / f"{name}.yaml", GPUS["h200"].memory
    overrides = [f"policy.model_name={model}", f"cluster.gpus_per_node={gpus}"]
    overrides += [f"policy.max_total_sequence_length={longest}", f"policy.sequence_packing.train_mb_tokens={tokens}"]
    overrides += [f"policy.dtensor_cfg.{key}" for key in layout]
    master = MASTERS[section_of(path)]
    config: Any = load_config(master, path, overrides)
    config = load_config(master, path, [*overrides, *batch_overrides(config)])
    phases = phases_of(config, ModelShape.of(shape(model)), Machine(is_gpu=True, memory=memory), rank)
    found = predicted_of("policy train", {phase.name: in_allocator(phase) for phase in phases})
    assert found is not None
    assert (found["peak"] / 1e9, found["reserved"] / 1e9) == pytest.approx((peak, reserved), rel=TOLERANCE)


def test_a_seed_draws_the_same_layouts_and_each_can_be_traced():
    first, again = (list(islice(random_layouts(3), 3)) for _ in range(2))
    assert first == again and len(set(first)) == 3
    for layout in first:
        assert sum("dtensor_cfg" in key for key in layout.overrides) >= 2


@pytest.mark.standin
@pytest.mark.timeout(1500)
def test_random_layouts_are_predicted_within_fifteen_percent():
    assert layouts_main(["--seed", "1", "--number", "20"]) == 0


EXPERTS_OVER_RANKS = (
    "policy.model_name=tiny-qwen3moe@2",
    "policy.max_total_sequence_length=64",
    "policy.sequence_packing.train_mb_tokens=128",
    "policy.sequence_packing.logprob_mb_tokens=128",
    "policy.megatron_cfg.expert_model_parallel_size=2",
    "policy.generation.vllm_cfg.tensor_parallel_size=1",
    "data.max_input_seq_length=32",
    "cluster.num_nodes=1",
    "cluster.gpus_per_node=2",
)


@pytest.mark.standin
def test_megatrons_experts_over_two_ranks_dispatch_alike_on_both(tmp_path):
    """The dispatcher sends as many rows as counts of all ranks say, which the host reads."""
    path, found = CONFIGS / "grpo_math_qwen30ba3b_megatron.yaml", tmp_path / "found.json"
    assert trace_main(["--config", str(path), "--all-ranks", "--json", str(found), *EXPERTS_OVER_RANKS]) == 0
    for report in json.loads(found.read_text()):
        train = next(numbers for phase, numbers in report["phases"].items() if phase.startswith("policy train"))
        assert train["collectives"]["alltoall_base x2"] > 0 and report["syncs"]


LEFT_OUT = (
    "grpo_math_qwen30ba3b_megatron",  # eight minutes of a CPU, for 48 layers of 128 experts
    "grpo_sliding_puzzle",  # 25 GB of the host, for what cpu_offload keeps there of 1.5e9 parameters
)


def by_name(text: str) -> dict[str, tuple[list[str], list[float]]]:
    """The rows of `TABLE` in a text: of each configuration three cells, and four in GB."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if " | rank " in line]
    return {name: (cells[:3], [float(cell) for cell in cells[3:]]) for name, *cells in rows}


@pytest.mark.standin
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("folder", FOLDERS)
def test_one_rank_of_every_configuration_runs_at_full_size_as_the_table_says(folder, capsys):
    """On its own GPUs, with all phases of its algorithm."""
    paths = [str(path) for path in on_gpus(folder) if path.stem not in LEFT_OUT]
    status = trace_main(["--table", *paths])
    printed = capsys.readouterr().out
    assert status == 0, printed
    found, told = by_name(printed), by_name((CONFIGS.parents[1] / "docs" / "gpu.md").read_text(encoding="utf-8"))
    for name, (cells, in_gb) in found.items():
        assert cells == told[name][0], name
        assert in_gb == pytest.approx(told[name][1], rel=0.02), name
