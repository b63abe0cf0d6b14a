"""The stand-in for CUDA's libraries: what it says, what it refuses, and what a program on it sees."""

import importlib
import json
import os
import re
import subprocess
import sys
from glob import glob
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from nemo_rl.utils.folders import cache_root
from tests.tables import named
from tests.unit.distributed.test_worker_groups import eventually
from tools.standin import mistakes
from tools.standin.build import HERE, STAMP, build, environment, missing, site_packages_of_torch, torch_version
from tools.standin.hook import sitecustomize
from tools.standin.mistakes import ALL, Layout
from tools.trace_recipe import Recipe, traces

LACKS = missing(site_packages_of_torch())
needs_build = pytest.mark.skipif(bool(LACKS), reason=f"the stand-in for CUDA needs {', '.join(LACKS)}")


@pytest.fixture(scope="module")
def libraries() -> Path:
    return build(site_packages_of_torch(), cache_root() / "standin")


def run(libraries: Path, code: str, **how: int) -> subprocess.CompletedProcess[str]:
    """A Python program on the stand-in."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(libraries, **how), capture_output=True, text=True, timeout=800)


def test_a_build_names_everything_that_is_missing_and_refuses_a_torch_without_cuda(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    version = tmp_path / "torch" / "version.py"
    version.write_text("__version__ = '2.13.0+cpu'\n")
    with pytest.raises(ValueError, match=r"built for CUDA 13, not 2\.13\.0\+cpu"):
        build(tmp_path, tmp_path / "out")
    version.write_text("__version__ = '2.13.0+cu130'\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"missing gcc \(package gcc\), nm .*, g\+\+ .*cublas") as caught:
        build(tmp_path, tmp_path / "out", values=True)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="folder without space"):
        build(tmp_path, tmp_path / "two words")


def test_an_environment_keeps_the_users_variables_and_refuses_another_torch_machine_or_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/mine.so")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of real ones
    own = {"torch": torch_version(), "machine": os.uname().machine}
    (tmp_path / STAMP).write_text(json.dumps(own))
    made = environment(tmp_path, gpu="a100", count=2)
    assert set(os.environ) <= set(made) and made["PYTHONDONTWRITEBYTECODE"] == "1"
    assert made["LD_PRELOAD"].split()[0] == f"{tmp_path}/libstandin.so" and made["LD_PRELOAD"].endswith(" /lib/mine.so")
    assert (made["STANDIN_CAPABILITY"], made["CUDA_VISIBLE_DEVICES"]) == ("8.0", "0,1")
    with pytest.raises(ValueError, match="knows a100, b200, h100, h200, not 't4'"):
        environment(tmp_path, gpu="t4")
    with pytest.raises(ValueError, match="built without values"):
        environment(tmp_path, values=True)
    for key, value in (("torch", "2.12.0+cu130"), ("machine", "riscv64")):
        (tmp_path / STAMP).write_text(json.dumps(own | {key: value}))
        with pytest.raises(ValueError, match=rf"built for {key} {value.replace('+', '.')}, and this is"):
            environment(tmp_path)


def test_a_process_with_another_torch_than_the_libraries_were_built_for_is_refused(monkeypatch):
    monkeypatch.setenv("STANDIN_TORCH", "2.13.0+cu130")
    sitecustomize.same_torch(SimpleNamespace(__version__="2.13.0+cu130"))
    with pytest.raises(ImportError, match=r"built for torch 2\.13\.0\+cu130, and this is 2\.12\.0\+cu130"):
        sitecustomize.same_torch(SimpleNamespace(__version__="2.12.0+cu130"))


def test_the_sitecustomize_of_a_user_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OF_THE_USER'] = 'set'\n")
    folders = (str(HERE / "hook"), str(tmp_path))
    variables = os.environ | {"STANDIN_TORCH": torch_version(), "PYTHONPATH": os.pathsep.join(folders)}
    program = "import os, sys; print(os.environ['OF_THE_USER'], type(sys.meta_path[0]).__name__)"
    told = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["set", "Finder"], told.stderr


DEVICE = """
import ctypes, torch
from nemo_rl.algorithms.parts.hardware import gpu_names
assert gpu_names() == [torch.cuda.get_device_name()] and "stand-in, no GPU" in gpu_names()[0]
assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.device_count() == 1
free, total = torch.cuda.mem_get_info()
x = torch.ones(4096, 4096, device="cuda")
y = (x @ x).cpu()  # no kernel has run, and a large copy is not made
assert torch.cuda.mem_get_info()[0] < free and x.sum().item() == 0
try:
    torch.empty(total, dtype=torch.uint8, device="cuda")
    raise SystemExit("more memory than there is")
