"""Random micro-batches for the tests of losses."""

import torch
from torch import Tensor

from nemo_rl.algorithms.losses.preference import PreferenceInputs
from nemo_rl.algorithms.losses.value import ValueInputs
from nemo_rl.types import LossInputs


def token_masks(num_rows: int, length: int, generator: torch.Generator) -> Tensor:
    """[B, S]: ragged rows, a prompt token first, with a gap where an environment spoke."""
    mask = torch.zeros(num_rows, length)
    for row in range(num_rows):
        mask[row, 1 : 2 + int(torch.randint(1, length - 1, (1,), generator=generator))] = 1.0
        if length > 4:
            mask[row, 3] = 0.0
    return mask


def random_rows(num_rows: int, seed: int, length: int = 8) -> tuple[Tensor, LossInputs]:
    """Logprobs and inputs; the second row is masked if there are three or more."""
    generator = torch.Generator().manual_seed(seed)
    sample_mask = torch.ones(num_rows)
    if num_rows >= 3:
        sample_mask[1] = 0.0
    inputs = LossInputs(
        input_ids=torch.zeros(num_rows, length, dtype=torch.int64),
        token_mask=token_masks(num_rows, length, generator),
        sample_mask=sample_mask,
    )
    return (-3 * torch.rand(num_rows, length, generator=generator)).requires_grad_(), inputs


def random_pairs(num_pairs: int, seed: int, length: int = 8) -> tuple[Tensor, PreferenceInputs]:
    """Logprobs and inputs; the second pair is masked if there are three or more."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = 2 * num_pairs
    mask = token_masks(num_rows, length, generator)
    logprobs = -3 * torch.rand(num_rows, length, generator=generator)
    reference = logprobs + 0.5 * torch.randn(num_rows, length, generator=generator)
    pair_mask = torch.ones(num_pairs)
    if num_pairs >= 3:
        pair_mask[1] = 0.0
    margin = torch.zeros(num_rows)
    margin[::2] = torch.rand(num_pairs, generator=generator)
    inputs = PreferenceInputs(
        input_ids=torch.zeros(num_rows, length, dtype=torch.int64),
        token_mask=mask,
        sample_mask=pair_mask.repeat_interleave(2),
        reference_logprob_sum=(reference * mask).sum(-1),
        margin=margin,
    )
    return logprobs.requires_grad_(), inputs


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
