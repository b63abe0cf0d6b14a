"""The configuration of an evaluation: what is refused, and what follows from what."""

import pytest

from nemo_rl.algorithms.setup.placement import describe_evaluation
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config, load_config
from nemo_rl.evals.config import EvalMasterConfig
from tests.tables import cases, pattern
from tests.unit.config.run_configs import CONFIGS

CPU = CONFIGS / "evals" / "eval_cpu.yaml"


def load(*overrides: str) -> EvalMasterConfig:
    return load_config(EvalMasterConfig, CPU, list(overrides))


def test_what_follows_from_what():
    """NeMo RL's own keys, with what they leave out."""
    generation = {"model_name": "m", "vllm_cfg": {"max_model_len": 512}, "top_k": -1}
    sections = {"generation": generation, "data": {"dataset_name": "math500"}, "env": {"math": {}}}
    config = build_config(EvalMasterConfig, sections)
    assert (config.generation.max_new_tokens, config.data.max_input_seq_length) == (512, 512)
    assert (config.generation.temperature, config.generation.val_temperature) == (0.0, 0.0)
    assert (config.tokenizer.name, config.generation.num_prompts_per_step) == ("m", -1)
    assert config.generation.vllm_cfg.gpu_memory_utilization == 0.9


REFUSED = """
eval.k_value=9 -> eval.k_value ... 9 is more than num_tests_per_prompt=8
generation.temperature=0 -> generation.temperature ... 0 gives 8 equal samples of each prompt
generation.val_temperature=0.5 -> generation.val_temperature ... for validation during training
generation.num_prompts_per_step=0 -> num_prompts_per_step ... must be 1 or more, or -1
eval.k_valu=2 -> the nearest valid key is eval.k_value
eval.metric=maj@k -> eval.metric ... must be 'pass@k' or 'cons@k'
data.dataset_name=null -> data.dataset_name ... name a dataset
data.datasets=[{dataset_name: gsm8k}] -> data.datasets ... both set
data.dataset_name=gsm8k & data.solution_key=a -> data.solution_key ... gsm8k has columns of its own
data.env_name=mth -> data.env_name ... no section env.mth; did you mean math?
data.dataset_name=mmlu & ~env.multichoice -> no math environment judges the answers of mmlu: add
data.max_input_seq_length=99 -> more than generation.vllm_cfg.max_model_len=48
generation.vllm_cfg.tensor_parallel_size=2 -> engines of 2 do not fill nodes of 1 CPU workers
eval.metric=cons@k & +env.rm={type: reward_model, model_name: m} & data.env_name=rm
    -> cons@k takes a vote on answers, and env.rm (reward_model) finds none
"""


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_what_cannot_work_is_refused(given, told):
    with pytest.raises(ConfigError, match=pattern(told)):
        load(*given)


def test_each_dataset_has_its_processor_and_its_judge():
    several = "[{dataset_name: gsm8k}, {dataset_name: mmlu_pro}, {dataset_name: mmlu_DE-DE, prompt_file: own.txt}]"
    config = load("data.dataset_name=null", "data.prompt_file=all.txt", f"data.datasets={several}")
    found = [(config.processor_of(d), config.environment_of(d), d.prompt_file) for d in config.data.chosen]
    assert found == [
        ("math_hf_data_processor", "math", "all.txt"),
        ("multichoice_qa_processor", "multichoice", "all.txt"),
        ("multichoice_qa_processor", "multilingual", "own.txt"),
    ]
    assert "mmlu_pro: multichoice_qa_processor, judged by env.multichoice" in describe_evaluation(config)
    one = load("data.dataset_name=gpqa", "env.math.verifier_type=english_multichoice", "~env.multichoice")
    assert one.environment_of(one.data.chosen[0]) == "math"
