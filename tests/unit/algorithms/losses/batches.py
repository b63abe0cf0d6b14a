"""Random micro-batches for the tests of losses."""

import torch
from torch import Tensor

from nemo_rl.algorithms.losses.preference import PreferenceInputs
from nemo_rl.algorithms.losses.value import ValueInputs
from nemo_rl.types import LossInputs


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
    width = max(len(chosen), len(rejected))
    logprobs, mask = torch.zeros(2, width), torch.zeros(2, width)
    for row, values in enumerate((chosen, rejected)):
        logprobs[row, : len(values)] = torch.tensor(values)
        mask[row, : len(values)] = 1.0
    inputs = PreferenceInputs(
        input_ids=torch.zeros(2, width, dtype=torch.int64),
        token_mask=mask,
        sample_mask=torch.ones(2),
        reference_logprob_sum=torch.tensor(reference),
        margin=torch.zeros(2),
    )
    return logprobs.requires_grad_(), inputs
