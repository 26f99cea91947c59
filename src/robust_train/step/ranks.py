"""Several ranks that share an optimizer step: they agree on its outcome, and sum their gradients.

The parts run without collectives, so a rank that runs out of memory repeats its share in smaller
parts and does not leave other ranks waiting in the middle of a backward pass. Afterwards the ranks
exchange a short message. The passes of a sharded model communicate (see ``sharded.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_not
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from robust_train.compat import (
    collectives_begun,
    copy_at_once,
    groups_of_process,
    hook_and_delay,
    preserve_version_counter,
    settle_buckets,
)
from robust_train.memory.clearing import clear_frames
from robust_train.model.errors import UserError
from robust_train.model.failure import Failure
from robust_train.readable import MIB
from robust_train.step import sharded
from robust_train.step.reachable import modules_of
from robust_train.step.sharded import WITHOUT, RanOutElsewhereError, refuse

T = TypeVar("T")


# --- agreeing ---


@dataclass(frozen=True)
class RanOut:
    """Memory ran out in a pass over parts of this size. If exhausted, no smaller size may be
    tried."""

    failure: Failure
    size: int
    is_exhausted: bool = False
    rank: int = 0


@dataclass(frozen=True)
class RankReport:
    """A rank's report after its parts."""

    ran_out: RanOut | None  # None: it did not
    # most samples in a part from now on; None: the whole batch
    size: int | None
    items: float  # the number of items that its loss averages over
    # Whether each shared parameter has a gradient.
    has_gradient: tuple[bool, ...] = ()
    returns_more: bool = False  # its function returned more than a loss


def agree(reports: Sequence[RankReport]) -> RankReport:
    """Return the combined report of all ranks. Its shortage is the first among them, exhausted
    ranks first. Its size is the smallest, its flags are set if any rank's is, and its items are the
    sum."""
    failed = [report.ran_out for report in reports if report.ran_out is not None]
    sizes = [report.size for report in reports if report.size is not None]
    present = zip(*(report.has_gradient for report in reports), strict=True)
    return RankReport(
        max(failed, key=attrgetter("is_exhausted"), default=None),
        min(sizes, default=None),
        sum(report.items for report in reports),
        tuple(map(any, present)),
        any(report.returns_more for report in reports),
    )


class OtherGroups:
    """Messages over other groups than the default group, in the first two parts of training.

    Later parts are not examined: a thread that saves a checkpoint has such a group too, and the
    sender of a message is not known. No checkpoint is saved before the first parts are done.
    """

    _PARTS = 2

    def __init__(self) -> None:
        self._parts = 0
        self._begun: dict[Any, int] = {}

    def begin_part(self, groups: Iterable[Any]) -> None:
        """Note what the groups of this process have begun."""
        if self._parts < self._PARTS:
            self._begun = {group: collectives_begun(group) for group in groups}

    def end_part(self, groups: Iterable[Any], ours: Container[Any]) -> bool:
        """Return whether each of the first parts, of which this is the last, has sent a message
        over a group that is not among ``ours``."""
        if self._parts >= self._PARTS:
            return False
        others = [group for group in groups if group not in ours]
        talks = any(collectives_begun(group) > self._begun.get(group, 0) for group in others)
        self._parts = self._parts + 1 if talks else self._PARTS
        return talks and self._parts == self._PARTS


class Ranks:
    """This process among those of torch's default process group."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # This group is on the host, because a message over the GPU would wait for everything that
        # is queued there. It is apart from the default group, which counts a user's collectives.
        self._group: Any = dist.new_group(backend="gloo")
        start_nccl()
        self.replicas = ReplicaFinder()
        self.ledger = sharded.Ledger(lambda ran_out: bool(self.figures([ran_out]).any()))
        self.other_groups = OtherGroups()
        self._reported: RankReport | None = None  # without the items
        self._agreed: RankReport | None = None

    def foreign(self) -> int:
        """Return how many collectives were started that neither this class nor FSDP2 knows of.

        Counts the default group, because another group may belong to a thread that saves
        checkpoints. It falls if the group counts none, or only those of its default backend."""
        return collectives_begun(self.world) - self.ledger.sent

    def talks_in_other_groups(self) -> bool:
        """Return whether the parts send over groups that neither this class nor FSDP2 knows of."""
        ours = {self.world, self._group, *self.ledger.groups}
        return self.other_groups.end_part(groups_of_process(dist), ours)

    def figures(self, mine: Sequence[float]) -> Tensor:
        """Return every rank's figures, a row each, by a small message. All ranks have to call
        it."""
        # Stay on the host whatever the default device is.
        with torch.device("cpu"):
            rows = torch.zeros(self.size, len(mine), dtype=torch.float64)
            rows[self.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(rows, group=self._group)
        return rows

    def exchange(self, report: RankReport) -> RankReport:
        """Send this rank's report and receive the others'. All ranks have to call it.

        Reports are exchanged only if a rank has news. Otherwise the last agreement holds.
        """
        counts = replace(report, items=0.0)
        has_news = report.ran_out is not None or counts != self._reported
        is_asked = has_news or self._agreed is None
        rows = self.figures([is_asked, report.items])
        self._reported = counts
        if self._agreed is None or rows[:, 0].any():
            self._agreed = agree(self.gather(report))
            return self._agreed
        return replace(self._agreed, ran_out=None, items=float(rows[:, 1].sum()))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, in several messages. All have to call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def start_nccl() -> None:
    """Make NCCL allocate its memory now, if the default group uses it. Later, in a part of a step,
    a lack of memory would be blamed on the micro-batch. All ranks have to call it."""
    if "nccl" not in str(dist.get_backend()):
        return
    dist.all_reduce(torch.zeros(1, device="cuda"))


_here: Ranks | None = None


def here() -> Ranks | None:
    """Return this process's ranks, or None if it trains alone."""
    global _here
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _here is None or _here.world is not dist.group.WORLD:
        _here = Ranks()
    return _here


