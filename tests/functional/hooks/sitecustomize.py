"""Hurts the process that imports it when told to, from inside: what no signal can do.

On the module path of a run whose variable `FAULTS_FOLDER` is set, every Python process of it imports this file when it
starts. A file `<pid>` in that folder names what to do: "exception", "nonsense" or "shape" (`fault_table.WHAT`).
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
import time
from pathlib import Path

POLL_S = 0.02


class InjectedFault(RuntimeError):
    """The exception of the tests."""


def _watch(folder: Path) -> None:
    order = folder / str(os.getpid())
    faults = {"exception": _raise_once, "nonsense": _return_nan, "shape": _lose_reward}
    while True:
        while not order.exists():
            time.sleep(POLL_S)
        faults[order.read_text()]()
        order.unlink()


def _change_rewards(change) -> None:
    """Of the next call of the environment."""
    module = sys.modules["nemo_rl.environments.math.environment"]
    one_turn = module.one_turn

    def changed(observations, metadata, rewards, **kwargs):
        module.one_turn = one_turn
        return one_turn(observations, metadata, change(rewards), **kwargs)

    module.one_turn = changed


def _lose_reward() -> None:
    _change_rewards(lambda rewards: rewards[:-1])


def _return_nan() -> None:
    if type(_target()).__name__ == "VerifierPool":
        _change_rewards(lambda rewards: rewards * float("nan"))
        return
    import torch

    models = [m for m in _objects() if issubclass(type(m), torch.nn.Module)]
    largest = max(models, key=lambda m: sum(p.numel() for p in m.parameters()))
    with torch.no_grad():
        for parameter in largest.parameters():
            parameter.fill_(float("nan"))


def _objects() -> list[object]:
    gc.unfreeze()  # an engine hides from the collector what there is when it has started
    return gc.get_objects()


def _target() -> object:
    """A worker, an engine's core, an environment's pool of verifiers, a keeper's module."""
    for found in _objects():
        name = type(found).__name__
        if name == "ActorHost":
            return found._worker
        if name == "EngineCoreProc":
            return found
        if name == "MathEnvironment":
            return found.pool
        if name == "GroupKeeper":
            return sys.modules["nemo_rl.rollouts.group_keeper"]
    return None


def _raise_once() -> None:
    """The next call of any public method of the target, of `ray.put` in its module, or the core's next step raises."""
    target = _target()
    if inspect.ismodule(target):
        target = target.ray
        names = ["put"]
    elif type(target).__name__ == "EngineCoreProc":
        names = ["step_fn"]
    else:
        names = [n for n, f in inspect.getmembers(type(target), inspect.isfunction) if not n.startswith("_")]
    before = {name: getattr(target, name) for name in names}

    def fail(*args, **kwargs):
        for name, method in before.items():
            setattr(target, name, method)
        raise InjectedFault("injected by the tests")

    async def fail_later(*args, **kwargs):
        fail()

    for name, method in before.items():
        setattr(target, name, fail_later if inspect.iscoroutinefunction(method) else fail)


def _start() -> None:
    folder = os.environ.get("FAULTS_FOLDER")
    if folder is not None:
        threading.Thread(target=_watch, args=[Path(folder)], name="faults", daemon=True).start()


_start()
os.register_at_fork(after_in_child=_start)
