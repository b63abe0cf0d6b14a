"""Random micro-batches for the tests of losses."""

import torch
from torch import Tensor

from nemo_rl.algorithms.losses.preference import PreferenceInputs
from nemo_rl.algorithms.losses.value import ValueInputs
from nemo_rl.types import LossFunction, LossInputs
from tests.loss_invariance import global_counts


def all_valid[InputsT: LossInputs](kind: type[InputsT], rows: int, length: int, **columns: Tensor) -> InputsT:
    """Inputs of rows without a prompt or padding."""
    ids, mask = torch.zeros(rows, length, dtype=torch.int64), torch.ones(rows, length)
    return kind(input_ids=ids, token_mask=mask, sample_mask=torch.ones(rows), **columns)


def evaluated(
    loss_fn: LossFunction, outputs: Tensor, inputs: LossInputs, *counts: float
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics; the counts of sequences and tokens are those of the inputs unless given."""
    seqs, toks = map(torch.tensor, counts) if counts else global_counts(inputs)
    loss, metrics = loss_fn(outputs, inputs, seqs, toks)
    (gradient,) = torch.autograd.grad(loss, outputs)
    return loss.item(), gradient, {name: value.item() for name, value in metrics.items()}


def random_rows(num_rows: int, seed: int, length: int = 8) -> tuple[Tensor, LossInputs]:
    """Logprobs and inputs: ragged rows, a prompt token first, with a gap where an environment spoke.

    The second row is masked if there are three or more.
    """
    generator = torch.Generator().manual_seed(seed)
    sample_mask, mask = torch.ones(num_rows), torch.zeros(num_rows, length)
    if num_rows >= 3:
        sample_mask[1] = 0.0
    for row in range(num_rows):
        mask[row, 1 : 2 + int(torch.randint(1, length - 1, (1,), generator=generator))] = 1.0
        if length > 4:
            mask[row, 3] = 0.0
    ids = torch.zeros(num_rows, length, dtype=torch.int64)
    inputs = LossInputs(input_ids=ids, token_mask=mask, sample_mask=sample_mask)
    return (-3 * torch.rand(num_rows, length, generator=generator)).requires_grad_(), inputs


def random_pairs(num_pairs: int, seed: int, length: int = 8) -> tuple[Tensor, PreferenceInputs]:
    """Logprobs and inputs; the second pair is masked if there are three or more."""
    generator = torch.Generator().manual_seed(seed + 1)
    logprobs, rows = random_rows(2 * num_pairs, seed, length)
    rows.sample_mask = torch.ones(num_pairs)
    if num_pairs >= 3:
        rows.sample_mask[1] = 0.0
    rows.sample_mask = rows.sample_mask.repeat_interleave(2)
    reference = logprobs.detach() + 0.5 * torch.randn(logprobs.shape, generator=generator)
    margin = torch.zeros(2 * num_pairs)
    margin[::2] = torch.rand(num_pairs, generator=generator)
    sums = (reference * rows.token_mask).sum(-1)
    return logprobs, PreferenceInputs(**vars(rows), reference_logprob_sum=sums, margin=margin)


def random_scores(num_pairs: int, seed: int) -> tuple[Tensor, PreferenceInputs]:
    """One score per row, at its last token."""
    logprobs, inputs = random_pairs(num_pairs, seed)
    last = inputs.token_mask.shape[1] - 1 - inputs.token_mask.flip(-1).argmax(-1)
    return (logprobs.detach() * torch.nn.functional.one_hot(last, logprobs.shape[1])).requires_grad_(), inputs


def random_values(num_rows: int, seed: int) -> tuple[Tensor, ValueInputs]:
    values, inputs = random_rows(num_rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    old, returns = (values.detach() + 0.3 * torch.randn(values.shape, generator=generator) for _ in range(2))
    return values, ValueInputs(**vars(inputs), values=old, returns=returns)


def pair_of(
    chosen: list[float], rejected: list[float], reference: tuple[float, float]
) -> tuple[Tensor, PreferenceInputs]:
    """One pair of answers with these logprobs, every token valid, and the reference's sums."""
    columns = {"reference_logprob_sum": torch.tensor(reference), "margin": torch.zeros(2)}
    inputs = all_valid(PreferenceInputs, 2, max(len(chosen), len(rejected)), **columns)
    logprobs = torch.zeros_like(inputs.token_mask)
    for row, values in enumerate((chosen, rejected)):
        logprobs[row, : len(values)] = torch.tensor(values)
        inputs.token_mask[row, len(values) :] = 0.0
    return logprobs.requires_grad_(), inputs