except torch.OutOfMemoryError:
    del x
torch.cuda.empty_cache()
library, pinned = ctypes.CDLL(None), torch.empty(1 << 20, pin_memory=True)
own = torch.empty(1 << 20)
assert pinned.is_pinned() and not own.is_pinned()
assert library.cudaHostRegister(ctypes.c_void_p(own.data_ptr()), ctypes.c_size_t(own.nbytes), 0) == 0
assert own.is_pinned()
assert ctypes.c_long.in_dll(library, "standin_launches").value > 0
unknown = ctypes.c_long.in_dll(library, "standin_unknown_calls")
assert unknown.value == 0
library.cudaDeviceGetTexture1DLinearMaxWidth(), library.cudaDeviceGetTexture1DLinearMaxWidth()
assert unknown.value == 2
block, ones = torch.zeros(4, device="cuda"), torch.ones(4)
library.standin_poke(ctypes.c_void_p(block.data_ptr()), ctypes.c_void_p(ones.data_ptr()), ctypes.c_size_t(16))
assert block.tolist() == [1, 1, 1, 1]
piece, where = ctypes.c_ulonglong(), (ctypes.c_int * 16)()
assert library.cuMemCreate(ctypes.byref(piece), ctypes.c_size_t(1 << 21), where, ctypes.c_ulonglong(0)) == 0
assert [library.cuMemRelease(piece) for _ in range(2)] == [0, 1]  # the second one is refused, as by the driver
print("done")
"""


@needs_build
def test_a_device_has_the_gpus_memory_and_computes_nothing_and_every_line_that_it_prints_says_so(libraries):
    done = run(libraries, DEVICE)
    assert done.stdout == "done\n", done.stderr
    lines = [line for line in done.stderr.splitlines() if "CUDACachingAllocator" not in line]  # torch's own warning
    assert len(lines) == 2 and all(line.startswith("stand-in for CUDA, no GPU computes: ") for line in lines), lines
    assert "no value on it is true" in lines[0]
    assert "cudaDeviceGetTexture1DLinearMaxWidth is not known to it" in lines[1]  # once


SENDER = '''
import sys, torch
from torch.multiprocessing.reductions import reduce_tensor
import pickle, os, signal, subprocess
block = torch.arange(64, device="cuda", dtype=torch.int64)
block.copy_(torch.arange(64))  # a copy takes place here, and a kernel does not
shared = reduce_tensor(block)
handle = pickle.dumps(shared)
reader = """
import pickle, sys, torch
rebuild, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
block = rebuild(*arguments)
print(block.cpu().sum().item())
block.copy_(torch.ones(64))
"""
subprocess.run([sys.executable, "-c", reader, handle.hex()], check=True)
print(block.cpu().sum().item(), flush=True)
print(os.fsdecode(shared[1][11]), flush=True)  # torch's counters of readers
os.kill(os.getpid(), signal.SIGKILL)
'''


@needs_build
def test_another_process_sees_the_same_device_memory_and_a_killed_one_leaves_nothing_in_dev_shm(libraries):
    before = set(os.listdir("/dev/shm"))
    done = run(libraries, SENDER, writes=1 << 20)
    read, written, counters = done.stdout.split()
    assert (read, written, done.returncode) == ("2016", "64", -9), done.stderr
    Path(f"/dev/shm{counters}").unlink()
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "standin" in name], left


ADAPTERS = "lora_cfg={enabled: true, match_all_linear: true}"
LAYOUTS = {
    "FSDP2, tensor and sequence parallel; GRPO with a refit": mistakes.TENSOR,
    "pipeline": mistakes.PIPELINE,
    "experts over ranks": mistakes.EXPERTS,
    "context parallel, adapters": Layout("tiny-qwen3", 4, ("context_parallel_size=2", ADAPTERS), config="sft"),
}
COLLECTIVES = {
    "FSDP2, tensor and sequence parallel; GRPO with a refit": {"allgather_base x4", "reduce_scatter_base x4"},
    "pipeline": {"send x2", "recv x2"},
    "experts over ranks": {"all_to_all_single x4", "reduce_scatter_base x8"},
    "context parallel, adapters": {"all_gather_into_tensor x2", "reduce_scatter_base x4"},
}


@needs_build
@pytest.mark.over_20s("the GPU's path of four layouts runs nowhere else by default")
def test_one_rank_of_each_kind_of_layout_builds_trains_offloads_and_refits_on_the_device(capfd):
    """And leaves nothing: torch itself leaves its counters of the readers of memory in /dev/shm."""
    recipes = [Recipe.prepare(mistakes.ROOT / layout.path, layout.overrides) for layout in LAYOUTS.values()]
    reports = traces([(recipe, 0) for recipe in recipes], "h100")
    for layout, report in zip(LAYOUTS, reports, strict=True):
        assert report["stop"] is None, (layout, report["stop"])
        train = next(numbers for phase, numbers in report["phases"].items() if "train" in phase)
        assert COLLECTIVES[layout] <= set(train["collectives"]), (layout, train["collectives"])
        assert train["tflop"] > 0 and 0 < train["peak"] <= train["reserved"] < report["memory"]
    processes = re.findall(r"process (\d+) uses an NVIDIA", capfd.readouterr().err)  # others leave files meanwhile
    assert len(processes) == len(LAYOUTS)
    assert eventually(lambda: not any(glob(f"/dev/shm/torch_{process}_*") for process in processes))


def test_each_seeded_mistake_still_has_its_place_in_the_sources_and_a_row_in_the_guide():
    guide = (mistakes.ROOT / "docs" / "guides" / "gpu-without-a-gpu.md").read_text()
    for mistake in ALL.values():
        mistakes.placed(mistake)
        assert mistake.row in guide, mistake.row
        assert all((mistakes.ROOT / test.partition("::")[0]).exists() for test in mistake.tests)


def by_layout() -> dict[str, list[str]]:
    """The names of mistakes of the same layout, which share the traces without a mistake."""
    found: dict[str, list[str]] = {}
    for name, mistake in ALL.items():
        found.setdefault(mistake.layout if isinstance(mistake.layout, str) else str(mistake.layout), []).append(name)
    return {names[0]: names for names in found.values()}


@needs_build
@pytest.mark.standin
@pytest.mark.timeout(1500)
@named("names", by_layout())
def test_mistakes_are_noticed_over_the_standin_as_the_guide_says(names):
    assert mistakes.main(["--traces", *names]) == 0


VALUES = """
import sys, torch
from torch.nn.attention.varlen import varlen_attn


