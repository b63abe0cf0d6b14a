"""Mistakes of a user: each gets one message that names the remedy, before anything starts, and nothing is lost."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTJConfig, GPTJForCausalLM

from nemo_rl.algorithms.distillation import prepare_distillation
from nemo_rl.algorithms.dpo import run_dpo
from nemo_rl.algorithms.parts.rollouts import Rollouts
from nemo_rl.algorithms.ppo import prepare_ppo
from nemo_rl.algorithms.run import USER_ERRORS, Run
from nemo_rl.algorithms.supervised import prepare_rows
from nemo_rl.config.loader import load_config
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.data.tiny_model import RECIPES, build_tiny_tokenizer, build_untrained_model
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointIdentityError, CheckpointManager
from nemo_rl.utils.checkpoint.manifest import find_damage
from tests.functional.cli import SMALL
from tests.tables import cases, pattern
from tests.unit.config.run_configs import CONFIGS, MASTERS
from tests.unit.policy.models import save_model

pytestmark = pytest.mark.usefixtures("alone")

PREPARE: dict[str, Callable[[Any], Any]] = dict.fromkeys(("sft", "dpo", "rm"), prepare_rows)
PREPARE |= {"grpo": Rollouts.prepare, "ppo": prepare_ppo, "distillation": prepare_distillation}


def config(kind: str, *overrides: str) -> Any:
    """Of the CPU example of an algorithm."""
    name = f"{kind}_cpu" if PREPARE[kind] is prepare_rows else f"{kind}_math_cpu"
    return load_config(MASTERS[kind], CONFIGS / f"{name}.yaml", list(overrides))


def prepared(kind: str, *overrides: str) -> Any:
    """Everything up to the start of Ray, in this process."""
    return PREPARE[kind](config(kind, *overrides))


def test_a_critic_and_a_teacher_are_prepared_with_the_policy():
    _, value = prepared("ppo")
    assert value.config.num_labels == 1 and value.config.architectures == ["Qwen2ForSequenceClassification"]
    rollouts, teachers = prepared("distillation")
    assert teachers.checked["teacher"].vocab_size == 264 and teachers.checked["teacher"].tasks == {"arithmetic"}
    assert {"teacher.model", "policy.model", "distillation"} <= rollouts.saves.identity.keys()


REFUSED = """
grpo & data.train.dataset_name=missing.jsonl -> dataset file 'missing.jsonl' does not exist
grpo & data.train.dataset_name=one.jsonl -> has 1 prompts, fewer than one step takes: set grpo.num_prompts
grpo & FOUR_ROWS & data.max_input_seq_length=3
    -> all prompts ... training data are longer than data.max_input_seq_length=3 tokens: 4 of them have
grpo & FOUR_ROWS & data.default.prompt_file=no.txt -> 'no.txt' does no
grpo & data.train.dataset_name=arithmetics -> did you mean arithmetic
grpo & data.train={dataset_name: arithmetic, kwargs: {samples: 3}} -> num_samples, max_operand, operators; samp
grpo & data.default.processor=math_processor -> did you mean math_data_processor
grpo & +env.mine={type: nowhere.envs:MyEnv} & data.default.env_name=mine -> no module 'nowhere' can be imported
grpo & policy.model_name=tiny:arithmetics -> did you mean tiny:arithmetic
grpo & policy.model_name=./taken -> './taken' is no model directory: it is a file. Expected are config.json
grpo & policy.model_name=./no/such -> policy.model_name: directory './no/such' does not exist
grpo & policy.max_total_sequence_length=4096 -> the 2048 positions ... policy.max_total_sequence_length=2048 or
grpo & cluster.cpu_workers_per_node=8 & policy.train_micro_batch_size=32
    & policy.generation.vllm_cfg.tensor_parallel_size=8
    -> does not divide the 4 attention heads of 'tiny:arithmetic'; these would: 1, 2, 4
