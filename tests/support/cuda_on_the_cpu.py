"""A stand-in for CUDA: tensors stay on the host, a limit is kept, and torch's functions are called
with their real signatures. Code for a GPU runs to its end without one."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from robust_train.memory import tensors as holders
from robust_train.readable import GIB, MIB

TOTAL = 139 * GIB
FAULT = "CUDA error: an illegal memory access was encountered"


class Gpu:
    """What torch's allocator knows about one large GPU."""

    def __init__(self) -> None:
        self.fraction = 1.0
        self.reserved = self.retries = self.workspaces_cleared = 0
        self.is_broken = False
        self._before = 0
        gc.collect()  # what is freed later would count as given back
        self._before = self.allocated()

    def answer(self) -> None:
        """Raise what every call raises after a fault."""
        if self.is_broken:
            raise torch.AcceleratorError(FAULT)

    def take(self, shape: Any, dtype: torch.dtype | None) -> None:
        """Count a request as torch's allocator does, and refuse one above the limit."""
        shape = (shape,) if isinstance(shape, int) else shape
        wanted, most = math.prod(shape) * (dtype or torch.float32).itemsize, self.fraction * TOTAL
        held = self.allocated()
        if wanted <= self.reserved - held:
            return
        if self.reserved + wanted > most:
            if held + wanted > most:
                raise torch.OutOfMemoryError(_message(wanted, most))
            self.retries += 1
            self.reserved = held
        self.reserved += wanted

    def allocated(self) -> int:
        """Return the bytes of all tensors that were not there before."""
        return max(sum(holders.storages(holders.live_tensors()).values()) - self._before, 0)

    def functions(self) -> dict[str, Any]:
        """Return what stands for functions of ``torch.cuda``."""

        def nothing(*args: Any, **named: Any) -> None:
            self.answer()

        def allocated(device: Any = None) -> int:
            self.answer()
            return self.allocated()

        def limit(fraction: float, device: Any = None) -> None:
            self.fraction = fraction

        def statistics(device: Any = None) -> dict[str, Any]:
            sizes = {"all": {"current": self.allocated()}}
            names = ("allocated_bytes", "reserved_bytes")
            return {"num_alloc_retries": self.retries, **dict.fromkeys(names, sizes)}

        def broken_kernel(*args: Any, **named: Any) -> Any:
            def call(*args: Any, **named: Any) -> None:
                self.is_broken = True

            return call

        about = SimpleNamespace(total_memory=TOTAL, uuid="0000", name="H200")
        sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved")
        does_nothing = (
            *("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"),
            *(
                "set_sync_debug_mode",
                "set_device",
                "manual_seed_all",
                "set_rng_state_all",
                "set_rng_state",
                "init",
            ),
        )
        return {
            **dict.fromkeys(sizes, allocated),
            **dict.fromkeys(does_nothing, nothing),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: False,
            "get_device_properties": lambda device=None: about,
            "get_device_name": lambda device=None: about.name,
            "get_rng_state": lambda device="cuda": torch.get_rng_state(),
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "is_bf16_supported": lambda including_emulation=True: True,
            "memory_snapshot": lambda *args, **named: [],
            "get_per_process_memory_fraction": lambda device=None: self.fraction,
            "memory_stats_as_nested_dict": statistics,
            "mem_get_info": lambda device=None: (TOTAL - self.allocated(), TOTAL),
            "set_per_process_memory_fraction": limit,
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "_compile_kernel": broken_kernel,
        }

    def clear_workspaces(self) -> None:
        """Stand for the function that clears cuBLAS's workspaces."""
        self.workspaces_cleared += 1


def _message(wanted: int, most: float) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {wanted / MIB:.2f} MiB. GPU 0 has a total capacity "
        f"of {TOTAL / GIB:.2f} GiB of which {TOTAL / GIB - 1:.2f} GiB is free. Including "
        "non-PyTorch memory, this process has 1.00 GiB memory in use. "
        f"{most / MIB:.2f} MiB allowed; Of the allocated memory 0.50 MiB is allocated by PyTorch, "
        "and 0.10 MiB is reserved by PyTorch but unallocated."
    )


class Event:
    """As torch's, of a GPU that is never behind."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


class OnTheHost(TorchFunctionMode):
    """Puts what is asked for on a GPU on the host."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "cuda":
            self._gpu.answer()
            return args[0]
        if name == "pin_memory":
            return args[0].clone()
        if name == "zeros_like":
            self._gpu.take(args[0].shape, args[0].dtype)
        if _is_gpu(kwargs.get("device")) or any(map(_is_gpu, args[1:])):
            self._gpu.answer()
            if "device" in kwargs:
                kwargs["device"] = "cpu"
            args = tuple("cpu" if _is_gpu(item) else item for item in args)
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


@contextlib.contextmanager
def cuda_on_the_cpu() -> Iterator[Gpu]:
    """Have this process find one GPU within the block."""
    gpu = Gpu()
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    with contextlib.ExitStack() as stack:
        for name, stand_in in gpu.functions().items():
            # a call that the real function would refuse is refused here
            double = mock.create_autospec(getattr(torch.cuda, name), side_effect=stand_in)
            stack.enter_context(mock.patch.object(torch.cuda, name, double))
        for name in ("Stream", "CUDAGraph", "graph"):
            double = mock.MagicMock(spec=getattr(torch.cuda, name))
            stack.enter_context(mock.patch.object(torch.cuda, name, double))
        event = mock.create_autospec(torch.cuda.Event, side_effect=Event)
        stack.enter_context(mock.patch.object(torch.cuda, "Event", event))
        empty = torch.empty

        def take(*args, **named) -> torch.Tensor:  # in backward passes as well
            if _is_gpu(named.get("device")):
                gpu.answer()
                gpu.take(args[0], named.get("dtype"))
                named["device"] = "cpu"
            return empty(*args, **named)

        rows = [SimpleNamespace(key="Memcpy DtoD", count=3)]
        profile = mock.MagicMock()
        profile.return_value.__enter__.return_value.key_averages.return_value = rows
        for where, name, stand_in in (
            (torch, "empty", take),
            (torch.accelerator, "is_available", lambda: False),
            (torch.profiler, "profile", profile),
            (torch._C, "_cuda_clearCublasWorkspaces", gpu.clear_workspaces),
            (torch._C, "_cuda_hasPrimaryContext", lambda index: True),
            (torch.cuda.memory, "_record_memory_history", lambda **named: None),
            (torch, "autocast", lambda kind, *rest, **named: autocast("cpu", *rest, **named)),
            (torch.amp, "GradScaler", lambda kind, **named: scaler("cpu", **named)),
        ):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        stack.enter_context(OnTheHost(gpu))
        yield gpu
