"""Memory predicted from shapes: what is counted, what is said, and against the memory of a process."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from nemo_rl.algorithms.parts import placement as setup
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.data.tiny_model import tiny_model_config
from nemo_rl.distributed.worker_template import HOST_ENVIRONMENT
from nemo_rl.models.policy.dtensor.draft import DraftHead, PredictionHead, draft_config
from nemo_rl.models.policy.memory import Machine, ModelShape, describe_memory, predict_memory
from tests.unit.config.run_configs import CONFIGS, MASTERS
from tests.unit.policy.families import family_config

SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_every_parameter_is_counted_once_those_of_a_tower_too():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    cfg = config("policy.model_name=tiny:shapes")
    seeing = setup.local_config(cfg.policy)
    assert seeing is not None and setup.memory_lines(cfg)[0].startswith("memory of a GPU")
    for kind, of in (
        (AutoModelForCausalLM, Qwen2Config(**SHAPE, intermediate_size=96, tie_word_embeddings=True)),
        (AutoModelForCausalLM, Qwen3MoeConfig(**SHAPE, **moe)),
        (AutoModelForImageTextToText, seeing),
    ):
        shape, model = ModelShape.of(of), kind.from_config(of)
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_layers == seeing.get_text_config().num_hidden_layers
    assert shape.tower_parameters == sum(parameter.numel() for parameter in model.model.visual.parameters())


def test_what_a_layer_saves_is_what_autograd_keeps():
    config = Qwen2Config(**SHAPE, intermediate_size=160)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").model
    layer, tokens = model.layers[1], 256
    states = torch.randn(1, tokens, 64, requires_grad=True)
    positions = model.rotary_emb(states, torch.arange(tokens)[None])
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *positions)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_square = tensor.shape[-1] == tokens  # eager attention keeps its scores, and fused kernels do not
        if storage.data_ptr() not in own and not is_square:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(states, position_embeddings=positions, attention_mask=None)
    predicted = ModelShape.of(config).saved_numbers(4, 1) * tokens
    assert predicted == pytest.approx(sum(kept.values()), rel=0.15)


def sizes_of(phase: Any) -> dict[str, float]:
    return {part.name: part.num_bytes for part in phase.parts}


def config(*overrides: str, name: str = "grpo_math_1B") -> Any:
    return load_config(MASTERS[name.partition("_")[0]], CONFIGS / f"{name}.yaml", list(overrides))


@pytest.fixture
def seven_billion(tmp_path: Path) -> Path:
    shape = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    Qwen2Config(**shape, num_attention_heads=28, num_key_value_heads=4).save_pretrained(tmp_path)
    return tmp_path


def test_ranks_share_weights_and_each_kind_of_device_has_a_peak_that_names_a_key(seven_billion):
    model = ModelShape.of(setup.local_config(config(f"policy.model_name={seven_billion}").policy))
    assert model.parameters == pytest.approx(7.62e9, rel=0.01)
    machine, peaks = Machine(is_gpu=True, memory=80e9), {}
    for gpus in (1, 8):
        small = "policy.sequence_packing.train_mb_tokens=4096", "policy.sequence_packing.logprob_mb_tokens=4096"
        phases = setup.phases_of(config(f"cluster.gpus_per_node={gpus}", *small), model, machine)
        [parts] = [sizes_of(phase) for phase in phases if phase.name == "train"]
        assert parts["parameters"] == 4 * model.parameters / gpus
        assert parts["optimizer state"] == 8 * model.parameters / gpus
        peaks[gpus] = describe_memory(phases, machine)[-1]
    assert "IT DOES NOT FIT, in train; most of it is optimizer state: lower it with more training ranks" in peaks[1]
    assert "IT DOES NOT FIT" not in peaks[8]
    own = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 4}}"
    lines = describe_memory(setup.phases_of(config(own, "cluster.gpus_per_node=8"), model, machine), machine)
    assert [line.split("  ")[0] for line in lines[-2:]] == ["peak of training", "peak of generation"]


def test_experts_are_sharded_once_and_a_rank_with_more_rows_needs_more(tmp_path):
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    shape = {"vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    Qwen3MoeConfig(**shape, **experts, num_key_value_heads=4).save_pretrained(tmp_path)
    cfg = config(
        f"policy.model_name={tmp_path}", "cluster.gpus_per_node=8", "policy.dtensor_cfg.expert_parallel_size=4"
    )
    model, machine = ModelShape.of(setup.local_config(cfg.policy)), Machine(is_gpu=True, memory=80e9)
    [parts] = [sizes_of(phase) for phase in setup.phases_of(cfg, model, machine) if phase.name == "train"]
    assert parts["parameters"] == 4 * model.parameters / 8
    lines = setup.memory_lines(cfg)
    [even] = [line.split() for line in lines if line.startswith("  train ")]
    [uneven] = [line for line in lines if "loaded evenly" in line]
    skewed = re.search(r"get 2 times as many rows, it has ([\d.]+) GB in train", uneven)
    assert skewed is not None and float(skewed[1]) > float(even[1]) * (1.0 if even[2] == "GB" else 1e-3)


def test_a_plan_fits_or_says_what_is_missing(seven_billion):
    asked = f"policy.model_name={seven_billion}", "policy.max_total_sequence_length=4096"
    cfg = config(*asked)
    plan = setup.propose_layout(cfg, "8xH100")
    assert "policy.dtensor_cfg.tensor_parallel_size=1" in plan and "cluster.gpus_per_node=8" in plan
    overrides = [line.strip() for line in plan.splitlines() if "=" in line and " " not in line.strip()]
    assert config(*asked, *overrides)
    dynamic = *asked, "policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false"
    plan = setup.propose_layout(config(*dynamic), "8xH100")
    assert config(*dynamic, *(line.strip() for line in plan.splitlines() if line.startswith("  policy.")))
    split = config(*asked, "cluster.gpus_per_node=8", "policy.dtensor_cfg.context_parallel_size=8")
    assert "policy.dtensor_cfg.tensor_parallel_size=1" in setup.propose_layout(split, "8xH100")
    [line] = setup.memory_lines(config("policy.model_name=nobody/has-this-model"))
    assert line.startswith("memory: not predicted: config.json ")
    for asked_of, devices, said in (
        (split, "4xH100", "no layout divides the batch"),
        (cfg, "1xL4", r"--plan 1xL4: it does not fit: the least needs \d+ GB of each GPU"),
        (cfg, "8xZ9", "memory of 'NVIDIA Z9' is not known; known are A100"),
    ):
        with pytest.raises(ConfigError, match=said):
            setup.propose_layout(asked_of, devices)


@pytest.mark.parametrize("devices", ["H100", "0xH100", "4x8", "4x8x", "99999x8xH100"])
def test_a_plan_is_for_nodes_and_gpus_of_a_kind(devices, seven_billion):
    with pytest.raises(ConfigError, match="write nodes x GPUs of each x kind"):
        setup.propose_layout(config(f"policy.model_name={seven_billion}"), devices)


@pytest.mark.parametrize(
    ("name", "asked", "phases"),
    [
        ("dpo", ["policy"], {"logprobs", "train", "update"}),
        ("ppo_math_1B", ["policy", "value"], {"value train", "generation"}),
        ("distillation_math", ["policy", "teacher"], {"teacher logprobs", "train"}),
    ],
)
def test_every_algorithm_is_planned_with_all_its_models(seven_billion, name, asked, phases):
    cfg = config(*(f"{section}.model_name={seven_billion}" for section in asked), name=name)
    plan = setup.propose_layout(cfg, "8xH100")
    assert phases <= {line.strip().split("  ")[0] for line in plan.splitlines()}
    assert not re.search(r"teacher (train|logprobs.*optimizer)", plan), "a teacher is not trained"
    assert setup.memory_lines(cfg)[0].startswith("memory of a GPU")


def test_pairs_take_two_sequences_and_a_reference_stays_on_the_host():
    def parts_of(name: str, *overrides: str) -> dict[str, float]:
        """Of a training rank on a CPU."""
        cfg = config("policy.sequence_packing.enabled=false", *overrides, name=name)
        return sizes_of(setup.phases_of(cfg, ModelShape.of(setup.local_config(cfg.policy)), Machine(is_gpu=False))[1])

    key = "dpo.precompute_reference_logprobs"
    ahead, later = (parts_of("dpo_cpu", f"{key}={value}") for value in ("true", "false"))
    assert later.pop("reference weights") == later["parameters"] and later == ahead
    parts = parts_of("rm_cpu")
    assert parts["activations"] > 0 and "logit tiles" not in parts, "a reward model has no vocabulary"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("grpo_math_cpu", ["policy", "engine"]),
        ("ppo_math_cpu", ["policy", "engine", "value"]),
        ("distillation_math_cpu", ["policy", "engine", "teacher"]),
    ],
)
def test_on_cpus_each_kind_of_process_has_a_peak_and_all_are_added_up(name, kinds):
    cfg = config(name=name)
    lines = setup.memory_lines(cfg)
    peaks = [line.split() for line in lines if line.startswith("  peak of ")]
    assert [words[2] for words in peaks] == kinds
    [together] = [line.split() for line in lines if line.startswith("  together ")]
    gb = [float(words[3]) / (1000 if words[4].startswith("MB") else 1) for words in peaks]
    assert float(together[1]) == pytest.approx(sum(gb) + 1.5, abs=0.2)


def test_an_engine_on_a_cpu_keeps_packed_weights_beside_those_it_loaded():
    cfg = config(name="grpo_math_cpu")
    tied, untied = (
        ModelShape.of(Qwen2Config(**SHAPE, intermediate_size=96, tie_word_embeddings=is_tied))
        for is_tied in (True, False)
    )
    assert untied.parameters - tied.parameters == tied.vocab_size * 64
    for model in (tied, untied):  # the input's embedding is not packed, and a tied head is
        engine = sizes_of(predict_memory(cfg.policy, model, Machine(is_gpu=False), num_ranks=1)[-1])
        norms = 64
        assert engine["engine's weights"] == 4 * model.parameters
        assert engine["packed weights"] == 4 * (tied.parameters - norms)


def test_a_draft_is_counted_in_training_and_in_the_engine():
    engine = "+policy.generation.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 3}"
    policy = config("+policy.draft.enabled=true", engine, name="grpo_math_cpu").policy
    model = tiny_model_config("tiny:arithmetic")
    drafts = {"eagle3": (model, DraftHead(LlamaConfig(**draft_config(policy, model))))}
    model = family_config("glm4_moe", first_k_dense_replace=0)
    mesh: Any = SimpleNamespace(expert=None, world=SimpleNamespace(device_type="cpu"))
    drafts["mtp"] = model, PredictionHead(model, torch.float32, mesh)
    for method, (model, draft) in drafts.items():
        policy.generation.vllm_kwargs["speculative_config"]["method"] = method
        number = sum(p.numel() for p in draft.parameters())
        phases = predict_memory(policy, ModelShape.of(model), Machine(is_gpu=False), num_ranks=1)
        assert sizes_of(phases[-1])["engine's draft"] == pytest.approx(4 * number, rel=0.02)
        assert sizes_of(phases[1])["draft"] > 16 * number


@pytest.mark.slow
def test_a_process_takes_the_memory_that_was_predicted():
    command = [sys.executable, "benchmarks/memory.py", "deep", "1"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800, env=environment)
    assert 0.85 <= float(done.stdout.split()[-1]) <= 1.15, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "distillation"])
def test_every_kind_of_process_of_a_run_takes_the_memory_that_was_predicted(tmp_path: Path, name: str):
    lengths = ["policy.max_total_sequence_length=18", "policy.generation.max_new_tokens=10"]
    folders = [f"logger.log_dir={tmp_path}", "checkpointing.enabled=false"]
    command = [sys.executable, "benchmarks/memory_of_runs.py", name, str(CONFIGS / f"{name}_math_cpu.yaml")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command += [*lengths, *folders, f"{name}.max_num_steps=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800, env=environment)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("policy", "generation", "teacher"))]
    assert len(rows) == (3 if name == "distillation" else 2), done.stdout
    assert all(0.85 <= float(row[-1]) <= 1.15 for row in rows), done.stdout


STEPS = """
import ctypes, resource, threading

libc, sizes = ctypes.CDLL(None), (1 << 20, 1 << 24, 1 << 26)
libc.malloc.restype = ctypes.c_void_p

def step():
    blocks = [libc.malloc(ctypes.c_size_t(size)) for size in sizes]
    for block, size in zip(blocks, sizes):
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))

for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=step)  # as Ray calls a worker
    thread.start()
    thread.join()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_third_step_has_the_memory_of_those_before_without_page_faults():
    environment = {**os.environ, **HOST_ENVIRONMENT}
    out = subprocess.run([sys.executable, "-c", STEPS], check=True, env=environment, capture_output=True, text=True)
    first, _, third = map(int, out.stdout.split())  # small objects of the first thread may lie between blocks
    assert 4 * third < first and third < 100, "81 MiB are 40 huge pages, or 20,000 small ones"