grpo & policy.optimizer.name=torch.optim.Adamm -> policy.optimizer.name 'torch.optim.Adamm': module
grpo & policy.optimizer.kwargs.lr=abc -> policy.optimizer.kwargs: AdamW refuses ... 'lr': 'abc'
grpo & +policy.hf_config_overrides={rope_theta: 500} -> has no rope_theta, so ... rope_parameters: {rope_type
grpo & checkpointing.checkpoint_dir=taken/c -> checkpointing.checkpoint_dir: cannot write to ' ... taken/c'
grpo & logger.log_dir=taken -> logger.log_dir: cannot write to 'taken'
grpo & +env.reward_model={model_name: rm} & data.default.env_name=reward_model
    -> reward model env.reward_model, ... set processor: conversation_processor
grpo & data.train.dataset_name=tests.jsonl & +env.code={num_workers: 1} & data.default.env_name=code & SMALL
    & data.default.processor=code_data_processor
    -> dataset 'tests' is for the code environment env.code, and has a list as input of a test, where one text
ppo & value.model_name=./other -> value.model_name: ... other' has another vocabulary than the policy
distillation & teacher.model_name=./other -> teacher.tokenizer.name: 2 of the student's 264 tokens differ for the
    ... teacher ... token ... : student '1', teacher '2'
distillation & teacher=null & +teachers={only: {model_name: ./other}} -> teachers.only.tokenizer.name: 2 of the student
dpo & data.train.dataset_name=helpsteer3 -> did you mean HelpSteer3
dpo & data.train.dataset_name=arithmetic -> row arithmetic:0 has no column 'chosen', which processor 'pref
sft & data.train.dataset_name=arithmetic_preference -> holds preferences: it is for the section data of DPO
sft & +data.default.processor=sft_procesor -> did you mean sft_processor
dpo & +data.default.processor=sft_processor -> has no column 'messages', which processor 'sft_processor'
dpo & +data.train.streaming=true -> dataset 'arithmetic_preference' cannot be streamed: it is generated
sft & policy.train_global_batch_size=20000 -> set policy.train_global_batch_size (now 20000) to at most
sft & +policy.reward_model_cfg={enabled: true} -> policy.reward_model_cfg.enabled: is for reward models
rm & policy.reward_model_cfg.enabled=false -> policy.reward_model_cfg: a reward model is trained with
rm & policy.reward_model_cfg.reward_model_type=regression -> reward_model_type: bradley_terry}
sft & data.validation=null -> set sft.val_period=0 and sft.val_at_start=false and checkpointing.metric_name=null
sft & +data.max_input_seq_length=96 -> 96 is more than policy.max_total_sequence_length=48; set data.max_in
sft & cluster.cpu_workers_per_node=2 & policy.train_global_batch_size=33
    -> 33 cannot be shared by 2 training ranks; make it a multiple of 2
dpo & policy.sequence_packing.train_mb_tokens=64
    -> 64 is too little ... pairs of the longest sequences would fit into no micro-batch; ... =96
sft & policy.sequence_packing.train_mb_tokens=32 -> the longest sequences would fit into no micro-batch
dpo & dpo.precompute_reference_logprobs=true & +data.train.streaming=true
    -> needs all rows before the first step; set dpo.
sft & checkpointing.metric_name=val:val_los -> produces val:val_los; did you mean val:val_loss?
sft & checkpointing.metric_name=train:num_too_long -> no run with this configuration produces train:num_to
dpo & checkpointing.metric_name=val:accuracy -> there are: val_loss, validation-default_accuracy,
rm & checkpointing.metric_name=val:validation-default_preference_loss -> no run with this configuration
sft & +sft.early_stopping={metric_name: 'val:val_los'} -> did you mean val:val_loss?
sft & +sft.early_stopping={metric_name: val_loss} -> must be "val:<metric>" or null, e.g. "val:val_loss"
dpo & +dpo.early_stopping={metric_name: 'val:val_loss', patience: null} -> so nothing would stop the run
sft & sft.val_period=0 & checkpointing.metric_name=null & +sft.early_stopping={metric_name: 'val:val_loss'}
    -> val:val_loss needs validation; set sft.val_period= ... or sft.early_stopping.metric_name=null