def of_all_ranks(value: Any) -> list[Any]:
    """Return every rank's value, by rank, when all have called this. A single process gets its
    value back."""
    group = here()
    return [value] if group is None else group.gather(value)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model over several ranks."""
    group = here()
    return group is not None and bool(group.ledger.roots_in([model]))


class SharedStep:
    """An optimizer step of all ranks, or of this process alone.

    Raises:
        UserError: a model cannot be split here.
    """

    def __init__(self, models: Iterable[nn.Module], function: Any = None) -> None:
        """Find the parameters that ranks share in ``models``, which learn. ``function`` may reach
        wrappers."""
        models = list(models)
        self._group = here()
        self._replicas: list[Replica] = []
        self._roots: tuple[Any, ...] = ()
        if self._group is None:
            # its model may be wrapped or sharded all the same
            if dist.is_available() and dist.is_initialized():
                self._replicas = [
                    replica
                    for model in models
                    for replica in replicas_of(model, function)
                    # else it does what it would without us
                    if _why_not(replica) is None
                ]
                self._roots = sharded.roots_in_one_process(models)
        else:
            self._roots = self._group.ledger.roots_in(models)
            if not self._roots:
                self._replicas = self._group.replicas.of(models, function)
            elif any(map(replicas_in, models)):
                raise UserError(
                    "run.backward: a model in DistributedDataParallel beside a sharded one "
                    f"would leave ranks waiting; shard both, {WITHOUT}"
                )
        trained = (
            parameter
            for replica in self._replicas
            for name, parameter in replica.module.named_parameters()
            if parameter.requires_grad and name not in replica.parameters_to_ignore
        )
        # each once, in an order that is the same on every rank
        self._parameters = list(dict.fromkeys(trained))
        self._foreign = 0

    @property
    def rank(self) -> int:
        """Number of this process."""
        return 0 if self._group is None else self._group.rank

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self._group is not None

    @property
    def is_sharded(self) -> bool:
        """Whether the passes gather weights, so that no rank may leave a part half-way."""
        return self._group is not None and bool(self._roots)

    def plan(self, parts: int, items: float, wants_check: bool) -> tuple[int, float, bool]:
        """Return how many parts all ranks of a sharded model run, the factor of their weights, and
        whether any rank wants its split to be checked.

        FSDP takes the mean of the ranks' gradients, whatever their shares in the items are.
        """
        assert self._group is not None
        rows = self._group.figures([parts, items, wants_check])
        most = int(rows[:, 0].max())
        of_all = float(rows[:, 1].sum())
        factor = items * self._group.size / of_all if of_all else 0.0
        return most, factor, bool(rows[:, 2].any())

    def figures(self, mine: Sequence[float]) -> list[list[float]]:
        """Return the figures of every rank that runs the same passes, which all call this."""
        if self._group is None or not self._roots:
            return [list(mine)]
        rows: list[list[float]] = self._group.figures(mine).tolist()
        return rows

    @contextlib.contextmanager
    def extra_pass(self) -> Iterator[None]:
        """Run a pass that is not a part. All ranks of a sharded model run it, and leave it
        together.

        Afterwards the model is as before the first pass on every rank. Otherwise weights that only
        some ranks freed would make their next passes differ.
        """
        if self._group is None:
            yield
            return
        self._foreign = self._group.foreign()
        if self._roots:
            self._group.ledger.begin_extra_pass()
        try:
            yield
        except RanOutElsewhereError as error:
            clear_frames(error)
            raise
        except Exception as error:
            clear_frames(error)
            self.end_part(ran_out=True)
            raise
        else:
            self.end_part(ran_out=False, is_extra=True)
        finally:
            self.reset()

    def begin_part(self, *, training: bool, has_weight: bool) -> None:
        """Begin a part, in which sharded models alone may communicate."""
        if self._group is not None:
            self._foreign = self._group.foreign()
            self._group.other_groups.begin_part(groups_of_process(dist))
            if self._roots:
                self._group.ledger.begin_part(self._roots, training=training, has_weight=has_weight)

    def end_part(self, *, ran_out: bool, is_extra: bool = False) -> None:
        """Reach its end, with a sharded model together with the other ranks.

        Raises:
            UserError: a message of the user's was in it, or sharded passes differ.
        """
        if self._group is None:
            return
        if not ran_out and self._group.foreign() > self._foreign:
            raise UserError(
                "run.backward: a collective of your own, send or recv, or a collective of a model "
                "in DistributedDataParallel that is not named, runs inside the "
                "function, where a rank that runs out of memory would leave the others waiting; "
                "call it after "
                f"run.backward, name the model as in [model, other], {WITHOUT}"
            )
        if not ran_out and not is_extra and self._group.talks_in_other_groups():
            raise UserError(
                "run.backward: messages over a process group of your own (a collective, send or "
                "recv) run inside the function, where a rank that runs out of memory would leave "
                f"the others waiting; send them after run.backward, {WITHOUT}"
            )
        if self._roots:
            self._group.ledger.end_part(ran_out=ran_out)

    def reset(self) -> None:
        """Put sharded models in order after a part that was left half-way."""
        sharded.reset(self._roots)

    @contextlib.contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Let the models' passes send nothing within this block."""
        ddp = DistributedDataParallel
        wrappers = [replica for replica in self._replicas if isinstance(replica, ddp)]
        with contextlib.ExitStack() as stack:
            for wrapper in wrappers:
                settle_buckets(wrapper)
                stack.enter_context(wrapper.no_sync())
                wrapper.require_forward_param_sync = False  # nor their buffers
            try:
                yield
            finally:
                for wrapper in wrappers:
                    wrapper.require_forward_param_sync = True

    def agree(self, report: RankReport) -> RankReport | None:
        """Exchange with the other ranks how the parts went, or None if there are none."""
        if self._group is None:
            return None
        # without a line of Python for each parameter: there may be ten thousand
        gradients = map(attrgetter("grad"), self._parameters)
        present = tuple(map(is_not, gradients, itertools.repeat(None)))
        return self._group.exchange(replace(report, has_gradient=present))

    @torch.no_grad()
    def sum_gradients(
        self, agreed: RankReport | None, loss: Tensor | None, items: float
    ) -> Tensor | None:
        """Sum the ranks' gradients, each by its share in the items of all, and return the mean loss
        over all ranks' items. A parameter without a gradient on any rank keeps none, so that
        optimizers pass it over."""
        if self.is_sharded:  # the gradients are summed already
            return sharded.mean_loss(self._roots, loss)
        if agreed is None or not self._parameters or not agreed.items:
            return loss
        for parameter, is_wanted in zip(self._parameters, agreed.has_gradient, strict=True):
            if is_wanted and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        total = torch.zeros((), dtype=torch.float32, device=self._parameters[0].device)
        if loss is not None:
            # a model on several GPUs ends on another one than it begins on
            total += loss.to(total.device)
        # last: the gradients are there in the order of their layers
        tensors = [p.grad for p in self._parameters if p.grad is not None] + [total]
        for bucket in _buckets(tensors):
            flat = _flattened(bucket).mul_(items / agreed.items)
            dist.all_reduce(flat, group=self._replicas[0].process_group)
            _spread(flat, bucket)
        return total

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Give every rank the buffers (BatchNorm's statistics) of the first, as DDP does."""
        for replica in () if self._group is None else self._replicas:
            if not replica.broadcast_buffers:
                continue
            buffers = [
                buffer
                for name, buffer in replica.module.named_buffers()
                if name not in replica.parameters_to_ignore
            ]
            source = dist.get_global_rank(replica.process_group, 0)
            with contextlib.ExitStack() as stack:
                for buffer in buffers:
                    # the same as far as autograd and the rewinding of steps are concerned
                    stack.enter_context(preserve_version_counter(torch, buffer))
                broadcast(buffers, source, replica.process_group)


# --- replicas of a model ---

BUCKET_BYTES = 25 * MIB
"""As DistributedDataParallel's: large enough for the network, small beside the gradients."""


class Replicated(nn.Module):
    """A model that is the same on every rank. ``run.backward`` sums its gradients. Rank 0 sends its
    weights and buffers once. Unlike DistributedDataParallel, it needs no buckets, which are a copy
    of all gradients."""

    broadcast_buffers = True
    parameters_to_ignore: frozenset[str] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.process_group: Any = dist.group.WORLD
        broadcast(
            list(itertools.chain(module.parameters(), module.buffers())), 0, self.process_group
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)


Replica = DistributedDataParallel | Replicated


class ReplicaFinder:
    """Finds the replicas in models, and refuses models that a rank cannot leave half-way."""

    def __init__(self) -> None:
        self._known = weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]()

    def of(self, models: Iterable[nn.Module], function: Any) -> list[Replica]:
        """Return the replicas in ``models`` at any depth, and wrappers that ``function`` reaches: a
        step may name the model and call its wrapper.

        Raises:
            UserError: a model communicates in its passes in a way that cannot be deferred.
        """
        replicas_found: list[Replica] = []
        for model in models:
            replicas: list[Any] = [ref() for ref in self._known.get(model, ())]
            # one without any may be wrapped by now
            if not replicas or None in replicas:
                replicas = replicas_of(model, function)
                if replicas or model not in self._known:
                    _refuse(model)
                    for replica in replicas:
                        _refuse(replica)
                self._known[model] = list(map(weakref.ref, replicas))
            replicas_found += replicas
        return list(dict.fromkeys(replicas_found))


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], source: int, group: Any) -> None:
    """Give every rank the tensors of ``source``, in few messages."""
    for bucket in _buckets(tensors):
        flat = _flattened(bucket)
        dist.broadcast(flat, source, group=group)
        _spread(flat, bucket)


