"""The reward model environment on a tiny random model, without Ray."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForSequenceClassification, Qwen2_5_VLConfig, Qwen2Config

from nemo_rl.config.errors import ConfigError
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.config import RewardModelEnvironmentConfig
from nemo_rl.environments.reward_model import RewardModelEnvironment
from nemo_rl.models.policy.config import TokenizerConfig
from tests.conversations import answered, sampled
from tests.tables import named
from tests.unit.config.run_configs import build

PROBLEMS = ["1+1", "12-3", "7+8+9", "5"]
ANSWERS = ["2", "nine, I think", "24", "5"]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1, "initializer_range": 0.3}
    tokens = {"vocab_size": len(build_tiny_tokenizer()), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    AutoModelForSequenceClassification.from_config(Qwen2Config(**sizes, **heads, **tokens)).save_pretrained(directory)
    build_tiny_tokenizer().save_pretrained(directory)
    return directory


def config(name: Path | str, **changes: Any) -> RewardModelEnvironmentConfig:
    settings = {"tokenizer": TokenizerConfig(name=str(name)), "precision": "float32", "batch_size": 3}
    return RewardModelEnvironmentConfig(model_name=str(name), **(settings | changes))


def asked(system_prompt_file: Path | None = None) -> tuple[list[Any], list[Any]]:
    """The message logs and metadata of answered prompts, as an episode sends them."""
    spec = TaskDataSpec(task_name="t", system_prompt_file=system_prompt_file)
    process, logs, metadata = find_processor("conversation_processor"), [], []
    for number, (problem, answer) in enumerate(zip(PROBLEMS, ANSWERS, strict=True)):
        datum = process({"problem": problem}, spec, build_tiny_tokenizer(), 64, number)
        log = [{"role": m["role"], "content": m["content"]} for m in datum["message_log"]]
        logs.append([*log, sampled(answer)])
        metadata.append(datum["extra_env_info"])
    return logs, metadata


@torch.no_grad()
def one_by_one(directory: Path) -> torch.Tensor:
    """Scores of the templated conversations, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    texts = [f"<|user|>{asked}<eos><|assistant|>{said}<eos>" for asked, said in zip(PROBLEMS, ANSWERS, strict=True)]
    tokenized = [build_tiny_tokenizer()(text, return_tensors="pt") for text in texts]
    return torch.stack([model(**inputs).logits[0, 0] for inputs in tokenized])


def test_reward_is_the_score_of_the_row_and_the_answer_without_a_system_prompt(model_directory, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.")
    returned = RewardModelEnvironment(config(model_directory).model_dump()).step(*asked(tmp_path / "system.txt"))
    want = one_by_one(model_directory)
    assert want.std() > 0.1, "scores that differ"
    torch.testing.assert_close(returned.rewards, want, rtol=1e-5, atol=1e-5)
    assert returned.terminateds.tolist() == [1.0] * 4
    squashed = RewardModelEnvironment(config(model_directory, sigmoid=True)).step(*asked())
    torch.testing.assert_close(squashed.rewards, want.sigmoid(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("value", "num_ends"), [("text", 2), ("tokens", 3)])
def test_a_question_ends_where_the_template_ends_it(model_directory, value, num_ends):
    settings = TokenizerConfig(name=str(model_directory), control_tokens_in_messages=value)
    environment = RewardModelEnvironment(config(model_directory, tokenizer=settings))
    assert environment.tokenize(answered("4", "q<eos>")).count(environment.tokenizer.eos_token_id) == num_ends


@pytest.mark.parametrize("file_format", ["torch_save", "safetensors", "consolidated"])
def test_a_checkpoint_of_a_run_is_a_reward_model(model_directory, tmp_path, file_format):
    policy = tmp_path / "step_7" / "policy"
    model = AutoModelForSequenceClassification.from_pretrained(model_directory, dtype=torch.float32)
    build_tiny_tokenizer().save_pretrained(policy / "tokenizer")
    model.config.save_pretrained(policy)
    if file_format == "consolidated":
        model.save_pretrained(policy / "weights" / "consolidated")
    elif file_format == "safetensors":
        writer = dcp.HuggingFaceStorageWriter(path=str(policy / "weights"), save_distributed=True)
        dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    else:
        dcp.save(model.state_dict(), checkpoint_id=policy / "weights", no_dist=True)
    want = one_by_one(model_directory)
    for name in (tmp_path / "step_7", policy):
        torch.testing.assert_close(RewardModelEnvironment(config(name)).step(*asked()).rewards, want)
    other = RewardModelEnvironment(config(model_directory, checkpoint_path=str(tmp_path / "step_7")))
    torch.testing.assert_close(other.step(*asked()).rewards, want)
    with pytest.raises(ValueError, match="is no checkpoint; give a step_N directory"):
        RewardModelEnvironment(config(model_directory, checkpoint_path=str(tmp_path)))


CLASSIFIER, SEEING = "Qwen2ForSequenceClassification", "Qwen2_5_VLForSequenceClassification"


@named(
    "made, message",
    {
        "three labels": (Qwen2Config(architectures=[CLASSIFIER], num_labels=3), f"{CLASSIFIER} with 3 labels"),
        "no classifier": (Qwen2Config(architectures=["Qwen2ForCausalLM"]), "no reward model but Qwen2ForCausalLM"),
        "images": (
            Qwen2_5_VLConfig(architectures=[SEEING], num_labels=1),
            "sees images; this environment scores texts",
        ),
    },
)
def test_what_is_no_reward_model_is_refused(made, message, tmp_path):
    build_tiny_tokenizer().save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        RewardModelEnvironment(config(tmp_path))


def test_conversations_that_cannot_be_scored_are_refused(model_directory):
    environment = RewardModelEnvironment(config(model_directory, max_total_sequence_length=12))
    logs, metadata = asked()
    assert len(environment.step(logs[:1], metadata[:1]).rewards) == 1
    with pytest.raises(ValueError, match=r"of \d+ tokens is longer than the 12"):
        environment.step(logs, metadata)
    with pytest.raises(ValueError, match="processor: conversation_processor"):
        environment.step(logs, [{"ground_truth": "2"}] * 4)
    strict = TokenizerConfig(name=str(model_directory), chat_template="{{ raise_exception('only poems') }}")
    with pytest.raises(ValueError, match=r"refuses the roles user, assistant: only poems"):
        RewardModelEnvironment(config(model_directory, tokenizer=strict)).step(logs, metadata)


def test_its_section_is_read_and_what_cannot_be_is_refused_by_name():
    section = "+env.reward_model={{model_name: rm, enabled: true, dtensor_cfg: {{tensor_parallel_size: {}}}}}".format
    loaded = build(section(1)).env["reward_model"]
    assert isinstance(loaded, RewardModelEnvironmentConfig) and loaded.tokenizer.name == "rm"
    with pytest.raises(ConfigError, match=r"env\.reward_model\.dtensor_cfg"):
        build(section(2))
