"""Checkpoints: layout, ranking, and the state after every kind of damage."""

import errno
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_rl.utils.checkpoint import manager as checkpoints
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager, DiskFullError
from nemo_rl.utils.checkpoint.manifest import MANIFEST_NAME, find_damage, sealed_digest, sealed_sizes
from nemo_rl.utils.config import CheckpointingConfig

SHARD = "policy/weights/shard_0.bin"


def manager_in(directory: Path, **settings) -> CheckpointManager:
    own = {name: settings.pop(name) for name in ("free_bytes", "known_metrics") if name in settings}
    cfg = CheckpointingConfig(checkpoint_dir=str(directory), **{"keep_top_k": None, "metric_name": None} | settings)
    return CheckpointManager(cfg, **own)


def write_state(content: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for part in ("weights", "optimizer"):
            (directory / "policy" / part).mkdir(parents=True)
            (directory / "policy" / part / "shard_0.bin").write_text(content * 100)

    return write


def save(manager: CheckpointManager, step: int, content: str = "x", **metrics: float) -> Path:
    logged = {name.replace("__", "/"): value for name, value in metrics.items()}
    return manager.start_save(step, write_state(content), {"current_step": step}, "seed: 1\n", logged).finish()


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_saved_checkpoint_is_complete_and_readable(tmp_path):
    manager = manager_in(tmp_path / "new" / "dir")
    path = save(manager, 3, train__reward=0.5, train__loss=float("nan"))
    assert path.name == "step_3" and (path / "config.yaml").read_text() == "seed: 1\n"
    metrics = {"train/reward": 0.5, "train/loss": "NaN"}
    assert manager.load_training_info(path) == {"current_step": 3, "metrics": metrics}
    assert manager.get_resume_paths(path) == (path / "policy" / "weights", path / "policy" / "optimizer")
    shards = [f"policy/{part}/shard_0.bin" for part in ("optimizer", "weights")]
    assert [*sealed_sizes(path)] == ["config.yaml", *shards, "training_info.json"] and sealed_sizes(tmp_path) == {}
    assert find_damage(path) is None
    before = sealed_digest(path)
    assert save(manager, 3, content="y") == path
    assert steps_in(path.parent) == ["step_3"], "the one before is gone"
    assert sealed_digest(path) != before is not None and sealed_digest(tmp_path) is None


def test_the_latest_finished_one_has_sound_training_info_whatever_its_weights(tmp_path):
    """What a start prints of a run to resume reads no weights."""
    manager = manager_in(tmp_path)
    assert manager.latest_finished() is None
    paths = [save(manager, step) for step in (1, 2, 3, 4)]
    (paths[1] / SHARD).write_text("damaged")
    (paths[2] / "training_info.json").write_text("{}")
    (paths[3] / MANIFEST_NAME).unlink()
    assert manager.latest_finished() == paths[1]


@pytest.mark.parametrize(
    ("higher_is_better", "accuracies", "kept"),  # the best first
    [
        (True, [0.2, 0.9, 0.8, 0.1, 0.5], "step_2 step_3 step_5"),
        (False, [0.2, 0.9, 0.8, 0.1, 0.5], "step_4 step_1 step_5"),
        (True, [0.5, 0.5, float("nan"), None, 0.5], "step_5 step_2"),  # of equals the newer
    ],
)
def test_the_best_and_the_latest_are_kept(tmp_path, caplog, higher_is_better, accuracies, kept):
    manager = manager_in(tmp_path, keep_top_k=2, metric_name="val:accuracy", higher_is_better=higher_is_better)
    for step, accuracy in enumerate(accuracies, 1):
        save(manager, step, **{"train__reward": 1.0} if accuracy is None else {"validation__accuracy": accuracy})
    assert steps_in(tmp_path) == sorted(kept.split())
    assert manager.get_best_checkpoint_path() == tmp_path / kept.split()[0]
    assert ("counts as the worst" in caplog.text) == (None in accuracies)


FT_STEPS = [
    # of every 2nd step the best two by accuracy, 0.9 at step 2 and 0.5 at steps 4 and 6; of all steps the latest two
    ({"keep_top_k": 2, "ft_keep_latest_k": 2}, "1 2 3 4 5 6 7", "2 6 7"),
    ({"keep_top_k": 1, "ft_keep_latest_k": 2}, "1 2 3", "2 3"),
    ({"keep_top_k": None, "ft_keep_latest_k": 1}, "1 2 3 4 5", "2 4 5"),
    ({"keep_top_k": 2, "ft_save_period": 1}, "1 2 3 4 5 6 7", "2 6 7"),
    ({"keep_top_k": None, "ft_save_period": 1}, "1 2 3", "1 2 3"),
]


@pytest.mark.parametrize(("settings", "saved", "kept"), FT_STEPS)
def test_checkpoints_against_failures_are_kept_beside_the_best(tmp_path, caplog, settings, saved, kept):
    manager = manager_in(tmp_path, save_period=2, metric_name="val:accuracy", **settings)
    for step in map(int, saved.split()):
        save(manager, step, **({} if step % 2 else {"validation__accuracy": 0.9 if step == 2 else 0.5}))
    assert steps_in(tmp_path) == [f"step_{step}" for step in kept.split()]
    assert "counts as the worst" not in caplog.text  # those in between have no validation


def test_a_step_may_lack_the_metric_that_ranks_unless_its_environment_reports_others(tmp_path, caplog):
    known = {"train/loss", "train/sums/reward", "train/sums/num_samples"}
    logged = {"train__reward": 1.0, "train__sums__num_samples": 0.0, "train__math__accuracy": 1.0}
    for name in ("train:loss", "train:sums/reward", "train:code/passed"):
        save(manager_in(tmp_path, known_metrics=known, metric_name=name), 1, **logged)
        assert f"no {name}: its checkpoint counts as the worst" in caplog.text
    with pytest.raises(ValueError, match=r'metric_name is "train:math/acuracy".*; there are: train/math/accuracy$'):
        save(manager_in(tmp_path, known_metrics=known, metric_name="train:math/acuracy"), 1, **logged)


def test_checkpoints_that_others_made_are_ranked_and_said_to_be_foreign(tmp_path):
    manager = manager_in(tmp_path, metric_name="val:accuracy")
    for step, accuracy in [(10, None), (20, 0.9), (30, 0.5)]:
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "training_info.json").write_text(json.dumps({"val:accuracy": accuracy}))
    with pytest.warns(UserWarning, match="step_10: ignored"):
        assert manager.get_best_checkpoint_path() == tmp_path / "step_20"
    with pytest.raises(CheckpointError, match=r"step_10: manifest\.json is missing: another program wrote this"):
        manager.latest_sound()


