"""Which GPUs CUDA_VISIBLE_DEVICES leaves to this process.

The variable is a grant by whoever set it, often a scheduler: it is never widened. CUDA's way of
reading it is followed where that is known (NVIDIA's documentation and PyTorch's tests of its own
reader); where it is not known, the reading that shows less is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from robust_train.gpu import inventory as nvml
from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.values import GpuInfo, Inventory, SkippedGpu

VARIABLE = "CUDA_VISIBLE_DEVICES"
_INTEGER = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)


@dataclass(frozen=True)
class Visible:
    """The GPUs that a process may use.

    Attributes:
        gpus: in the order of CUDA's ordinals. On a machine with MIG slices each slice that may be
            used is listed although one process sees one slice at most: see :meth:`ordinal`.
        hidden_on_purpose: the variable asks for no GPU (empty, ``-1``, ``NoDevFiles``).
        warning: a sentence where the variable hides GPUs by a mistake, or where it is uncertain
            what it shows.
        problem: a sentence where the machine itself has nothing to show, whatever the variable.
        machine: every GPU of the machine that answers, visible or not.
        answered: False where the driver hangs, so that nothing is known of the GPUs.
    """

    gpus: tuple[GpuInfo, ...] = ()
    hidden_on_purpose: bool = False
    warning: str | None = None
    problem: str | None = None
    machine: tuple[GpuInfo, ...] = field(default=(), repr=False, compare=False)
    answered: bool = True

    @property
    def why_none(self) -> str:
        """Why there are no GPUs, where there are none."""
        if self.hidden_on_purpose:
            return f"{VARIABLE} hides every GPU"
        return self.problem or self.warning or "no GPU is visible"

    def ordinal(self, uuid: str) -> int | None:
        """The CUDA ordinal in a process with the same environment; None if not addressable there.

        CUDA enumerates one slice at most, and no whole GPU beside a slice.
        """
        slices = [gpu.uuid for gpu in self.gpus if gpu.parent_uuid is not None]
        shown = slices[:1] or [gpu.uuid for gpu in self.gpus]
        return shown.index(uuid) if uuid in shown else None


def visible_gpus(
    inventory: Inventory, environ: Mapping[str, str], *, ordinals: bool = True
) -> Visible:
    """The part of ``inventory`` that CUDA_VISIBLE_DEVICES in ``environ`` leaves to us.

    A GPU that CUDA counts but NVML could not read keeps its place, as one that is unusable.

    Args:
        inventory: the machine.
        environ: whose CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER count.
        ordinals: the order has to be CUDA's even where the mask does not depend on it. On a
            machine with several models that costs the start of a short process, once.
    """
    mask = environ.get(VARIABLE)
    if not inventory.answered:
        hides_all = mask is not None and _hides_all(mask)
        return Visible(hidden_on_purpose=hides_all, problem=inventory.problem, answered=False)
    places = _places(inventory)
    warning = None
    counts = names_integers(mask) or (ordinals and mask is None)
    if counts and _order_is_uncertain(inventory, environ):
        try:
            places = _in_cuda_order(places, cuda_order(environ))
        except CudaOrderError as error:
            if mask is not None:
                warning = (
                    f"{VARIABLE}={mask}: CUDA's own numbering of the GPUs here is unknown "
                    f"({error}), so the numbers are taken in PCI order; name the GPUs by UUID, or "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
    old_names = nvml.legacy_slice_names() if mask and mask.startswith("MIG-GPU-") else {}
    seen = resolve_mask(mask, places, old_names)
    sentences = [sentence for sentence in (warning, seen.warning) if sentence]
    return replace(
        seen,
        warning="; ".join(sentences) or None,
        problem=inventory.problem,
        machine=inventory.gpus,
    )


def mask_for(gpus: Sequence[GpuInfo], *, by_index: bool) -> str:
    """Return a CUDA_VISIBLE_DEVICES that shows exactly these GPUs, in this order.

    Args:
        gpus: to show; none hides all.
        by_index: numbers rather than UUIDs, for programs that read integers, where NVML's and
            CUDA's lists surely agree. They hold under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    indices = [gpu.cuda_index for gpu in gpus]
    if by_index and None not in indices:
        return ",".join(map(str, indices))
    return ",".join(gpu.uuid for gpu in gpus)


def names_integers(mask: str | None) -> bool:
    """Whether a mask numbers GPUs, so that what it shows depends on who counts."""
    return mask is not None and _INTEGER.match(mask) is not None and not _hides_all(mask)


def resolve_mask(
    mask: str | None,
    cuda_order: Sequence[GpuInfo],
    old_slice_names: Mapping[str, str] | None = None,
) -> Visible:
    """Read a CUDA_VISIBLE_DEVICES as CUDA does.

    Args:
        mask: the variable's value, None where it is not set.
        cuda_order: the machine's GPUs in the order in which CUDA numbers them. The slices of a GPU
            stand together and count as one, for the number and for the UUID of that GPU; either
            shows the first of them alone.
        old_slice_names: slices' UUIDs by their names of the form ``MIG-GPU-<uuid>/<i>/<j>``.
    """
    if mask is None:
        return Visible(tuple(cuda_order))
    if _hides_all(mask):
        return Visible(hidden_on_purpose=True)
    if mask.startswith("GPU-"):
        return _resolve(mask, _with_prefix("GPU-"), _finder_by_gpu_uuid(cuda_order))
    if mask.startswith("MIG-"):
        find = _finder_by_slice_uuid(cuda_order, old_slice_names or {})
        return _resolve(mask, _with_prefix("MIG-"), find)
    return _resolve(mask, _number, _finder_by_number(cuda_order))


