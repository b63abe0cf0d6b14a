"""A data loader of your own: short prompts first, shuffled among those of similar length.

    uv run --extra cpu examples/run_grpo_math.py --config examples/configs/grpo_math_cpu.yaml \\
        data.custom_dataloader=examples.custom_dataloader.custom_dataloader:ShortFirst

`data.custom_dataloader` names a subclass of `PromptDataLoader`, or a function with its arguments that makes one.
Checkpoints keep its epoch and its number of batches, and a resumed run asks it for the rest.
"""

from __future__ import annotations

import numpy as np

from nemo_rl.data.rows.dataloader import PromptDataLoader

NUM_BUCKETS = 8


class ShortFirst(PromptDataLoader):
    """A curriculum by length: eight buckets from short to long, each shuffled again in every epoch."""

    def order(self) -> np.ndarray:
        lengths = np.array([len(str(self.dataset[index].row)) for index in range(len(self.dataset))])
        buckets = np.array_split(np.argsort(lengths, kind="stable"), NUM_BUCKETS)
        if self.shuffle:
            generator = np.random.default_rng([self.seed, self.epoch])
            buckets = [generator.permutation(bucket) for bucket in buckets]
        return np.concatenate(buckets)