def test_a_script_saves_with_a_dictionary_as_configuration(tmp_path):
    settings = {"enabled": True, "checkpoint_dir": tmp_path, "metric_name": "val:accuracy", "keep_top_k": 1}
    manager = CheckpointManager(settings | {"higher_is_better": True, "save_period": 1})
    for step, accuracy in [(1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)]:
        info = {"step": torch.tensor(step), "val:accuracy": np.float64(accuracy)}
        manager.finalize_checkpoint(str(manager.init_tmp_checkpoint(step, info, {"seed": torch.tensor(1)})))
    assert steps_in(tmp_path) == ["step_2", "step_4"]
    assert (tmp_path / "step_2" / "config.yaml").read_text() == "seed: 1\n"
    assert manager.load_training_info(manager.get_best_checkpoint_path()) == {"step": 2, "val:accuracy": 0.9}
    assert manager.latest_sound() == tmp_path / "step_4"
    with pytest.raises(TypeError, match="cannot be written as JSON: Tensor"):
        manager.init_tmp_checkpoint(5, {"losses": torch.ones(2)})


def test_a_metric_without_val_or_train_is_a_key_of_the_scripts_training_info(tmp_path):
    settings = {"checkpoint_dir": tmp_path, "metric_name": "loss", "higher_is_better": False, "keep_top_k": None}
    manager = CheckpointManager(settings)
    for step, info in [(1, {"loss": 0.5}), (2, {}), (3, {"loss": 0.9}), (4, {"loss": math.nan})]:
        manager.finalize_checkpoint(manager.init_tmp_checkpoint(step, info))
    with pytest.warns(UserWarning, match=r"^step_2, step_4: ignored for want of loss$"):
        assert manager.get_best_checkpoint_path() == tmp_path / "step_1"
    with pytest.warns(UserWarning, match=r"val_loss; the latest is taken$"):
        best = CheckpointManager(settings | {"metric_name": "val_loss"}).get_best_checkpoint_path()
    assert best == tmp_path / "step_4"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (SHARD, flip_a_byte, "is not what was saved"),
        (SHARD, Path.unlink, "is missing"),
        (SHARD, lambda path: os.truncate(path, 7), "has 7 bytes instead of 100"),
        (MANIFEST_NAME, flip_a_byte, "is damaged"),
        (MANIFEST_NAME, Path.unlink, "is missing"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used_or_all_are_listed(tmp_path, caplog, name, damage, reason):
    for step in (10, 20):
        save(manager_in(tmp_path), step)
    damage(tmp_path / "step_20" / name)
    manager = manager_in(tmp_path, keep_top_k=1)
    assert manager.latest_sound() == tmp_path / "step_10"
    assert f"step_20 is refused: {name} {reason}" in caplog.text and "falling back" in caplog.text
    save(manager, 15)
    assert steps_in(tmp_path) == ["step_15", "step_20"], "the damaged one neither counts nor displaces"
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_15"
    save(manager, 20, content="y")
    assert manager.latest_sound() == tmp_path / "step_20"
    for step in (19, 20):
        flip_a_byte(save(manager_in(tmp_path), step) / SHARD)
    with pytest.raises(CheckpointError, match=r"2 checkpoints and none is sound:\n  step_20: .*\n  step_19: .*shard_0"):
        manager.latest_sound()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_SAID = r"step 2 .*the disk was full after 4\.\d KiB.*step_1 is untouched"


@pytest.mark.parametrize(
    ("cause", "kind", "said"), [(None, RuntimeError, "worker 0 failed"), (FULL, DiskFullError, FULL_SAID)]
)
def test_a_write_that_raises_leaves_nothing_behind_and_a_full_disk_is_said(tmp_path, cause, kind, said):
    manager = manager_in(tmp_path)
    save(manager, 1)

    def write(directory: Path) -> None:
        (directory / "half").write_bytes(b"x" * 4096)
        raise RuntimeError("worker 0 failed") from cause

    with pytest.raises(kind, match=said):
        manager.start_save(2, write, {}, "", {}).finish()
    assert steps_in(tmp_path) == ["step_1"]
    with pytest.raises(DiskFullError, match=r"\d{3} bytes are needed and 150 bytes are free.*step_1 is untouched"):
        save(manager_in(tmp_path, free_bytes=lambda path: 150), 2)
    assert steps_in(tmp_path) == ["step_1"], "noticed before anything is written"
    save(manager, 2)
    assert manager.latest_sound() == tmp_path / "step_2"


def saves_until(directory: Path, moment: str) -> None:
    """Ends this process right before its n-th rename, or while it writes."""
    renames = itertools.count(1)

    def hook(event: str, args: object) -> None:
        if event == "os.rename" and moment == f"rename {next(renames)}":
            os.kill(os.getpid(), signal.SIGKILL)

    def write(path: Path) -> None:
        write_state("new")(path)
        if moment == "write":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    manager_in(directory).start_save(2, write, {}, "", {}).finish()


@pytest.mark.parametrize(
    ("moment", "before"),
    [
        ("write", [1]),
        ("rename 1", [1]),  # all is written, step_2 not yet named
        ("rename 1", [1, 2]),  # step_2 exists and is about to step aside
        ("rename 2", [2]),  # it has stepped aside, the new one is not named yet
    ],
)
def test_kill_9_while_saving_never_loses_the_last_sound_one(tmp_path, moment, before):
    for step in before:
        save(manager_in(tmp_path), step)
    process = multiprocessing.get_context("fork").Process(target=saves_until, args=(tmp_path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with manager_in(tmp_path).held("logs") as manager:
        latest = manager.latest_sound()
    assert latest == tmp_path / f"step_{before[-1]}" and (latest / SHARD).read_text() == "x" * 100
    assert all(path.startswith("step_") for path in steps_in(tmp_path))


def test_a_save_in_the_background_is_no_checkpoint_until_it_is_finished(tmp_path):
    manager = manager_in(tmp_path, keep_top_k=1)
    save(manager, 1)
    is_over = False

    def start_write(directory: Path) -> SimpleNamespace:
        return SimpleNamespace(is_done=lambda: is_over, finish=partial(write_state("x"), directory))

    pending = manager.start_save(2, start_write, {"current_step": 2}, "", {})
    assert pending.advance() is None and not pending.is_written
    assert steps_in(tmp_path) == ["step_1", "tmp_step_2"] and manager.latest_sound() == tmp_path / "step_1"
    is_over = True
    assert pending.is_written
    while (path := pending.advance()) is None:
        time.sleep(0.01)
    assert path == manager.latest_sound() == tmp_path / "step_2" and 0 < pending.seconds < 60
    assert steps_in(tmp_path) == ["step_2"], "keep_top_k holds for it as for others"
    manager.start_save(3, start_write, {}, "", {}).discard()
    assert steps_in(tmp_path) == ["step_2"]
    save(manager, 3)


def test_identity_lists_every_difference():
    run = {"model": {"config": "bb", "tokenizer": "tt"}, "dataset": "d1", "keys": [1, 2]}
    saved = run | {"model": {"config": "aa", "tokenizer": "tt"}, "gone": 1}
    checkpoints.check_identity(saved, json.loads(json.dumps(saved)))
    checkpoints.check_identity(saved, saved | {"keys": (1, 2)})
    with pytest.raises(checkpoints.CheckpointIdentityError, match=r"checkpointing\.checkpoint_dir") as caught:
        checkpoints.check_identity(saved, run)
    assert str(caught.value).splitlines()[1:-1] == [
        "  gone: the checkpoint has 1, this run '(absent)'",
        "  model.config: the checkpoint has 'aa', this run 'bb'",
    ]
