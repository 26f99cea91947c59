"""Check on one GPU what a machine without GPUs cannot show: a table of expected against seen.

Each probe runs in a process of its own with a time limit, on the idlest GPU; those that depend on
the allocator's segments run with expandable ones, the product's default, and without. No network
and no data are needed. Without PROBE the table is also written to docs/gpu/NAME.md, to commit.

Run: python benchmarks/gpu_check.py [--name NAME] [--minutes 30] [PROBE ...]   (or: just gpu-check)
Exit code: 0 all as expected, 1 something differs or failed, 2 no GPU that torch can use, 3 nothing
differs, but some of it could not be checked.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before torch is imported, which may take a minute
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import gpu_check_trainers  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from robust_train import compat  # noqa: E402
from robust_train.attempt.host_copies import HostCopies  # noqa: E402
from robust_train.attempt.reports import Reports  # noqa: E402
from robust_train.children.interpreters import Interpreters, request_imports  # noqa: E402
from robust_train.failures import classify_failure  # noqa: E402
from robust_train.features.memory_samples.sampler import Sampler  # noqa: E402
from robust_train.folder.checkpoint_writing import write_atomically  # noqa: E402
from robust_train.gpu.cuda_order import started_driver  # noqa: E402
from robust_train.gpu.inventory import close_session, read_inventory  # noqa: E402
from robust_train.gpu.processes import find_holders  # noqa: E402
from robust_train.gpu.select import idlest, label, others_on  # noqa: E402
from robust_train.gpu.visible import VARIABLE as MASK  # noqa: E402
from robust_train.gpu.visible import visible_gpus  # noqa: E402
from robust_train.host.allocator import VARIABLE, allocator_settings  # noqa: E402
from robust_train.memory.clearing import release_memory, return_memory  # noqa: E402
from robust_train.memory.cuda import alloc_retries  # noqa: E402
from robust_train.memory.in_use import memory_in_use  # noqa: E402
from robust_train.model.errors import UserError  # noqa: E402
from robust_train.model.failure import Clue, FailureKind  # noqa: E402
from robust_train.queue.registry import QueuedJob, Registry  # noqa: E402
from robust_train.readable import GIB, MIB, first_line  # noqa: E402
from robust_train.step.batcher import MicroBatcher  # noqa: E402
from robust_train.step.oom_handler import retry_on_oom  # noqa: E402
from robust_train.step.probing import optimizer_bytes  # noqa: E402
from robust_train.step.update import LateFigures, update  # noqa: E402

EVIDENCE = ROOT / "docs" / "gpu"
TIMED = ("vit_base_patch16_224", "resnet50")
NOBODY = 65534
SHRINK = 1
"""Sizes are divided by it where a stand-in runs the probes without a GPU."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    what: str
    expected: str
    seen: str
    passed: bool | None  # None: it could not be checked

    @property
    def mark(self) -> str:
        """What the table says of it."""
        if self.passed is None:
            return "not checked"
        if not self.passed:
            return "DIFFERS"
        return "ok" if self.expected else "figure"


Checks = Iterator[Check]


def equal(what: str, expected: object, seen: object) -> Check:
    return Check(what, str(expected), str(seen), expected == seen)


def below(what: str, limit: float, seen: float, unit: str = "") -> Check:
    return Check(what, f"< {limit:g}{unit}", f"{seen:.3g}{unit}", seen < limit)


def figure(what: str, seen: str) -> Check:
    """A figure for the documentation, which nothing is expected of."""
    return Check(what, "", seen, True)


def not_checked(what: str, why: object) -> Check:
    return Check(what, "", first_line(why)[:120], None)


def milliseconds(work: Callable[[], Any], times: int = 1) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / times


def side(length: int) -> int:
    return max(length // SHRINK, 8)


def limit_to(size: float) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(size / total, 1.0))


def free_bytes() -> int:
    return gpu().free_bytes


def gpu() -> Any:
    """The first GPU that this process may use, as NVML shows it."""
    visible = visible_gpus(read_inventory(processes=True), os.environ)
    if not visible.gpus:
        raise RuntimeError(f"NVML shows no GPU: {visible.why_none}")
    return visible.gpus[0]


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def probe_nvml() -> Checks:
    started = time.perf_counter()
    found = read_inventory(processes=True)
    yield below("NVML's first answer", 30, time.perf_counter() - started, " s")
    yield equal("problem with NVML", None, found.problem)
    yield figure("GPU", f"{gpu().name}, driver {found.driver_version}, {gpu().compute_mode}")
    yield equal("why it is unusable", None, gpu().unusable)
    taken = milliseconds(lambda: read_inventory(processes=False), 20)
    yield figure("reading all GPUs", f"{taken:.1f} ms")
    close_session()  # as the sampler does between two readings, so that a GPU can be reset
    taken = milliseconds(lambda: read_inventory(processes=False))
    yield figure("opening NVML and reading all GPUs", f"{taken:.1f} ms")


