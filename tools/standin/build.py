"""Builds the stand-in for CUDA's libraries, and says with which variables a program runs on it. No GPU computes.

    python tools/standin/build.py [OUT]

prints the folder of the libraries, below OUT or `$NEMO_RL_CACHE/standin`. A function that a library of the installed
wheels exports is written by hand in a C file of this folder, may do nothing in silence (silent.py), or names itself
when it is called. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from nemo_rl.utils.files import make_once  # noqa: E402
from nemo_rl.utils.folders import cache_root  # noqa: E402
from tools.standin.silent import silent  # noqa: E402

COMMON = "libstandin.so"
VALUES = "libvalues.so"
STAMP = "stamp.json"


@dataclass(frozen=True)
class Gpu:
    """What a program is told of a GPU: sizes in bytes, as the GPU's own driver reports them."""

    name: str
    memory: int
    capability: str
    processors: int
    shared: int
    """Shared memory of a multiprocessor."""
    l2: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 85_097_971_712, "8.0", 108, 167_936, 41_943_040),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 85_024_112_640, "9.0", 132, 233_472, 52_428_800),
    "h200": Gpu("NVIDIA H200", 150_119_972_864, "9.0", 132, 233_472, 62_914_560),
    "b200": Gpu("NVIDIA B200", 191_501_434_880, "10.0", 148, 233_472, 132_644_864),
}


@dataclass(frozen=True)
class Library:
    """A library that is stood in for."""

    soname: str
    source: str
    real: str | None
    """The real one in site-packages, whose functions are exported; None: those of cuda.h, or of the source alone."""
    versioned: bool = False
    """Its symbols carry the library's name as their version."""


LIBRARIES = (
    Library("libcudart.so.13", "runtime.c", "nvidia/cu13/lib/libcudart.so.13", versioned=True),
    Library("libcuda.so.1", "driver.c", None),
    Library("libcublasLt.so.13", "cublaslt.c", "nvidia/cu13/lib/libcublasLt.so.13", versioned=True),
    Library("libcublas.so.13", "cublas.c", "nvidia/cu13/lib/libcublas.so.13", versioned=True),
    Library("libnvidia-ml.so.1", "nvml.c", None),
    Library("libnccl.so.2", "nccl.c", "nvidia/nccl/lib/libnccl.so.2"),
)


def missing(site_packages: Path, *, values: bool = False) -> list[str]:
    """What a build needs and this machine lacks, in words; `values` needs a C++ compiler too."""
    packages = {"gcc": "gcc", "nm": "binutils"} | ({"g++": "g++"} if values else {})
    lacks = [f"{tool} (package {package})" for tool, package in packages.items() if shutil.which(tool) is None]
    if _include(site_packages) is None:
        lacks.append("cuda.h (the wheel of Triton, or a CUDA toolkit)")
    lacks += [
        str(site_packages / lib.real) for lib in LIBRARIES if lib.real and not (site_packages / lib.real).exists()
    ]
    return lacks


def build(site_packages: Path, out: Path, *, values: bool = False) -> Path:
    """The folder of libraries for the torch in `site_packages`, below `out`; built where it is not there yet.

    `values` adds the library that has the CPU compute what is on the device. ValueError names what is missing, and a
    torch that is not built for CUDA 13.
    """
    version = torch_version(site_packages)
    if "+cu13" not in version:
        raise ValueError(f"the stand-in for CUDA needs a torch built for CUDA 13, not {version} in {site_packages}")
    stamp = {"torch": version, "machine": platform.machine(), "sources": _digest()}
    name = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:16]
    folder = out.resolve() / (f"{name}-values" if values else name)
    if any(character in str(folder) for character in " :"):  # which separate the libraries in LD_PRELOAD
        raise ValueError(f"the stand-in for CUDA cannot be loaded from {folder}: name a folder without space and colon")
    if not folder.is_dir() and (lacks := missing(site_packages, values=values)):
        raise ValueError(f"the stand-in for CUDA cannot be built: missing {', '.join(lacks)}")

    def make(begun: Path) -> None:
        _compile(site_packages, begun, values=values)
        (begun / STAMP).write_text(json.dumps(stamp))

    return make_once(folder, make)


