"""Whole runs on a pretrained model of 135M parameters, against transformers and against each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nemo_rl.rollouts.records import read_groups, step_folder
from tests.functional.cli import SMALL, continues_bit_for_bit, exact, example, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

QUESTIONS = {
    "What is the capital of France?": "Paris.",
    "Name a colour of the rainbow.": "Red.",
    "What is 3 + 4?": "7",
    "Who wrote Hamlet?": "William Shakespeare.",
    "Translate to French: good morning": "Bonjour.",
    "Write one short sentence about the sea.": "The sea is deep.",
    "List three animals.": "Cat, dog, horse.",
    "How many legs has a spider?": "Eight.",
}
NUM_TOKENS = 24
WHOLE = ("policy.max_total_sequence_length=160", f"policy.generation.max_new_tokens={NUM_TOKENS}")
# Short answers are good ones: a reward that differs between the answers of any model.
BRIEF = (
    "env={brief: {type: composite, num_workers: 1, reward_functions: "
    "[{name: length, reward: length, weight: 1.0, kwargs: {soft_limit: 10, hard_limit: 120}}]}}",
    "data.default.env_name=brief",
)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"input": question, "output": answer} for question, answer in QUESTIONS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in QUESTIONS.items()
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def grpo(model: Path, questions: Path) -> tuple[str, ...]:
    """A run of 4 x 4 answers a step on that model."""
    data = f"{{dataset_name: ResponseDataset, split: null, data_path: {questions}}}"
    named = (f"policy.model_name={model}", f"data.train={data}", f"data.validation={data}")
    return (*SMALL, *named, *WHOLE, *BRIEF, "policy.optimizer.kwargs.lr=1e-5", "grpo.max_num_epochs=4")


def in_transformers(folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def prompt_of(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    asked = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_greedy_answers_are_those_of_transformers(smollm2, questions, tmp_path):
    data = f"data={{dataset_name: ResponseDataset, split: null, data_path: {questions}, env_name: math}}"
    greedy = ("generation.temperature=0.0", "eval.num_tests_per_prompt=1", "eval.k_value=1")
    sizes = (f"generation.max_new_tokens={NUM_TOKENS}", "generation.vllm_cfg.max_model_len=160")
    model = f"generation.model_name={smollm2}"
    run(tmp_path, f"eval.save_path={tmp_path}", model, data, *greedy, *sizes, **example("eval", "evals/eval_cpu"))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == len(QUESTIONS)
    reference, tokenizer = in_transformers(smollm2)
    found = {line["prompt_id"]: line["response"] for line in lines}
    for response, question in zip((found[name] for name in sorted(found)), QUESTIONS, strict=True):
        asked = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = reference.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert response == tokenizer.decode(ids, skip_special_tokens=True), question


def test_a_step_of_grpo_is_the_formula_by_hand(smollm2, questions, tmp_path):
    """Loss and norm of the gradient from the recorded samples; and every token has the logprob of its sampling."""
    record = "grpo.rollout_record={enabled: true, save_dir: record}"
    finished = run(tmp_path, *grpo(smollm2, questions), record, "grpo.max_num_steps=3", "checkpointing.enabled=false")
    exact(finished.steps, 3)
    reference, _ = in_transformers(smollm2)
    groups, _ = read_groups(step_folder(tmp_path / "record", 1))
    num_tokens = sum(int(sample.token_mask.sum()) for group in groups for sample in group.samples)
    total = 0.0
    for group in groups:
        rewards = torch.tensor([sample.meta.reward for sample in group.samples], dtype=torch.float64)
        others = (rewards.sum() - rewards) / (len(rewards) - 1)  # the baseline leaves the sample out
        advantages = (rewards - others) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group.samples, advantages.tolist(), strict=True):
            ids, mask = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.token_mask)[1:]
            logprobs = reference(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -(advantage * ratio * mask).sum() / num_tokens
            loss.backward()
            total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf")).item()
    assert finished.steps[0]["train/loss"] == pytest.approx(total, rel=1e-5, abs=1e-7)
    assert finished.steps[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_killed_run_goes_on_to_the_bit_and_two_engines_draw_the_same_samples(smollm2, questions, tmp_path):
    overrides = grpo(smollm2, questions)
    before, finished = continues_bit_for_bit(tmp_path / "one", *overrides, "grpo.max_num_steps=6")
    rows = [row for row in before + finished.metrics if row["step"] > 0]
    exact(rows, 6)
    many = ("cluster.cpu_workers_per_node=2", "checkpointing.enabled=false", "grpo.max_num_steps=1")
    (two,) = run(tmp_path / "two", *overrides, *many).steps
    for name in ("train/reward", "train/mean_gen_tokens_per_sample", "train/global_valid_toks"):
        assert two[name] == rows[0][name], name


@pytest.mark.parametrize("adapters", ["false", "true"])
def test_a_saved_model_has_the_validation_loss_of_its_run(smollm2, talks, tmp_path, adapters):
    """Merged adapters too: the run has them apart."""
    data = f"{{dataset_name: ResponseDataset, split: null, data_path: {talks}}}"
    overrides = (
        f"policy.model_name={smollm2}",
        f"policy.dtensor_cfg.lora_cfg={{enabled: {adapters}, dim: 8, alpha: 16}}",
        f"data={{train: {data}, validation: {data}}}",
        "sft.max_num_epochs=4",
        "sft.max_num_steps=3",
        "sft.val_at_end=true",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=8",
        "policy.max_total_sequence_length=160",
        "policy.optimizer.kwargs.lr=1e-4",
        "checkpointing.save_period=3",
        "checkpointing.metric_name=null",
        "++checkpointing.save_consolidated=true",
    )
    finished = run(tmp_path, *overrides, **example("sft"))
    (folder,) = tmp_path.glob("results/*/step_3/policy/weights/consolidated")
    reference, _ = in_transformers(folder)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    total, num_tokens = 0.0, 0
    for question, answer in QUESTIONS.items():
        prompt = prompt_of(tokenizer, question)
        ids = torch.tensor(prompt + tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logprobs = reference(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total -= logprobs[len(prompt) - 1 :].sum().item()
        num_tokens += len(ids) - len(prompt)
    assert finished.curve("validation/val_loss")[-1] == pytest.approx(total / num_tokens, rel=1e-5)