def _spread(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Invert `_flattened`."""
    if flat.data_ptr() != bucket[0].data_ptr():
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        pairs = zip(bucket, parts, strict=True)
        copy_at_once(torch, bucket, [part.view_as(tensor) for tensor, part in pairs])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors that can be sent together. A large tensor is sent alone, uncopied."""
    filling: dict[object, list[Tensor]] = {}
    filled: Counter[object] = Counter()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if tensor.nbytes >= BUCKET_BYTES:
            yield [tensor]
            continue
        filling.setdefault(kind, []).append(tensor)
        filled[kind] += tensor.nbytes
        if filled[kind] >= BUCKET_BYTES:
            del filled[kind]
            yield filling.pop(kind)
    yield from filling.values()


def _flattened(bucket: Sequence[Tensor]) -> Tensor:
    """Return the tensors as a single flat tensor, without a copy if possible, because a lone tensor
    may be large."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def replicas_in(model: nn.Module) -> list[Replica]:
    """Find the model itself, inside ``torch.compile``'s module, or deeper."""
    return [part for part in model.modules() if isinstance(part, Replica)]


def replicas_of(model: nn.Module, function: Any) -> list[Replica]:
    """Find the replicas in a model, or else its wrappers among the modules that a function
    reaches."""
    inside = replicas_in(model)
    if inside:
        return inside
    ids = set(map(id, model.parameters()))
    return [
        replica
        for other in modules_of(function)
        for replica in replicas_in(other)
        if ids & set(map(id, replica.parameters()))
    ]


def _refuse(model: nn.Module) -> None:
    for name, part in model.named_modules():
        refuse(name, part, _why_not(part))


def _why_not(module: nn.Module) -> str | None:
    """Return why a rank cannot leave this module's pass half-way, or None if it can."""
    waiting = "from the other ranks, where one that runs out of memory would leave them waiting"
    names = {cls.__name__ for cls in type(module).__mro__}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        return f"has sparse gradients, which are not summed; use sparse=False, {WITHOUT}"
    if isinstance(module, nn.SyncBatchNorm):
        return f"gathers its statistics {waiting}; use BatchNorm, {WITHOUT}"
    is_split = any(
        cls.__name__ == "DTensor"
        for parameter in module.parameters(recurse=False)
        for cls in type(parameter).__mro__
    )
    if is_split or names & {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}:
        return f"gathers its weights {waiting}; use DistributedDataParallel, {WITHOUT}"
    if not isinstance(module, DistributedDataParallel):
        return None
    has_hook, delays = hook_and_delay(module)
    if has_hook:
        return "has a communication hook, which would be passed over; do without one of the two"
    options = {name: getattr(module, name, None) for name in ("static_graph", "mixed_precision")}
    for option, is_on in {**options, "delay_all_reduce_params": delays}.items():
        if is_on:
            return (
                f"has {option}, with which DistributedDataParallel communicates in "
                "every backward pass; do without it"
            )
    if dist.get_world_size(module.process_group) != dist.get_world_size():
        return f"shares its gradients with some of the ranks only; use one group, {WITHOUT}"
    return None