def numbers(device):
    torch.manual_seed(0)
    x, weight = torch.randn(12, 64), torch.randn(64, 64).to(device).requires_grad_()
    out = torch.nn.functional.silu(x.to(device) @ weight).softmax(-1)
    states = out.view(12, 4, 16).to(torch.bfloat16)
    if device == "cuda":
        offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
        rows = varlen_attn(states, states, states, offsets, offsets, 7, 7, window_size=(-1, 0))
    else:
        parts = [part.transpose(0, 1)[None].float() for part in states.split([5, 7])]
        attend = torch.nn.functional.scaled_dot_product_attention
        rows = torch.cat([attend(p, p, p, is_causal=True)[0].transpose(0, 1) for p in parts])
    loss = rows.float().square().sum()
    loss.backward()
    return [loss.item(), weight.grad.norm().item(), torch.arange(5, device=device).flip(0).tolist()]


print(numbers("cpu"), numbers("cuda"), sep="\\n")
"""


@pytest.mark.skipif(bool(missing(site_packages_of_torch(), values=True)), reason="g++ is not installed")
@pytest.mark.standin
def test_with_values_the_device_computes_as_the_cpu_does_forward_and_backward():
    libraries = build(site_packages_of_torch(), cache_root() / "standin", values=True)
    done = run(libraries, VALUES, values=True)
    host, device = (json.loads(line) for line in done.stdout.splitlines())
    assert device[:2] == pytest.approx(host[:2], rel=1e-2) and device[2] == host[2] == [4, 3, 2, 1, 0], done.stderr
    assert "the CPU computes its values" in done.stderr


KERNEL = """
import sys, torch, triton, triton.language as tl
from triton.runtime import interpreter
sys.path.insert(0, sys.argv[1])
import standin_values
standin_values.of_triton(interpreter)


@triton.jit
def kernel(x, y, out, size: tl.constexpr):
    at = tl.arange(0, size)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(a < b, a * b - a, -tl.maximum(a, 1.5)) + (b + b).to(tl.int32))


@triton.jit
def product(x, y, out, size: tl.constexpr):
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


