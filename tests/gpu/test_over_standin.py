"""The tests of one GPU, and its benchmark, over the stand-in for CUDA with values: what passes, and what stops where.

So that none of them rots before it meets a GPU. A row that changes is a change of the test, of the program, or of the
stand-in.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from nemo_rl.utils.folders import cache_root
from tests.functional.cli import ROOT
from tools.standin.build import build, environment, missing, site_packages_of_torch

pytestmark = [
    pytest.mark.standin,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing(site_packages_of_torch(), values=True)), reason="g++ is not installed"),
]

STOPS: dict[str, str] = {}
"""What a test says that does not pass, by the beginning of its name."""

LEFT_OUT = "not compiled and not left_and_taken"
"""Not run: what is compiled for the device has no values on a CPU; and one that takes more than 150 s there."""


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    libraries = build(site_packages_of_torch(), cache_root() / "standin", values=True)
    return environment(libraries, values=True)


def test_every_test_of_a_gpu_passes_or_stops_at_a_named_operation(tmp_path: Path, variables: dict[str, str]) -> None:
    report = tmp_path / "report.xml"
    options = ("-m", "gpu", "-k", LEFT_OUT, "-n0", "-q", "--timeout=300", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", "tests/unit"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-4000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = next((part for part in case if part.tag in ("failure", "error")), None)
        found[case.attrib["name"]] = None if failure is None else failure.attrib["message"]
    assert len(found) >= 30
    for name, message in found.items():
        stop = next((text for start, text in STOPS.items() if name.startswith(start)), None)
        assert (message is None) == (stop is None), f"{name}: {message or 'passes'}"
        assert message is None or stop in message, f"{name}: {message}"
    stale = [start for start in STOPS if not any(name.startswith(start) for name in found)]
    assert not stale, f"no such tests: {stale}"


def test_every_part_of_the_benchmark_without_an_engine_measures(tmp_path: Path, variables: dict[str, str]) -> None:
    found = tmp_path / "gpu.json"
    command = ["benchmarks/gpu.py", "--size", "tiny", "--json", str(found), "--parts", "ipc", "refit", "train", "head"]
    subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, timeout=900)
    report = json.loads(found.read_text())
    assert "stand-in, no GPU" in report["device"] and not report["failed"]
    names = {result["name"] for result in report["results"]}
    assert {"training, MFU", "offload over a pinned copy", "logprobs of a head over ideal"} <= names
    assert all(result["value"] == 1 for result in report["results"] if result["part"] == "ipc")
