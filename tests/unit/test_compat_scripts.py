"""Scripts written for NeMo RL: what replaces them is said at their first call that cannot be, and their pieces work."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from nemo_rl.algorithms import dpo, grpo, supervised
from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.compat import ABSENT
from nemo_rl.data.rows import processors
from nemo_rl.data.tiny_model import RECIPES, TinyVisionRecipe, build_processor, build_tiny_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.math.environment import MathEnvironment
from tests.unit.test_compat import theirs

CONFIGS = Path(__file__).parents[2] / "examples/configs"

START = """
import argparse
from nemo_rl.algorithms.utils import get_tokenizer, set_seed
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from nemo_rl.utils.logger import get_next_experiment_dir

register_omegaconf_resolvers()
parser = argparse.ArgumentParser()
parser.add_argument("--config")
args, overrides = parser.parse_known_args(words)
config = parse_hydra_overrides(load_config(args.config), overrides)
sections = config = OmegaConf.to_container(config, resolve=True)
config["logger"]["log_dir"] = get_next_experiment_dir(config["logger"]["log_dir"])
"""
GENERATES = """
tokenizer = get_tokenizer(config["policy"]["tokenizer"])
config["policy"]["generation"] = configure_generation_config(config["policy"]["generation"], tokenizer)
"""
SCRIPTS = {
    "grpo": f"""{START}{GENERATES}
from nemo_rl.algorithms.grpo import MasterConfig, grpo_train, setup
from nemo_rl.data.utils import setup_response_data
dataset, val_dataset, task_to_env, val_task_to_env = setup_response_data(tokenizer, config["data"], config["env"])
""",
    "sft": f"""{START}
from nemo_rl.algorithms.sft import MasterConfig, setup, sft_train
policy, cluster, *others = setup(config, get_tokenizer(config["policy"]["tokenizer"]), [], [])
""",
    "dpo": f"""{START}
