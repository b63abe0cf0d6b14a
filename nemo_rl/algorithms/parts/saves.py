"""The outputs of a run: whether they can be written, and whether the checkpoints that exist belong to this run."""

import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PretrainedConfig

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager, check_identity, require_optimizer
from nemo_rl.utils.checkpoint.tensors import DamagedTensorsError
from nemo_rl.utils.logger import check_packages
from nemo_rl.utils.registry import import_object

logger = logging.getLogger(__name__)

WEIGHT_CHECKS = {  # only the backend that trains is imported
    "dtensor_cfg": "nemo_rl.models.policy.dtensor.checks:check_saved_weights",
    "megatron_cfg": "nemo_rl.models.policy.megatron.files:check_checkpoint",
}


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The checkpoints of a run, which are looked at before anything starts, and taken by `open`."""

    manager: CheckpointManager | None  # None: nothing is saved
    identity: dict[str, Any]  # a run that continues a checkpoint must have the same

    @classmethod
    def prepare(
        cls, config: RunConfig, trained: Mapping[str, tuple[PolicyConfig, PretrainedConfig]], identity: dict[str, Any]
    ) -> Self:
        """Check that logs and checkpoints can be written, and that the checkpoints that exist belong to this run.

        `trained`: folder in a checkpoint -> settings and model of each policy that is trained.

        Raises:
            ValueError: a folder cannot be written, or the package of a tracker is not installed.
            CheckpointIdentityError: listing every difference.
            CheckpointError: if the run cannot continue the newest checkpoint.
        """
        manager = None
        if config.checkpointing.enabled:
            manager = CheckpointManager(config.checkpointing, known_metrics=config.known_metrics)
            latest = manager.latest_finished()
            if latest is not None:
                info = manager.load_training_info(latest)
                assert info is not None
                check_identity(info["identity"], identity)
                require_optimizer(latest)
                for folder, (policy, model) in trained.items():
                    check_saved_weights(latest, policy, model, folder)
            check_writable(manager.checkpoint_dir, "checkpointing.checkpoint_dir")
        check_writable(Path(config.logger.log_dir), "logger.log_dir")
        check_packages(config.logger)
        return cls(manager=manager, identity=identity)

    def open[ConfigT: RunConfig](
        self, config: ConfigT, run_dir: Path, stack: ExitStack
    ) -> tuple[ConfigT, list[str], dict[str, Any]]:
        """Hold the checkpoints until the stack ends, and repair what a dead run left unfinished.

        Returns the configuration that applies, with the hyperparameters of the newest checkpoint; a sentence for each
        key that differs from it; and its training_info.json, empty without a checkpoint.
        """
        if self.manager is None:
            return config, [], {}
        stack.enter_context(self.manager.held(run_dir))
        latest = self.manager.latest_finished()
        if latest is None:
            return config, [], {}
        config, changes = config.continuing(self.manager.load_config(latest))
        return config, changes, self.manager.load_training_info(latest) or {}


def check_saved_weights(latest: Path, policy: PolicyConfig, model: PretrainedConfig, folder: str = "policy") -> None:
    """Check by their headers that the weights in `folder` of the newest checkpoint are those that this run trains.

    Damaged files are left to the resuming run, which falls back to an older checkpoint.

    Raises:
        CheckpointError: listing the missing, the unexpected and the differently shaped tensors.
    """
    if not (latest / folder / "weights").is_dir():
        raise CheckpointError(f"{latest} holds no {folder}/weights")
    try:
        import_object(WEIGHT_CHECKS[policy.backend_key], "check")(latest / folder, policy, model)
    except DamagedTensorsError as error:
        logger.warning("%s", error)


def check_writable(directory: Path, key: str) -> None:
    """Create `directory` if necessary, and a temporary file in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}: cannot write to {str(directory)!r}: {error.strerror}; name another directory, or remove what is "
            "in the way"
        ) from error
