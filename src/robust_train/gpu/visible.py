"""Reads and writes CUDA_VISIBLE_DEVICES.

The launcher and commands read which GPUs the variable allows them to use, and the launcher writes
it for attempts. A scheduler may have set the variable, so no other GPUs are ever used. It is read
as CUDA reads it, as far as that is known (NVIDIA's documentation, PyTorch's tests). If in doubt,
the reading with fewer GPUs counts.
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
"""Selects how an attempt's CUDA_VISIBLE_DEVICES names GPUs: ``uuid``, ``index``, or ``auto``, which
is ``index`` for scripts. Users set it for a program that reads only the other names."""

# Variables that Slurm sets for a job with reserved GPUs.
_SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
_INTEGER = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)
_NOT_AN_ENTRY = "ends the list (a list holds numbers from 0, or GPU- UUIDs, or MIG- UUIDs)"


@dataclass(frozen=True)
class Visible:
    """The GPUs that a process may use."""

    # GPUs in the order of CUDA's ordinals, with every usable MIG slice.
    gpus: tuple[GpuInfo, ...] = ()
    # Whether the variable requests no GPUs (empty, `-1`, `NoDevFiles`).
    hidden_on_purpose: bool = False
    # A sentence if the variable is ambiguous or has a mistake, empty otherwise.
    warning: str = ""
    # All GPUs of the machine, visible or not.
    inventory: Inventory = field(default=Inventory(), repr=False, compare=False)

    @property
    def machine(self) -> tuple[GpuInfo, ...]:
        """Every GPU of the machine that NVML can read."""
        return self.inventory.gpus or self.gpus

    @property
    def why_none(self) -> str:
        """Why no GPU is visible."""
        if self.hidden_on_purpose:
            return f"{VARIABLE} hides every GPU"
        return self.inventory.problem or self.warning or "no GPU is visible"

    def ordinal(self, uuid: str) -> int | None:
        """Return a GPU's CUDA ordinal in a process with the same environment, None if CUDA does not
        show it. CUDA shows at most one MIG slice, and no whole GPU in addition to it."""
        slices = [gpu.uuid for gpu in self.gpus if gpu.parent_uuid is not None]
        shown = slices[:1] if slices else [gpu.uuid for gpu in self.gpus]
        return shown.index(uuid) if uuid in shown else None


def visible_gpus(inventory: Inventory, environ: Mapping[str, str]) -> Visible:
    """Return the GPUs of ``inventory`` that CUDA_VISIBLE_DEVICES in ``environ`` shows.

    A GPU that CUDA counts but NVML could not read keeps its number, and is unusable. If the machine
    has several models of GPUs, a short-lived process reads CUDA's order.
    """
    mask = environ.get(VARIABLE)
    if not inventory.answered:
        is_hidden = mask is not None and _hides_all(mask)
        return Visible(hidden_on_purpose=is_hidden, inventory=inventory)
    gpus = _add_unreadable(inventory)
    warnings: list[str] = []
    has_numbers = mask is None or names_integers(mask)
    if has_numbers and _is_order_uncertain(inventory, environ):
        try:
            gpus = _sort_by_uuids(gpus, cuda_order(environ))
        except CudaOrderError as error:
            if mask is not None:
                warnings.append(
                    f"{VARIABLE}={mask}: CUDA's own numbering of the GPUs here is unknown "
                    f"({error}), so the numbers are taken in PCI order; name the GPUs by UUID, or "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
    visible = resolve_mask(mask, gpus)
    if visible.warning:
        warnings.append(visible.warning)
    return replace(visible, warning="; ".join(warnings), inventory=inventory)


def allocated_by(environ: Mapping[str, str]) -> str:
    """Return the scheduler that reserved GPUs for a process with this environment: ``Slurm``,
    ``Ray``, or empty if there is none.

    If Slurm does not manage GPUs, or a Ray task requested no GPU, nothing is reserved, although the
    process sees every GPU of the host.
    """
    if "SLURM_JOB_ID" in environ and any(environ.get(name) for name in _SLURM_GPUS):
        return "Slurm"
    if "RAY_RAYLET_PID" in environ and environ.get("CUDA_VISIBLE_DEVICES"):
        return "Ray"
    return ""


def numbers_gpus(environ: Mapping[str, str], *, reads_uuids: bool) -> bool:
    """Return whether an attempt's CUDA_VISIBLE_DEVICES contains indices instead of UUIDs.

    Args:
        environ: the user's environment.
        reads_uuids: whether the attempt's program can read UUIDs.

    Raises:
        ConfigError: ``ROBUST_TRAIN_CUDA_VISIBLE_DEVICES`` has an unknown value.
    """
    given = environ.get(NAMES_VARIABLE) or "auto"
    if given not in ("auto", "uuid", "index"):
        raise ConfigError(f"{NAMES_VARIABLE}={given}: must be one of auto, uuid, index")
    return given == "index" or (given == "auto" and not reads_uuids)


def mask_for(gpus: Sequence[GpuInfo], *, by_index: bool) -> str:
    """Return a CUDA_VISIBLE_DEVICES that shows exactly these GPUs, in this order.

    Args:
        gpus: the GPUs to show. An empty sequence hides all GPUs.
        by_index: whether to use numbers under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, for programs that
            read integers. UUIDs are used if CUDA's numbers are uncertain.
    """
    indices = [gpu.cuda_index for gpu in gpus]
    if by_index and None not in indices:
        return ",".join(map(str, indices))
    return ",".join(gpu.uuid for gpu in gpus)


def names_integers(mask: str | None) -> bool:
    """Return whether a mask contains numbers. Their meaning depends on the order of the GPUs."""
    return mask is not None and _INTEGER.match(mask) is not None and not _hides_all(mask)


def resolve_mask(mask: str | None, cuda_order: Sequence[GpuInfo]) -> Visible:
    """Read a CUDA_VISIBLE_DEVICES as CUDA does.

    Args:
        mask: the variable's value, None if it is not set.
        cuda_order: the machine's GPUs as CUDA numbers them. The MIG slices of a GPU are adjacent
            and have one number. The number or UUID of the GPU shows only its first slice.
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
            # CUDA shows no GPU in this case.
            return Visible(warning=_mistake(mask, entry, "is named twice", 0))
        keys.append(key)
    for entry, key in zip(entries, keys, strict=False):
        try:
            gpu = _find_gpu(key, cuda_order)
        except _NoSuchGpuError as error:
            mistake = _mistake(mask, entry, str(error), len(shown))
            return Visible(tuple(shown), warning=mistake)
        if gpu in shown:
            repeated = "names a GPU for the second time"
            return Visible(warning=_mistake(mask, entry, repeated, 0))
        shown.append(gpu)
    ignored = entries[len(keys) :]
    # A trailing comma is not a mistake.
    if shown and not any(entry.strip() for entry in ignored):
        return Visible(tuple(shown))
    mistake = _mistake(mask, ignored[0], _NOT_AN_ENTRY, len(shown))
    return Visible(tuple(shown), warning=mistake)


