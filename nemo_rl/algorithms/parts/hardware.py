"""Whether this machine has the GPUs and processes that a run needs, and whether it is slow at what the run computes.

Looked at before torch and Ray are loaded.
"""

import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.config.rules import StrictModel
from nemo_rl.distributed.limits import process_limits
from nemo_rl.distributed.processor import lacks_bfloat16, processor_flags
from nemo_rl.distributed.ray_places import find_cluster
from nemo_rl.environments.section_parts import DeviceConfig
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.engine_config import EngineConfig
from nemo_rl.utils.config import ClusterConfig

_RAY_PROCESSES = 200  # processes and threads of Ray, the driver and single actors, on a machine of two cores


class NeedsHardware(Protocol):
    """A configuration of a run: its machines, and a configuration that a machine without a GPU can run."""

    cpu_config: ClassVar[str]

    @property
    def cluster(self) -> ClusterConfig: ...

    @property
    def gpus_beside_cluster(self) -> int:
        """GPUs that teachers and environments need in addition to `cluster`."""
        ...

    @property
    def processes_per_worker(self) -> int:
        """Processes and threads of one worker of each group."""
        ...


def check_hardware(
    cfg: NeedsHardware, *, num_gpus: int | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError if the run joins no Ray cluster and needs more GPUs or processes than this machine has.

    `num_gpus` replaces the number that is found on this machine.
    """
    address = find_cluster(environment)
    if address is None:
        check_processes(_RAY_PROCESSES + cfg.processes_per_worker * cfg.cluster.workers_per_node, process_limits())
    more = cfg.gpus_beside_cluster
    wanted = cfg.cluster.gpus_per_node + more
    if address is not None or wanted == 0:
        return
    found = num_visible_gpus(environment) if num_gpus is None else num_gpus
    beside = f" ({more} of them for environments, env.<name>.resources, or teachers)" if more else ""
    if found == 0:
        problem = f"{wanted} GPU(s) wanted{beside} and none found on this machine; to run on CPU take --config "
        problem += f"{cfg.cpu_config}; to use a Ray cluster that runs elsewhere set RAY_ADDRESS"
    elif wanted > found:
        fewer = f"cluster.gpus_per_node={found - more}" if found > more else "fewer for those"
        problem = f"{wanted} GPUs wanted{beside}, {found} found on this machine; set {fewer}, or RAY_ADDRESS for a Ray "
        problem += "cluster that runs elsewhere"
    else:
        return
    raise ConfigError([Problem(("cluster", "gpus_per_node"), problem)])


def check_processes(needed: int, limits: Sequence[tuple[int, int, str]]) -> None:
    """Raise ConfigError if one of the `process_limits` has no room for this number of processes and threads."""
    for allowed, used, remedy in limits:
        if used + needed > allowed:
            problem = f"this run needs {needed} processes and threads, and {allowed} are allowed, {used} of them in use"
            raise ConfigError([Problem((), f"{problem}: raise the limit ({remedy})")])


def slow_precision(cfg: NeedsHardware, flags: Collection[str] | None = None) -> str | None:
    """A warning if the run computes in bfloat16 on CPUs like this one, and this one is slow at that; else None.

    `flags` replace the flags of this machine's processor.
    """
    if cfg.cluster.use_gpus or not lacks_bfloat16(processor_flags() if flags is None else flags):
        return None
    keys = [f"{key}=float32" for key in _bfloat16_keys(cfg)]
    if not keys:
        return None
    return (
        "this CPU has no instructions for bfloat16 (AVX512-BF16, AMX) and is about five times slower with it than with "
        f"float32: set {' '.join(keys)}"
    )


def _bfloat16_keys(section: Any) -> Iterator[str]:
    """The keys below `section` that let models compute in bfloat16 on CPUs."""
    if isinstance(section, dict | list):
        for entry in section.values() if isinstance(section, dict) else section:
            yield from _bfloat16_keys(entry)
    if not isinstance(section, StrictModel):
        return
    if isinstance(section, EngineConfig):
        if section.written_dtype == "bfloat16":
            yield section.key(section.dtype_key)
        return
    values = dict(section)
    if isinstance(section, GenerationConfig):  # of the engines, one counts
        values = {section.engine_key: section.engine}
    has_model = values.get("model_name", "") is not None
    is_on_gpu = isinstance(where := values.get("resources"), DeviceConfig) and where.gpus_per_node > 0
    if values.get("precision") == "bfloat16" and has_model and not is_on_gpu:
        yield section.key("precision")
    for value in values.values():
        yield from _bfloat16_keys(value)


_NAME_BYTES = 96  # the longest name of a GPU that NVML writes


def gpu_names() -> list[str]:
    """The names of this machine's GPUs, of which the driver is asked: in a few milliseconds, and no GPU is taken.

    NVML is asked, the driver's library for management. It counts whatever `CUDA_VISIBLE_DEVICES` says, and is there
    where the driver has no files in /dev and /proc (WSL2). Where it does not work (Jetson), libcuda is asked.
    """
    names = _names_of("libnvidia-ml.so.1", _nvml_name, "nvmlDeviceGetCount_v2", "nvmlInit_v2")
    return names or _names_of("libcuda.so.1", _cuda_name, "cuDeviceGetCount", "cuInit", 0)


def _names_of(
    library: str, name_of: Callable[[ctypes.CDLL, int], bytes], count: str, init: str, *flags: int
) -> list[str]:
    """The names that a library of the driver gives; none where it is not installed, or finds no driver."""
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        return []
    number = ctypes.c_int(0)
    if loaded[init](*flags) != 0 or loaded[count](ctypes.byref(number)) != 0:
        return []
    names = [name_of(loaded, index) for index in range(number.value)]
    return [name.decode(errors="replace") for name in names if name]


def _nvml_name(nvml: ctypes.CDLL, index: int) -> bytes:
    """Empty for a GPU that does not answer."""
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
        nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES))
    return name.value


def _cuda_name(cuda: ctypes.CDLL, index: int) -> bytes:
    """Empty for a GPU that does not answer."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    if cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
        cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    return name.value


def num_visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """The number of GPUs that a process on this machine can use, without importing torch."""
    found = len(gpu_names())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    if "-1" in chosen:
        chosen = chosen[: chosen.index("-1")]
    return min(len(chosen), found)
