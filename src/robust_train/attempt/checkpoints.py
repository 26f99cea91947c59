"""Checkpoints: written whole or not at all, and checked before they are used.

The attempt's process saves with :class:`CheckpointFolder`, at once or on another thread while
training continues, and loads with :func:`read_newest`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from errno import EINVAL, ENOENT, ENOSPC, ESTALE
from functools import partial
from pathlib import Path
from pickle import PickleError, UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_train.attempt.arena import Arena
from robust_train.attempt.cadence import Saving
from robust_train.compat import keep_versions, load_shards, saving_files, tree_map_with_path
from robust_train.failures import classify_failure
from robust_train.folder.best import Best, keep_if_best
from robust_train.folder.checkpoints import (
    SUFFIX,
    USELESS,
    CheckpointError,
    Content,
    Position,
    damage_in,
    is_readable,
    read_manifests,
    size_of,
    sync_all,
    why_full,
    write_atomically,
)
from robust_train.folder.identity import wait_until_readable
from robust_train.host.memory import read_host_memory
from robust_train.model.errors import RankFailure, UserError
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line
from robust_train.step.ranks import of_all_ranks

log = logging.getLogger("robust_train")

T = TypeVar("T")

LARGEST_COPY = 0.5
"""The largest copy, as a share of the host memory that would be available without it."""

Share = Callable[[str, Tensor], Any]
"""Takes a tensor's name and the tensor, and returns what a rank keeps of it."""

# The file in a folder of shards that has all other values, and where each shard is.
VALUES = "values.pt"
INDEX = "index.pt"

# Keys in a checkpoint of `run.save`: its step, and the value and mode of its metric.
STEP = "step"
METRIC = "saved_with_metric"


