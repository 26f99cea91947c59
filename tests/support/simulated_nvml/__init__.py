"""A simulated machine with NVIDIA GPUs: C libraries that the real bindings load, and a state file.

Tests change a :class:`Machine` while programs run on it; the libraries read the file at every call.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import warm

MIB = 1024**2
HERE = Path(__file__).resolve().parent

# NVML's return codes that tests set
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
VERSION_MISMATCH = 18
UNKNOWN = 999


def build_nvml(folder: Path, *options: str, source="nvml.c", name="libnvidia-ml.so.1") -> Path:
    """Compile the simulated ``libnvidia-ml.so.1`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / name
    command = ["cc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(library)]
    subprocess.run([*command, *options, str(HERE / source)], check=True)
    return library


def build_libcuda(folder: Path, *options: str) -> Path:
    return build_nvml(folder, *options, source="cuda.c", name="libcuda.so.1")


def build_driver(folder: Path, machine: Machine) -> Path:
    """Compile both for one machine alone, as if they were its own: they need no variable."""
    build_nvml(folder, f'-DMACHINE="{machine.folder}"')
    return build_libcuda(folder, f'-DMACHINE="{machine.folder}"').parent


@dataclass
class Slice:
    """A MIG slice. ``uuid`` defaults to one made from its GPU's."""

    total_mib: int
    free_mib: int | None = None
    name: str | None = None
    uuid: str | None = None
    compute: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass
class Gpu:
    """A GPU as NVML tells of it; sizes in MiB.

    ``free_mib`` defaults to all that is not reserved. ``compute`` and ``graphics`` list processes
    as (pid, MiB or None). ``recovery``, ``remap_failed`` and ``pages_pending`` are what the driver
    tells of its health, None where it cannot. ``mig`` is None where the GPU cannot be sliced, else
    its slices, and ``mig_mode`` whether slicing is on. ``compute_mode``: 0 default, 2 prohibited,
    3 exclusive.
    """

    name: str = "NVIDIA A100-SXM4-40GB"
    total_mib: int = 40960
    free_mib: int | None = None
    reserved_mib: int = 0
    utilization: int | None = 0
    throttle: int = 0
    compute_mode: int = 0
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    mig: list[Slice] | None = None
    mig_mode: int = 1
    uuid: str | None = None
    pci: str | None = None
    recovery: int | None = None
    remap_failed: int | None = None
    pages_pending: int | None = None


class Machine:
    """A simulated machine; what is changed here is what programs see at their next call.

    ``gpus`` are in NVML's order, ``cuda_order`` has UUIDs in CUDA's fastest-first order if that is
    another; ``cuda`` is the newest that the driver supports, as ``12080``, 0 if it cannot say.
    """

    alone = False
    """Whether its interpreters begin as users' do, and not as forks (see :mod:`warm`)."""

    def __init__(self, folder, libraries, gpus=(), *, driver="570.86.15", cuda=0, cuda_order=None):
        self.folder = folder / "machine"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state = self.folder / "state"
        self.libraries, self.gpus = libraries, list(gpus)
        self.driver, self.cuda, self.cuda_order = driver, cuda, cuda_order
        self._troubles: dict[str, int] = {}
        self._write()

    @property
    def environ(self) -> dict[str, str]:
        """What a program needs in its environment, from its start, to run on this machine."""
        paths = [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
            "SIMULATED_NVML_STATE": str(self.state),
            "SIMULATED_NVML_CALLS": str(self.folder / "calls"),
            # its jobs stand in a line of their own
            "ROBUST_TRAIN_QUEUE_DIR": str(self.folder / "queue"),
        }

    def uuid(self, index: int, piece: int | None = None) -> str:
        gpu = self.gpus[index]
        if piece is None:
            return gpu.uuid or f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}"
        return gpu.mig[piece].uuid or f"MIG-{index:08x}-aaaa-bbbb-dddd-{piece:012x}"

    def update(self, index: int, **changes: Any) -> None:
        """Change fields of one GPU."""
        names = {item.name for item in fields(Gpu)}
        for name, value in changes.items():
            assert name in names, name
            setattr(self.gpus[index], name, value)
        self._write()

    def fail(self, function: str, code: int, where: int | str = "all") -> None:
        """Let an NVML or CUDA function answer ``code``; 0 heals it. Its name has no version suffix
        (``nvmlDeviceGetMemoryInfo_v2`` excepted); ``where``: a GPU's index, ``I.mig.J``, or all."""
        self._trouble(f"error.{function}.{where}", code)

    def hang(self, function: str, where: int | str = "system") -> None:
        """Let a function not come back, whatever signals come."""
        self._trouble(f"hang.{function}.{where}", 1)

    def _trouble(self, name, value):
        self._troubles[name] = value
        self._write()

    def calls(self, function: str) -> list[tuple[int, str]]:
        """Calls of a function so far, as (pid, where)."""
        log = self.folder / "calls"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(int(pid), where) for pid, name, where in lines if name == function]

    def environment(self, **more: str) -> dict[str, str]:
        """A whole environment for a program here: this one's, less other GPUs' traces."""
        return {**warm.plain_environ(), **self.environ, **more}

    def start(self, snippet: str, **more: str) -> subprocess.Popen[str]:
        """Start an interpreter on this machine that runs a snippet of Python."""
        arguments = ["-c", textwrap.dedent(snippet)]
        return warm.start(arguments, Path.cwd(), self.environment(**more), alone=self.alone)

    def python(self, snippet: str, **more: str) -> Any:
        """Run a snippet on this machine; its last line of output, read as JSON."""
        process = self.start(snippet, **more)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
        return json.loads(out.splitlines()[-1])

    def _write(self) -> None:
        lines = [f"driver {self.driver}", f"driver.cuda {self.cuda}", f"gpus {len(self.gpus)}"]
        if self.cuda_order is not None:
            lines.append("cuda.order " + " ".join(self.cuda_order))
        for index, gpu in enumerate(self.gpus):
            lines += self._lines_of(index, gpu)
        lines += [f"{name} {value}" for name, value in self._troubles.items()]
        new = self.state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        # a program reads the old state or the new one, never a half
        new.replace(self.state)

    def _lines_of(self, index: int, gpu: Gpu) -> list[str]:
        pci = gpu.pci or f"00000000:{index * 16 + 7:02X}:00.0"
        values: dict[str, Any] = {
            "uuid": self.uuid(index),
            "name": gpu.name,
            "pci": pci,
            "util": -1 if gpu.utilization is None else gpu.utilization,
            "throttle": gpu.throttle,
            "compute_mode": gpu.compute_mode,
            "mig": -1 if gpu.mig is None else gpu.mig_mode,
            "graphics": _processes(gpu.graphics),
            **_memory(gpu.total_mib, gpu.free_mib, gpu.reserved_mib, gpu.compute),
        }
        for name in ("recovery", "remap_failed", "pages_pending"):
            if getattr(gpu, name) is not None:
                values[name] = getattr(gpu, name)
        for number, piece in enumerate(gpu.mig or []):
            slice_values = {
                "uuid": self.uuid(index, number),
                "name": piece.name or f"{gpu.name} MIG",
                "util": -1,
                **_memory(piece.total_mib, piece.free_mib, 0, piece.compute),
            }
            values |= {f"mig.{number}.{key}": value for key, value in slice_values.items()}
        return [f"gpu.{index}.{key} {value}" for key, value in values.items()]


def _memory(total_mib, free_mib, reserved_mib, compute) -> dict[str, Any]:
    free = total_mib - reserved_mib if free_mib is None else free_mib
    return {
        "total": total_mib * MIB,
        "free": free * MIB,
        "reserved": reserved_mib * MIB,
        "used": (total_mib - reserved_mib - free) * MIB,
        "compute": _processes(compute),
    }


def _processes(processes: list[tuple[int, int | None]]) -> str:
    return " ".join(f"{pid}:{'-' if mib is None else mib * MIB}" for pid, mib in processes)
