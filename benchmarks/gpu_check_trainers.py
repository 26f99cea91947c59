"""What ``gpu_check.py`` trains under the launcher; each works on the CPU too."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from robust_train import TrainingStopped

GIB = 2**30


def sees(cfg: Any, run: Any) -> dict[str, Any]:
    """Return what an attempt sees of the machine's GPUs, and what it may take."""
    torch.ones(1, device=cfg.device)
    run.progress(1)
    if not torch.cuda.is_initialized():
        return {"device": cfg.device}
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1)
    return {
        "mask": os.environ["CUDA_VISIBLE_DEVICES"],
        "uuid": f"GPU-{torch.cuda.get_device_properties(0).uuid}",
        "count": torch.cuda.device_count(),
        # torch divides the limit in bytes by what the GPU has
        "fraction": round(fraction(0), 3),
        "expandable": bool(torch.cuda.memory_snapshot()[0].get("is_expandable")),
    }


def break_the_context() -> None:
    """Write to an illegal address."""
    # torch passes an int as 4 bytes
    source = 'extern "C" __global__ void k(int p) { *(int *)(size_t)p = 1; }'
    kernel = torch.cuda._compile_kernel(source, "k")
    kernel(args=[16])
    torch.cuda.synchronize()


def faults_once(cfg: Any, run: Any) -> str:
    """Break the CUDA context in the first attempt."""
    torch.ones(9, device=cfg.device)
    run.progress(1)
    if run.attempt == 1:
        break_the_context()
    return str(cfg.device)


def fills_eight_gib(cfg: Any, run: Any) -> int:
    """Ask for 8 GiB when others have had the time to take most of the GPU."""
    torch.ones(1, device=cfg.device)
    Path(os.environ["READY_FILE"]).touch()
    deadline = time.monotonic() + 60
    while not Path(os.environ["GO_FILE"]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.progress(1)
    blocks = [torch.empty(GIB // 4, dtype=torch.uint8, device=cfg.device) for _ in range(32)]
    return len(blocks)


def is_sliced(cfg: Any, run: Any) -> int:
    """Hold a GiB and count steps; save and stop when that is asked for."""
    device = cfg.device if torch.cuda.is_available() else "cpu"
    held = torch.ones(GIB, dtype=torch.uint8, device=device)
    state = {"count": torch.zeros(1, device=device)}
    step: int = run.load(state)
    run.save(state, step)
    # until the one who waits is gone, and for as long as it takes to see that the slice is over
    until = Path(os.environ["GO_FILE"])
    while step < 10 or not until.exists():
        step += 1
        state["count"] += 1
        run.progress(step)
        if run.should_stop():
            run.save(state, step)
            raise TrainingStopped
        time.sleep(0.05)
    del held
    return int(state["count"].item()) - step


class RunsOut(torch.autograd.Function):
    """Asks for more than there is in the backward pass, where ``asks`` is set."""

    asks = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if RunsOut.asks and len(gradient) == RunsOut.asks:
            torch.empty(2**50, dtype=torch.uint8, device=gradient.device)
        return gradient


def runs_out_at_50(cfg: Any, run: Any) -> dict[str, float]:
    """Run out of memory in step 50 of 60; return what that step took longer, and left behind."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    model.to(cfg.device)
    batch = torch.randn(cfg.training.batch_size, 1024)
    seconds, held = [], []
    for step in range(1, 61):
        RunsOut.asks = len(batch) if step == 50 else 0
        started = time.perf_counter()
        model.zero_grad()
        run.backward(lambda x: RunsOut.apply(model(x.to(cfg.device))).square().mean(), batch, model)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
        seconds.append(time.perf_counter() - started)
        run.progress(step)
    left = held[49] - held[48] if held else 0
    usual = statistics.median(seconds[10:49])
    return {"lost_seconds": seconds[49] - usual, "left_bytes": left}


def captures(cfg: Any, run: Any) -> int | str:
    """Train a model whose graphs are captured; above 32 samples step 5 runs out of memory.

    Return the last step, or why torch cannot compile here.
    """
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    model.to(cfg.device)
    compiled = torch.compile(model, mode="reduce-overhead")
    batch = torch.randn(cfg.training.batch_size, 64, device=cfg.device)
    try:
        compiled(batch).mean().backward()
    except Exception as error:  # no C compiler, no Python.h: nothing of ours
        return f"torch.compile fails here: {type(error).__name__}: {error}"
    for step in range(1, 7):
        RunsOut.asks = len(batch) if step == 5 and len(batch) > 32 else 0
        model.zero_grad()
        run.backward(lambda x: RunsOut.apply(compiled(x)).mean(), batch, model)
        run.progress(step)
    return step


def is_timed(cfg: Any, run: Any) -> float:
    """Train a large model on random images; write the mean seconds of a step to a file.

    TIMED_HOW is ``plain`` (nothing of robust-train's), ``fused`` or ``unfused``. Nothing waits for
    the GPU between the first and the last step that count.
    """
    import timm

    device = torch.device(cfg.device)
    small = os.environ.get("TIMED_SMALL") == "1"
    size, batch_size, steps = (64, 2, 12) if small else (224, 64, 80)
    name, sized = os.environ["TIMED_MODEL"], {}
    if name.startswith("vit"):
        sized["img_size"] = size
    model = timm.create_model(name, num_classes=100, **sized).to(device)
    how = os.environ["TIMED_HOW"]
    is_fused = device.type == "cuda" and how != "unfused"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)
    images = torch.randn(batch_size, 3, size, size, device=device)
    labels = torch.randint(100, (batch_size,), device=device)

    def loss_of(part: Any) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(part[0]), part[1])

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    first, started = steps // 4, 0.0
    for step in range(1, steps + 1):
        if step == first:
            started = now()
        if how == "plain":
            loss_of((images, labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            run.backward(loss_of, (images, labels), model)
            run.step(optimizer)
            run.progress(step, total_steps=steps)
    mean = (now() - started) / (steps - first + 1)
    Path(os.environ["TIMED_FILE"]).write_text(f"{mean}")
    return mean