"""
FOUR_ROWS = " & ".join(("data.train.dataset_name=four.jsonl", *SMALL))


def exchange_two_tokens(folder: Path) -> None:
    """The tiny model, whose vocabulary has "1" and "2" in each other's place."""
    shutil.copytree(resolve_model("tiny:arithmetic"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(("given", "told"), cases(REFUSED, {"FOUR_ROWS": FOUR_ROWS, "SMALL": " & ".join(SMALL)}))
def test_names_sizes_folders_and_combinations(tmp_path, given, told):
    """A case begins with the algorithm; the overrides follow."""
    (tmp_path / "taken").touch()
    for name, number in (("one", 1), ("four", 4)):
        (tmp_path / f"{name}.jsonl").write_text('{"input": "1+1=", "output": "2"}\n' * number)
    test = {"input": "1+1=", "output": "2", "tests": [{"input": [["1"]], "output": "2"}]}
    (tmp_path / "tests.jsonl").write_text((json.dumps(test) + "\n") * 4)
    if "./other" in given[-1]:
        exchange_two_tokens(tmp_path / "other")
    with pytest.raises(USER_ERRORS, match=pattern(told)):
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


def norm_missing(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def torch_shard_missing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "pytorch_model-2.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def call_in_pickle(model: Path) -> None:
    torch.save({"model.norm.weight": print}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def renamed(name: str) -> Callable[[Path], None]:
    """The weights under another name."""

    def edit(model: Path) -> None:
        (model / "model.safetensors").rename(model / name)

    return edit


def adapter(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-1.5B"}))
    save_file({}, model / "adapter_model.safetensors")


SPOILT: dict[str, Callable[[Path], None]] = {
    "no model directory: it has no config.json": without("config.json"),
    "has no weights": without("model.safetensors"),
    "model.safetensors is damaged": cut_in_half,
    "no chat template: set policy.tokenizer.chat_template": without("chat_template.jinja"),
    "a 'vit' model, not a causal language model": edited("config.json", model_type="vit"),
    "model.embed_tokens.weight [264, 128] instead of [100, 128]": edited("config.json", vocab_size=100),
    "6 tensors of another shape: ... gate_proj ... [256, 128] inst": edited("config.json", intermediate_size=192),
    "contradicts itself: ... num_hidden_layers ... (3) must be equal": edited("config.json", num_hidden_layers=3),
    "do not match its config.json ... \n  1 tensors missing: model.norm.": norm_missing,
    "names 1 files, of which 1 are missing: model-00002-of-00002.safetensors; copy them too": shard_missing,
    "names 1 files, of which 1 are missing: pytorch_model-2.bin; copy them too": torch_shard_missing,
    "pytorch_model.bin is cut short, or holds more than tensors ... write its tensors as model.safe": call_in_pickle,
    "has its weights in pickles that are not read (model.pt): load it with torch and write": renamed("model.pt"),
    "has its weights in the format GGUF (model.gguf): name a file, such as ": renamed("model.gguf"),
    "is an adapter and no model: name the model 'Qwen/Qwen2.5-1.5B', with the adapter in dtensor_cfg.lora_cfg": adapter,
    "' has no vocabulary (merges.txt, tokenizer.json, vocab.json); copy the tokenizer's": without("tokenizer.json"),
    "does not know ... tokenizer_config.json does not name": edited("tokenizer_config.json", pad_token=None),
}


@pytest.mark.parametrize("told", SPOILT)
def test_model_directories(tmp_path, told):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny:arithmetic"), model)
    assert prepared("grpo", f"policy.model_name={model}").model.model_path == str(model)
    SPOILT[told](model)
    with pytest.raises(ValueError, match=pattern(told)):
        prepared("grpo", f"policy.model_name={model}")


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
gemma2 & policy.padding_free=true -> policy.padding_free=true: ... set policy.padding_free=null, or
tiny & RANKS=2 & PART.pipeline_parallel_size=2 -> shares one matrix between its embeddings ... and its head
tiny & RANKS=2 & PART.expert_parallel_size=2 -> dense model and has no experts to spread; set ... =1
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
        prepared("grpo", *model, *overrides)


def test_a_checkpoint_without_its_optimizer_or_of_another_run_is_refused_with_every_difference():
    info, manager = {"identity": prepared("grpo").saves.identity}, CheckpointManager(config("grpo").checkpointing)
    manager.start_save(10, lambda directory: None, info, "", {}).finish()
    with pytest.raises(CheckpointError, match=r"step_10 was saved without the optimizer \(checkpointing\.save_optimi"):
        prepared("grpo")

    def write(directory: Path) -> None:
        (directory / "policy" / "optimizer").mkdir(parents=True)
        shutil.copytree(resolve_model("tiny:arithmetic"), directory / "policy" / "weights")

    written = manager.start_save(20, write, info, "", {}).finish()
    prepared("grpo")
    told = r"(?s)data\.train.*grpo\.seed: the checkpoint has 42, this run 7"
    with pytest.raises(CheckpointIdentityError, match=told):
        prepared("grpo", "grpo.seed=7", "data.train={dataset_name: arithmetic, kwargs: {num_samples: 500}}")
    assert find_damage(written) is None


# -- rows to learn from

FOUR = ("policy.train_global_batch_size=4", "policy.train_micro_batch_size=4")
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
# Templates that know the roles user and assistant: one refuses others, one leaves them out.
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
DEAF = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE = '+policy.tokenizer.chat_template="{}"'.format
MINE = "data.validation=[{dataset_name: arithmetic, split: validation}, {name: mine, dataset_name: rows.jsonl}]"


def turns(*roles: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": "2"} for role in roles]}


def rows(folder: Path, *content: object) -> str:
    """The override that trains on these rows, of a file rows.jsonl."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in content))
    return "data.train.dataset_name=rows.jsonl"


TEACHER = turns("user", "teacher", "assistant")
BAD_ROWS: list[tuple[str, dict[str, object], tuple[str, ...], str]] = [
    ("sft", turns("assistant", "user"), (), "data.train: not one of the 4 rows ... 4 ends_with_user): row rows:0, col"),
    ("sft", turns("user", "assistant"), ("+sft.roles_to_train_on=[helper]",), "no_loss_tokens) ... ['helper']"),
    ("sft", turns("user"), (MINE, "data.train.dataset_name=arithmetic"), "validation set 'mine': not one of the 4 ro"),
    ("sft", TEACHER, (TEMPLATE(STRICT),), "row rows:0:  ... no role teacher"),
    ("sft", TEACHER, (TEMPLATE(DEAF),), "row rows:0:  ... 'teacher'"),
    ("sft", {"question": "1"}, (), "dataset 'rows' has no column 'input' (input_key); its columns are: q"),
    ("rm", {**PAIR, "rejected": "2"}, (), "(4 identical_answers): row rows:0, column 'rejected': the same answer as"),
    ("rm", {**PAIR, "rejected": "3" * 60}, (), "(4 too_long): row rows:0, column 'rejected': ... tokens, more than"),
    ("rm", {"prompt": "1", "chosen": "2"}, (), "has no column 'rejected' (rejected_key); its columns are: pr"),
]


@pytest.mark.parametrize(("kind", "row", "overrides", "told"), BAD_ROWS)
def test_conversations_and_pairs(tmp_path, kind, row, overrides, told):
    with pytest.raises(ValueError, match=pattern(told)):
        prepared(kind, *FOUR, rows(tmp_path, *[row] * 4), *overrides)


def test_some_bad_rows_are_a_counted_warning(tmp_path, caplog):
    bad = [{**PAIR, "rejected": "2"}, {**PAIR, "rejected": "2"}, {**PAIR, "chosen": ""}]
    with caplog.at_level(logging.WARNING):
        prepared("dpo", *FOUR, rows(tmp_path, *[PAIR] * 5, *bad))
    (warning,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "data.train: 3 of the 8 rows tried are left out of training (2 identical_answers, 1 empty_answer)" in warning
    assert "row rows:5, column 'rejected'" in warning and "row rows:7, column 'chosen'" in warning


def test_the_set_that_is_split_off_has_metrics_beside_named_ones():
    """`split_validation_size` makes the set `default`, whatever other sets there are."""
    more = "data.validation=[{name: more, dataset_name: arithmetic, split: validation}]"
    for name in ("default", "more"):
        metric = f"checkpointing.metric_name=val:validation-{name}_loss"
        config("sft", "+data.train.split_validation_size=0.1", more, metric)


def test_the_run_ends_with_status_2_and_one_message(tmp_path, capsys, monkeypatch):
    bad = config("dpo", *FOUR, rows(tmp_path, *[{**PAIR, "rejected": "2"}] * 4))
    monkeypatch.setattr(Run, "start", lambda *_: pytest.fail("nothing may start"))
    assert run_dpo(bad) == 2
    text = "".join(capsys.readouterr())
    assert "ERROR data.train: not one of the 4 rows tried" in text.replace("\n", " ") and "Traceback" not in text
    assert not (tmp_path / "logs").exists() or not list((tmp_path / "logs").iterdir())
