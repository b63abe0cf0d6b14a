"""The benchmark of a GPU, as far as a CPU can take it: the same functions at tiny size."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from benchmarks.gpu import TINY, head, refit_of, train

CPU = torch.device("cpu")


def test_weights_arrive_in_another_process() -> None:
    over_copies, rate = refit_of(TINY.refits[0], CPU, 1 << 18, 1)  # the function compares what has arrived
    assert over_copies.value > 0 and over_copies.asked == "at most 2" and rate.unit == "GB/s"


def test_packed_sequences_train_and_logprobs_have_gradients() -> None:
    def measure(results: Any) -> None:
        torch.set_num_threads(1)
        results.put([*train(TINY, CPU), *head(TINY, CPU)])

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=measure, args=(results,))
    process.start()
    training, forward, both = results.get()
    process.join(60)
    assert training.name == "training" and training.value > 0 and forward.value > 0 and both.value > 0
