"""Loaded by every Python process on the stand-in for CUDA, by PYTHONPATH: acts on modules once they are loaded.

Refuses another torch than the one that the libraries were built for. With true values (STANDIN_VALUES) it installs
those of `standin_values` and `standin_vllm`; without them vLLM gets tokens, and a weight sync fingerprints, from
`standin_engine`.
"""

import importlib.abc
import importlib.machinery
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


def followers():
    """By the name of a module: what is called with it once it has been loaded."""
    import standin_engine
    import standin_values
    import standin_vllm

    if "STANDIN_VALUES" not in os.environ:
        return {
            "nemo_rl.refit.fingerprint": standin_engine.of_fingerprints,
            "torch": same_torch,
            "vllm.v1.worker.gpu.sample.sampler": standin_engine.of_sampler,
        }

    def of_torch(torch):
        same_torch(torch)
        standin_values.of_torch(torch)

    return {
        "torch": of_torch,
        "triton.runtime.interpreter": standin_values.of_triton,
        "vllm._custom_ops": standin_vllm.of_operators,
        "vllm.distributed.device_communicators.pynccl_wrapper": standin_vllm.of_nccl,
        "vllm.v1.attention.ops.triton_unified_attention": standin_vllm.of_triton_attention,
    }


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `followers` as the other finders do, and adds what is to follow their execution."""

    def __init__(self, after):
        self.after = after

    def find_spec(self, name, path, target=None):
        if name not in self.after:
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
            self.after[name](module)

        spec.loader.exec_module = exec_module
        return spec


def run_the_users_own():
    """Python loads one module of this name; the one that it would have loaded without this folder runs after it."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "STANDIN_TORCH" in os.environ:
    sys.meta_path.insert(0, Finder(followers()))
    run_the_users_own()