x, y = torch.randn(2, 512).bfloat16()
kernel[(1,)](x, y, out := torch.empty_like(x), 512)
expected = torch.where(x < y, x * y - x, -x.clamp(min=1.5)) + (y + y).int()
print((out != expected).sum().item())
x, y = torch.randn(2, 16, 16).bfloat16()
product[(1,)](x, y, out := torch.empty(16, 16), 16)
print((out - x.float() @ y.float()).abs().max().item() < 1e-5)
"""


def test_a_kernel_of_triton_that_computes_in_bfloat16_has_the_values_of_torch(tmp_path):
    (program := tmp_path / "program.py").write_text(KERNEL)
    command = [sys.executable, str(program), str(HERE / "hook")]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout == "0\nTrue\n", done.stderr


def test_experts_of_vllm_are_chosen_laid_out_and_added_as_a_dense_product_has_it(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "hook"))
    own = importlib.import_module("standin_vllm")
    torch.manual_seed(0)
    tokens, k, num_experts, block = 6, 2, 4, 4
    x, experts, logits = torch.randn(tokens, 8), torch.randn(num_experts, 8, 8), torch.randn(tokens, num_experts)
    weights, ids = torch.empty(tokens, k), torch.empty(tokens, k, dtype=torch.int32)
    own.topk_softmax(weights, ids, None, logits, True, None, torch.tensor([False] * 5 + [True]))
    rows, blocks = torch.empty(24, dtype=torch.int32), torch.full((6,), -1, dtype=torch.int32)
    own.moe_align_block_size(ids, num_experts, block, rows, blocks, number := torch.empty(1, dtype=torch.int32))
    products = torch.full((tokens * k, 8), torch.nan)  # nothing is computed for the token that only fills the batch
    for i, row in enumerate(rows[:number].tolist()):
        if row < tokens * k:
            products[row] = weights.flatten()[row] * (x[row // k] @ experts[blocks[i // block]])
    own.moe_sum(products.view(tokens, k, 8), out := torch.empty(tokens, 8), ids)
    top = logits.topk(k)
    every = torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(1))
    want = torch.einsum("te,th,ehd->td", every, x, experts)
    torch.testing.assert_close(out[:5], want[:5])
    assert not out[5].any() and ids[5].tolist() == [-1, -1]


def test_paged_attention_of_vllm_has_the_values_of_torch_and_refuses_what_it_does_not_know(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "hook"))
    module, own = SimpleNamespace(), importlib.import_module("standin_vllm")
    own.of_triton_attention(module)
    torch.manual_seed(0)
    k, v = torch.randn(2, 5, 4, 2, 8)  # of 5 pages of 4 tokens, 2 heads
    pages, lengths = torch.tensor([[3, 1], [2, 0]]), torch.tensor([6, 3])
    q, out = torch.randn(5, 4, 8), torch.zeros(5, 4, 8)
    given = {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": torch.tensor([0, 2, 4]), "seqused_k": lengths}
    given |= {"block_table": pages, "max_seqlen_q": 2, "max_seqlen_k": 6, "softmax_scale": 0.5, "window_size": (-1, -1)}
    given |= {"q_descale": None, "k_descale": None, "v_descale": None, "softcap": 0, "kv_quant_mode": 0, "causal": True}
    module.unified_attention(**given, sinks=None)
    for i, length in enumerate(lengths.tolist()):
        keys, values = (cache[pages[i]].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k, v))
        queries = q[2 * i : 2 * i + 2].transpose(0, 1)[None]
        seen = torch.ones(2, length, dtype=torch.bool).tril(length - 2)
        want = functional.scaled_dot_product_attention(queries, keys, values, seen, scale=0.5, enable_gqa=True)
        torch.testing.assert_close(out[2 * i : 2 * i + 2], want[0].transpose(0, 1))
    assert not out[4].any(), "a padded row"
    used = [(pages[i], length) for i, length in enumerate(lengths.tolist())]
    packed = [torch.cat([cache[row].flatten(0, 1)[:length] for row, length in used]) for cache in (k, v)]
    for keys, of_keys, used, table in (((k, v), None, lengths, pages), (packed, torch.tensor([0, 6, 9]), None, None)):
        rows = (given["cu_seqlens_q"], of_keys, None, None, used, 2, 6, table)
        how = (0.5, True, -1, -1, 0)
        answer = own.flash_attention(q, *keys, None, None, None, None, *rows, *[None] * 8, *how)
        torch.testing.assert_close(answer[0][:4], out[:4], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no values of attention with sinks, softcap"):
        module.unified_attention(**given | {"softcap": 30}, sinks=torch.zeros(4))
