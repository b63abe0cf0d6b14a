from typing import Any

import pytest

from nemo_rl.distributed.accelerator import Accelerator


def register(accelerator: Accelerator, moves: list[str], name: str, **how: Any) -> None:
    accelerator.register(name, lambda: moves.append(f"+{name}"), lambda: moves.append(f"-{name}"), **how)


def build(exclusive: bool = True) -> tuple[Accelerator, list[str]]:
    accelerator, moves = Accelerator(exclusive), []
    for name in ("policy", "generation"):
        register(accelerator, moves, name)
    return accelerator, moves


def test_groups_take_turns_and_stay_awake_until_another_is_acquired() -> None:
    accelerator, moves = build()
    for name in ("policy", "policy", "generation", "policy"):
        with accelerator.hold(name):
            assert accelerator.awake == name
    assert moves == ["+policy", "-policy", "+generation", "-generation", "+policy"]
    accelerator, moves = build(False)  # nothing moves unless devices are exclusive
    with accelerator.hold("policy"), accelerator.hold("generation"):
        pass
    assert moves == [] and accelerator.awake is None


def test_one_move_may_take_the_place_of_sleep_and_wake() -> None:
    accelerator, moves = build()
    register(accelerator, moves, "refit", wake_after={"policy": lambda: moves.append("policy>refit")})
    for name in ("policy", "refit", "generation", "refit"):
        accelerator.acquire(name)
    assert moves == ["+policy", "policy>refit", "-refit", "+generation", "-generation", "+refit"]


def test_a_held_device_cannot_be_acquired_unless_it_is_lent() -> None:
    accelerator, moves = build()
    with accelerator.hold("policy"):
        with accelerator.hold("policy"):
            pass
        with pytest.raises(RuntimeError, match="'generation' wants the device while 'policy' holds it"):
            accelerator.acquire("generation")
        with pytest.raises(RuntimeError, match="still held"):
            accelerator.release("policy")
    accelerator.release("policy")
    assert moves == ["+policy", "-policy"] and accelerator.awake is None
    # It can be lent, and comes back.
    accelerator, moves = build()
    with accelerator.hold("generation"):
        with accelerator.lend("generation"), accelerator.hold("policy"):
            assert accelerator.awake == "policy"
        assert accelerator.awake == "generation"
        with pytest.raises(RuntimeError, match="'policy' wants the device while 'generation' holds it"):
            accelerator.acquire("policy")
        with pytest.raises(ValueError, match="broken"), accelerator.lend("generation"):
            raise ValueError("broken")
    accelerator.acquire("policy")
    assert moves == ["+generation", "-generation", "+policy", "-policy", "+generation", "-generation", "+policy"]


def test_a_group_may_be_registered_or_rebuilt_awake_and_none_is_after_a_move_that_failed() -> None:
    accelerator, moves = build()
    register(accelerator, moves, "critic", is_awake=True)
    accelerator.acquire("critic")
    accelerator.acquire("policy")
    assert moves == ["-critic", "+policy"]
    with pytest.raises(AssertionError, match="'late' cannot be on the device: 'policy' is"):
        register(accelerator, moves, "late", is_awake=True)
    accelerator.release("policy")
    accelerator.rebuilt("critic")  # its workers died and were started again
    accelerator.acquire("policy")
    assert moves[2:] == ["-policy", "-critic", "+policy"]
    accelerator.register("big", lambda: 1 / 0, lambda: None)
    with pytest.raises(ZeroDivisionError):
        accelerator.acquire("big")
    assert accelerator.awake is None
    with pytest.raises(AssertionError, match="'reward' is not registered"):
        accelerator.acquire("reward")
    with pytest.raises(AssertionError, match="registered already"):
        register(accelerator, moves, "policy")


def test_an_alias_uses_its_group_and_calls_back_on_release() -> None:
    accelerator, moves = build()
    accelerator.register_alias("visitor", "policy", on_release=lambda: moves.append("visitor leaves"))
    with accelerator.hold("visitor"):
        assert accelerator.awake == "policy"
        with pytest.raises(RuntimeError, match="'generation' wants the device"):
            accelerator.acquire("generation")
    with accelerator.hold("policy"):
        pass
    assert moves == ["+policy", "visitor leaves"]
    with pytest.raises(ValueError, match="broken"), accelerator.hold("visitor"):
        raise ValueError("broken")
    assert moves == ["+policy", "visitor leaves"], "what it left behind is for whoever handles the error"
