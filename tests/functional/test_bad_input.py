"""Mistakes of a user: each gets one message that names the remedy, early, and nothing is lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import GPTJConfig, GPTJForCausalLM

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.setup.launch import USER_ERRORS
from nemo_rl.algorithms.setup.rollouts import RolloutInputs
from nemo_rl.algorithms.setup.rollouts import prepare_rollouts as prepare
from nemo_rl.config.loader import load_config
from nemo_rl.data.tiny_model import RECIPES, build_tiny_tokenizer, build_untrained_model, resolve_model
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointIdentityError, CheckpointManager
from nemo_rl.utils.checkpoint.manifest import find_damage
from tests.functional.cli import CPU_CONFIG, SMALL
from tests.tables import cases, pattern
from tests.unit.policy.models import save_model

pytestmark = pytest.mark.usefixtures("alone")


def prepared(*overrides: str) -> RolloutInputs:
    """Everything up to the start of Ray, in this process."""
    return prepare(load_config(GRPOMasterConfig, CPU_CONFIG, list(overrides)))


REFUSED = """
data.train.dataset_name=missing.jsonl -> dataset file 'missing.jsonl' does not exist
data.train.dataset_name=one.jsonl -> has 1 prompts, fewer than one step takes: set grpo.num_prompts
FOUR_ROWS & data.max_input_seq_length=3
    -> all prompts ... training data are longer than data.max_input_seq_length=3 tokens: 4 of them have
FOUR_ROWS & data.default.prompt_file=no.txt -> 'no.txt' does no
data.train.dataset_name=arithmetics -> did you mean arithmetic
data.train={dataset_name: arithmetic, kwargs: {samples: 3}} -> num_samples, max_operand, operators; samp
data.default.processor=math_processor -> did you mean math_data_processor
+env.mine={type: nowhere.envs:MyEnv} & data.default.env_name=mine -> no module 'nowhere' can be imported
policy.model_name=tiny:arithmetics -> did you mean tiny:arithmetic
policy.model_name=./no/such -> policy.model_name: directory './no/such' does not exist
policy.max_total_sequence_length=4096 -> the 2048 positions ... policy.max_total_sequence_length=2048 or
cluster.cpu_workers_per_node=8 & policy.train_micro_batch_size=32 & policy.generation.vllm_cfg.tensor_parallel_size=8
    -> does not divide the 4 attention heads of 'tiny:arithmetic'; these would: 1, 2, 4
policy.optimizer.name=torch.optim.Adamm -> policy.optimizer.name 'torch.optim.Adamm': module
policy.optimizer.kwargs.lr=abc -> policy.optimizer.kwargs: AdamW refuses ... 'lr': 'abc'
+policy.hf_config_overrides={rope_theta: 500} -> has no rope_theta, so ... rope_parameters: {rope_type
checkpointing.checkpoint_dir=taken/c -> checkpointing.checkpoint_dir: cannot write to ' ... taken/c'
logger.log_dir=taken -> logger.log_dir: cannot write to 'taken'
+env.reward_model={model_name: rm} & data.default.env_name=reward_model
    -> reward model env.reward_model, ... set processor: conversation_processor
"""


FOUR_ROWS = " & ".join(("data.train.dataset_name=four.jsonl", *SMALL))


@pytest.mark.parametrize(("given", "told"), cases(REFUSED, {"FOUR_ROWS": FOUR_ROWS}))
def test_names_sizes_and_folders(tmp_path, given, told):
    (tmp_path / "taken").touch()
    for name, number in (("one", 1), ("four", 4)):
        (tmp_path / f"{name}.jsonl").write_text('{"input": "1+1=", "output": "2"}\n' * number)
    with pytest.raises((*USER_ERRORS, FileNotFoundError), match=pattern(told)):
        prepared(*given)


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def edited(file: str, **changes: object) -> Callable[[Path], None]:
    """`None` removes a key."""

    def edit(model: Path) -> None:
        content = json.loads((model / file).read_text()) | changes
        (model / file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return edit


def cut_in_half(model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def shard_missing(model: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def without_tensor(name: str) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        del tensors[name]
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return edit


SPOILT: dict[str, Callable[[Path], None]] = {
    "no model directory: it has no config.json": without("config.json"),
    "has no weights": without("model.safetensors"),
    "model.safetensors is damaged": cut_in_half,
    "no chat template: set policy.tokenizer.chat_template": without("chat_template.jinja"),
    "a 'vit' model, not a causal language model": edited("config.json", model_type="vit"),
    "model.embed_tokens.weight [264, 128] instead of [100, 128]": edited("config.json", vocab_size=100),
    "6 tensors of another shape: ... gate_proj ... [256, 128] inst": edited("config.json", intermediate_size=192),
    "contradicts itself: ... num_hidden_layers ... (3) must be equal": edited("config.json", num_hidden_layers=3),
    "do not match its config.json ... \n  1 tensors missing: model.norm.": without_tensor("model.norm.weight"),
    "names 1 files, of which 1 are missing: model-00002-of-00002.safetensors; copy them too": shard_missing,
    "does not know ... tokenizer_config.json does not name": edited("tokenizer_config.json", pad_token=None),
}


@pytest.mark.parametrize("told", SPOILT)
def test_model_directories(tmp_path, told):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny:arithmetic"), model)
    assert prepared(f"policy.model_name={model}").model.model_path == str(model)
    SPOILT[told](model)
    with pytest.raises(ValueError, match=pattern(told)):
        prepared(f"policy.model_name={model}")


# -- layouts, packing and adapters, by what the model is


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> Path:
    """A folder of small models, each under the name of its family, with the tiny tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("families"), build_tiny_tokenizer()
    save_model("gemma2", folder / "gemma2", vocab_size=len(tokenizer))
    save_model("qwen2-tied", folder / "narrow")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 16}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    GPTJForCausalLM(GPTJConfig(**sizes, **tokens)).save_pretrained(folder / "gptj")
    build_untrained_model(RECIPES["arithmetic-moe"], tokenizer).save_pretrained(folder / "moe")
    for path in folder.iterdir():
        tokenizer.save_pretrained(path)
    return folder


