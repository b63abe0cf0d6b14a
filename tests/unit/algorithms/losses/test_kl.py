import math

import pytest
import torch

from nemo_rl.algorithms.losses.divergence import calculate_kl


def test_the_three_estimators_by_hand():
    logprobs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])  # r = 0.5
    assert calculate_kl(logprobs, reference, "k1").item() == pytest.approx(math.log(2))
    assert calculate_kl(logprobs, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert calculate_kl(logprobs, reference, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_the_expectation_under_the_policy_is_the_kl(kl_type):
    policy, reference = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (policy * (policy / reference).log()).sum()
    estimates = calculate_kl(policy.log(), reference.log(), kl_type)
    assert (policy * estimates).sum().item() == pytest.approx(exact.item())


def test_the_gradient_of_k2_is_that_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2]).double().log()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad(
        (logprobs.exp().detach() * calculate_kl(logprobs, reference, "k2")).sum(), logits
    )
    torch.testing.assert_close(estimated, exact)


def test_clamps_and_their_absence():
    logprobs, reference = torch.tensor([0.0, 0.0]), torch.tensor([5.0, -5.0])
    assert calculate_kl(logprobs, reference, "k1", 2.0, None).tolist() == [-2.0, 2.0]
    assert calculate_kl(logprobs, reference, "k1", None, 3.0).tolist() == [-3.0, 3.0]
    assert calculate_kl(logprobs, reference, "k1", None, None).tolist() == [-5.0, 5.0]
    assert calculate_kl(logprobs, reference, "k3").tolist() == pytest.approx([10.0, math.exp(-5) - 1 + 5])