def probe_guard() -> Checks:
    """CUDA is untouched until it is used, so a standby can still choose its GPU and settings."""
    yield equal("CUDA started by importing torch", False, started_driver() is not None)
    torch.cuda.device_count()
    yield equal("… by device_count()", False, started_driver() is not None)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.environ.update(CUDA_VISIBLE_DEVICES=gpu().uuid, CUDA_DEVICE_ORDER="PCI_BUS_ID")
            os.environ[VARIABLE] = allocator_settings({}, expandable_segments=True)
            torch.ones(1, device="cuda")
            segments = torch.cuda.memory_snapshot()
            seen: Any = [torch.cuda.device_count(), bool(segments[0].get("is_expandable"))]
        except BaseException as error:
            seen = f"{type(error).__name__}: {error}"[:80]
        os.write(writing, json.dumps(seen).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    yield equal(
        "a fork's GPUs, expandable segments",
        [1, True],
        json.loads(os.read(reading, 999) or b"null"),
    )
    torch.cuda.is_available()
    torch.ones(1, device="cuda")
    yield equal("CUDA started by a tensor", True, started_driver() is not None)


def probe_context() -> Checks:
    before, taken = free_bytes(), gpu().used_bytes
    a = torch.randn(side(4096), side(4096), device="cuda")
    a @ a, a.bfloat16() @ a.bfloat16()
    conv = nn.Conv2d(64, 64, 3).cuda().bfloat16()
    conv(torch.randn(8, 64, side(64), side(64), device="cuda").bfloat16()).sum().backward()
    torch.cuda.synchronize()
    beside = before - free_bytes() - torch.cuda.memory_reserved()
    figures = memory_in_use()
    measured = figures.get("context_bytes")
    yield figure("context, cuBLAS and cuDNN", f"{beside // MIB} MiB")
    if measured is None and gpu().processes:
        yield Check("the attempt's own measure", "known", "NVML does not show it", False)
    elif measured is None:  # a container
        own = figures.get("context_at_most_bytes", 0) - taken
        yield below("… by what all of the GPU holds, off by", 128, abs(own - beside) / MIB, " MiB")
    else:
        yield below("… differs from that by", 128, abs(measured - beside) / MIB, " MiB")


class Late(torch.autograd.Function):
    """Asks for too much in the backward pass, which runs in the device's own thread."""

    most: int | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Late.most is not None and gradient.shape[0] > Late.most:
            torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
        return gradient


Pass = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, before: Pass | None) -> None:
        super().__init__()
        self.before = before
        self.conv = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            x = self.before(x)
        return nn.functional.dropout(torch.relu(self.norm(self.conv(x))), 0.1) + x


class Net(nn.Module):
    """Six layers; ``late`` is called in the fourth one, so that of its backward pass half is done.

    Where layers are checkpointed it is within what is computed again.
    """

    def __init__(self, reentrant: bool | None = None, late: Pass | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(late if n == 3 else None) for n in range(6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.float().square().mean(dim=(1, 2, 3))


def segments() -> Check:
    """Whether the allocator's segments are those that this process was started with."""
    torch.ones(1, device="cuda")
    found = torch.cuda.memory_snapshot()
    seen = bool(found[0].get("is_expandable")) if found else None
    return equal("segments are expandable", wants_expandable(), seen)


def wants_expandable() -> bool:
    return "expandable_segments:True" in os.environ.get(VARIABLE, "")


def probe_step() -> Checks:
    """Memory runs out in a real backward pass, and the step is repeated: the point of it all."""
    limit_to(4 * GIB)
    yield segments()
    for kind in STEPS:
        try:
            yield from step_of(kind)
        except Exception as error:
            yield Check(kind, "no error", f"{type(error).__name__}: {error}"[:120], False)


STEPS = ("plain", "around", "checkpoint", "reentrant", "bf16", "fp16 scaler", "compile")
"""Kinds of steps; memory runs out in the middle layer, and once around all of them."""


def step_of(kind: str) -> Checks:
    torch.manual_seed(0)
    late: Pass = Late.apply
    if kind == "compile":
        # compiled, the request for too much would be optimised away
        late = torch.compiler.disable(Late.apply)
    inside = None if kind == "around" else late
    net = Net({"checkpoint": False, "reentrant": True}.get(kind), inside).cuda()
    model = torch.compile(net, dynamic=True) if kind == "compile" else net
    scaler = torch.amp.GradScaler("cuda", enabled=kind == "fp16 scaler")
    x = torch.randn(32, 32, side(64), side(64)).pin_memory().requires_grad_(kind == "reentrant")
    half = torch.float16 if "fp16" in kind else torch.bfloat16
    if kind == "compile":
        try:
            model(x[:8].cuda()).mean().backward()
        except Exception as error:  # no C compiler, no Python.h: nothing of ours
            why = f"torch.compile fails here: {type(error).__name__}: {error}"
            yield not_checked("compile", why)
            return
        net.zero_grad()

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", half, enabled="16" in kind):
            losses = model(part.cuda(non_blocking=True))
        return (Late.apply(losses) if kind == "around" else losses).mean()

    yield from is_repeated(
        kind,
        loss_of,
        x,
        net,
        backward=lambda loss: scaler.scale(loss).backward(),
        # from the same split, dropout's draws are the same
        most=1e-2 if "16" in kind else 1e-5,
    )


def is_repeated(
    name: str,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    net: nn.Module,
    *,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    most: float = 1e-5,
    generator: torch.Generator | None = None,
) -> Checks:
    """Memory runs out above 8 samples: the gradients are those of a step in eights."""

    def step(size: int, limit: int | None) -> tuple[list[torch.Tensor], int]:
        Late.most = limit
        torch.manual_seed(1)
        if generator is not None:
            generator.manual_seed(1)
        changes: list[object] = []
        batcher = MicroBatcher(size, on_event=changes.append)
        batcher.backward(loss_of, x, net, backward=backward)
        gradients = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        return gradients, len(changes)

    expected, _ = step(8, None)
    # the failed step frees cuBLAS's workspaces, which would hide as much that it leaves behind
    return_memory(workspaces=True)
    before = torch.cuda.memory_allocated()
    found, repeats = step(32, 8)
    size = sum(g.numel() * g.element_size() for g in found)
    left = torch.cuda.memory_allocated() - before - size
    yield equal(f"{name}: repeats of the step", 2, repeats)
    yield below(f"{name}: gradients differ by", most, largest_difference(found, expected))
    yield below(f"{name}: memory left behind", 1, left / MIB, " MiB")


class Tower(nn.Module):
    """A billion weights in sixty layers, each computed again in the backward pass."""

    def __init__(self, late: Pass) -> None:
        super().__init__()
        width = side(4096)
        self.late = late
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(60))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + checkpoint(self.step, x, layer, number == 30, use_reentrant=False)
        return x.float().square().mean(dim=(1, 2))

    def step(self, x: torch.Tensor, layer: nn.Module, is_late: bool) -> torch.Tensor:
        x = nn.functional.gelu(layer(nn.functional.layer_norm(x, x.shape[-1:])))
        return self.late(x) if is_late else x


def probe_large() -> Checks:
    """Memory runs out in the middle of the backward pass of a model of a billion weights."""
    with torch.device("cuda"):
        net = Tower(Late.apply).bfloat16()
        x = torch.randn(32, 64, side(4096)).bfloat16()
    # room for two copies of the gradients and for activations, but not for what Late asks for
    gc.collect()
    limit_to(torch.cuda.memory_allocated() + 7 * GIB)
    yield segments()

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return net(part).mean()

    yield from is_repeated("1B, checkpoint, bf16", loss_of, x, net, most=1e-2)

    def step(limit: int | None) -> None:
        Late.most = limit
        MicroBatcher(32).backward(loss_of, x, net)
        net.zero_grad()

    step(None)
    whole, repeated = (milliseconds(partial(step, limit)) for limit in (None, 8))
    yield figure("… its step, and a repeated one", f"{whole:.0f} ms, {repeated:.0f} ms")
    yield below("… time lost", 2, (repeated - whole) / 1000, " s")


def probe_second() -> Checks:
    """Memory runs out in the backward pass through a gradient, whose graph is held by cycles."""
    limit_to(4 * GIB)
    net, x = Net().cuda(), torch.randn(32, 32, side(64), side(64), device="cuda")

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        part = part.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(part).mean(), part, create_graph=True)
        return Late.apply(slope).square().mean()

    yield from is_repeated("second derivatives", loss_of, x, net)


