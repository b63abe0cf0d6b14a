"""Which worker group uses the devices: one object decides, so that no loop moves anything itself."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class _Group:
    wake: Callable[[], None]
    sleep: Callable[[], None]
    wake_after: Mapping[str, Callable[[], None]]


class Accelerator:
    """Lets worker groups that share devices use them in turn. At most one is awake: it has its state on the devices.

        accelerator = Accelerator(exclusive=True)
        accelerator.register("policy", policy.onload, policy.offload)
        with accelerator.hold("policy"):  # another group that is awake is put to sleep first
            ...

    A group stays awake until another is acquired, so holding it again moves nothing. With `exclusive=False` (CPU, or
    devices of its own for each group) nothing ever moves, and any number of groups may be held at once.
    """

    def __init__(self, exclusive: bool) -> None:
        self.exclusive = exclusive
        self._groups: dict[str, _Group] = {}
        self._aliases: dict[str, tuple[str, Callable[[], None]]] = {}  # alias -> group, called at the end of a `hold`
        self.awake: str | None = None  # the group that is on the devices, if groups take turns
        self._holding: list[str] = []

    def register(
        self,
        name: str,
        wake: Callable[[], None],
        sleep: Callable[[], None],
        *,
        is_awake: bool = False,
        wake_after: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        """Add a group. `is_awake`: it was built on the devices and is there now, which at most one group can be.

        `wake_after`: by the name of the group that is awake, the exchange of both in one move, without `sleep`.
        """
        assert name not in self._groups, f"{name!r} is registered already"
        if is_awake and self.exclusive:
            assert self.awake is None, f"{name!r} cannot be on the device: {self.awake!r} is"
            self.awake = name
        self._groups[name] = _Group(wake, sleep, wake_after or {})

    def register_alias(self, name: str, group: str, on_release: Callable[[], None] = lambda: None) -> None:
        """Add another name for `group`, whose state it uses.

        `on_release` is called when a `hold` of this name ends without an error. After it, nothing uses the group.
        """
        assert group in self._groups and name not in self._groups
        self._aliases[name] = (group, on_release)

    def rebuilt(self, name: str) -> None:
        """Note that a registered group was rebuilt on the devices, where no other group is awake."""
        assert name in self._groups and self.awake in (None, name)
        self.awake = name if self.exclusive else None

    def acquire(self, name: str) -> None:
        """Wake `name`, after putting the group that is awake to sleep.

        Raises RuntimeError while another group is inside `hold`. If a move raises, no group counts as awake.
        """
        name = self._group_of(name)
        assert name in self._groups, f"{name!r} is not registered: {sorted(self._groups)} are"
        if not self.exclusive or self.awake == name:
            return
        others = [holder for holder in self._holding if holder != name]
        if others:
            raise RuntimeError(f"{name!r} wants the device while {others[-1]!r} holds it")
        previous, self.awake = self.awake, None
        group = self._groups[name]
        if previous is not None and previous in group.wake_after:
            group.wake_after[previous]()
        else:
            if previous is not None:
                self._groups[previous].sleep()
            group.wake()
        self.awake = name

    def release(self, name: str) -> None:
        """Put `name` to sleep now if it is awake: something that is not registered needs the devices."""
        if self.exclusive and self.awake == name:
            if name in self._holding:
                raise RuntimeError(f"{name!r} is still held")
            self.awake = None
            self._groups[name].sleep()

    @contextmanager
    def hold(self, name: str) -> Generator[None]:
        """`acquire`, and no other group can be acquired until the block ends."""
        self.acquire(name)
        group = self._group_of(name)
        self._holding.append(group)
        try:
            yield
            if name in self._aliases:
                self._aliases[name][1]()
        finally:
            self._holding.remove(group)

    @contextmanager
    def lend(self, name: str) -> Generator[None]:
        """Let others acquire the devices until the block ends, although `name` is held; then wake it again."""
        group = self._group_of(name)
        count = self._holding.count(group)
        self._holding = [holder for holder in self._holding if holder != group]
        try:
            yield
        finally:
            self._holding += [group] * count
        if count:
            self.acquire(name)

    def _group_of(self, name: str) -> str:
        return self._aliases[name][0] if name in self._aliases else name
