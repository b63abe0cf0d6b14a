"""TRL's side of the comparison: `compute_loss` of its trainers, on inputs laid out as its collators lay them out."""

import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from tests.parity.ours import LONGEST_COMPLETION, TEMPERATURE, batch, model, rows_of, tokenizer

ATTENTION = "eager"


def _trainer(trainer: Any, config: Any, kind: str, options: dict[str, Any], row: dict[str, str], **more: Any) -> Any:
    """A trainer of TRL for a model of that kind; `row` is one of its data set, which is not used."""
    disable_progress_bars()
    fixed = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    fixed |= {"per_device_train_batch_size": len(batch().sequences)}
    policy = model(kind, ATTENTION)
    with tempfile.TemporaryDirectory() as folder:
        # With a KL term the trainer of GRPO loads the reference from where it believes the policy came from. It is not
        # used: the logprobs of the reference are among the inputs.
        policy.save_pretrained(folder)
        policy.config._name_or_path = folder
        args = config(output_dir=folder, **fixed | options)
        data = Dataset.from_dict({name: [text] for name, text in row.items()})
        return trainer(policy, args=args, train_dataset=data, processing_class=tokenizer(), **more)


def grpo(options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """`options` of `GRPOConfig`."""
    options = {"temperature": TEMPERATURE, "max_completion_length": LONGEST_COMPLETION} | options
    rewards = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    trainer = _trainer(GRPOTrainer, GRPOConfig, "policy", options, {"prompt": "a"}, **rewards)
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop
    return _backward(trainer, [_grpo_inputs()])


def _grpo_inputs() -> dict[str, Tensor]:
    """Prompts padded on the left, completions on the right."""
    data = batch()
    rows = rows_of(TEMPERATURE, with_logprobs=True)
    tool_mask = _padded([sequence.mask for sequence in data.sequences], value=1)
    completion_mask = _padded([[1] * len(sequence.completion) for sequence in data.sequences])

    def of_completions(column: str) -> Tensor:
        values = [row.columns[column][len(s.prompt) :] for row, s in zip(rows, data.sequences, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    return {
        "prompt_ids": _padded([sequence.prompt for sequence in data.sequences], left=True),
        "prompt_mask": _padded([[1] * len(sequence.prompt) for sequence in data.sequences], left=True),
        "completion_ids": _padded([sequence.completion for sequence in data.sequences]),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": data.advantages,
        "old_per_token_logps": of_completions("prev_logprobs"),
        "ref_per_token_logps": of_completions("reference_policy_logprobs"),
        "num_items_in_batch": (completion_mask * tool_mask).sum(),
    }


def sft(options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """`options` of `SFTConfig`."""
    trainer = _trainer(SFTTrainer, SFTConfig, "policy", options, {"prompt": "a", "completion": "b"})
    inputs = _causal_inputs(list(range(len(batch().sequences))))
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    return _backward(trainer, [inputs | {"labels": labels}])


def dpo(options: dict[str, Any], *, pair_by_pair: bool = False) -> tuple[float, dict[str, Tensor]]:
    """`options` of `DPOConfig`. `pair_by_pair`: the mean of the losses of batches of one pair each."""
    row, reference = {"prompt": "a", "chosen": "b", "rejected": "c"}, model("reference", ATTENTION)
    trainer = _trainer(DPOTrainer, DPOConfig, "policy", options, row, ref_model=reference)
    return _backward(trainer, [_causal_inputs(rows) for rows in _chosen_then_rejected(pair_by_pair)])


def reward(options: dict[str, Any], *, with_margin: bool) -> tuple[float, dict[str, Tensor]]:
    """`options` of `RewardConfig`."""
    trainer = _trainer(RewardTrainer, RewardConfig, "reward", options, {"chosen": "ab", "rejected": "ac"})
    inputs = _causal_inputs(*_chosen_then_rejected(pair_by_pair=False))
    del inputs["completion_mask"]
    if with_margin:
        inputs["margin"] = batch().margins
    return _backward(trainer, [inputs])


def _chosen_then_rejected(pair_by_pair: bool) -> list[list[int]]:
    """Rows of each batch: TRL puts the chosen sequences of all pairs before the rejected ones."""
    rows = range(len(batch().sequences))
    if pair_by_pair:
        return [[row, row + 1] for row in rows[::2]]
    return [[*rows[::2], *rows[1::2]]]


def _causal_inputs(rows: list[int]) -> dict[str, Tensor]:
    sequences = [batch().sequences[row] for row in rows]
    return {
        "input_ids": _padded([sequence.ids for sequence in sequences]),
        "attention_mask": _padded([[1] * len(sequence.ids) for sequence in sequences]),
        "completion_mask": _padded([sequence.token_mask for sequence in sequences]),
    }


def _padded(rows: list[list[int]], *, value: int = 0, left: bool = False) -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def _backward(trainer: Any, inputs: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Mean over the batches, and its gradient by the names of parameters."""
    policy = trainer.model
    policy.train()
    losses = torch.stack([trainer.compute_loss(policy, each) for each in inputs])
    loss = losses.mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return loss.item(), {name: gradient for name, gradient in gradients.items() if gradient is not None}