def probe_generator() -> Checks:
    """A user's own generator on the GPU draws the same numbers when the step is repeated."""
    limit_to(4 * GIB)
    net = Net(late=Late.apply).cuda()
    x = torch.randn(32, 32, side(64), side(64), device="cuda")
    own = torch.Generator(x.device)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(part.shape, generator=own, device=part.device)
        return net(part + noise).mean()

    yield from is_repeated("own generator", loss_of, x, net, generator=own)


def probe_retry() -> Checks:
    """A failed try's gradients do not count."""
    limit_to(2 * GIB)
    net, x = Net().cuda(), torch.randn(32, 32, side(64), side(64), device="cuda")

    def accumulate(batch_size: int) -> None:
        torch.manual_seed(1)
        for part in x.split(batch_size):
            (Late.apply(net(part)).sum() / 32).backward()
            if batch_size > 8:
                torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")

    accumulate(8)
    expected = [2 * p.grad for p in net.parameters()]
    retry_on_oom()(accumulate)(32)
    found = [p.grad for p in net.parameters()]
    yield below("retry_on_oom: gradients differ by", 1e-5, largest_difference(found, expected))
    model = nn.Linear(side(8192), side(8192), bias=False, device="cuda")
    rows = torch.randn(8, side(8192), device="cuda")

    def step(batch_size: int) -> None:
        model.zero_grad()
        model(rows[:batch_size]).mean().backward()

    def peak_of(work: Callable[[int], None]) -> int:
        work(8)
        torch.cuda.reset_peak_memory_stats()
        work(8)
        return torch.cuda.max_memory_allocated()

    more = peak_of(retry_on_oom()(step)) - peak_of(step)
    yield below("retry_on_oom: more memory in a call", 1, more / MIB, " MiB")


def probe_rewind() -> Checks:
    """Statistics that are frozen in the first step and trained later go back with a repeated one.

    Of a large buffer that does not change there is no copy, and an optimizer that steps within the
    backward pass is refused.
    """
    limit_to(4 * GIB)
    x = torch.randn(32, 32, side(64), side(64), device="cuda")
    norm = nn.BatchNorm2d(32)
    net = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), norm).cuda()
    start, seen = copy.deepcopy(net.state_dict()), []

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return Late.apply(net(part)).square().mean()

    for size, most in ((8, None), (32, 8)):
        net.load_state_dict(start)
        batcher = MicroBatcher(size)
        for is_trained in (False, True):
            net.train(is_trained)
            Late.most = most if is_trained else None
            batcher.backward(loss_of, x, net)
        assert norm.running_var is not None
        seen.append(norm.running_var.clone())
    differ = largest_difference(seen[1:], seen[:1])
    yield below("frozen at first: statistics differ by", 1e-5, differ)
    net.register_buffer("weights", torch.zeros(16 * MIB, device="cuda"))
    before, batcher = torch.cuda.memory_allocated(), MicroBatcher(8)
    batcher.backward(loss_of, x, net)
    more = (torch.cuda.memory_allocated() - before) / MIB
    yield below("copies of a buffer of 64 MiB that does not change", 1, more, " MiB")
    net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        MicroBatcher(8).backward(loss_of, x, net)
        refused = False
    except UserError:
        refused = True
    yield equal("a step within the backward pass is refused", True, refused)


