"""Every name of NeMo RL imports, and calls as its users write them give what they expect or say what to call."""

import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from nemo_rl import compat_calls
from nemo_rl.compat import TABLE, targets
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.config import ENV_REGISTRY
from nemo_rl.utils.registry import import_object
from tests.tables import named


def theirs(module: str) -> Any:
    """A module of NeMo RL, which no editor and no static check can see."""
    return importlib.import_module(f"nemo_rl.{module}")


@pytest.mark.parametrize("module", TABLE)
def test_the_names_are_ours_and_on_the_page(module: str) -> None:
    page = (Path(__file__).parents[2] / "docs/coming-from-nemo-rl.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{module}` |")]
    for name, target in targets(module).items():
        ours, _, attribute = target.partition(":")
        wanted = vars(importlib.import_module(f"nemo_rl.{ours}"))[attribute]
        assert getattr(theirs(module), name) is wanted is import_object(f"nemo_rl.{module}.{name}", "name"), name
        assert f"`{name}`" in row


def test_a_fresh_process_imports_them_in_every_form() -> None:
    code = """
import nemo_rl.environments.utils
import nemo_rl.algorithms.loss.loss_functions as functions
from nemo_rl.data.packing.algorithms import get_packer
from nemo_rl.data.datasets import load_response_dataset, registry
assert nemo_rl.environments.utils.chunk_list_to_workers([1, 2, 3], 2) == [[1, 2], [3]]
assert functions.NLLLossFn.__module__ == "nemo_rl.compat_calls"
assert get_packer("first_fit_decreasing", 10).pack([6, 5, 4]) == [[0, 2], [1]]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr


def test_other_names_are_errors_as_always() -> None:
    with pytest.raises(ImportError, match="cannot import name 'registr_env' from"):
        exec("from nemo_rl.environments.utils import registr_env")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        theirs("environments.util")
    assert pickle.loads(pickle.dumps(TaskDataSpec)) is TaskDataSpec


# Calls


def test_configuration(tmp_path: Path) -> None:
    config = theirs("utils.config")
    config.register_omegaconf_resolvers()
    (tmp_path / "base.yaml").write_text("policy: {model_name: a, tokenizer: {name: '${policy.model_name}'}}\n")
    (tmp_path / "run.yaml").write_text("defaults: base.yaml\ngrpo: {n: '${mul:2,3}'}\n")
    overrides = ["policy.model_name=b", "+grpo.k=[1,2]"]
    cfg = config.parse_hydra_overrides(config.load_config(tmp_path / "run.yaml"), overrides)
    assert (cfg.policy.tokenizer.name, cfg.grpo.n, list(cfg.grpo.k)) == ("b", 6, [1, 2])
    run = config.load_config(Path(__file__).parents[2] / "examples/configs/grpo_math_cpu.yaml")
    sections: Any = OmegaConf.to_container(config.parse_hydra_overrides(run, ["grpo.max_num_steps=3"]))
    assert theirs("algorithms.grpo").MasterConfig(**sections).grpo.max_num_steps == 3
    with pytest.raises(config.OverridesError, match="modle_name"):
        config.parse_hydra_overrides(cfg, ["policy.modle_name=b"])
    project = theirs("distributed.virtual_cluster").PY_EXECUTABLES.VLLM.split()[-1]
    assert (Path(project) / "pyproject.toml").is_file()


def test_data(tmp_path: Path) -> None:
    datasets, processors = theirs("data.datasets"), theirs("data.processors")

    (tmp_path / "rows.jsonl").write_text('{"q": "1+1", "a": "2"}\n{"q": "2+2", "a": "4"}\n')
    section: dict[str, Any] = {"dataset_name": "ResponseDataset", "data_path": tmp_path / "rows.jsonl"}
    section |= {"input_key": "q", "output_key": "a", "split_validation_size": 0.5}
    data = datasets.load_response_dataset(section)
    assert (len(data.dataset), len(data.val_dataset), data.task_name) == (1, 1, "ResponseDataset")
    build_tiny_tokenizer().save_pretrained(tmp_path / "model")
    section = {"name": f"{tmp_path}/model", "chat_template": "default", "use_fastokens": False}
    tokenizer = theirs("algorithms.utils").get_tokenizer(section)
    rows = [{"problem": "1+1", "expected_answer": "2", "task_name": "math"}]
    process = processors.math_hf_data_processor
    for given in (process, {"math": (TaskDataSpec("math"), process)}):
        dataset = datasets.AllTaskProcessedDataset(rows, tokenizer, TaskDataSpec("math"), given, max_seq_length=64)
        assert (len(dataset), dataset[0]["extra_env_info"]) == (1, {"ground_truth": "2"})
    log = dataset[0]["message_log"]
    assert theirs("data.llm_message_utils").get_keys_from_message_log(log, ["role", "absent"]) == [{"role": "user"}]
    spec = TaskDataSpec("math")
    for spec.system_prompt, start in ((None, "Think first,"), ("Be brief.", "Be brief.\n\nThink first,")):
        with_tags = processors.math_gdpo_data_processor(rows[0], spec, tokenizer, None, 0)["message_log"]
        assert [message["role"] for message in with_tags] == ["system", "user"]
        assert with_tags[0]["unrendered"].startswith(start)


def test_advantages_are_theirs() -> None:
    estimators, utils = theirs("algorithms.advantage_estimator"), theirs("algorithms.utils")
    prompts, rewards, mask = torch.full((4, 1), 7), torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4, 3)
    baseline, std = utils.calculate_baseline_and_std_per_prompt(prompts, rewards, torch.ones(4))
    assert baseline.tolist() == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3])
    assert std.tolist() == pytest.approx([0.0, 3**-0.5, 3**-0.5, 3**-0.5])
    assert utils.masked_mean(rewards, torch.tensor([1, 1, 0, 0])).item() == 0.5

    def advantages(kind: str, config: dict[str, Any], prompts: torch.Tensor = prompts, **batch: Any) -> list[float]:
        estimator = getattr(estimators, f"{kind}AdvantageEstimator")(config, {})
        return estimator.compute_advantage(prompts, rewards, mask, **batch)[:, 2].tolist()

    relative = advantages("GRPO", {"use_leave_one_out_baseline": True})
    assert relative == pytest.approx([1.0, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rel=1e-5)
    mixed = advantages("GRPO", {"use_leave_one_out_baseline": False}, torch.tensor([[7], [8], [7], [8]]))
    assert mixed == pytest.approx([2**-0.5, 0, -(2**-0.5), 0], rel=1e-5)
    assert sum(advantages("ReinforcePlusPlus", {"minus_baseline": True})) == pytest.approx(0, abs=1e-5)
    batch = {"reward1": rewards, "reward2": 10 * rewards.flip(0)}
    first, *_, last = advantages("GDPO", {"use_leave_one_out_baseline": False}, repeated_batch=batch)
    assert first == pytest.approx(last, rel=1e-5)
    gdpo = estimators.GDPOAdvantageEstimator({"use_leave_one_out_baseline": False}, {})
    assert gdpo.compute_advantage(prompts, None, mask, batch)[0, 0].item() == pytest.approx(first)
    with pytest.raises(TypeError, match="compute_advantage needs rewards"):
        estimators.GRPOAdvantageEstimator({}, {}).compute_advantage(prompts, None, mask)


def test_an_empty_batch_has_no_advantages() -> None:
    prompts, rewards = torch.empty((0, 5), dtype=torch.int64), torch.empty(0)
    baseline, std = theirs("algorithms.utils").calculate_baseline_and_std_per_prompt(prompts, rewards, rewards)
    assert baseline.shape == std.shape == (0,)
    for kind in ("GRPO", "GDPO", "ReinforcePlusPlus"):
        estimator = vars(compat_calls)[f"{kind}AdvantageEstimator"]({})
        assert estimator.compute_advantage(prompts, rewards, torch.empty(0, 7)).shape == (0, 7)
    assert theirs("algorithms.utils").masked_mean(rewards, rewards) == 0


def test_entries_of_registries_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = theirs("environments.utils").ENV_REGISTRY
    assert registry["math"]["actor_class_fqn"] == ENV_REGISTRY["math"] and "maths" not in registry
    monkeypatch.setitem(registry, "mine", {"actor_class_fqn": "my_envs.Mine"})
    assert ENV_REGISTRY["mine"] == "my_envs.Mine" and len(registry) == len(ENV_REGISTRY)
    with pytest.raises(TypeError, match="not default_processor: set data"):
        registry["other"] = {"actor_class_fqn": "my_envs.Mine", "default_processor": "default"}
    found = theirs("data.processors").PROCESSOR_REGISTRY
    assert all(callable(found[name]) for name in found) and "sft_processor" in found


def test_reward_functions_of_two_texts() -> None:
    rewards = theirs("environments.rewards")
    tagged, box = "<think>so</think> <answer>1/2</answer>", "<answer>[1, 1, 3, 3]</answer>"
    assert rewards.math_expression_reward("0.5", tagged) == (1.0, True)
    assert rewards.math_expression_reward("0.5", "<a>3</a>", tag="a") == (0.0, False)
    assert rewards.format_reward("", tagged) == (1.0, None) and rewards.format_reward("", box)[0] == 0.75
    assert rewards.exact_answer_alphanumeric_reward("ab", "<answer>A-b</answer>") == (1.0, True)
    assert rewards.bbox_giou_reward("[1, 1, 3, 3]", box, giou_penalty_thres=0.5) == (1.0, True)
    assert rewards.bbox_giou_reward("[1, 1, 3, 3]", "no tags") == (0.0, False)
    parts = [(rewards.format_reward, 0.25), (rewards.math_expression_reward, 0.75)]
    assert rewards.combine_reward_functions(parts)("0.5", tagged) == (1.0, True)
    assert rewards.combine_reward_functions(parts)("1", box) == (pytest.approx(0.25 * 0.75), False)
    assert rewards.combine_reward_functions([(rewards.format_reward, 1.0)])("", box) == (0.75, None)
    with pytest.raises(ValueError, match="weights add up to 1"):
        rewards.combine_reward_functions([(rewards.format_reward, 0.5)])


def test_losses_take_a_batch_by_name() -> None:
    loss_functions = theirs("algorithms.loss")
    ids, ones = torch.arange(8).view(2, 4), torch.ones(2, 4)
    data = BatchedDataDict({"input_ids": ids, "token_mask": ones, "sample_mask": torch.ones(2)})
    logprobs, counts = torch.full((2, 3), -0.5), (torch.tensor(2.0), torch.tensor(6.0))
    loss, metrics = loss_functions.NLLLossFn()(data, *counts, next_token_logprobs=logprobs)
    assert (loss.item(), metrics["num_unmasked_tokens"].item()) == (0.5, 6)
    columns = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data |= dict.fromkeys(columns, -0.5 * ones) | {"advantages": 2 * ones}
    cfg = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None}
    cfg["positive_example_nll_weight"] = 0.0  # a key of theirs that asks for nothing
    loss, _ = loss_functions.ClippedPGLossFn(cfg)(data, *counts, next_token_logprobs=logprobs)
    assert loss.item() == -2


@named(
    "solution, truth, strict, score, found",
    {
        "a fraction": ("so it is\nAnswer: $\\frac12$", "\\frac{1}{2}", False, 1.0, "\\frac{1}{2}"),
        "an answer before the end": ("Answer: 4" + 300 * " ", "4", False, -1.0, None),  # the answer stands at the end
        "the last box": ("\\boxed{1} \\boxed{a{b}}", "a{b}", True, 1.0, "a{b}"),
        "an open box": ("\\boxed{1", "1", True, -1.0, None),
    },
)
def test_answers_are_scored_as_by_their_verifier(
    solution: str, truth: str, strict: bool, score: float, found: str | None
) -> None:
    verifier = theirs("environments.dapo_math_verifier")
    found_here = verifier.compute_score(solution, truth, strict_box_verify=strict)
    assert found_here == {"score": score, "acc": score > 0, "pred": found}


def test_answers_are_read_as_by_their_parser() -> None:
    verifier = theirs("environments.dapo_math_verifier")
    assert verifier.is_correct_minerva("Answer: 1,000", "so \\boxed{1000}", gt_need_extract=True) == (True, "1000")
    parsing = theirs("evals.answer_parsing")
    [german] = [word for word in parsing.MULTILINGUAL_ANSWER_REGEXES if "Antwort" in word]
    pattern = parsing.MULTILINGUAL_ANSWER_PATTERN_TEMPLATE.format(german)
    found = re.search(pattern, parsing.normalize_response("**Antwort: $\uff22$**"))
    assert found is not None and parsing.normalize_extracted_answer(found[1]) == "B"
    prompts = torch.tensor([[1, 2], [1, 2], [3, 0], [3, 0], [4, 0]])
    rate = theirs("environments.metrics").calculate_pass_rate_per_prompt
    assert rate(prompts, torch.tensor([0.0, 1.0, 0.0, -1.0, 2.0])) == pytest.approx(2 / 3)


def test_the_puzzle_is_played_without_an_environment() -> None:
    game = theirs("environments.games.sliding_puzzle").SlidingPuzzleGameLogic
    made = game.generate({"size": 3, "shuffle_moves": 5})
    assert set(made) == {"size", "grid", "solution", "empty_pos", "commands"} and made["grid"] != made["solution"]
    assert made["grid"][made["empty_pos"][0]][made["empty_pos"][1]] == 0 and "3x3" in game.init(made)
    state = {**made, "size": 2, "grid": [[1, 2], [0, 3]], "empty_pos": (1, 0)}
    for action, reward in (("view", 0), ("up", 0), ("slide 1 2", 0), ("slide 9 9", 0), ("left", 1), ("slide 2 2", 1)):
        text, found, done, after = game.step(action, state)
        assert (found, done) == (reward, reward == 1) and (text == game.render(state)) == (action == "view")
        assert after["grid"] == ([[1, 2], [3, 0]] if done else state["grid"])
    assert game.step("down", state)[3]["empty_pos"] == (0, 0)


def test_pythons_of_actors_and_defaults_of_datasets() -> None:
    registry = theirs("distributed.ray_actor_environment_registry")
    assert registry.get_actor_python_env("nemo_rl.environments.math.environment.MathEnvironment") == sys.executable
    with pytest.raises(ValueError, match=r"no Python is registered for 'a\.B'"):
        registry.get_actor_python_env("a.B")
    section = {"processor": "mine"}
    theirs("data.datasets").update_single_dataset_config(section, {"processor": "default", "env_name": "math"})
    assert section == {"processor": "mine", "env_name": "math"}
    assert theirs("algorithms.loss.interfaces").LossType.TOKEN_LEVEL.value == "token_level"


@named(
    "module, name, ours",
    {
        "DPO": ("loss", "DPOLossFn", "nemo_rl.algorithms.losses.preference.DPOLoss"),
        "NLL": ("loss_functions", "NLLLoss", "nemo_rl.algorithms.losses.nll.NLLLoss"),
        "distillation": ("loss", "DistillationLossFn", "nemo_rl.algorithms.losses.distillation.DistillationLoss"),
    },
)
def test_a_call_that_means_something_else_names_ours(module: str, name: str, ours: str) -> None:
    with pytest.raises(TypeError, match=re.escape(ours)):
        getattr(theirs(f"algorithms.{module}"), name)({}, None)
