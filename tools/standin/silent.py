"""Functions of CUDA's libraries that may do nothing in silence, since kernels do nothing; with the reason of each.

The others that the real libraries export, and that no C file here defines, are named on stderr when they are called.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Silent:
    """Functions of one library whose whole name matches one of the patterns."""

    library: str
    why: str
    patterns: tuple[str, ...]
    is_kernel: bool = False
    """A call counts as the launch of a kernel."""

    def fits(self, library: str, function: str) -> bool:
        return library == self.library and any(re.fullmatch(pattern, function) for pattern in self.patterns)


RUNTIME, DRIVER, NCCL = "libcudart.so.13", "libcuda.so.1", "libnccl.so.2"
CUBLAS, CUBLASLT = "libcublas.so.13", "libcublasLt.so.13"

SILENT = (
    Silent(
        RUNTIME,
        "wishes about time and place, which change no result",
        (
            "cudaFuncSet(Attribute|CacheConfig)",
            "cudaStreamSetAttribute",
            "cudaStreamAttachMemAsync",
            "cudaDeviceSet(Limit|CacheConfig)",
            "cudaDevice(Enable|Disable)PeerAccess",
            "cudaSetDeviceFlags",
            "cudaMem(Advise|PrefetchAsync)",
            "cudaMemPool(SetAttribute|SetAccess|TrimTo|Destroy)",
            "cudaCtxResetPersistingL2Cache",
            "cudaProfiler(Start|Stop)",
        ),
    ),
    Silent(
        RUNTIME,
        "a program registers its kernels when it is loaded, and none runs",
        (
            "__cuda(Register|Unregister)(FatBinary|FatBinaryEnd|Function|Var|HostVar|ManagedVar)",
            "__cudaInitModule",
            "cudaLibraryUnload",
        ),
    ),
    Silent(
        RUNTIME,
        "graphs do nothing",
        ("cudaGraphUpload", "cudaGraphExec(Update|KernelNodeSetParams)", "cudaGraphDebugDotPrint"),
    ),
    Silent(
        DRIVER,
        "all is done when a call returns: there is nothing to wait for",
        ("cu(Ctx|Stream|Event)Synchronize", "cu(Stream|Event)Query", "cuStreamWaitEvent"),
    ),
    Silent(
        DRIVER,
        "wishes about time and place, which change no result",
        ("cuFuncSet(Attribute|CacheConfig)", "cuCtxEnablePeerAccess", "cuProfiler(Start|Stop)"),
    ),
    Silent(
        DRIVER,
        "one context and one module have no end",
        ("cu(Module|Library)Unload", "cuDevicePrimaryCtx(Release|Reset|SetFlags)(_v2)?"),
    ),
    Silent(
        DRIVER,
        "memory lies at its addresses from the start, and every process may use it: see driver.c",
        ("cuMem(Map|SetAccess)",),
    ),
    Silent(
        DRIVER,
        "descriptions of memory that a kernel reads, and none runs",
        ("cuTensorMapEncode(Tiled|Im2col)", "cuTensorMapReplaceAddress"),
    ),
    Silent(
        CUBLAS,
        "settings of a handle, which no product reads",
        (
            "cublasSet(Stream|Workspace|PointerMode)_v2",
            "cublasSet(MathMode|SmCountTarget|AtomicsMode)",
        ),
    ),
    Silent(
        CUBLAS,
        "products and triangular solves: kernels do nothing",
        (
            "cublas[SDCZH]gemm(3m|StridedBatched|Batched|GroupedBatched)?(_v2)?(_64)?",
            "cublas[SDCZ](gemv|ger|syrk|trsm|trmm)(StridedBatched|Batched)?(_v2)?(_64)?",
            "cublasGemm(Ex|BatchedEx|StridedBatchedEx|GroupedBatchedEx)(_64)?",
        ),
        is_kernel=True,
    ),
    Silent(
        CUBLASLT,
        "attributes of descriptors, which no product reads",
        ("cublasLt(MatmulDesc|MatrixLayout|MatmulPreference|MatmulAlgoConfig)SetAttribute",),
    ),
    Silent(
        NCCL,
        "a group of calls: each is begun when it returns",
        ("ncclGroup(Start|End)",),
    ),
    Silent(
        NCCL,
        "buffers need no entry: they are this process's memory",
        ("ncclComm(Register|Deregister|WindowRegister|WindowDeregister|Finalize)", "ncclRedOpDestroy"),
    ),
)


def silent(library: str, function: str) -> Silent | None:
    """The entry that lets the function do nothing in silence, or None."""
    return next((entry for entry in SILENT if entry.fits(library, function)), None)