from nemo_rl.data.utils import setup_preference_data
dataset, val_dataset = setup_preference_data(get_tokenizer(config["policy"]["tokenizer"]), config["data"])
""",
}
RUNS = {"grpo": (grpo, "run_grpo"), "sft": (supervised, "run_sft"), "dpo": (dpo, "run_dpo")}


@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_the_two_lines_that_take_the_place_of_a_script_run(algorithm, monkeypatch, tmp_path):
    build_tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = ["--config", f"{CONFIGS}/{algorithm}{'_math' if algorithm == 'grpo' else ''}_cpu.yaml"]
    own = {"logger.log_dir": tmp_path, f"{algorithm}.max_num_steps": 3, "policy.tokenizer.name": tmp_path / "model"}
    words += [f"++{key}={value}" for key, value in own.items()]
    known: dict[str, Any] = {"words": words, "OmegaConf": OmegaConf}
    with pytest.raises(TypeError, match="made from its configuration") as error:
        exec(SCRIPTS[algorithm], known)
    started: list[Any] = []
    monkeypatch.setattr(*RUNS[algorithm], started.append)
    exec(re.findall(r"(?:^    .*\n)+", str(error.value), re.M)[0].replace("    ", ""), {"sections": known["sections"]})
    [config] = started
    assert config.loop.max_num_steps == 3 and config.logger.log_dir == f"{tmp_path}/exp_000"


def test_modules_without_a_counterpart_say_so() -> None:
    for module in (*ABSENT, "data.hf_datasets.openmathinstruct2"):
        with pytest.raises(ModuleNotFoundError, match=r"(?s)of NeMo RL has no counterpart.*run_grpo\(MasterConfig"):
            theirs(module)


def test_a_section_read_like_a_dictionary_says_what_replaces_the_script() -> None:
    config = GRPOMasterConfig.model_construct()
    with pytest.raises(TypeError, match=r"read \.policy, not \['policy'\].*examples/run_grpo\.py --config"):
        config["policy"]


# Pieces of scripts


def own_processor(datum_dict: Any, task_data_spec: Any, tokenizer: Any, max_seq_length: int, idx: int) -> Any:
    """As somebody wrote it for NeMo RL: it renders the prompt and makes its tokens by itself."""
    message = {"role": "user", "content": task_data_spec.prompt.format(datum_dict["messages"][0]["content"])}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    message["token_ids"] = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    message["content"] = text
    return {
        "message_log": [message],
        "length": len(message["token_ids"]),
        "extra_env_info": {"ground_truth": datum_dict["messages"][1]["content"]},
        "loss_multiplier": 1.0 if len(message["token_ids"]) <= max_seq_length else 0.0,
        "idx": idx,
        "task_name": datum_dict["task_name"],
    }


class SumsInTurn:
    """A stand-in for an engine: answers every other time with what stands before the equals sign, added up."""

    def generate_text(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        sums = [sum(map(int, re.findall(r"\d+", prompt))) for prompt in data["prompts"]]
        return BatchedDataDict({"texts": [f"\\boxed{{{total + i % 2}}}" for i, total in enumerate(sums)]})


def evaluate(generation: Any, loader: Any, step: Callable[..., Any], num_tests: int) -> tuple[float, float]:
    """An evaluation loop as scripts of NeMo RL have it: pass@1 and cons@2."""
    evals = theirs("evals.eval")
    passed = agreed = num_prompts = 0.0
    for batch in loader:
        batch = batch.repeat_interleave(num_tests)
        prompts = ["\n".join(message["content"] for message in log) for log in batch["message_log"]]
        texts = generation.generate_text(BatchedDataDict({"prompts": prompts}), greedy=False)["texts"]
        for log, text in zip(batch["message_log"], texts, strict=True):
            log.append({"role": "assistant", "content": text, "sampled": True})
        plain = [[{key: m[key] for key in ("role", "content", "sampled") if key in m} for m in log]
                 for log in batch["message_log"]]  # fmt: skip
        answered = step(plain, batch["extra_env_info"])
        rewards = answered.rewards
        passed += evals.eval_pass_k(rewards, num_tests, 1)
        agreed += evals.eval_cons_k(rewards, num_tests, 2, answered.answers)
        num_prompts += len(rewards) / num_tests
    return passed / num_prompts, agreed / num_prompts


def test_a_processor_a_dataset_and_an_evaluation_loop_go_together(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(processors, "PROCESSOR_REGISTRY", dict(processors.PROCESSOR_REGISTRY))
    data, interfaces = theirs("data.datasets"), theirs("data.interfaces")
    theirs("data.processors").register_processor("own_processor_of_a_script", own_processor)
    (tmp_path / "prompt.txt").write_text("Add: {}")
    tokenizer = build_tiny_tokenizer()
    rows = [
        {"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(4)
    ]
    spec = interfaces.TaskDataSpec(task_name="sums", prompt_file=tmp_path / "prompt.txt")
    by_task = {"sums": (spec, own_processor)}
    dataset = data.AllTaskProcessedDataset([{**row, "task_name": "sums"} for row in rows], tokenizer, spec, by_task, 64)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=theirs("data.collate_fn").eval_collate_fn)
    [first, _] = loader
    assert first["length"].tolist() == [len(log[0]["token_ids"]) for log in first["message_log"]]
    assert first["idx"] == [0, 1] and first["batch_max_length"].tolist() == [int(first["length"].max())] * 2
    environment = MathEnvironment({"num_workers": 1})
    try:
        assert evaluate(SumsInTurn(), loader, environment.step, num_tests=2) == (0.5, 0.5)
    finally:
        environment.shutdown()
    # An evaluation's own dataset has what its prompts are made with.
    (tmp_path / "problems.csv").write_text("question,solution\n1+1,2\n")
    section = {"dataset_name": tmp_path / "problems.csv", "problem_key": "question", "solution_key": "solution"}
    loaded = data.load_eval_dataset({**section, "file_format": "csv", "prompt_file": tmp_path / "prompt.txt"})
    whole = data.AllTaskProcessedDataset(loaded.rekeyed_ds, tokenizer, loaded.task_spec, loaded.processor, 64)
    assert whole[0]["extra_env_info"] == {"ground_truth": "2"} and "Add: 1+1" in tokenizer.decode(
        [token for message in whole[0]["message_log"] for token in message["token_ids"]]
    )


def test_numbers_of_an_evaluation_are_sums_over_prompts() -> None:
    evals = theirs("evals.eval")
    rewards, answers = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), ["4", "5", "5", None, "7", "7"]
    assert evals.eval_pass_k(rewards, 3, 1) == pytest.approx(1 / 3 + 2 / 3)
    assert evals.eval_pass_k(rewards, 3, 2) == pytest.approx(2 / 3 + 1)
    assert evals.eval_cons_k(rewards, 3, 3, answers) == 1.0
    config = evals.MasterConfig(
        **{"eval": {"metric": "pass@k"}, "generation": {"model_name": "m"}, "data": {"dataset_name": "math500"}},
        env={"math": {"num_workers": 1}},
    )
    assert isinstance(config.eval, evals.EvalConfig)
    for name in ("setup", "run_env_eval"):
        with pytest.raises(TypeError, match=r"from nemo_rl\.evals\.eval import MasterConfig, run_eval"):
            getattr(evals, name)(config, None, None)


def test_the_processor_of_a_model_that_sees(tmp_path) -> None:
    recipe = RECIPES["shapes"]
    assert isinstance(recipe, TinyVisionRecipe)
    tokenizer = build_tiny_tokenizer(recipe)
    build_processor(recipe, tokenizer).save_pretrained(tmp_path / "seeing")
    tokenizer.save_pretrained(tmp_path / "text")
    get_tokenizer = theirs("algorithms.utils").get_tokenizer
    processor = get_tokenizer({"name": tmp_path / "seeing"}, get_processor=True)
    image = torch.zeros(3, 16, 16)
    made = processor(text=["<|vision_start|><|image_pad|><|vision_end|>"], images=[image], return_tensors="pt")
    assert {"input_ids", "pixel_values"} <= set(made) and processor.tokenizer.pad_token is not None
    joined = get_tokenizer({"name": tmp_path / "seeing", "chat_template": None}, get_processor=True)
    assert joined.apply_chat_template([{"role": "user", "content": "as it is"}], tokenize=False) == "as it is"
    with pytest.raises(ValueError, match="has no processor"):
        get_tokenizer({"name": str(tmp_path / "text")}, get_processor=True)