def environment(
    folder: Path, *, gpu: str = "h100", values: bool = False, writes: int = 0, count: int = 1
) -> dict[str, str]:
    """The whole environment of a child process that runs on the stand-in: this process's one, with more in it.

    `folder` is what `build` returned. `gpu` is a key of GPUS, of which the machine has `count`, at most 8. With
    `values` the CPU computes what is on the device. Else a copy to the device, or a fill, takes place up to `writes`
    bytes.
    ValueError for another GPU, and for a folder that was built for another torch or another kind of machine.
    """
    if gpu not in GPUS:
        raise ValueError(f"the stand-in for CUDA knows {', '.join(sorted(GPUS))}, not {gpu!r}")
    stamp = json.loads((folder / STAMP).read_text())
    here = {"torch": torch_version(), "machine": platform.machine()}
    for key, found in here.items():
        if stamp[key] != found:
            raise ValueError(f"{folder} was built for {key} {stamp[key]}, and this is {found}: build it again")
    libraries = [COMMON, *(library.soname for library in LIBRARIES), *(copy.name for copy in _copies(folder))]
    made = GPUS[gpu]
    variables = {
        "STANDIN_NAME": made.name,
        "STANDIN_BYTES": str(made.memory),
        "STANDIN_CAPABILITY": made.capability,
        "STANDIN_PROCESSORS": str(made.processors),
        "STANDIN_SHARED_BYTES": str(made.shared),
        "STANDIN_L2_BYTES": str(made.l2),
        "STANDIN_COUNT": str(count),
        "STANDIN_WRITES": str(1 << 40 if values else writes),
        "STANDIN_TORCH": stamp["torch"],
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),  # of the stand-in, whichever real GPUs are chosen
        "LD_PRELOAD": _before("LD_PRELOAD", [str(folder / name) for name in libraries], " "),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", [str(folder)], ":"),
        "PYTHONPATH": _before("PYTHONPATH", [str(HERE / "hook")], ":"),
    }
    if values:
        if not (folder / VALUES).exists():
            raise ValueError(f"{folder} was built without values: build it with values=True")
        variables |= {"STANDIN_VALUES": str(folder / VALUES), "TRITON_INTERPRET": "1"}
    return dict(os.environ) | variables


def site_packages_of_torch() -> Path:
    """The folder that has this interpreter's torch, which is not imported. ValueError without one."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ValueError("the stand-in for CUDA needs torch, which this Python has not: uv sync --extra cpu")
    return Path(found.origin).parents[1]


def torch_version(site_packages: Path | None = None) -> str:
    """Such as 2.13.0+cu130, of the torch in this folder, or of this interpreter's one."""
    path = (site_packages or site_packages_of_torch()) / "torch/version.py"
    if not path.exists():
        raise ValueError(f"the stand-in for CUDA needs torch, which {site_packages} has not: uv sync --extra cpu")
    version = re.search(r"__version__ = '([^']+)'", path.read_text())
    assert version is not None, path
    return version[1]


def _before(variable: str, values: Sequence[str], separator: str) -> str:
    """These, and then what the user has in the variable."""
    own = os.environ.get(variable)
    return separator.join([*values, own] if own else values)


def _digest() -> str:
    """Of all that a build is made of."""
    files = [path for path in HERE.iterdir() if path.suffix in (".c", ".h", ".cpp")]
    files = sorted([*files, HERE / "build.py", HERE / "silent.py"])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _include(site_packages: Path) -> Path | None:
    """A folder with all headers of CUDA: Triton's wheel has them, those of CUDA itself are in several wheels."""
    wheels = [site_packages / "triton/backends/nvidia/include", site_packages / "nvidia/cu13/include"]
    folders = [*wheels, *sorted(Path("/usr/local").glob("cuda*/include"))]
    needed = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


