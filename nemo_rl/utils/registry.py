"""Objects that a configuration names: by import path or by a registered name, tokens by an environment variable."""

import gc
import importlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import Any

from nemo_rl.config.errors import did_you_mean


class MissingPackage(ValueError):
    """A module exists, and what it imports is not installed."""


@contextmanager
def without_collections() -> Generator[None]:
    """Import libraries in the body without garbage collection, which would take a fifth of the time.

    Later collections do not look at what is there after an import: modules stay, and there are a million objects.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


def import_object(path: str, what: str) -> Any:
    """The object behind `package.module:name` or `package.module.name`. `what` says in an error what it is.

    Raises:
        ValueError: when the path is incomplete, when the module or the name in it does not exist, or when the working
            folder and another place have a module of that name. MissingPackage when the module imports another that is
            not installed.
    """
    module_name, separator, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not separator or not module_name or not name:
        raise ValueError(f"{what} {path!r} is not an import path; write package.module:name")
    if (both := _two_places(module_name.partition(".")[0])) is not None:
        raise ValueError(
            f"{what} {path!r} is in two places: {both[0]} would be used, and {both[1]} in the working folder would "
            "not: rename the one in the working folder"
        )
    try:
        with without_collections():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise MissingPackage(f"{what} {path!r} imports {error.name}, which is not installed here") from error
        raise ValueError(f"{what} {path!r}: no module {error.name!r} can be imported from here") from error
    try:
        return getattr(module, name)  # also what a module makes when it is asked, as those with names of NeMo RL do
    except AttributeError as error:
        raise ValueError(f"{what} {path!r}: module {module_name!r} has no {name!r}") from error


def _two_places(name: str) -> tuple[str, str] | None:
    """The files of a top-level module, if the working folder has one and another place on `sys.path` too."""
    here = os.path.realpath(os.getcwd())
    others = [path for path in sys.path if os.path.realpath(path) != here]
    there, own = _place(name, others), _place(name, [here])
    return None if there is None or own is None or there == own else (there, own)


def _place(name: str, folders: Sequence[str]) -> str | None:
    """The file of a module, or the folder of a package without `__init__.py`."""
    spec = PathFinder.find_spec(name, list(folders))
    if spec is None:
        return None
    return os.path.realpath(spec.origin or next(iter(spec.submodule_search_locations or ())))


def find[T](registry: Mapping[str, T], name: str, what: str) -> T:
    """The entry of `registry`, or the object behind an import path `package.module:name`.

    Raises:
        ValueError: when there is neither.
    """
    if name in registry:
        return registry[name]
    if ":" in name:
        return import_object(name, what)
    raise ValueError(
        f"unknown {what} {name!r}; {did_you_mean(name, registry)} An import path (package.module:name) works too"
    )


def token_in(variable: str) -> str:
    """The token that an environment variable holds. Raises ValueError if it holds none."""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"the environment variable {variable} is not set; export it before the run starts")
    return token
