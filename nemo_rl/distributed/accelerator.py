"""Who is on the accelerator: one object knows, so that no loop onloads or offloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class _Tenant:
    onload: Callable[[], None]
    offload: Callable[[], None]


class Accelerator:
    """Hands the devices from one tenant to the next.

        accelerator = Accelerator(exclusive=True)
        accelerator.register("policy", policy.onload, policy.offload)
        with accelerator.hold("policy"):  # whoever was there is offloaded first
            ...

    A tenant stays on the device until another asks for it, so holding it again moves nothing. With `exclusive=False`
    (CPU, or each tenant on devices of its own) nothing ever moves and any number may hold at once.
    """

    def __init__(self, exclusive: bool) -> None:
        self.exclusive = exclusive
        self._tenants: dict[str, _Tenant] = {}
        self._guests: dict[str, str] = {}
        self._on_leave: dict[str, Callable[[], None]] = {}
        self._present: str | None = None
        self._holding: list[str] = []

    @property
    def present(self) -> str | None:
        """The tenant that is on the device, if they take turns."""
        return self._present

    def register(
        self, name: str, onload: Callable[[], None], offload: Callable[[], None], *, on_device: bool = False
    ) -> None:
        """Make a tenant known.

        `on_device`: it is on the device now, as it was built there; one tenant at most can be.
        """
        if name in self._tenants:
            raise ValueError(f"{name!r} is registered already")
        if on_device and self.exclusive:
            if self._present is not None:
                raise ValueError(f"{name!r} cannot be on the device: {self._present!r} is")
            self._present = name
        self._tenants[name] = _Tenant(onload, offload)

    def register_guest(self, name: str, host: str, on_leave: Callable[[], None]) -> None:
        """Make a tenant known that lives in another: wherever `host` is, it is too.

        `on_leave` is called when a `hold` of it ends without an error: it must then ask nothing more of its host.
        """
        assert host in self._tenants and name not in self._tenants
        self._guests[name] = host
        self._on_leave[name] = on_leave

    def built(self, name: str) -> None:
        """A registered tenant was built anew on the device, which nobody else is on."""
        assert name in self._tenants and self._present in (None, name)
        self._present = name if self.exclusive else None

    def acquire(self, name: str) -> None:
        """Bring `name` onto the device, after taking off whoever is there.

        Raises RuntimeError while another tenant is inside `hold`. If a move raises, nobody counts as present.
        """
        name = self._guests.get(name, name)
        if name not in self._tenants:
            raise ValueError(f"{name!r} is not registered: {sorted(self._tenants)} are")
        if not self.exclusive or self._present == name:
            return
        others = [holder for holder in self._holding if holder != name]
        if others:
            raise RuntimeError(f"{name!r} wants the device while {others[-1]!r} holds it")
        previous, self._present = self._present, None
        if previous is not None:
            self._tenants[previous].offload()
        self._tenants[name].onload()
        self._present = name

    def release(self, name: str) -> None:
        """Take `name` off the device now, if it is there: before the device is needed by something unregistered."""
        if self.exclusive and self._present == name:
            if name in self._holding:
                raise RuntimeError(f"{name!r} is still held")
            self._present = None
            self._tenants[name].offload()

    @contextmanager
    def lend(self, name: str) -> Iterator[None]:
        """Others may have the device until the block ends, although `name` is held; then it is back."""
        tenant = self._guests.get(name, name)
        count = self._holding.count(tenant)
        self._holding = [holder for holder in self._holding if holder != tenant]
        try:
            yield
        finally:
            self._holding += [tenant] * count
        if count:
            self.acquire(name)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """`acquire`, and nobody else may acquire until the block ends."""
        self.acquire(name)
        tenant = self._guests.get(name, name)
        self._holding.append(tenant)
        try:
            yield
            if name in self._guests:
                self._on_leave[name]()
        finally:
            self._holding.remove(tenant)