def _run(*command: str | Path) -> str:
    """The output of a command. ValueError with its errors if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _functions(path: Path, *flags: str) -> list[str]:
    """The functions that a library or an object file defines, without their versions."""
    rows = [line.split() for line in _run("nm", *flags, "--defined-only", path).splitlines()]
    return sorted({row[2].split("@")[0] for row in rows if len(row) == 3 and row[1] in ("T", "W")})


def _of_driver(include: Path) -> list[str]:
    """The functions of cuda.h: no wheel brings the driver."""
    text = (include / "cuda.h").read_text()
    names = set(re.findall(r"CUresult CUDAAPI\s+(cu\w+)\(", text))
    return sorted(names | set(re.findall(r"#define\s+cu\w+\s+(cu\w+_v[23])\b", text)))


def _stubs(library: Library, names: Iterable[str]) -> str:
    """C code of functions that do nothing: those that may in silence, and those that say so."""
    lines = ['#include "standin.h"']
    for name in names:
        if (entry := silent(library.soname, name)) is None:
            body = f'return standin_unknown("{name}");'
        else:
            body = "standin_launch(); return 0;" if entry.is_kernel else "return 0;"
        lines.append(f"int {name}(void) {{ {body} }}")
    return "\n".join([*lines, ""])


def _compile(site_packages: Path, out: Path, *, values: bool) -> None:
    include = _include(site_packages)
    assert include is not None
    flags = ["-std=gnu17", "-fPIC", "-O2", "-w", "-I", HERE, "-I", include]
    link = ["-L", out, f"-l:{COMMON}", "-Wl,-rpath,$ORIGIN"]
    common = [HERE / name for name in ("gpu.c", "memory.c", "streams.c", "report.c", "loader.c")]
    # Without a stack protector, which would keep loader.c from passing a call on by a jump.
    soname = f"-Wl,-soname,{COMMON}"
    _run("gcc", "-shared", *flags, "-fno-stack-protector", "-o", out / COMMON, *common, "-ldl", "-lpthread", soname)
    for library in LIBRARIES:
        made = out / f"{library.source}.o"
        _run("gcc", "-c", *flags, HERE / library.source, "-o", made)
        if library.real is not None:
            exported = _functions(site_packages / library.real, "-D")
        else:
            exported = _of_driver(include) if library.source == "driver.c" else []
        by_hand = set(_functions(made))
        stubs = out / f"{library.source}.stubs.c"
        public = [name for name in exported if not name.startswith("_") or name.startswith("__cuda")]
        stubs.write_text(_stubs(library, [name for name in public if name not in by_hand]))
        parts: list[str | Path] = [made, stubs, *link]
        if library.versioned:
            version = out / f"{library.source}.map"
            version.write_text(f"{library.soname} {{ global: *; }};\n")
            parts.append(f"-Wl,--version-script={version}")
        names = [library.soname]
        if library.source == "runtime.c":
            names += [copy.name for copy in _copies_in_wheels(site_packages)]
        for name in names:
            _run("gcc", "-shared", *flags, "-o", out / name, *parts, f"-Wl,-soname,{name}")
    if values:
        torch = [site_packages / "torch/include", site_packages / "torch/include/torch/csrc/api/include", include]
        includes = [word for folder in torch for word in ("-I", folder)]
        libraries = ["-L", site_packages / "torch/lib", "-lc10", "-ltorch_cpu"]
        options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", *includes]
        _run("g++", *options, "-o", out / VALUES, HERE / "values.cpp", *libraries)


def _copies_in_wheels(site_packages: Path) -> list[Path]:
    """Copies of the runtime which wheels bring under names of their own, as torchvision does.

    A program would load them beside the stand-in, and vLLM takes the first one that it finds in the process.
    """
    return [*site_packages.glob("*.libs/libcudart*.so*"), *site_packages.glob("*/libcudart-*.so*")]


def _copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("libcudart[.-]*.so*") if path.name != "libcudart.so.13")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="default: standin in the cache of this project")
    parser.add_argument("--values", action="store_true", help="with the library that has the CPU compute")
    chosen = parser.parse_args(arguments)
    try:
        print(build(site_packages_of_torch(), chosen.out or cache_root() / "standin", values=chosen.values))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
