"""Models and sequences on which our losses and TRL's are compared: tiny, random, float32. And our side of it:

packed rows, our logprobs, the loss of each micro-batch with the counts of the batch.
"""

import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen2ForSequenceClassification as Qwen2Classifier

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.attention import ATTENTION
from nemo_rl.models.policy.batch.microbatches import LoadedRow, loss_inputs, scored_sequences
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, Scalars
from nemo_rl.types import LossFunction, SamplingParams

NUM_PAIRS, LONGEST_COMPLETION = 4, 12


@dataclass(frozen=True)
class Sequence:
    """A prompt and what was answered; `mask` says which tokens of the answer carry loss."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion

    @property
    def token_mask(self) -> list[int]:
        return [0] * len(self.prompt) + self.mask


@dataclass(frozen=True)
class Batch:
    """Eight sequences, which are four pairs: even ones chosen, odd ones rejected, on the same prompt."""

    sequences: list[Sequence]
    advantages: Tensor  # [8]
    margins: Tensor  # [4]
    noise: list[Tensor]  # per sequence [T]: previous logprobs minus those of the policy


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tiny_tokenizer()


def _config(architecture: str, **changes: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # logits that differ: at 0.02 every loss sits where nothing has happened yet
        pad_token_id=tokenizer().pad_token_id,
        tie_word_embeddings=True,
        architectures=[architecture],
        **changes,
    )


@lru_cache
def _original(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "reward":
        return Qwen2Classifier(_config("Qwen2ForSequenceClassification", num_labels=1))
    model = Qwen2ForCausalLM(_config("Qwen2ForCausalLM"))
    if kind == "reference":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def model(kind: str, attention: str) -> PreTrainedModel:
    """A copy of the "policy", the "reference" near it, or the "reward" model, with that attention of transformers."""
    copied = copy.deepcopy(_original(kind))
    copied.set_attn_implementation(attention)
    return copied


@lru_cache
def batch() -> Batch:
    """Ragged, with a gap in two of the answers, where a tool or a user would have spoken."""
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def tokens(count: int) -> list[int]:
        return torch.randint(10, len(tokenizer()), (count,), generator=generator).tolist()

    sequences = []
    for _ in range(NUM_PAIRS):
        prompt = tokens(number(3, 9))
        for _ in range(2):
            completion = tokens(number(4, LONGEST_COMPLETION))
            mask = [1] * len(completion)
            if len(completion) >= 9:
                mask[3:6] = [0, 0, 0]
            sequences.append(Sequence(prompt, completion, mask))
    assert sum(0 in sequence.mask for sequence in sequences) >= 2
    return Batch(
        sequences=sequences,
        advantages=torch.randn(2 * NUM_PAIRS, generator=generator),
        margins=torch.rand(NUM_PAIRS, generator=generator),
        noise=[0.3 * torch.randn(len(sequence.ids), generator=generator) for sequence in sequences],
    )


ROWS_PER_MICRO_BATCH = 2
TEMPERATURE = 0.7


def loss_and_gradient(loss_fn: LossFunction, kind: str, temperature: float) -> tuple[float, dict[str, Tensor]]:
    """Summed over micro-batches of two sequences, as an optimizer step does it. `kind`: of model, "policy" or "reward".

    The gradient is by the names of the parameters of transformers.
    """
    is_reward = kind == "reward"
    policy = LogprobModel(model(kind, ATTENTION), SamplingParams(max_new_tokens=0, temperature=temperature))
    rows = rows_of(temperature, with_logprobs=not is_reward)
    seqs = torch.tensor(float(len(rows)))
    toks = torch.stack([row.token_mask.sum() for row in rows]).sum().float()
    total = 0.0
    for start in range(0, len(rows), ROWS_PER_MICRO_BATCH):
        micro_batch = rows[start : start + ROWS_PER_MICRO_BATCH]
        outputs = _outputs(policy, micro_batch, Scalars() if is_reward else Logprobs(), last_token_only=is_reward)
        inputs = loss_inputs(micro_batch, loss_fn.inputs_type, torch.device("cpu"))
        loss, _ = loss_fn(outputs, inputs, seqs, toks)
        loss.backward()
        total += loss.item()
    gradients = {name: parameter.grad for name, parameter in policy.hf.named_parameters()}
    return total, {name: gradient for name, gradient in gradients.items() if gradient is not None}


@lru_cache
def rows_of(temperature: float, *, with_logprobs: bool) -> list[LoadedRow]:
    """With the columns of every loss: previous and reference logprobs, advantages, reference sums, margins."""
    rows = []
    for number, sequence in enumerate(batch().sequences):
        mask = torch.tensor(sequence.token_mask, dtype=torch.bool)
        columns = {
            "advantages": batch().advantages[number].expand(len(mask)).clone(),
            "margin": batch().margins[number // 2] if number % 2 == 0 else torch.tensor(0.0),
        }
        rows.append(
            LoadedRow(
                sample_id=str(number), token_ids=torch.tensor(sequence.ids), token_mask=mask, mask=1.0, columns=columns
            )
        )
    if not with_logprobs:
        return rows
    for kind in ("policy", "reference"):
        scorer = LogprobModel(model(kind, ATTENTION), SamplingParams(max_new_tokens=0, temperature=temperature))
        with torch.no_grad():
            scored = _outputs(scorer, rows, Logprobs(), last_token_only=False)
        for row, logprobs, noise in zip(rows, scored, batch().noise, strict=True):
            logprobs = logprobs[: len(row.token_ids)]
            if kind == "policy":
                row.columns["prev_logprobs"] = row.columns["generation_logprobs"] = logprobs + noise * row.token_mask
            else:
                row.columns["reference_policy_logprobs"] = logprobs
                row.columns["reference_logprob_sum"] = logprobs.sum()
    return rows


def _outputs(scorer: LogprobModel, rows: list[LoadedRow], task: HeadTask, *, last_token_only: bool) -> Tensor:
    """[B, S]"""
    layout = RowLayout(padding_free=True, own_states=last_token_only)
    return scorer(layout.build(scored_sequences(rows, last_token_only=last_token_only)), task)