# One of each check: the others of adapters, plans and stages are in tests/unit/policy.
OF_MODELS = """
narrow -> policy.tokenizer.name: ... has 264 tokens, more than the 97 of ' ... narrow'
gptj & RANKS=2 & PART.tensor_parallel_size=2 -> no tensor-parallel plan is known for GPTJ ... write one and
tiny & RANKS=4 & PART.tensor_parallel_size=4 -> not divide the 2 key/value heads ... these would: 1, 2
gemma2 & RANKS=2 & PART.context_parallel_size=2 -> cannot be cut over ranks, because ... soft-capped
gemma2 & policy.sequence_packing.enabled=true
    -> cannot lie end to end, because ... soft-capped ... dynamic_batching.enabled=true
gemma2 & policy.padding_free=true -> policy.padding_free=true: ... set it to null or false
tiny & RANKS=2 & PART.pipeline_parallel_size=2 -> shares one matrix between its embeddings ... and its head
tiny & RANKS=2 & PART.expert_parallel_size=2 -> dense model and has no experts to spread; set it to 1
moe & RANKS=8 & PART.expert_parallel_size=8 -> not divide the 4 experts ... these would: 1, 2, 4
tiny & checkpointing.metric_name=train:moe/router_entropy -> is a dense model and has no metrics of exper
tiny & LORA.enabled=true & LORA.match_all_linear=false & LORA.target_modules=[q_projj]
    -> matches no linear ... mean 'q_proj'
tiny & LORA.enabled=true & LORA.adapter_path=nowhere -> nowhere is no adapter in PEFT's format: adapter_config
"""
SHORT = {
    "RANKS": "policy.train_micro_batch_size=32 & cluster.cpu_workers_per_node",
    "PART": "policy.dtensor_cfg",
    "LORA": "policy.dtensor_cfg.lora_cfg",
}


@pytest.mark.parametrize(("given", "told"), cases(OF_MODELS, SHORT))
def test_layouts_and_adapters_that_the_model_cannot_have(families, given, told):
    """A case begins with a family of models; the overrides follow."""
    family, *overrides = given
    model = () if family == "tiny" else (f"policy.model_name={families / family}",)
    with pytest.raises(ValueError, match=pattern(told)):
        prepared(*model, *overrides)


def test_a_checkpoint_without_its_optimizer_or_of_another_run_is_refused_with_every_difference(tmp_path):
    config = load_config(GRPOMasterConfig, CPU_CONFIG, [])
    info, manager = {"identity": prepare(config).identity}, CheckpointManager(config.checkpointing)
    manager.start_save(10, lambda directory: None, info, "", {}).finish()
    with pytest.raises(CheckpointError, match=r"step_10 was saved without the optimizer \(checkpointing\.save_optimi"):
        prepared()

    def write(directory: Path) -> None:
        (directory / "policy" / "optimizer").mkdir(parents=True)
        shutil.copytree(resolve_model("tiny:arithmetic"), directory / "policy" / "weights")

    written = manager.start_save(20, write, info, "", {}).finish()
    prepared()
    told = r"(?s)data\.train.*grpo\.seed: the checkpoint has 42, this run 7"
    with pytest.raises(CheckpointIdentityError, match=told):
        prepared("grpo.seed=7", "data.train={dataset_name: arithmetic, kwargs: {num_samples: 500}}")
    assert find_damage(written) is None