class CheckpointFolder:
    """The checkpoints that a run saves, of which the newest ``keep`` stay.

    They are files like ``step-00000120.pt``, or folders like ``step-00000120`` that
    ``write_folder`` writes. For a folder all ranks save, and rank 0 reports.
    """

    def __init__(
        self,
        saving: Saving,
        # Reports a complete checkpoint: its path, its step, and its position in the data.
        report: Callable[[Path, int, Position | None], None],
        *,
        is_main: bool,
        keep: int,  # 0 if a framework removes old checkpoints
        write_folder: Callable[[Content, Path], Path] | None = None,
        # How many copies of a checkpoint the ranks of this host make at the same time.
        copies: int = 1,
        suffix: str = ".pt",
    ) -> None:
        saving.rotates = keep > 0
        self.path = saving.folder
        self._saving = saving
        self._report = report
        self._is_main = is_main
        self._keep = keep
        self._write_folder = write_folder
        self._suffix = suffix
        # The checkpoint that is being written while training continues.
        self._in_flight: _Copy | None = None
        self._unwritten: _Copy | None = None  # the newest checkpoint, if the disk did not take it
        self._rotating: Future[None] | None = None
        self._room = HostCopies(copies)

    def save(self, content: Content, step: int) -> Path:
        """Save and report a checkpoint, then remove the oldest checkpoints beyond ``keep``.

        Raises:
            CheckpointError: it could not be written. The earlier checkpoints are untouched.
        """
        self.report_written(wait=True)
        self._unwritten = None
        path = self._write(content, step)
        self._written(path, step, self._saving.batches.position)
        self.report_written(wait=True)
        return path

    def save_from_copy(self, content: Content, step: int) -> None:
        """Save while training continues, if there is memory for a copy. Call :meth:`report_written`
        after each step.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written.
        """
        self.report_written(wait=True)
        # The copy's memory is used again.
        self._unwritten = None
        self._room.begin()
        # Other ranks may write without a copy, and all ranks write together.
        copied = self._room.copy(content)
        if copied is None:
            self.save(content, step)
            return
        self._goes_on(step, lambda: self._write(copied, step), is_repeatable=True)

    def save_files(
        self,
        path: Path,
        step: int,
        *,
        write: Callable[[], object],
        publish: Callable[[], Path],
        at_once: bool = False,
    ) -> None:
        """Save a checkpoint of many files.

        A framework's ``write`` creates them in the folder ``path``. ``publish`` turns them into a
        complete checkpoint and returns its path. Everything that is passed to ``torch.save`` and
        safetensors is copied, and written while training continues, unless ``at_once``. All ranks
        have to call it. All but rank 0 write at once, so that rank 0 knows when their files exist.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written. No file of it is
                left.
        """
        self.report_written(wait=True)
        self._saving.check_folder()
        self._room.begin()
        owed: list[Callable[[], None]] = []

        def later(save: Callable[[Any], None], content: Any, file: Path) -> None:
            copied = self._room.copy({os.path.relpath(file, path): content})
            if copied is None:
                save(content)
            else:
                owed.append(partial(save, *copied.values()))

        at_once |= not self._is_main
        copying = nullcontext() if at_once else saving_files(later)

        def complete() -> Path:
            self._saving.check_folder()
            with self._none_left(path):
                for save in owed:
                    save()
                whole = publish()
                sync_all(whole)
            return self._checked(whole)

        with self._none_left(path), copying:
            together(write, of_all_ranks)
        if self._is_main:
            self._goes_on(step, complete)
        else:
            self._report(path, step, None)

    @contextlib.contextmanager
    def _none_left(self, path: Path) -> Iterator[None]:
        """Remove ``path`` if the disk does not take it.

        Raises:
            CheckpointError: the disk did not take it.
        """
        try:
            yield
        except Exception as error:
            if not is_of_disk(error):
                raise
            why = first_line(error)
            # torch's file writer does not name the reason.
            if not isinstance(error, OSError) and why_full(self.path.parent, str(path)):
                why = os.strerror(ENOSPC)
            if self._is_main:
                shutil.rmtree(path, ignore_errors=True)
            raise CheckpointError(f"cannot write {path}: {why}") from None

    def _goes_on(
        self, step: int, write: Callable[[], Path], *, is_repeatable: bool = False
    ) -> None:
        """Write a checkpoint on the writer's thread, while training continues."""
        future = self._saving.writer.submit(write)
        again = write if is_repeatable else None
        self._in_flight = _Copy(future, step, self._saving.batches.position, again)
        self._saving.clock.copied()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is written while training continues, and not reported yet."""
        return self._in_flight is not None

    def write_again(self) -> bool:
        """Write the newest checkpoint once more, if the disk did not take it, and return whether
        its copy still exists.

        Raises:
            CheckpointError: the disk still does not take it.
        """
        checkpoint = self._unwritten
        if checkpoint is None or checkpoint.write is None:
            return False
        self._written(checkpoint.write(), checkpoint.step, checkpoint.position)
        self._unwritten = None
        self.report_written(wait=True)
        return True

    def report_written(self, *, wait: bool = False) -> None:
        """Report the checkpoint that was written during training, if it is complete; ``wait`` until
        it is.

        Raises:
            CheckpointError: it could not be written. The earlier checkpoints are untouched.
        """
        checkpoint = self._in_flight
        if checkpoint is not None and (wait or checkpoint.future.done()):
            self._in_flight = None
            self._unwritten = checkpoint
            try:
                path = checkpoint.future.result()
            finally:
                self._room.shrink()
            self._unwritten = None
            self._written(path, checkpoint.step, checkpoint.position)
        if wait and self._rotating is not None:
            self._rotating.result()

    def remove_leftovers(self, resumed_from: Path | None) -> None:
        """Remove unfinished checkpoints of attempts that were killed."""
        if not self._saving.owns_folder():
            return
        for leftover in self.path.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
            # A folder may have disappeared, and leftovers do no harm.
            with contextlib.suppress(OSError):
                leftover.unlink()
        for values in self.path.glob(f"step-*/{VALUES}"):  # a folder of shards without a manifest
            folder = values.parent
            if folder != resumed_from and not folder.with_name(folder.name + SUFFIX).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _write(self, content: Content, step: int) -> Path:
        self._saving.check_folder()
        path = self.path / f"step-{step:08d}"
        if self._write_folder is not None:
            return self._checked(self._write_folder(content, path))
        whole = self._checked(write_atomically(content, path.with_suffix(self._suffix)))
        if METRIC in content:
            _keep_if_best(whole, step, *content[METRIC])
        return whole

    def _checked(self, path: Path) -> Path:
        if self._is_main and (damage := self._saving.damage_in(path)):
            raise CheckpointError(f"checkpoint {path}: {damage}; it is not used")
        return path

    def _written(self, path: Path, step: int, at: Position) -> None:
        """Report a complete checkpoint as rank 0, and let the writer's thread remove old ones."""
        if not self._is_main:
            return
        self._report(path, step, at)
        if self._keep:
            # Removing a large file takes time, too.
            self._rotating = self._saving.writer.submit(self._saving.rotate, self._keep)


