"""The doctor's findings, good and bad, and its remedies."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.distributed import doctor
from nemo_rl.distributed.errors import RayLost
from nemo_rl.distributed.processor import processor_flags
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup, require_shared
from tests.functional.cli import ROOT
from tests.tables import named


def test_a_folder_has_space_and_speed_or_is_bad_where_it_cannot_be_written(tmp_path: Path) -> None:
    finding = doctor.examine_folder(tmp_path / "new")
    assert "GB free" in finding.text and "MB/s written" in finding.text
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    told = f"{tmp_path}/file/logs: cannot be written: Not a directory; name another folder with --folder"
    assert str(doctor.examine_folder(tmp_path / "file" / "logs")) == f"bad    folder {told}"


def test_few_open_files_are_bad() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        finding = doctor.examine_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert str(finding) == f"bad    open files: at most 1024; run `ulimit -n {hard}` before `ray start`"


def test_a_machine_whose_ports_are_taken_is_bad(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address st\n"
    lines = [f"{slot}: 0100007F:{40000 + slot:04X} 00000000:0000 0A\n" for slot in range(1500)]
    for folder in ("sys/net/ipv4", "net"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text("40000\t41999\n")
    (tmp_path / "net/tcp").write_text(head + "".join(lines))
    (tmp_path / "net/tcp6").write_text(f"{head}0: 00000000000000000000000001000000:9C40 0 0A\n")
    finding = doctor.examine_processes([(5000, 10, "one"), (4096, 4000, "`ulimit -u`")])
    assert finding.level == "bad" and "4000 of 4096" in finding.text and "`ulimit -u`" in finding.remedy
    assert doctor.examine_processes([]).level == doctor.examine_processes([(5000, 10, "one")]).level == "good"
    finding = doctor.examine_ports(tmp_path)
    assert finding.level == "bad" and finding.text == "500 of 40000 to 41999 are free"
    assert doctor.examine_ports().level == "good"


def test_a_node_without_the_shared_file_system_is_named(tmp_path: Path) -> None:
    class TwoNodes:
        members = tuple(SimpleNamespace(bundles=[SimpleNamespace(node_ip=ip)]) for ip in ("10.0.0.1", "10.0.0.2"))
        seen_by_second = True

        def call_all(self, method: Any, file: Path) -> list[bool]:
            return [file.is_file(), self.seen_by_second]

    group: Any = TwoNodes()
    assert doctor.examine_shared(group, tmp_path).level == "good"
    group.seen_by_second = False
    with pytest.raises(ValueError, match=r"checkpoint_dir: the nodes 10\.0\.0\.2 do not see the files in .*: name a"):
        require_shared(group, tmp_path, "checkpointing.checkpoint_dir")
    assert "10.0.0.2" in doctor.examine_shared(group, tmp_path).text
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_torch_cannot_use_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if doctor.torch.cuda.is_available():
        pytest.skip("torch can use the GPUs of this machine")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.examine_gpus(1).text == "there is no nvidia-smi"
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)

    def finding(line: str) -> doctor.Finding:
        program.write_text(f"#!/bin/sh\necho {line}\n")
        return doctor.examine_gpus(1)

    old = finding("NVIDIA H100, 470.10, 3")
    assert old.level == "bad" and "1 x NVIDIA H100, driver 470.10" in old.text and "driver" in old.remedy
    assert "version mismatch" in finding("Failed to initialize NVML: Driver/library version mismatch; exit 18").text
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    used = finding("NVIDIA H100, 580.95, 4096")
    assert used.level == "remark" and "up to 4.0 GB in use" in used.text
    assert finding("NVIDIA GB10, 580.95, '[N/A]'").level == doctor.examine_gpus(0).level == "good"


@named(
    "lines, level",
    {
        "AVX2": ("processor\t: 0\nflags\t\t: fpu avx2\n", "remark"),
        "AMX": ("flags\t\t: avx2 avx512_bf16 amx_bf16\n", "good"),
        "ARM": ("Features\t: asimd bf16\n", "good"),
        "unnamed": ("processor\t: 0\n", "good"),
    },
)
def test_a_processor_without_bfloat16_is_a_remark(lines: str, level: str, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(lines)
    assert doctor.examine_processor(processor_flags(file)).level == level, lines


def test_a_hub_that_does_not_answer_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert doctor.examine_hub().level == "remark"
        taken.listen()
        assert doctor.examine_hub().level == "good"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor.examine_hub().level == "good"


def test_a_ray_that_does_not_start_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RayLost("Ray did not start on this machine: the current node timed out.\nMore lines.")

    monkeypatch.setattr(doctor, "init_ray", fail)
    monkeypatch.setattr(doctor, "shutdown_ray", lambda: None)  # of the cluster of other tests
    found: list[doctor.Finding] = []
    assert not doctor.examine(1, 0, [], found.append)
    assert [finding.text for finding in found] == ["Ray did not start on this machine: the current node timed out."]


@pytest.mark.over_20s("starts Ray in a process of its own; two workers load torch")
def test_the_whole_examination_of_this_machine(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/doctor.py"), "--folder", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=800)
    lines = finished.stdout.splitlines()
    for subject in (
        "machine",
        "processor",
        "GPUs",
        "versions",
        "/dev/shm",
        "open files",
        f"folder {tmp_path}",
        "Hugging Face hub",
    ):
        assert any(f"node 0 (127.0.0.1), {subject}: " in line for line in lines), finished.stdout + finished.stderr
    for subject in ("Ray", "clocks"):
        assert any(line.startswith((f"good   {subject}: ", f"remark {subject}: ")) for line in lines)
    assert finished.returncode == int(any(line.startswith("bad") for line in lines))


@pytest.mark.over_20s("two workers load torch")
def test_two_nodes_talk_and_share_a_folder_and_one_is_not_two(ray_local: None, tmp_path: Path, monkeypatch) -> None:
    with (
        RayVirtualCluster([1, 1], use_gpus=False, name="pair") as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(doctor.WORKER), name_prefix="doctor") as group,
    ):
        assert str(doctor.examine_shared(group, tmp_path)).startswith("good")
        found = [str(finding) for finding in doctor.examine_cluster(group, use_gpu=False)]
        assert any(text.startswith("good   collective: 2 ranks over gloo: ") for text in found), found
    monkeypatch.setattr(doctor, "shutdown_ray", lambda: None)  # of the cluster of other tests
    told: list[doctor.Finding] = []
    assert not doctor.examine(2, 0, [], told.append)
    assert told[-1].text.startswith("2 nodes asked for, and the Ray cluster has 1: start Ray on more machines, or set")
