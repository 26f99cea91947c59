"""The GPUs that CUDA_VISIBLE_DEVICES leaves to this process.

The variable is a grant, often of a scheduler: it is never widened. It is read as CUDA does, as far
as that is known (NVIDIA's documentation, PyTorch's tests). In doubt, the reading that shows fewer
GPUs counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.model.errors import ConfigError
from robust_train.model.gpu import GpuInfo, Inventory

VARIABLE = "CUDA_VISIBLE_DEVICES"
NAMES_VARIABLE = "ROBUST_TRAIN_CUDA_VISIBLE_DEVICES"
"""How an attempt's GPUs are named, for a program that reads only the other names: ``uuid``,
``index``, or ``auto``, which is ``index`` for scripts."""

_SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
_INTEGER = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)
_NOT_AN_ENTRY = "ends the list (a list holds numbers from 0, or GPU- UUIDs, or MIG- UUIDs)"


@dataclass(frozen=True)
class Visible:
    """The GPUs that a process may use."""

    # GPUs in the order of CUDA's ordinals, with every usable MIG slice.
    gpus: tuple[GpuInfo, ...] = ()
    # the variable asks for none (empty, `-1`, `NoDevFiles`)
    hidden_on_purpose: bool = False
    # one sentence if the variable hides GPUs by a mistake, or is ambiguous
    warning: str = ""
    # all of the machine, visible or not
    inventory: Inventory = field(default=Inventory(), repr=False, compare=False)

    @property
    def machine(self) -> tuple[GpuInfo, ...]:
        """Every GPU of the machine that answers."""
        return self.inventory.gpus or self.gpus

    @property
    def why_none(self) -> str:
        """The reason for a lack of GPUs, if any."""
        if self.hidden_on_purpose:
            return f"{VARIABLE} hides every GPU"
        return self.inventory.problem or self.warning or "no GPU is visible"

    def ordinal(self, uuid: str) -> int | None:
        """Return the CUDA ordinal in a process with the same environment, or None. CUDA enumerates
        at most a single slice, and no whole GPU next to a slice."""
        slices = [gpu.uuid for gpu in self.gpus if gpu.parent_uuid is not None]
        shown = slices[:1] if slices else [gpu.uuid for gpu in self.gpus]
        return shown.index(uuid) if uuid in shown else None


def visible_gpus(inventory: Inventory, environ: Mapping[str, str]) -> Visible:
    """Return the part of ``inventory`` that CUDA_VISIBLE_DEVICES in ``environ`` leaves to us. A GPU
    that CUDA counts but NVML could not read keeps its number and is unusable. With several models,
    a short process reads CUDA's order, once."""
    mask = environ.get(VARIABLE)
    if not inventory.answered:
        hidden = mask is not None and _hides_all(mask)
        return Visible(hidden_on_purpose=hidden, inventory=inventory)
    listed = _listed(inventory)
    warning = ""
    counts = mask is None or names_integers(mask)
    if counts and _order_is_uncertain(inventory, environ):
        try:
            listed = _in_cuda_order(listed, cuda_order(environ))
        except CudaOrderError as error:
            if mask is not None:
                warning = (
                    f"{VARIABLE}={mask}: CUDA's own numbering of the GPUs here is unknown "
                    f"({error}), so the numbers are taken in PCI order; name the GPUs by UUID, or "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
    seen = resolve_mask(mask, listed)
    return replace(
        seen, warning="; ".join(filter(None, (warning, seen.warning))), inventory=inventory
    )


def allocated_by(environ: Mapping[str, str]) -> str:
    """Return the allocator of the GPUs of a process with this environment: ``Slurm``, ``Ray``, or
    empty for none.

    Their allocation is a reservation already. Slurm without GPUs in its configuration, and a Ray
    task that requested none, reserve nothing, although they see every GPU of the host.
    """
    if "SLURM_JOB_ID" in environ and any(environ.get(name) for name in _SLURM_GPUS):
        return "Slurm"
    if "RAY_RAYLET_PID" in environ and environ.get("CUDA_VISIBLE_DEVICES"):
        return "Ray"
    return ""


def numbers_gpus(environ: Mapping[str, str], *, reads_uuids: bool) -> bool:
    """Return whether an attempt is given indices in CUDA_VISIBLE_DEVICES, not UUIDs.

    Raises:
        ConfigError: the variable has another value.
    """
    given = environ.get(NAMES_VARIABLE) or "auto"
    if given not in ("auto", "uuid", "index"):
        raise ConfigError(f"{NAMES_VARIABLE}={given}: must be one of auto, uuid, index")
    return given == "index" or (given == "auto" and not reads_uuids)


def mask_for(gpus: Sequence[GpuInfo], *, by_index: bool) -> str:
    """Return a CUDA_VISIBLE_DEVICES that shows exactly these GPUs, in this order.

    Args:
        gpus: the GPUs to show. None hides all.
        by_index: use numbers under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, for programs that read
            integers, if NVML's and CUDA's lists surely agree.
    """
    indices = [gpu.cuda_index for gpu in gpus]
    if by_index and None not in indices:
        return ",".join(map(str, indices))
    return ",".join(gpu.uuid for gpu in gpus)


def names_integers(mask: str | None) -> bool:
    """Return whether a mask has numbers, whose meaning depends on the order of the GPUs."""
    return mask is not None and _INTEGER.match(mask) is not None and not _hides_all(mask)


def resolve_mask(mask: str | None, cuda_order: Sequence[GpuInfo]) -> Visible:
    """Read a CUDA_VISIBLE_DEVICES as CUDA does.

    Args:
        mask: the variable's value, None if it is not set.
        cuda_order: the machine's GPUs as CUDA numbers them. The slices of a GPU are adjacent and
            count together. The GPU's number or UUID shows only the first of them.
    """
    if mask is None:
        return Visible(tuple(cuda_order))
    if _hides_all(mask):
        return Visible(hidden_on_purpose=True)
    kind = mask[:4] if mask.startswith(("GPU-", "MIG-")) else ""
    entries = mask.split(",")
    keys: list[int | str] = []
    shown: list[GpuInfo] = []
    for entry in entries:
        key: int | str | None = entry
        if not kind:
            key = _number(entry)
        elif not entry.startswith(kind):
            key = None
        if key is None:
            break
        if key in keys:
            # CUDA then shows nothing at all
            return Visible(warning=_mistake(mask, entry, "is named twice", 0))
        keys.append(key)
    for entry, key in zip(entries, keys, strict=False):
        try:
            gpu_at = _find(key, cuda_order)
        except _NotThereError as error:
            mistake = _mistake(mask, entry, str(error), len(shown))
            return Visible(tuple(shown), warning=mistake)
        if gpu_at in shown:
            repeated = "names a GPU for the second time"
            return Visible(warning=_mistake(mask, entry, repeated, 0))
        shown.append(gpu_at)
    ignored = entries[len(keys) :]
    # a trailing comma hides nothing
    if shown and not any(entry.strip() for entry in ignored):
        return Visible(tuple(shown))
    mistake = _mistake(mask, ignored[0], _NOT_AN_ENTRY, len(shown))
    return Visible(tuple(shown), warning=mistake)


class _NotThereError(Exception):
    """An entry of a mask names no GPU. The message gives the reason."""


def _find(key: int | str, cuda_order: Sequence[GpuInfo]) -> GpuInfo:
    """Return the GPU that an entry of a mask names, or its first slice."""
    first_parts: dict[str, GpuInfo] = {}
    for gpu in cuda_order:
        first_parts.setdefault(gpu.parent_uuid or gpu.uuid, gpu)
        # CUDA's documentation allows a unique prefix for whole GPUs only
        if gpu.parent_uuid is not None and gpu.uuid == key:
            return gpu
    if isinstance(key, int):
        if key >= len(first_parts):
            count = len(first_parts)
            raise _NotThereError(f"is out of range (the number of GPUs here is {count})")
        return list(first_parts.values())[key]
    if key.startswith("MIG-"):
        raise _NotThereError("is the whole UUID of no MIG slice here")
    matches = [gpu for uuid, gpu in first_parts.items() if uuid.startswith(key)]
    if not matches:
        raise _NotThereError("is the UUID of no GPU here")
    if len(matches) > 1:
        raise _NotThereError(f"begins the UUIDs of {len(matches)} GPUs")
    return matches[0]


def _mistake(mask: str, entry: str, fault: str, shown: int) -> str:
    effect = "no GPU is visible" if shown == 0 else "only the entries before it count"
    return (
        f"{VARIABLE}={mask}: the entry '{entry}' {fault}, so {effect}; correct or unset the "
        f"variable (robust-train gpus lists what there is), or set {VARIABLE}= for the CPU"
    )


def _hides_all(mask: str) -> bool:
    first = mask.split(",")[0].strip()
    return not mask.strip() or first in ("NoDevFiles", "-1")


def _number(entry: str) -> int | None:
    """Read a number as strtoul does: what follows the digits is ignored, or None if negative."""
    digits = _INTEGER.match(entry)
    return None if digits is None or int(digits[1]) < 0 else int(digits[1])


def _listed(inventory: Inventory) -> list[GpuInfo]:
    """Return the GPUs in PCI order, with those that CUDA may count though NVML cannot read them."""
    listed = list(inventory.gpus)
    for lost in inventory.skipped:
        # without even a UUID the GPU is lost or closed to us, for CUDA too
        if lost.uuid is not None:
            later = (i for i, gpu in enumerate(listed) if gpu.index > lost.index)
            gpu = _unreadable(lost.uuid, lost.index, lost.reason)
            listed.insert(next(later, len(listed)), gpu)
    return listed


def _unreadable(uuid: str, index: int, reason: str) -> GpuInfo:
    return GpuInfo(uuid, "unreadable GPU", index, "", 0, 0, 0, unusable=reason)


def _order_is_uncertain(inventory: Inventory, environ: Mapping[str, str]) -> bool:
    if any(gpu.parent_uuid is not None for gpu in inventory.gpus):
        return False  # CUDA would list one slice and nothing else
    if inventory.skipped:
        return True
    by_pci = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not by_pci and len({gpu.name for gpu in inventory.gpus}) > 1


def _in_cuda_order(listed: Sequence[GpuInfo], uuids: Sequence[str]) -> list[GpuInfo]:
    gpu_by_uuid = {gpu.uuid.partition("-")[2]: gpu for gpu in listed}
    reason = "NVML does not list it"
    return [
        gpu_by_uuid[uuid] if uuid in gpu_by_uuid else _unreadable(f"GPU-{uuid}", -1, reason)
        for uuid in uuids
    ]