@dataclass(frozen=True)
class _Copy:
    """A checkpoint that is written while training continues."""

    future: Future[Path]
    step: int
    position: Position  # its position in the data
    write: Callable[[], Path] | None  # writes it once more; None if only its framework can


def _keep_if_best(checkpoint: Path, step: int, value: float, mode: str) -> None:
    """Keep a checkpoint of ``run.save`` as the best checkpoint, if it is. A full disk costs a
    warning."""
    try:
        keep_if_best(checkpoint, Best(value, step, mode=mode))
    except OSError as error:
        log.warning("%s: not kept as the best checkpoint: %s", checkpoint, error.strerror)


class HostCopies:
    """Host memory for a copy of what is saved, used again by each save: fresh memory takes five to
    seven times as long to fill. For a GPU it is pinned, so the GPU writes at full speed, all
    tensors at once."""

    def __init__(self, copies: int = 1) -> None:
        # How many such copies the ranks of this host make at the same time.
        self._copies = copies
        self.arenas = {pinned: Arena(pinned=pinned) for pinned in (False, True)}

    def begin(self) -> None:
        """Start a save: the copy of the previous save is no longer needed."""
        for arena in self.arenas.values():
            arena.begin()

    def copy(self, content: Content) -> Content | None:
        """Return a copy with all tensors in host memory, None if there is no room. Tensors that
        share their memory, such as tied weights, are copied once and share it again."""
        tensors: dict[str, Tensor] = {}

        def note(name: str, tensor: Tensor) -> Tensor:
            tensors[name] = tensor.detach()
            return tensor

        named_map(note, content)
        shared = _shared_bytes(tensors)
        sources: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whose, source = shared.get(name, (name, tensor))
            sources[whose] = source
        # Meta tensors without values, with the strides and the size of the copies.
        alike = {
            name: torch.empty_like(storage, device="meta")
            for name, storage in sources.items()
            if _is_plain(storage)
        }
        sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}
        for name, storage in alike.items():
            sizes[sources[name].is_cuda][name] = storage.untyped_storage().nbytes()
        more = [self.arenas[kind].more_for([*of.values()]) for kind, of in sizes.items()]
        others = [_bytes_of(storage) for name, storage in sources.items() if name not in alike]
        if not self._has_room(sum(more + others)):
            return None
        copied = None
        try:
            copied = self._copies_of(sources, alike, sizes)
        except Exception as error:
            if not classify_failure(error).kind.is_memory:
                raise
        if copied is None:
            # The frames that held the new copies have ended by now.
            self._clear()
            return None

        def copy_of(name: str, tensor: Tensor) -> Tensor:
            if name not in shared:
                return copied[name]
            whose, _ = shared[name]
            return _view_like(tensor, copied[whose])

        return named_map(copy_of, content, _settled)

    def _copies_of(
        self,
        sources: Mapping[str, Tensor],
        alike: Mapping[str, Tensor],  # meta tensors of those that go to an arena
        sizes: Mapping[bool, Mapping[str, int]],  # their sizes, by arena
    ) -> dict[str, Tensor]:
        copied = {}
        for kind, of in sizes.items():
            for name, room in zip(of, self.arenas[kind].take([*of.values()]), strict=True):
                like = alike[name]
                target = torch.empty(0, dtype=like.dtype)
                target.set_(room, 0, like.size(), like.stride())
                copied[name] = target.copy_(sources[name], non_blocking=kind)
        for name, tensor in sources.items():
            if name not in alike:
                copied[name] = tensor.to("cpu", copy=True)
        for device in {tensor.device for tensor in sources.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copied

    def shrink(self) -> None:
        """Return memory that the last save did not need, and all of it if others need it."""
        for arena in self.arenas.values():
            arena.trim()
        if not self._has_room(0):
            self._clear()

    def _clear(self) -> None:
        for arena in self.arenas.values():
            arena.clear()

    def _has_room(self, more: int) -> bool:
        """Return whether the copies, with this many more bytes, leave others as much again."""
        kept = sum(arena.taken for arena in self.arenas.values()) * self._copies
        more *= self._copies
        return kept + more <= LARGEST_COPY * (read_host_memory().available + kept)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor consists only of values in a single stretch of memory."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _shared_bytes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Return the name of the first tensor and all bytes of the storage, for each tensor that shares
    its storage. Dtypes are kept apart, because torch.save refuses a storage with two of them."""
    names: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr(), tensor.dtype
            if storage.nbytes():
                names.setdefault(key, []).append(name)
    storages = {}
    for group in names.values():
        if len(group) > 1:
            storage = tensors[group[0]].untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            flat.set_(storage, 0, (storage.nbytes(),), (1,))
            storages.update(dict.fromkeys(group, (group[0], flat)))
    return storages


def _view_like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Return the part of a storage's copied bytes that belongs to the tensor."""
    view = torch.empty(0, dtype=tensor.dtype, device=copied.device)
    return view.set_(
        copied.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _settled(value: Any) -> Any:
    """Return a copy of a value that training may change, or the value itself if it cannot be
    copied."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    return value


def _bytes_of(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # The size of a sparse tensor is unknown, but less than this.
    return int(local.numel() * local.element_size())


def contents_of(
    state: Mapping[str, Any], step: int, metric: float | None = None, mode: str = "max"
) -> Content:
    """Return the content to save for ``state``: state dicts of objects that have them, and numpy's
    numbers as Python's.

    Raises:
        UserError: a part is sharded over the ranks, or could not be read again, or ``mode`` is not
            a mode.
    """
    if mode not in ("max", "min"):
        raise UserError(f"run.save(mode={mode!r}): must be 'max' or 'min'")

    def checked(_: str, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "to_local"):
            raise UserError(
                "run.save: holds sharded tensors; save them with torch.distributed.checkpoint, "
                "then call run.checkpoint_saved"
            )
        return tensor

    content: Content = {}
    for name, part in state.items():
        state_of_part = part.state_dict() if hasattr(part, "state_dict") else part
        named = named_map(checked, {name: state_of_part}, _as_number)
        content |= named
        file = io.BytesIO()
        try:
            torch.save(named_map(lambda *_: 0, named), file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except PickleError:
            raise UserError(
                f"run.save: {name!r} holds an object that torch.load(weights_only=True) refuses: "
                "it could not be resumed from; save tensors, numbers, text, lists, dictionaries"
            ) from None
    content[STEP] = step
    if metric is not None:
        content[METRIC] = [float(metric), mode]
    return content


def _as_number(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", 1) == 0 else value


def restore(state: MutableMapping[str, Any], content: Content) -> int:
    """Put what :func:`contents_of` returned into ``state``, and return its step."""
    for name, part in list(state.items()):
        if hasattr(part, "load_state_dict"):
            part.load_state_dict(content[name])
        else:
            state[name] = content[name]
    return int(content[STEP])


def is_of_disk(error: BaseException) -> bool:
    """Return whether a save failed because of the disk, whichever library says so."""
    full = FailureKind.DISK_FULL
    return isinstance(error, OSError) or classify_failure(error).kind is full


def together(act: Callable[[], Any], gather: Callable[[Any], list[Any]]) -> Any:
    """Return the result of ``act``. If disk or memory fails on rank 0, all ranks raise that
    error."""
    result = None
    error = None
    try:
        result = act()
    except (OSError, MemoryError, RuntimeError, _UnusableError) as raised:
        error = raised
    except Exception as raised:  # safetensors has its own exception class
        if not is_of_disk(raised):
            raise
        error = OSError(first_line(raised))
    for rank, raised_there in enumerate(gather(error)):
        if raised_there is None:
            continue
        if error is None and not isinstance(raised_there, (OSError, _UnusableError)):
            failure = classify_failure(raised_there)
            raise RankFailure(rank, failure, is_elsewhere=True) from raised_there
        if error is not None and raised_there is not error:
            raised_there.__cause__ = error  # keeps its stack
        raise raised_there
    return result


def named_map(
    change: Share, content: Content, change_other: Callable[[Any], Any] = lambda value: value
) -> Content:
    """Return ``content`` with each tensor changed. Each has a unique name, such as
    ``model.head.weight``."""
    names = set[str]()

    def changed(keys: Sequence[Any], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return change_other(leaf)
        name = ".".join(str(getattr(key, "key", key)) for key in keys)
        # "net" with "ema.weight" and "net.ema" with "weight" would have the same name.
        while name in names:
            name += "'"
        names.add(name)
        return change(name, leaf)

    new = dict(tree_map_with_path(changed, content))
    for name, part in content.items():
        keep_versions(new[name], part)
    return new


def read_newest(
    path: Path,
    required: Collection[str] = (),
    *,
    share: Share | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> tuple[Path, Content] | None:
    """Return the checkpoint ``path``, or the newest intact checkpoint before it in the same folder,
    with its content, or None if none is intact.

    It is a file or a folder of shards. The launcher has already compared the checksums of ``path``.
    A file without the keys ``required`` belongs to someone else. ``share`` returns the part of a
    tensor that a rank keeps; for a meta tensor, whose shards are read later, it returns the tensor
    to fill. ``gather`` returns the values of all ranks that read together.

    Raises:
        UserError: all intact checkpoints are of another trainer or torch. Starting again would
            remove them.
        ConfigError: a file cannot be read, even after a while.
        MemoryError, RuntimeError: there is no memory to read it, whatever its content.
    """
    manifests = wait_until_readable(lambda: read_manifests(path.parent))
    wanted = next((manifest for manifest in manifests if manifest.path == path.absolute()), None)
    if wanted is not None:
        manifests = [
            manifest
            for manifest in manifests
            if manifest.job == wanted.job and manifest.order < wanted.order
        ]
    folder = path.parent.absolute()
    names = [
        manifest.path.name
        for manifest in sorted(manifests, key=lambda manifest: manifest.order, reverse=True)
        if manifest.path.parent == folder and manifest.loss not in USELESS
    ]

    def compare() -> None:
        here = wait_until_readable(lambda: size_of(path) if path.exists() else False)
        if len(set(gather(here))) > 1:
            why = "the ranks find different checkpoints; it has to be one folder that all nodes see"
            raise OSError(ESTALE, why, str(path.parent))

    # A network disk shows a new file to some hosts later.
    wait_until_readable(compare)
    refusal = ""
    for name in gather([path.name, *names])[0]:
        # On another node this may be another checkpoint.
        candidate = path.parent / name
        try:
            read = partial(_read, candidate, required, share, is_compared=candidate == path)
            return candidate, wait_until_readable(partial(together, read, gather))
        except _UnusableError as fault:
            log.warning(
                "checkpoint %s cannot be used (%s); trying the one before it", candidate, fault
            )
            if isinstance(fault, _RefusedError) and not refusal:
                refusal = f"{candidate} is whole, but {fault}"
    if refusal:
        raise UserError(
            f"checkpoint {refusal}; resume with the trainer and the torch that saved it, or "
            "start over with resume=false, which sets it aside"
        )
    log.warning("no checkpoint is intact: training starts from the beginning")
    return None


class _UnusableError(Exception):
    """A defect of a checkpoint file."""


class _RefusedError(_UnusableError):
    """The reason not to read an intact checkpoint."""


def _read(
    path: Path,
    required: Collection[str],
    share: Share | None,
    *,
    is_compared: bool,  # whether its checksums are compared, which torch does not do
) -> Content:
    """Return the content of a complete checkpoint.

    Raises:
        _UnusableError: no attempt can ever read it.
        OSError: it is unreadable now.
    """
    shards: dict[str, Tensor] = {}

    def kept(name: str, tensor: Tensor) -> Tensor:
        share_of_it = share(name, tensor) if share else tensor
        if tensor.is_meta:
            if share_of_it.is_meta:
                share_of_it = torch.empty_like(share_of_it, device="cpu")
            shards[name] = share_of_it
        return share_of_it

    try:
        file = path / VALUES if path.is_dir() else path
        file.open("rb").close()
        if not is_compared and (damage := damage_in(path, reads=True)):
            raise _UnusableError(damage)
        # weights_only, because a file from elsewhere must not run code here. mmap, because a share
        # is less than the whole file.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=bool(share))
        if not isinstance(content, dict):
            raise _RefusedError(f"it holds a {type(content).__name__} and is not a checkpoint")
        missing = sorted(set(required) - content.keys())
        if missing:
            raise _RefusedError(f"it has no {missing[0]!r} and is not a checkpoint of this trainer")
        content = named_map(kept, content)
        if shards:
            load_shards(path, path / INDEX, shards)
        return content
    except _UnusableError:
        raise
    except Exception as error:
        # Damaged files make zip and pickle readers raise nearly anything, and EINVAL for a bad
        # offset.
        of_the_file = (None, EINVAL, ENOENT)
        is_away = isinstance(error, OSError) and error.errno not in of_the_file
        if is_away or classify_failure(error).kind.is_memory:
            raise
        is_whole = isinstance(error, UnpicklingError) and is_readable(path)
        raise (_RefusedError if is_whole else _UnusableError)(first_line(error)) from None
