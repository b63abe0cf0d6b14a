"""Logprobs without bias, and the same bits for a row whatever rows are beside it."""

import pytest
import torch

from nemo_rl.utils.logprobs import log_softmax

ROWS, BLOCK = 256, 32


def peaked(vocabulary: int, seed: int) -> torch.Tensor:
    """Logits [BLOCK, V] below 32; the best word of each row stands 15 above the rest."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(BLOCK, vocabulary, generator=generator)
    logits[torch.arange(BLOCK), torch.randint(vocabulary, (BLOCK,), generator=generator)] = logits.amax(-1) + 15
    return logits


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_a_large_vocabulary_adds_no_bias(vocabulary: int) -> None:
    """Signed errors of the best word's logprob against float64, in the mean over all rows."""
    ours, of_torch = [], []
    for seed in range(ROWS // BLOCK):
        logits = peaked(vocabulary, seed)
        best = logits.argmax(-1, keepdim=True)
        exact = (logits.gather(1, best).double() - logits.double().logsumexp(-1, keepdim=True))[:, 0]
        ours += (log_softmax(logits).gather(1, best)[:, 0].double() - exact).tolist()
        of_torch += (logits.log_softmax(-1).gather(1, best)[:, 0].double() - exact).tolist()
    assert abs(sum(ours)) / ROWS < 1e-6
    assert abs(sum(of_torch)) / ROWS > 3e-6, "torch is as exact: use its own"


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    logits = peaked(49_152, 0)
    logits[:, ::3] = float("-inf")  # as top-k leaves them
    together = log_softmax(logits)
    for row in (0, 7, 31):
        assert torch.equal(log_softmax(logits[row : row + 1])[0], together[row])
    assert float(together.double().exp().sum(-1).sub(1).abs().max()) < 1e-5
