"""The command line as a user meets it: output, exit status and time of real processes."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.cli import Parser, load_from_command_line
from tests.tables import named
from tests.unit.config.run_configs import ROOT

DRIVER = Path(__file__).parent / "fixtures" / "driver.py"
CPU = ("--config", "examples/configs/grpo_math_cpu.yaml")


def cpu_of(command: list[object]) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished process and the seconds of CPU it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=800)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cpu_of([sys.executable, DRIVER, *arguments])[0]


def fastest(limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The first of three runs below `limit` times the CPU of an import of its libraries, 0.3 s on most machines:
    processes that share a core with others take longer.
    """
    found = []
    for _ in range(3):
        _, import_s = cpu_of([sys.executable, "-c", "import numpy, pydantic, yaml"])
        done, cpu_s = cpu_of([sys.executable, DRIVER, *arguments])
        if cpu_s < limit * import_s:
            return done
        found.append((cpu_s, import_s))
    raise AssertionError(f"never below {limit} imports: {found}")


def test_help_lists_the_sections_within_a_second() -> None:
    done = fastest(4, "--help")
    assert done.returncode == 0
    for section in ("grpo", "loss_fn", "policy", "data", "env", "logger", "checkpointing", "cluster"):
        assert f"\n  {section} " in done.stdout
    assert "policy.model_name=" in done.stdout


def test_a_wrong_key_ends_within_three_seconds_with_status_2_and_no_traceback() -> None:
    done = fastest(8, *CPU, "grpo.ratio_clip_min=0.1")
    said = "command line: grpo.ratio_clip_min=0.1: unknown key; the nearest valid key is loss_fn.ratio_clip_min"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")


def test_a_signal_before_the_run_ends_the_command_with_a_sentence() -> None:
    program = (
        "import runpy, signal, sys; from nemo_rl.config import loader\n"
        "loader.load_config = lambda *_: signal.raise_signal(signal.SIGTERM)\n"
        f"runpy.run_path({str(DRIVER)!r})"
    )
    done = cpu_of([sys.executable, "-c", program])[0]
    assert (done.returncode, done.stderr) == (143, "SIGTERM: the command ends before the run has begun\n")


def test_a_correct_command_line_loads() -> None:
    done = run(*CPU, "policy.model_name=mine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "loaded mine\n", "")


@named(
    "arguments, message",
    {
        "no such file": (["--config=nothing.yaml"], CPU[1]),
        "unknown option": (["--dryrun"], "unknown option --dryrun"),
        "two files": (
            ["--config", "a.yaml", "x=1", "--config=b.yaml"],
            "--config: got a.yaml and b.yaml; give it once",
        ),
    },
)
def test_mistakes_of_a_command_line_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"description": "", "default_config": CPU[1], "placement": ""}
    with pytest.raises(SystemExit, match="2"):
        load_from_command_line(GRPOMasterConfig, argv=arguments, **how)
    assert message in capsys.readouterr().err


def test_a_parser_stores_an_option_once_and_collects_what_is_to_be_collected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser()
    parser.add_argument("folder")
    parser.add_argument("--every", "-e", type=float, default=1.0)
    parser.add_argument("--filter", action="append")
    for _ in range(2):
        given = parser.parse_args(["a", "--every", "1.0", "--filter", "b", "--filter", "c"])
        assert (given.folder, given.every, given.filter) == ("a", 1.0, ["b", "c"])
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["a", "--every", "1.0", "-e", "1.0"])
    assert "argument --every/-e: got 1.0 and 1.0; give it once" in capsys.readouterr().err


def test_remarks_follow_on_request() -> None:
    theirs = "+reward_penalties={penalize_empty_final_answer: false}"
    said = [run(*CPU, theirs, *more).stderr for more in ([], ["--remarks"])]
    assert said[0].startswith("the configuration is in NeMo RL's form: it loads, with ")
    assert len(said[0].splitlines()) == 1 < len(said[1].splitlines()) and said[1].startswith(said[0])
    assert "reward_penalties: asks for nothing at this value\n" in said[1]