class _NoSuchGpuError(Exception):
    """An entry of a mask matches no GPU. The message gives the reason."""


def _find_gpu(key: int | str, cuda_order: Sequence[GpuInfo]) -> GpuInfo:
    """Return the GPU for an entry of a mask, or the first slice of that GPU.

    Raises:
        _NoSuchGpuError: the entry matches no GPU, or several.
    """
    # The first slice of each GPU, or the GPU itself, by the GPU's UUID.
    by_uuid: dict[str, GpuInfo] = {}
    for gpu in cuda_order:
        by_uuid.setdefault(gpu.parent_uuid or gpu.uuid, gpu)
        # CUDA allows a unique prefix of a UUID only for whole GPUs.
        if gpu.parent_uuid is not None and gpu.uuid == key:
            return gpu
    if isinstance(key, int):
        if key >= len(by_uuid):
            raise _NoSuchGpuError(f"is out of range (the number of GPUs here is {len(by_uuid)})")
        return list(by_uuid.values())[key]
    if key.startswith("MIG-"):
        raise _NoSuchGpuError("is not the whole UUID of a MIG slice here")
    matches = [gpu for uuid, gpu in by_uuid.items() if uuid.startswith(key)]
    if not matches:
        raise _NoSuchGpuError("is not the UUID of a GPU here")
    if len(matches) > 1:
        raise _NoSuchGpuError(f"is the start of the UUIDs of {len(matches)} GPUs")
    return matches[0]


def _mistake(mask: str, entry: str, fault: str, shown: int) -> str:
    """Return a warning about an entry of a mask. ``shown`` is the number of GPUs before it."""
    effect = "no GPU is visible" if shown == 0 else "only the entries before it count"
    return (
        f"{VARIABLE}={mask}: the entry '{entry}' {fault}, so {effect}; correct or unset the "
        f"variable (robust-train gpus lists the GPUs here), or set {VARIABLE}= for the CPU"
    )


def _hides_all(mask: str) -> bool:
    first = mask.split(",")[0].strip()
    return not mask.strip() or first in ("NoDevFiles", "-1")


def _number(entry: str) -> int | None:
    """Read a number as C's strtoul does, which ignores text after the digits. None if the entry has
    no number, or a negative number."""
    digits = _INTEGER.match(entry)
    if digits is None:
        return None
    number = int(digits[1])
    return None if number < 0 else number


def _add_unreadable(inventory: Inventory) -> list[GpuInfo]:
    """Return the GPUs in PCI order, including GPUs that NVML cannot read although CUDA may count
    them."""
    gpus = list(inventory.gpus)
    for skipped in inventory.skipped:
        # Without a UUID, the GPU is lost or not accessible, so CUDA does not count it either.
        if skipped.uuid is None:
            continue
        place = len(gpus)
        for number, gpu in enumerate(gpus):
            if gpu.index > skipped.index:
                place = number
                break
        gpus.insert(place, _unreadable_gpu(skipped.uuid, skipped.index, skipped.reason))
    return gpus


def _unreadable_gpu(uuid: str, index: int, reason: str) -> GpuInfo:
    return GpuInfo(uuid, "unreadable GPU", index, "", 0, 0, 0, unusable=reason)


def _is_order_uncertain(inventory: Inventory, environ: Mapping[str, str]) -> bool:
    """Return whether CUDA may number the GPUs in another order than NVML."""
    if any(gpu.parent_uuid is not None for gpu in inventory.gpus):
        return False  # CUDA shows a single MIG slice, so there is no order.
    if inventory.skipped:
        return True
    is_by_pci = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not is_by_pci and len({gpu.name for gpu in inventory.gpus}) > 1


def _sort_by_uuids(gpus: Sequence[GpuInfo], uuids: Sequence[str]) -> list[GpuInfo]:
    """Return the GPUs in the order of these UUIDs, which lack ``GPU-`` or ``MIG-``. A UUID that
    NVML does not list becomes an unusable GPU."""
    by_uuid = {gpu.uuid.partition("-")[2]: gpu for gpu in gpus}
    ordered: list[GpuInfo] = []
    for uuid in uuids:
        if uuid in by_uuid:
            ordered.append(by_uuid[uuid])
        else:
            ordered.append(_unreadable_gpu(f"GPU-{uuid}", -1, "NVML does not list it"))
    return ordered
