"""The GPUs of a machine, which the driver's libraries are asked for."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.algorithms.parts.hardware import gpu_names, num_visible_gpus

FAKE_NVML = """
#include <string.h>
static int initialised;
int nvmlInit_v2(void) { initialised = 1; return INIT; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return initialised ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 7L); return index == 1; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strcpy(name, "GPU 0");
    name[4] += (long)device - 7;
    return 0;
}
"""
FAKE_CUDA = """
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Orin", length); return device; }
"""
ASK = """
import sys, time
from nemo_rl.algorithms.parts.hardware import gpu_names, num_visible_gpus
begin = time.process_time()
names = gpu_names()
assert "torch" not in sys.modules and time.process_time() - begin < 0.05
print(names, *(num_visible_gpus({"CUDA_VISIBLE_DEVICES": text}) for text in ("", "1", "0,-1,1", "0,1,2")))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: apt-get install gcc")
@pytest.mark.parametrize(
    ("init", "told"),
    [(0, "['GPU 0', 'GPU 2'] 0 1 1 2"), (9, "['Orin'] 0 1 1 1")],  # 9: NVML finds no driver
)
def test_the_driver_tells_the_gpus_that_answer_by_nvml_and_where_nvml_does_not_work_by_libcuda(
    tmp_path: Path, init: int, told: str
) -> None:
    for name, code in (("libnvidia-ml.so.1", FAKE_NVML), ("libcuda.so.1", FAKE_CUDA)):
        compiler = ["gcc", "-shared", "-fPIC", "-x", "c", f"-DINIT={init}", "-", "-o", str(tmp_path / name)]
        subprocess.run(compiler, input=code, text=True, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == told, done.stderr


def test_a_machine_without_the_drivers_libraries_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert gpu_names() == []
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
