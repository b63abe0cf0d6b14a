"""A policy as the rest of the library sees it: it sends plans and object references, and receives metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transformers import AutoProcessor, PreTrainedTokenizerBase

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.actor_host import Method
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.distributed.worker_template import HOST_ENVIRONMENT
from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig
from nemo_rl.models.policy.flops import find_gpu
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.interfaces import PolicyWorkerInterface
from nemo_rl.models.policy.layout import training_sizes
from nemo_rl.models.policy.settings import PolicyWorkerSettings, SampleSettings
from nemo_rl.types import BatchPlan, LossFunction, RowKey, TokenAdvantages, TrainResult
from nemo_rl.utils.checkpoint.save import AllWritten, SaveRequest, StateWrite

T = TypeVar("T")

DRAFTING_WORKER = "nemo_rl.models.policy.dtensor.draft.DraftingPolicyWorker"


class WorkersWrite:
    """A background save by the workers of a group; a `StateWrite`."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group = group
        self.refs = group.start_all(PolicyWorkerInterface.finish_save_checkpoint)

    def is_done(self) -> bool:
        return len(self.group.done(self.refs)) == len(self.refs)

    def finish(self) -> None:
        self.group.wait(self.refs)


class Policy:
    """The trained model, sharded over workers, one on each bundle of `cluster`. Plans and handles go in, never tensors.

    One step: `load(plan)`, then the logprob passes, then `train`. The results of a pass stay with the samples on the
    workers. Convention: the logprob of token i is at position i, position 0 is 0, rows are right-padded.

    `processor_path`: folder of the image processor, which checkpoints of a vision-language model hold.
    Training, scoring and checkpointing acquire `accelerator` as `name_prefix`, which is `settings.folder`.

    Attributes:
        name_prefix: workers are named `<name_prefix>-<rank>`, in errors too.
        data_parallel_size: ranks that hold different samples: `BatchPlan.ranks` has this many entries.
        gpu: peak rates of one device; None if unknown (CPUs).
    """

    workers: ClassVar = {
        "dtensor_cfg": "nemo_rl.models.policy.dtensor.worker.DTensorPolicyWorker",
        "megatron_cfg": "nemo_rl.models.policy.megatron.worker.MegatronPolicyWorker",
    }

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
        settings: PolicyWorkerSettings,
        *,
        timeout_s: float,
        processor_path: str | None = None,
    ) -> None:
        self.config, self.tokenizer, self.processor_path = config, tokenizer, processor_path
        self.model_path = settings.model_path
        self.accelerator, self.name_prefix = accelerator, settings.folder
        self._plan: BatchPlan | None = None
        self._samples: SampleSettings | None = None
        self._writing: list[Any] = []  # the calls of `write_samples`
        sizes = training_sizes(config, cluster.world_size())
        sharding = sizes.sharding()
        self.data_parallel_size = sizes.data_parallel
        # The data-parallel coordinate of each worker is the number of its `RankPlan`.
        self.data_coordinates = [sharding.get_worker_coords(rank)["data_parallel"] for rank in range(sharding.size)]
        host_environment = {} if settings.use_gpu else HOST_ENVIRONMENT
        has_draft = isinstance(config, RolloutPolicyConfig) and config.draft.enabled
        worker = DRAFTING_WORKER if has_draft else self.workers[config.backend_key]
        self._start = partial(
            RayWorkerGroup,
            cluster,
            RayWorkerBuilder(worker, config, settings),
            name_prefix=self.name_prefix,
            env_vars=host_environment | (config.backend_cfg.env_vars or {}),
            timeout_s=timeout_s,
            sharding=sharding,
        )
        self.group = self._start()
        self._on_wait: Callable[[], None] | None = None
        self.gpu = find_gpu(self.group.call_one(0, PolicyWorkerInterface.device_name))
        accelerator.register(self.name_prefix, self.onload, self.offload, is_awake=True)

    def restart(self) -> None:
        """End all workers, dead or alive, and start new ones with the weights of the model's own checkpoint.

        `load_checkpoint` and a new `prepare_refit` must follow.
        """
        self.group.shutdown()
        awake = self.accelerator.awake
        if awake is not None and awake != self.name_prefix:
            self.accelerator.release(awake)
        num_bytes, self.group = self.group.controller_tensor_bytes, self._start()
        self.group.controller_tensor_bytes += num_bytes
        self.group.on_wait = self._on_wait
        self._writing = []
        if self._samples is not None:
            self.group.call_all(PolicyWorkerInterface.keep_samples, self._samples)
        self.accelerator.rebuilt(self.name_prefix)

    @property
    def node_ip(self) -> str:
        """The address of the node of rank 0."""
        identity = self.group.members[0].identity
        assert identity is not None, "the group has started"
        return identity.node_ip

    def while_waiting(self, callback: Callable[[], None]) -> None:
        """Call `callback` about twice a second while the controller waits for the workers. Its errors end the wait."""
        self._on_wait = self.group.on_wait = callback

    def onload(self, *, with_optimizer: bool = True) -> None:
        """Weights and, unless a refit follows, optimizer state onto the devices. Called by the accelerator."""
        self.group.call_all(PolicyWorkerInterface.onload, with_optimizer=with_optimizer)

    def offload(self, *, with_weights: bool = True) -> None:
        """Optimizer state and, unless a refit follows, weights to host memory. Called by the accelerator."""
        self.group.call_all(PolicyWorkerInterface.offload, with_weights=with_weights)

    def _call[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """The results of `method` of each worker, with weights and optimizer state on the devices."""
        with self.accelerator.hold(self.name_prefix):
            return self.group.call_all(method, *args, **kwargs)

    @property
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""
        return self.group.controller_tensor_bytes

    def load(self, plan: BatchPlan) -> None:
        """Every worker fetches the rows it owns from the object store and drops the rows of the last plan."""
        work = []
        for rank_plan in plan.ranks:
            refs, places = dict[Any, int](), dict[int, tuple[int, int]]()  # lists of groups, and groups in them
            for number in sorted({planned.group for batch in rank_plan.logprobs for planned in batch}):
                ref, place = plan.groups[number]
                places[number] = refs.setdefault(ref, len(refs)), place
            work.append((rank_plan, places, *refs))
        self._plan = plan
        self.group.call_each(PolicyWorkerInterface.load, [work[coordinate] for coordinate in self.data_coordinates])

    def compute(self, task: HeadTask, column: str) -> None:
        """Compute the output of `task` for the loaded rows under the current weights, and keep it as `column`.

        `prev_logprobs` may be left out before a `train` of one optimizer step: its forward pass gives the same values.
        """
        self._call(PolicyWorkerInterface.compute, task, column)

    def compute_reference_logprobs(self) -> None:
        """Compute logprobs under the weights the run started from, as column `reference_policy_logprobs`."""
        self._call(PolicyWorkerInterface.compute_reference_logprobs)

    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        """Sum a column over the tokens that carry loss, by row, and keep the sums as column `total`."""
        return _merged(self.group.call_all(PolicyWorkerInterface.sum_column, column, total))

    def share(self, column: str) -> dict[RowKey, Any]:
        """References to a column of every loaded row, for `attach` of a policy that loaded the same groups."""
        return _merged(self.group.call_all(PolicyWorkerInterface.share, column))

    def attach(self, column: str, shared: Mapping[RowKey, Any]) -> None:
        """Every worker fetches, for its rows, the column that another policy shared."""
        assert self._plan is not None, "load comes first"
        work = []
        for rank_plan in self._plan.ranks:
            keys = [key for batch in rank_plan.logprobs for planned in batch for key in planned.keys]
            work.append((column, keys, *(shared[key] for key in keys)))
        self.group.call_each(PolicyWorkerInterface.attach, [work[coordinate] for coordinate in self.data_coordinates])

    def inspect(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(worker, *args)` on every worker, as an investigation does (`inspection.py`)."""
        return self._call(PolicyWorkerInterface.inspect, function, *args)

    def inspect_weights(self) -> None:
        """Raises WorkerError, which names worker and weights, if some are not finite."""
        self._call(PolicyWorkerInterface.inspect_weights)

    def mask_sequences_by_importance(self, threshold: float) -> dict[str, float]:
        """Sequence-level importance masking: sequences whose mean exp(|prev - generation logprob|) exceeds `threshold`
        take no part in the loss.

        Returns `max_seq_mult_prob_error` and `num_masked_seqs_by_logprob_error`.
        """
        return self.group.call_all(PolicyWorkerInterface.mask_sequences_by_importance, threshold)[0]

    def set_token_advantages(self, advantages: TokenAdvantages) -> None:
        """Turn the advantages of the loaded rows into advantages per token (KL penalty inside the reward)."""
        self.group.call_all(PolicyWorkerInterface.set_token_advantages, advantages)

    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        """Metrics of the loss over the loaded plan, which has one optimizer step, without training; includes `loss`."""
        return self._call(PolicyWorkerInterface.evaluate, loss_fn, task)[0]

    def train(self, loss_fn: LossFunction, task: HeadTask, is_last_pass: bool = True) -> TrainResult:
        """Take the plan's optimizer steps. The loss gets the output of `task`. Acquires the accelerator.

        `is_last_pass`: of the training step over the plan.
        """
        results = self._call(PolicyWorkerInterface.train, loss_fn, task, is_last_pass)
        first = results[0]
        first.nonfinite_samples = sorted({sample for result in results for sample in result.nonfinite_samples})
        return first

    def keep_samples(self, folder: Path, max_tokens: int) -> None:
        """From the next plan on, keep the values that `write_samples` writes of the reported rows."""
        tokenizer: Any = self.tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        anchor = tokenizer("0", add_special_tokens=False)["input_ids"][-1]
        self._samples = SampleSettings(folder=folder, max_tokens=max_tokens, decode=decode, anchor=anchor)
        self.group.call_all(PolicyWorkerInterface.keep_samples, self._samples)

    def write_samples(self, step: int) -> None:
        """The workers begin to write the reported rows of the loaded plan into the folder, before their next call."""
        self._writing = self.group.start_all(PolicyWorkerInterface.write_samples, step)

    def samples_written(self) -> list[str]:
        """Wait for the end of `write_samples`. Returns the problems."""
        writing, self._writing = self._writing, []
        return [problem for problem in self.group.wait(writing) if problem is not None]

    def save_checkpoint(self, directory: Path, request: SaveRequest) -> StateWrite:
        """Write `weights/`, `optimizer/`, `tokenizer/` and the workers' random generators under `directory`.

        With `request.in_background`, weights and optimizer state are still being written when this returns.
        """
        self._call(PolicyWorkerInterface.save_checkpoint, directory, request)
        self._save_tokenizer(directory / self.name_prefix / "tokenizer")
        if request.save_consolidated:
            self._save_tokenizer(directory / self.name_prefix / "weights" / "consolidated")
        return WorkersWrite(self.group) if request.in_background else AllWritten()

    def _save_tokenizer(self, folder: Path) -> None:
        if self.processor_path is not None:
            AutoProcessor.from_pretrained(self.processor_path).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)  # with the chat template of the run

    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        """Read the files of `save_checkpoint`, on the same or another number of ranks."""
        self._call(PolicyWorkerInterface.load_checkpoint, directory, load_optimizer=load_optimizer)

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Create the transfer buffers, once. Returns names, shapes, dtypes, offsets and buffer handles per rank."""
        return self.group.call_all(PolicyWorkerInterface.prepare_refit, settings)

    def pack(self, bucket: int) -> list[dict[str, Any]]:
        """Pack bucket number `bucket`. Returns each rank's message to its receiver (fingerprints, never tensors)."""
        return self.group.call_all(PolicyWorkerInterface.pack, bucket)

    def check_health(self, timeout_s: float | None = None) -> None:
        """Raise WorkerDied, naming the worker, if one is gone, or WorkerHang if one does not answer."""
        self.group.wait(self.group.start_all(PolicyWorkerInterface.device_name), timeout_s)

    def shutdown(self) -> None:
        """End the workers."""
        self.group.shutdown(PolicyWorkerInterface.shutdown)


def _merged(parts: Sequence[Mapping[RowKey, Any]]) -> dict[RowKey, Any]:
    return {key: value for part in parts for key, value in part.items()}