_Key = Callable[[str], int | str | None]
"""From an entry to what it says; None where it is of another kind than the list."""
_Find = Callable[[Any], GpuInfo | str]
"""From what an entry says to its GPU, or to the reason why it names none."""


def _resolve(mask: str, key: _Key, find: _Find) -> Visible:
    entries = mask.split(",")
    keys: list[int | str] = []
    for entry in entries:
        said = key(entry)
        if said is None:
            break
        if said in keys:
            # CUDA then shows nothing at all
            return Visible(warning=_mistake(mask, entry, "is named twice", 0))
        keys.append(said)
    shown: list[GpuInfo] = []
    for said, entry in zip(keys, entries, strict=False):
        found = find(said)
        if isinstance(found, str):
            return Visible(tuple(shown), warning=_mistake(mask, entry, found, len(shown)))
        if found in shown:
            return Visible(warning=_mistake(mask, entry, "names a GPU for the second time", 0))
        shown.append(found)
    ignored = entries[len(keys) :]
    # a trailing comma hides nothing
    if any(entry.strip() for entry in ignored) or not shown:
        fault = "ends the list (a list holds numbers from 0, or GPU- UUIDs, or MIG- UUIDs)"
        return Visible(tuple(shown), warning=_mistake(mask, ignored[0], fault, len(shown)))
    return Visible(tuple(shown))


def _mistake(mask: str, entry: str, fault: str, shown: int) -> str:
    effect = "no GPU is visible" if shown == 0 else "only what stands before it counts"
    return (
        f"{VARIABLE}={mask}: the entry '{entry}' {fault}, so {effect}; correct or unset the "
        f"variable (robust-train gpus lists what there is), or set {VARIABLE}= for the CPU"
    )


def _hides_all(mask: str) -> bool:
    first = mask.split(",")[0].strip()
    return not mask.strip() or first == "NoDevFiles" or first == "-1"


def _number(entry: str) -> int | None:
    """As strtoul reads it: what follows the digits is ignored; a negative one ends the list."""
    digits = _INTEGER.match(entry)
    return None if digits is None or int(digits[1]) < 0 else int(digits[1])


def _with_prefix(prefix: str) -> _Key:
    return lambda entry: entry if entry.startswith(prefix) else None


def _finder_by_number(cuda_order: Sequence[GpuInfo]) -> _Find:
    gpus = [pieces[0] for pieces in _whole_gpus(cuda_order).values()]

    def find(number: int) -> GpuInfo | str:
        if number < len(gpus):
            return gpus[number]
        return f"is out of range (the number of GPUs here is {len(gpus)})"

    return find


def _finder_by_gpu_uuid(cuda_order: Sequence[GpuInfo]) -> _Find:
    gpus = _whole_gpus(cuda_order)

    def find(prefix: str) -> GpuInfo | str:
        matches = [uuid for uuid in gpus if uuid.startswith(prefix)]
        if not matches:
            return "is the UUID of no GPU here"
        if len(matches) > 1:
            return f"begins the UUIDs of {len(matches)} GPUs"
        return gpus[matches[0]][0]

    return find


def _finder_by_slice_uuid(
    cuda_order: Sequence[GpuInfo], old_slice_names: Mapping[str, str]
) -> _Find:
    slices = {gpu.uuid: gpu for gpu in cuda_order if gpu.parent_uuid is not None}

    def find(name: str) -> GpuInfo | str:
        # CUDA's documentation allows a unique prefix for whole GPUs only
        found = slices.get(old_slice_names.get(name, name))
        return "is the whole UUID of no MIG slice here" if found is None else found

    return find


def _whole_gpus(cuda_order: Sequence[GpuInfo]) -> dict[str, list[GpuInfo]]:
    """GPUs by UUID, each with its slices or itself, in order."""
    whole: dict[str, list[GpuInfo]] = {}
    for gpu in cuda_order:
        whole.setdefault(gpu.parent_uuid or gpu.uuid, []).append(gpu)
    return whole


def _places(inventory: Inventory) -> list[GpuInfo]:
    """The GPUs in PCI order, with those that CUDA may count though NVML could not read them."""
    places = list(inventory.gpus)
    for lost in inventory.skipped:
        # without even a UUID the GPU is lost or closed to us, for CUDA too
        if lost.uuid is None:
            continue
        later = (i for i, gpu in enumerate(places) if gpu.index > lost.index)
        places.insert(next(later, len(places)), _placeholder(lost, lost.uuid))
    return places


def _placeholder(lost: SkippedGpu, uuid: str) -> GpuInfo:
    return GpuInfo(
        uuid=uuid,
        name="unreadable GPU",
        index=lost.index,
        pci_bus_id="",
        total_bytes=0,
        free_bytes=0,
        used_bytes=0,
        unusable=lost.reason,
    )


def _order_is_uncertain(inventory: Inventory, environ: Mapping[str, str]) -> bool:
    if any(gpu.parent_uuid is not None for gpu in inventory.gpus):
        return False  # CUDA would list one slice and nothing else
    if inventory.skipped:
        return True
    by_pci = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not by_pci and len({gpu.name for gpu in inventory.gpus}) > 1


def _in_cuda_order(places: Sequence[GpuInfo], uuids: Sequence[str]) -> list[GpuInfo]:
    known = {gpu.uuid.partition("-")[2]: gpu for gpu in places}
    return [
        known.get(uuid) or _placeholder(SkippedGpu(-1, "NVML does not list it"), f"GPU-{uuid}")
        for uuid in uuids
    ]
