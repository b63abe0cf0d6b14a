"""Loaded by every Python process on the stand-in for CUDA, by PYTHONPATH: acts on modules once they are loaded.

Refuses another torch than the one that the libraries were built for. With true values (STANDIN_VALUES) it installs
those of `standin_values` and `standin_vllm`; without them vLLM gets tokens, and a weight sync fingerprints, from
`standin_engine`.
"""

import importlib.abc
import importlib.util
import os
import sys


def same_torch(torch):
    """ImportError if the libraries, whose functions depend on torch's release, were built for another one."""
    built_for = os.environ["STANDIN_TORCH"]
    if torch.__version__ != built_for:
        raise ImportError(
            f"the stand-in for CUDA was built for torch {built_for}, and this is {torch.__version__}: run "
            "tools/standin/build.py with this Python"
        )


def of_torch(torch):
    same_torch(torch)
    if "STANDIN_VALUES" in os.environ:
        import standin_values

        standin_values.of_torch(torch)


def of_triton(interpreter):
    if "STANDIN_VALUES" in os.environ:
        import standin_values

        standin_values.of_triton(interpreter)


def of_sampler(sampler):
    if "STANDIN_VALUES" not in os.environ:
        import standin_engine

        standin_engine.of_sampler(sampler)


def of_fingerprints(fingerprint):
    if "STANDIN_VALUES" not in os.environ:
        import standin_engine

        standin_engine.of_fingerprints(fingerprint)


def of_vllm(operators):
    if "STANDIN_VALUES" in os.environ:
        import standin_vllm

        standin_vllm.of_operators(operators)


def of_triton_attention(module):
    if "STANDIN_VALUES" in os.environ:
        import standin_vllm

        standin_vllm.of_triton_attention(module)


def of_nccl(wrapper):
    if "STANDIN_VALUES" in os.environ:
        import standin_vllm

        standin_vllm.of_nccl(wrapper)


AFTER = {
    "nemo_rl.refit.fingerprint": of_fingerprints,
    "torch": of_torch,
    "triton.runtime.interpreter": of_triton,
    "vllm._custom_ops": of_vllm,
    "vllm.distributed.device_communicators.pynccl_wrapper": of_nccl,
    "vllm.v1.attention.ops.triton_unified_attention": of_triton_attention,
    "vllm.v1.worker.gpu.sample.sampler": of_sampler,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of AFTER as the other finders do, and adds what is to follow their execution."""

    def find_spec(self, name, path, target=None):
        if name not in AFTER:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            AFTER[name](module)

        spec.loader.exec_module = exec_module
        return spec


if "STANDIN_TORCH" in os.environ:
    sys.meta_path.insert(0, Finder())