def probe_shared() -> Checks:
    """A tensor in another process, which expandable segments may not allow."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    given, answers = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=_reads, args=(given, answers), daemon=True)
    child.start()
    mine = torch.ones(1, device="cuda")
    try:
        given.put(mine)
        seen = answers.get()
    except RuntimeError as error:
        child.kill()
        seen = str(error)
    child.join()
    if seen == "1.0":
        yield figure("a tensor in another process", "is shared")
    elif wants_expandable():
        clue = classify_failure(RuntimeError(seen)).evidence.clue
        yield equal("the error is known as the segments'", Clue.SEGMENTS, clue)
    else:
        yield Check("a tensor in another process", "is shared", first_line(seen), False)


def _reads(given: Any, answers: Any) -> None:
    try:
        answers.put(str(given.get().item()))
    except Exception as error:
        answers.put(str(error) or type(error).__name__)


def probe_optimizer() -> Checks:
    model = nn.Linear(side(16384), side(16384), bias=False, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    size = model.weight.numel() * 4
    model.weight.grad = torch.ones_like(model.weight)
    limit_to(2.6 * size)
    try:
        optimizer.step()
        yield Check("memory in the first step", "runs out", "is enough", False)
    except torch.OutOfMemoryError as error:
        release_memory(error)
        yield equal("state left of a failed first step", 0, len(optimizer.state))
    gc.collect()
    torch.cuda.empty_cache()
    limit_to(16 * size)
    expected = 2 * size + sum(optimizer_bytes(model.parameters()))
    model.weight.grad = torch.ones_like(model.weight)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated()
    yield below("peak of the first step differs by", 0.1, abs(peak - expected) / expected)


def probe_fraction() -> Checks:
    limit_to(8 * GIB)
    held = torch.empty(7 * GIB, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        yield Check("memory at the limit", "runs out", "is enough", False)
    except torch.OutOfMemoryError as error:
        failure = classify_failure(error)
        yield equal("kind", FailureKind.DEVICE_OOM, failure.kind)
        own = getattr(failure.evidence, "own_limit", None)
        yield equal("our own limit is known as such", True, own)
    del held


def probe_tight() -> Checks:
    """The allocator's own clearings are counted by step."""
    limit_to(4 * GIB)
    before, steps = alloc_retries(0) or 0, 0
    # what is cached of the last step is too small and in the way
    for half_gib in (4, 5, 6, 7):
        torch.empty(half_gib * GIB // 2, dtype=torch.uint8, device="cuda")
        after = alloc_retries(0) or 0
        steps += after > before
        before = after
    yield equal("steps in a row that emptied the cache", 3, steps)


def probe_sticky() -> Checks:
    torch.ones(9, device="cuda")
    try:
        gpu_check_trainers.break_the_context()
        yield not_checked("fault", "no fault happened")
        return
    except Exception as error:
        kind = classify_failure(error).kind
        if kind is not FailureKind.DEVICE_FAULT and "illegal" not in str(error):
            yield not_checked("fault", f"the kernel does not compile: {error}")
            return
        yield equal("kind of an illegal address", FailureKind.DEVICE_FAULT, kind)
    # the allocator may still count, or the figures are the process's
    figures = sorted(memory_in_use())
    yield Check("figures after a fault", "some", ", ".join(figures), bool(figures))
    try:
        return_memory()
        yield equal("return_memory after a fault", "returns", "returns")
    except Exception as error:
        yield equal("return_memory after a fault", "returns", type(error).__name__)
    code = "import torch; print(torch.ones(3, device='cuda').sum().item())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    yield equal("a new process on the same GPU", "3.0", ended.stdout.strip())


def probe_graph() -> Checks:
    """Clearing between two replays of a graph that uses cuBLAS's workspace."""
    stream = torch.cuda.Stream()
    a, b = (torch.randn(side(32768), 640, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):  # long sums, so that it is split over K
            a.T @ b
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = a.T @ b
    graph.replay()
    torch.cuda.synchronize()
    expected = out.clone()
    for workspaces in (False, True):
        return_memory(thorough=False, workspaces=workspaces)
        others = [torch.full((GIB // 16,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
        graph.replay()
        torch.cuda.synchronize()
        after = "a failure" if workspaces else "a step"
        yield equal(f"replay after {after}'s clearing", True, torch.equal(out, expected))
        intact = all(bool((other == 7).all()) for other in others)
        yield equal("… leaves others' memory", True, intact)


def probe_buffers() -> Checks:
    layers = [layer for _ in range(53) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(64, 64, device="cuda")
    batcher = MicroBatcher(64)

    def plain() -> None:
        model(x).mean().backward()
        model.zero_grad()

    def ours() -> None:
        batcher.backward(lambda part: model(part).mean(), x, model)
        model.zero_grad()

    copies, kernels = {}, {}
    for work in (plain, ours):
        milliseconds(work, 5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        rows = profile.key_averages()
        if not rows:
            yield not_checked("kernels", "the profiler shows none (CUPTI)")
            return
        kernels[work] = sum(row.count for row in rows)
        copies[work] = sum(row.count for row in rows if "copy" in row.key.lower())
    yield below("more copies a step, 53 BatchNorms", 10, copies[ours] - copies[plain])
    yield below("more kernels and copies", 10, kernels[ours] - kernels[plain])
    pairs = [(milliseconds(plain, 10), milliseconds(ours, 10)) for _ in range(7)]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    yield figure("step, plain and with run.backward", f"{before:.2f} ms, {after:.2f} ms")
    # the layers are so small that a step takes as long as its host does
    yield below("host time added to a step", 0.5, after - before, " ms")
    yield equal("what waits for the GPU in a step", "nothing", what_waits(ours))


def adamw(weights: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=0.1, **options)


def sgd(weights: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, **options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "AdamW, fused": partial(adamw, fused=True),
    "SGD": sgd,
    "SGD, fused": partial(sgd, fused=True),
}
BAD_STEPS = (1, 5)


def probe_update() -> Checks:
    """The end of a step waits for nothing, and leaves out what would spoil the weights."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
    x, batcher, late = torch.randn(64, 64, device="cuda"), MicroBatcher(64), LateFigures()
    optimizer = adamw(model.parameters(), fused=True)

    def step(number: int) -> None:
        loss = batcher.backward(lambda part: model(part).square().mean(), x, model)
        done = update(optimizer, loss, max_grad_norm=1.0)
        assert done.is_bad is not None
        late.swap(number, done.is_bad)

    for number in range(3):
        step(number)
    yield equal("what waits for the GPU, fused", "nothing", what_waits(lambda: step(3)))
    sent: list[Any] = []
    reports = Reports(sent.append, is_main=True)

    def report(number: int) -> None:
        loss = batcher.backward(lambda part: model(part).square().mean(), x, model)
        reports.progress(number, None, {"loss": loss})

    waits = what_waits(lambda: report(4))
    reports.send_last_progress()
    yield equal("… with run.progress(loss=tensor)", "nothing", waits)
    yield equal("losses that are reported", [True], [one.metrics["loss"] > 0 for one in sent])
    for name, make in OPTIMIZERS.items():
        left_out, without = (weights_after(make, skips=skips) for skips in (False, True))
        differ = largest_difference(left_out, without)
        yield below(f"{name}: NaN in steps 1 and 5, weights differ by", 1e-6, differ)


def weights_after(
    make: Callable[[Any], torch.optim.Optimizer], *, skips: bool
) -> list[torch.Tensor]:
    """Return weights after eight steps, of which bad ones are met, or skipped altogether."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64).cuda()
    optimizer = make(net.parameters())
    batches = torch.randn(9, 64, 64).cuda()
    for number in range(1, 9):
        is_bad = number in BAD_STEPS
        if is_bad and skips:
            continue
        loss = net(batches[number]).square().mean()
        if is_bad:
            loss = loss * float("nan")
        loss.backward()
        update(optimizer, loss.detach())
    return [parameter.detach().clone() for parameter in net.parameters()]


def what_waits(work: Callable[[], object]) -> str:
    """Return what of some work waits for the GPU, in torch's words."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        return "nothing"
    except RuntimeError as error:
        return first_line(error)[:120]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def probe_saves() -> Checks:
    """Copies of 20 GiB while training overwrites the weights: how long it stands still for them,
    and the pinned memory that they take and return."""
    state = {f"layer{n}": torch.empty(GIB // 4, device="cuda") for n in range(20)}
    copies, before = HostCopies(), pinned_bytes()
    for number, which in enumerate(("first", "second"), start=1):
        for tensor in state.values():
            tensor.fill_(number)
        copies.begin()
        started = time.perf_counter()
        copied = copies.copy({"model": state})
        stall = time.perf_counter() - started
        if copied is None:
            yield not_checked("a copy of 20 GiB", "the host has no room for it")
            return
        for tensor in state.values():
            tensor.fill_(-1)
        torch.cuda.synchronize()
        is_whole = all(bool((one == number).all()) for one in copied["model"].values())
        yield equal(f"{which} copy is of the moment of the save", True, is_whole)
        yield figure(f"training stands still for the {which} one", f"{stall:.2f} s")
    # a part of it, which a disk takes in seconds
    few = {name: copied["model"][name] for name in list(state)[:4]}
    written = write_atomically({"model": few}, Path(tempfile.mkdtemp()) / "copy.pt")
    on_disk = torch.load(written, weights_only=True)["model"]
    is_same = all(bool((one == number).all()) for one in on_disk.values())
    yield equal("on disk it is of that moment, too", True, is_same)
    del few, on_disk
    written.unlink()
    counted = sum(arena.taken for arena in copies.arenas.values())
    if (taken := pinned_bytes()) is None or before is None:
        yield not_checked("pinned memory", "this torch does not tell (host_memory_stats)")
        return
    off = abs(taken - before - counted) / MIB
    yield below("pinned memory differs from what is counted by", 1, off, " MiB")
    del copied
    for arena in copies.arenas.values():
        arena.clear()
    left = (pinned_bytes() or 0) - before
    yield below("pinned memory that is not returned", 1, left / MIB, " MiB")


def pinned_bytes() -> int | None:
    """Return the pinned memory that torch has from the system, used or not."""
    read = getattr(torch.cuda, "host_memory_stats", dict)
    figures = {**read()}
    return figures.get("allocated_bytes.current", figures.get("allocated_bytes.all.current"))


STANDBYS = {
    "asks_for_a_gpu": "import torch\nHAS_GPU = torch.cuda.is_available()\n",
    "takes_a_gpu": "import torch\nHELD = torch.ones(1, device='cuda')\n",
}


def probe_standby() -> Checks:
    """An interpreter that waits for the next attempt holds nothing of a GPU."""
    folder = Path(tempfile.mkdtemp())
    for name, code in STANDBYS.items():
        (folder / f"{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    before, many = free_bytes(), Interpreters()
    try:
        asks, takes = (many.start() for _ in STANDBYS)
        for one, name in zip((asks, takes), STANDBYS, strict=True):
            one.prepare(request_imports([name], is_standby=True))
        many.await_prepared([asks, takes])
        yield equal("one that has asked torch for a GPU can be used", True, asks.is_usable)
        yield equal("one that has started CUDA is known", "takes_a_gpu", takes.culprit)
        deadline = time.monotonic() + 10
        while takes.is_running and time.monotonic() < deadline:
            many.poll()
            time.sleep(0.05)
        yield equal("… and ends by itself", 0, takes.returncode)
        while free_bytes() < before - 64 * MIB and time.monotonic() < deadline:
            time.sleep(0.05)
        yield below("they leave taken of the GPU", 64, (before - free_bytes()) / MIB, " MiB")
    finally:
        many.close()
        sys.path.remove(str(folder))


def probe_ranks() -> Checks:
    """Two processes on one GPU, over gloo: memory runs out on one of them."""
    import torch.multiprocessing as mp

    for how in ("bare", "inside of another", "another default device"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(run_rank, args=(how, folder), nprocs=2)
            except Exception as error:
                last = str(error).splitlines()[-1]
                yield Check(f"{how}: ranks", "end", last[:120], False)
                continue
            for rank in range(2):
                repeats, differ = json.loads(Path(folder, f"rank-{rank}").read_text())
                yield equal(f"{how}, rank {rank}: the step is repeated", True, repeats >= 1)
                yield below(f"{how}, rank {rank}: gradients differ by", 1e-4, differ)


def run_rank(rank: int, how: str, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(side(2048), side(2048)) for _ in range(6))).cuda()
    model: nn.Module = DistributedDataParallel(net)
    if how == "inside of another":
        model = nn.Sequential(model)
    if how == "another default device":
        torch.set_default_device("cuda")
    generator = torch.Generator("cpu").manual_seed(rank)
    x = torch.randn(side(65536), side(2048), generator=generator, device="cpu")

    def step(size: int) -> tuple[list[torch.Tensor], int]:
        changes: list[object] = []
        batcher = MicroBatcher(size, on_event=changes.append)
        batcher.backward(lambda part: model(part.cuda()).square().mean(), x, model)
        gradients = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        return gradients, len(changes)

    expected, _ = step(side(4096))
    torch.cuda.empty_cache()
    if rank == 0:
        limit_to(torch.cuda.memory_allocated() + 2.5 * GIB)
    found, repeats = step(side(65536))
    seen = [repeats, largest_difference(found, expected)]
    Path(folder, f"rank-{rank}").write_text(json.dumps(seen))


def probe_teardown() -> Checks:
    """How long NVML shows a killed process's memory."""
    size = max(free_bytes() // GIB - 8, 1)
    for expandable in (True, False):
        before = free_bytes()
        ours = {VARIABLE: allocator_settings({}, expandable_segments=expandable)}
        with holding(size, **ours) as is_held:
            yield equal(f"a child holds {size} GiB", True, is_held)
            started = time.perf_counter()
        while free_bytes() < before - 256 * MIB and time.perf_counter() < started + 30:
            time.sleep(0.02)
        name = "expandable" if expandable else "plain"
        taken = time.perf_counter() - started
        yield below(f"{size} GiB back after a kill ({name})", 5, taken, " s")


def probe_sampler() -> Checks:
    a = torch.randn(side(1024), side(1024), device="cuda")

    def work() -> None:
        for _ in range(200):
            a @ a

    milliseconds(work, 20)
    rows = []
    for _ in range(7):
        alone = milliseconds(work, 30)
        folder = Path(tempfile.mkdtemp())
        often = {"interval_seconds": 0.01, "cost_share": 1}
        sampler = Sampler(folder, 1, "cuda:0", lambda: 1, **often)
        sampler.start()
        rows.append(milliseconds(work, 30) / alone)
        sampler.stop()
    yield below("a sample each 10 ms costs", 2, 100 * (statistics.median(rows) - 1), " %")


def probe_history() -> Checks:
    """What recording the allocator's history costs a step that takes as long as its host does."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(64))).cuda()
    x = torch.randn(1, 64, device="cuda")

    def step() -> None:
        net(x).mean().backward()
        net.zero_grad()

    milliseconds(step, 20)
    rows = []
    for _ in range(7):
        alone = milliseconds(step, 50)
        compat.record_allocator_history(torch, 20_000)
        rows.append(milliseconds(step, 50) / alone)
        compat.end_allocator_history(torch)
    yield below("recording the history costs", 2, 100 * (statistics.median(rows) - 1), " %")


def probe_doctor() -> Checks:
    """What users run: facts, then an allocation, an out-of-memory error and a recovery."""
    command = [sys.executable, "-m", "robust_train.cli.main", "doctor", "--probe"]
    # libraries that the image lacks may be on the path, too
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu().uuid, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    yield equal("exit code of robust-train doctor --probe", 0, done.returncode)
    lines = [line for line in done.stdout.splitlines() if line.startswith("probe of")]
    said = lines[0] if lines else (done.stderr.strip().splitlines() or [""])[-1]
    if "not probed" in said:
        yield not_checked("it recovers", said)
    else:
        yield Check("it recovers", "continued", said[:100], "continued with" in said)


def probe_clear() -> Checks:
    """What one periodic clearing costs, with what follows it."""
    blocks = min(160, int(free_bytes() * 0.8) // (256 * MIB))

    def use() -> None:
        taken = [torch.empty(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
        torch.cuda.synchronize()
        del taken

    use()
    again = milliseconds(use)
    clearing = milliseconds(lambda: return_memory(thorough=False))
    taking = milliseconds(use)
    yield figure(
        f"{blocks // 4} GiB: from the cache, clearing, taking",
        f"{again:.1f}, {clearing:.0f}, {taking:.0f} ms",
    )


# --- the product ---


def start_job(
    folder: Path,
    trainer: str,
    *overrides: str,
    script: str = "train_robust.py",
    exported: str | None = None,
) -> subprocess.Popen[str]:
    """Start the launcher on a trainer of ours, on the GPU that this process sees.

    ``exported`` is what the user has set for the allocator.
    """
    command = [
        sys.executable,
        str(ROOT / script),
        f"trainer._target_=gpu_check_trainers.{trainer}",
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    paths = (str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))
    # what the attempt gets is what the launcher makes of it
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environ.pop(VARIABLE, None)
    if exported is not None:
        environ[VARIABLE] = exported
    return subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def job(trainer: str, *overrides: str, exported: str | None = None) -> dict[str, Any]:
    """Run a job to its end; return its summary. Raises RuntimeError: there is none."""
    folder = Path(tempfile.mkdtemp())
    process = start_job(folder, trainer, *overrides, exported=exported)
    return ended(process, folder)


def ended(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    _, errors = process.communicate()
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        last = (errors.strip().splitlines() or ["it says nothing"])[-1]
        raise RuntimeError(f"exit code {process.returncode}: {last}") from None
    return summary


NO_WAIT = ("wait_for_gpu=false", "allow_cpu_fallback=false")


def probe_attempt() -> Checks:
    """An attempt of the launcher reports what it sees."""
    seen = job("sees", *NO_WAIT)["result"] or {}
    for name, expected in (
        ("mask", gpu().uuid),
        ("uuid", gpu().uuid),
        ("count", 1),
        ("expandable", True),
    ):
        yield equal(f"an attempt's {name}", expected, seen.get(name))
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        yield not_checked("an attempt's fraction", "this torch does not say")
        return
    yield equal("an attempt's fraction", 0.95, seen.get("fraction"))
    mine = job("sees", *NO_WAIT, exported="per_process_memory_fraction:0.25")
    if mine["result"] is None:  # torch before 2.9 knows no such setting
        yield not_checked("fraction where 0.25 is exported", mine["reason"])
        return
    fraction = mine["result"].get("fraction")
    yield equal("fraction where 0.25 is exported", 0.25, fraction)


def probe_fault() -> Checks:
    """An illegal address in an attempt: the next one has the same GPU."""
    attempts = job("faults_once", *NO_WAIT)["attempts"]
    outcomes = [one["outcome"] for one in attempts]
    # whatever it was taken for, the message is CUDA's
    if "illegal" not in (attempts[0]["message"] or ""):
        yield not_checked("a fault", f"none happened: {attempts[0]['message']}")
        return
    yield equal("attempts", ["device_fault", "completed"], outcomes)
    yield equal("on GPUs", [gpu().uuid] * 2, [one["gpu_uuid"] for one in attempts])
    if len(attempts) == 2:
        first, second = attempts
        between = second["started"] - first["started"] - first["seconds"]
        yield below("from the fault to the next attempt", 30, between, " s")


def probe_captured() -> Checks:
    """Memory runs out beside a captured graph: the next attempt has half the batch."""
    done = job("captures", "training.batch_size=64", *NO_WAIT)
    first, last = done["attempts"][0], done["attempts"][-1]
    if isinstance(done["result"], str):
        yield not_checked("a captured graph", done["result"])
        return
    yield equal("first attempt", "device_oom at batch 64", said_of(first))
    yield equal("last attempt", "completed at batch 32", said_of(last))
    yield equal("attempts", 2, len(done["attempts"]))


def probe_crowded() -> Checks:
    """A second process takes the rest of the GPU: the driver itself is out of memory."""
    folder = Path(tempfile.mkdtemp())
    ready, go = folder / "ready", folder / "go"
    os.environ |= {"READY_FILE": str(ready), "GO_FILE": str(go)}
    run = folder / "run"
    rule = ("gpu_check_interval_seconds=1", "allow_cpu_fallback=false")
    process = start_job(run, "fills_eight_gib", "training.batch_size=64", *rule)
    try:
        if not appears(ready, process, 60):
            yield not_checked("a crowded GPU", "the job has not begun")
            return
        with holding(max(free_bytes() // GIB - 4, 1)) as is_held:
            yield equal("a second process holds the rest", True, is_held)
            go.touch()
            journal = run / "journal.jsonl"
            appears(journal, process, 60, "attempt_ended")
    finally:
        go.touch()
    attempts = ended(process, run)["attempts"]
    failure = attempts[0]["failure"] or {}
    yield equal("kind of the driver's own error", "device_oom", failure.get("kind"))
    evidence = failure.get("evidence") or {}
    yield equal("taken for our own limit", False, evidence.get("own_limit"))
    yield equal("figures in the message", True, bool(evidence.get("requested_bytes")))
    yield equal("what is done", "wait", attempts[0]["action"])
    yield equal("when there is room again", "completed at batch 64", said_of(attempts[-1]))


def probe_slices() -> Checks:
    """A job whose time slice is over saves, leaves the GPU, and resumes once no one waits."""
    if os.geteuid() != 0:
        yield not_checked("a time slice", "only root can show it another user's job")
        return
    folder = Path(tempfile.mkdtemp())
    go = folder / "go"
    os.environ |= {"GO_FILE": str(go), "ROBUST_TRAIN_QUEUE_DIR": str(folder / "queue")}
    registry = Registry(folder / "queue")
    room = int(0.97 * gpu().total_bytes)
    run = folder / "run"
    rule = ("gpu_check_interval_seconds=1", "allow_cpu_fallback=false", "gpu_slice_minutes=0")
    process = start_job(run, "is_sliced", *rule)
    try:
        journal = run / "journal.jsonl"
        if not appears(journal, process, 60, '"checkpoint"'):
            yield not_checked("a time slice", "the job has not begun")
            return
        held = free_bytes()
        other = registry.enter(QueuedJob(reserved_bytes=room, only=(gpu().uuid,)))
        other.update(replace(other.job, polled_at=time.monotonic() + 1e6))
        os.fchown(other.fd, NOBODY, -1)
        is_paused = appears(journal, process, 60, "attempt_ended")
        yield equal("the slice ends while another user waits", True, is_paused)
        deadline = time.monotonic() + 10
        while free_bytes() < held + GIB and time.monotonic() < deadline:
            time.sleep(0.02)
        yield below("the GPU lacks of what the job held", 64, (held + GIB - free_bytes()) / MIB)
        other.release()
    finally:
        go.touch()
        registry.close()
    done = ended(process, run)
    outcomes = [(one["outcome"], one["action"]) for one in done["attempts"]]
    yield equal("attempts", [("interrupted", "queue_again"), ("completed", "none")], outcomes)
    yield equal("steps lost or repeated", 0, done["result"])


def said_of(attempt: dict[str, Any]) -> str:
    return f"{attempt['outcome']} at batch {attempt['batch_size']}"


def appears(path: Path, process: subprocess.Popen[str], seconds: float, text: str = "") -> bool:
    """Wait until a file has this text, while the process runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and text in path.read_text():
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def holding(gib: int, **environ: str) -> Iterator[bool]:
    """Have another process hold so much of the GPU within this block; False if it cannot."""
    code = (
        "import torch, time; "
        f"a = [torch.empty(2**30, dtype=torch.uint8, device='cuda') for _ in range({gib})]; "
        "torch.cuda.synchronize(); print('ready', flush=True); time.sleep(300)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip() == b"ready"
    finally:
        child.kill()
        child.wait()


def probe_lost() -> Checks:
    """Memory runs out at step 50 of a job, which repeats that step alone."""
    done = job("runs_out_at_50", "training.batch_size=64", *NO_WAIT)
    yield equal("attempts", ["completed"], [one["outcome"] for one in done["attempts"]])
    if (seen := done["result"]) is not None:
        yield below("time lost", 2, seen["lost_seconds"], " s")
        yield below("memory left behind", 1, seen["left_bytes"] / MIB, " MiB")


def probe_speed() -> Checks:
    """Steps under the launcher by ``run.backward`` and ``run.step``, against a plain loop without
    it. Nothing waits for the GPU while they are timed."""
    if importlib.util.find_spec("timm") is None:
        yield not_checked("train_robust.py ÷ a plain loop", "timm is not installed")
        return
    for model in TIMED:
        seconds: dict[str, list[float]] = {how: [] for how in ("plain", "fused", "unfused")}
        for how in (*seconds, *seconds):
            folder = Path(tempfile.mkdtemp())
            file = folder / "seconds"
            os.environ |= {"TIMED_MODEL": model, "TIMED_FILE": str(file), "TIMED_HOW": how}
            script = "train.py" if how == "plain" else "train_robust.py"
            device = "cuda:0" if how == "plain" else "auto"
            process = start_job(folder / "run", "is_timed", f"device={device}", script=script)
            _, errors = process.communicate()
            if not file.exists():
                last = (errors.strip().splitlines() or ["it says nothing"])[-1]
                yield Check(f"{model} by {script}", "trains", last[:120], False)
                return
            seconds[how].append(float(file.read_text()))
        plain, fused, unfused = (min(times) for times in seconds.values())
        yield figure(f"step of {model} in a plain loop", f"{1000 * plain:.1f} ms")
        yield below(f"{model}: train_robust.py ÷ a plain loop", 1.01, fused / plain)
        # its update waits for the backward pass, and foreach copies all weights
        yield figure(f"{model}: … with an unfused optimizer", f"{unfused / plain:.3f}")


def probe_pytest() -> Checks:
    if importlib.util.find_spec("pytest") is None:
        yield not_checked("pytest -m gpu", "pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "0"]
    else:
        command += ["-o", "addopts="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if re.search(r"[1-9]\d* passed", said) is None and done.returncode in (0, 4, 5):
        yield not_checked("pytest -m gpu", said)
    else:
        yield Check("pytest -m gpu", "exit code 0", said[:120], done.returncode == 0)


BOTH = frozenset(
    ("step", "large", "retry", "shared", "optimizer", "fraction", "tight", "graph", "clear")
)
"""Probes that run with expandable segments and without."""

PROBES: dict[str, tuple[Callable[[], Checks], int]] = {
    # what would change most comes first: a machine may be there for ten minutes
    "nvml": (probe_nvml, 60),
    "guard": (probe_guard, 60),
    "attempt": (probe_attempt, 100),
    "step": (probe_step, 150),
    "update": (probe_update, 60),
    "saves": (probe_saves, 60),
    "large": (probe_large, 120),
    "standby": (probe_standby, 60),
    "lost": (probe_lost, 100),
    "fault": (probe_fault, 150),
    "speed": (probe_speed, 600),
    "teardown": (probe_teardown, 100),
    "crowded": (probe_crowded, 200),
    "slices": (probe_slices, 200),
    "context": (probe_context, 60),
    "second": (probe_second, 60),
    "generator": (probe_generator, 60),
    "retry": (probe_retry, 60),
    "rewind": (probe_rewind, 60),
    "shared": (probe_shared, 60),
    "optimizer": (probe_optimizer, 60),
    "fraction": (probe_fraction, 60),
    "tight": (probe_tight, 60),
    "sticky": (probe_sticky, 60),
    "graph": (probe_graph, 60),
    "buffers": (probe_buffers, 60),
    "ranks": (probe_ranks, 120),
    "sampler": (probe_sampler, 60),
    "history": (probe_history, 60),
    "clear": (probe_clear, 60),
    "doctor": (probe_doctor, 100),
    "captured": (probe_captured, 200),
    "pytest": (probe_pytest, 400),
}


def run_probe(name: str, seconds: float, *, expandable: bool = True) -> list[Check]:
    """Run one probe in a process of its own; whatever it has seen when its time is up counts."""
    command = [sys.executable, __file__, "--probe", name]
    # settings that the user has exported would decide about segments
    environ = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environ[VARIABLE] = allocator_settings({}, expandable_segments=expandable)
    child = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=max(seconds, 1))
        ended = f"exit code {child.returncode}"
    except subprocess.TimeoutExpired as late:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = (late.stdout or b"").decode(), ""
        # one that waits in the driver does not end
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, errors = child.communicate(timeout=5)
        ended = f"still running after {seconds:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    checks = [Check(**json.loads(line)) for line in lines]
    if child.returncode != 0:
        last = (errors.strip().splitlines() or [""])[-1]
        checks.append(Check("ends", "exit code 0", f"{ended} {last}"[:160], False))
    return checks


def lines_of(name: str, checks: list[Check]) -> list[str]:
    return [
        f"{name:<18} {one.what:<46} {one.expected:<18} {one.seen:<34} {one.mark}" for one in checks
    ]


def page(results: dict[str, list[Check]], verdict: str) -> str:
    """Return the page of evidence."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    driver = read_inventory(processes=False).driver_version
    rows = [
        f"| {name} | {cell(one.what)} | {cell(one.expected)} | {cell(one.seen)} | {one.mark} |"
        for name, checks in results.items()
        for one in checks
    ]
    about = [
        f"# {gpu().name}",
        "",
        "For anyone who asks what was seen on a GPU: each check with what was expected.",
        "",
        f"Written on {day} by `python benchmarks/gpu_check.py` at commit {commit()}: driver "
        f"{driver}, torch {torch.__version__}, Python {sys.version.split()[0]}. {verdict}.",
        "",
        "| probe | what | expected | seen | |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*about, *rows, ""])


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "?"
    return "?"


def choose_gpu() -> str | None:
    """Show the probes the idlest GPU; return why there is none."""
    found = visible_gpus(read_inventory(), os.environ).gpus
    # a test that runs this has used the GPU itself
    ours = [os.getpid(), *(one.pid for one in psutil.Process().parents())]
    best = idlest(found, ours)
    if best is None:
        holders = find_holders(found)
        others = (f"{label(one)}: {others_on(one, holders, ours)}" for one in found)
        return "no GPU is idle: " + "; ".join(others) if found else "NVML shows no GPU"
    os.environ[MASK] = best.uuid
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("probes", nargs="*", metavar="PROBE", help=", ".join(PROBES))
    parser.add_argument("--name", help="of the page in docs/gpu; default: the GPU's")
    parser.add_argument("--minutes", type=float, default=30, help="time in all")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        for check in PROBES[arguments.probe][0]():
            print(json.dumps(asdict(check)), flush=True)
        return 0
    unknown = [name for name in arguments.probes if name not in PROBES]
    if unknown:
        parser.error(f"no probe {unknown[0]!r}; there are {', '.join(PROBES)}")
    why = choose_gpu()  # before torch reads the mask
    if why is not None and why.startswith("no GPU is idle"):
        print(f"gpu-check: nothing was checked: {why}", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("gpu-check: no GPU that torch can use; nothing was checked", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    deadline = STARTED + 60 * arguments.minutes
    results: dict[str, list[Check]] = {}
    for name in arguments.probes or PROBES:
        for expandable in (True, False) if name in BOTH else (True,):
            title = name if expandable else f"{name} (plain)"
            left = deadline - time.monotonic()
            if left < 5:
                results[title] = [not_checked("is run", "no time left (--minutes)")]
            else:
                limit = min(PROBES[name][1], left)
                results[title] = run_probe(name, limit, expandable=expandable)
            print("\n".join(lines_of(title, results[title])), flush=True)
    passed = [one.passed for checks in results.values() for one in checks]
    differ, unseen = passed.count(False), passed.count(None)
    parts = [f"{differ} differ"] * bool(differ) + [f"{unseen} not checked"] * bool(unseen)
    verdict = ", ".join(parts) or "all as expected"
    print(verdict)
    if arguments.name or not arguments.probes:
        name = arguments.name or re.sub(r"[^a-z0-9]+", "-", gpu().name.lower()).strip("-")
        path = EVIDENCE / f"{name}.md"
        path.write_text(page(results, verdict))
        print(f"written to {path}")
    return 1 if differ else 3 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
