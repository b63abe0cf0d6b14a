"""Our side of the comparison: packed rows, our logprobs, the loss of each micro-batch with the counts of the batch."""

from collections.abc import Sequence as SequenceOf
from functools import lru_cache

import torch
from torch import Tensor

from nemo_rl.models.policy.attention import ATTENTION
from nemo_rl.models.policy.batch.microbatches import Row, loss_inputs, scored_sequences
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, Scalars
from nemo_rl.types import LossFunction, SamplingParams
from tests.parity.batch import batch, model

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
def rows_of(temperature: float, *, with_logprobs: bool) -> list[Row]:
    """With the columns of every loss: previous and reference logprobs, advantages, reference sums, margins."""
    rows = []
    for number, sequence in enumerate(batch().sequences):
        mask = torch.tensor(sequence.token_mask, dtype=torch.bool)
        columns = {
            "advantages": batch().advantages[number].expand(len(mask)).clone(),
            "margin": batch().margins[number // 2] if number % 2 == 0 else torch.tensor(0.0),
        }
        rows.append(
            Row(sample_id=str(number), token_ids=torch.tensor(sequence.ids), token_mask=mask, mask=1.0, columns=columns)
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


def _outputs(scorer: LogprobModel, rows: SequenceOf[Row], task: HeadTask, *, last_token_only: bool) -> Tensor:
    """[B, S]"""
    layout = RowLayout(padding_free=True, own_states=last_token_only)
    return scorer(layout.build(scored_sequences(rows, last_token_only=last_token_only)), task)
