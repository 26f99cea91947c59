"""Two processes that train a model sharded by FSDP2 over gloo: prints what fails in each.

Usage: group_of_sharded_ranks.py FOLDER few|thorough
"""

import functools
import gc
import itertools
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from group_of_ranks import attempt
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training_world import write_image_folder

from forked_ranks import of_forks, outcomes
from memory_limit import MIB, lift_limit, limit_growth
from robust_train.config.training_plans import SplitRule
from robust_train.memory.clearing import return_memory
from robust_train.model.errors import RankFailure, UserError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.ranks import of_all_ranks
from robust_train.step.recorder import Recorder
from robust_train.step.split_watch import SplitWatch
from robust_train.step.splitting import bounds
from robust_train.vision.sharding import share_buffers

SHARES = (slice(0, 8), slice(8, 13))
"""Uneven on purpose: with parts of two samples rank 1 has one part less."""

WIDE = 1 << 20
"""Numbers of one sample in a block, for a moment: 4 MiB, and the same again."""


class OwnAllGather(DefaultAllGather):
    pass


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.block.must_fit("backward", len(gradient))
        return gradient, None


class Fuse:
    """When a block runs out of memory; an object of its own stays as a failed pass leaves it."""

    def __init__(self):
        self.bomb: str | None = None  # where it runs out
        self.most = 2  # samples that fit
        self.at = 1  # in which pass from now on
        self.is_once = False


class Block(nn.Module):
    """Runs out of memory where its fuse says."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.fuse = Fuse()
        self.activation = 16

    def must_fit(self, where, samples):
        fuse = self.fuse
        fuse.at -= fuse.bomb == where
        if fuse.bomb == where and fuse.at <= 0 and samples > fuse.most:
            fuse.bomb = None if fuse.is_once else where
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def forward(self, x):
        self.must_fit("forward", len(x))
        hidden = self.narrow(torch.relu(self.wide(x))).repeat(1, self.activation // 16) * 2
        return x + Backward.apply(hidden[:, :16], self)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), *(Block() for _ in range(3)), nn.Linear(16, 3))


def sharded(mesh, **options):
    model = network()
    for part in model[1:4]:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(13, 4, generator=generator), torch.randn(13, 3, generator=generator)


def step(batcher, model, mine):
    x, y = data()
    passes = []

    def loss_of(batch):
        passes.append(len(batch[0]))
        return nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    loss = batcher.backward(loss_of, (x[mine], y[mine]), model)
    needed = max(len(bounds(share.stop - share.start, batcher.size or 8)) for share in SHARES)
    return loss, int(len(passes) > needed)


def validate(batcher, model, mine):
    weight = next(model.parameters())
    weight.grad = before = torch.ones_like(weight)
    with torch.no_grad():
        outputs = torch.cat(batcher.forward(model, data()[0][mine], model))
    assert weight.grad is before, "a gradient of earlier batches outlives a validation"
    weight.grad = None
    return outputs


def backward_of_one(model):
    x, y = data()
    nn.functional.mse_loss(model(x), y).backward()


def worst_gradient(model):
    reference = network()
    backward_of_one(reference)
    return furthest(model, reference)


def furthest(model, reference):
    """How far a sharded model's gradients are from those of another one."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)


def a_step_is_repeated_wherever_memory_runs_out(rank, mesh, is_thorough=False):
    """Once in each place, on each rank, in the first step and in a later one."""
    losses = []
    places = list(itertools.product((True, False), ("forward", "backward"), (1, 3), (0, 1), (0, 1)))
    # each value of each of them, and each pair of the first and of the last two
    few = [places[n] for n in (0b00_0_00, 0b01_0_11, 0b10_1_01, 0b11_1_10)]
    for place in places if is_thorough else few:
        reshards, where, block, bad, when = place
        model = sharded(mesh, reshard_after_forward=reshards)
        batcher = MicroBatcher(batch_size=4)
        with torch.no_grad():
            outputs = network()(data()[0][SHARES[rank]])
        for number in range(3):
            model[block].fuse.bomb = where if rank == bad and number == when else None
            loss, repeats = step(batcher, model, SHARES[rank])
            worst = worst_gradient(model)
            model.zero_grad()
            assert (repeats, worst < 1e-6) == (number == when, True), (place, number, worst)
            losses.append(loss.item())
        assert batcher.size == 2, place
        model[block].fuse.bomb = "forward" if rank == bad else None
        kept = validate(batcher, model, SHARES[rank])
        assert (kept - outputs).abs().max() < 1e-6, place
    assert max(losses) - min(losses) < 1e-6


def sharded_as(mesh, kind):
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(mesh, **({"mp_policy": half} if kind == "bf16" else {}))
    if kind == "checkpointing":
        for part in model[1:4]:
            checkpoint(part)
    return model


def clipped_gradients_of_adamws_steps_are_those_of_one_process(rank, mesh):
    """The step in which memory runs out and those after it included."""
    for kind in ("plain", "checkpointing"):
        model, reference = sharded_as(mesh, kind), network()
        optimizers = [
            torch.optim.AdamW(net.parameters(), 1e-2, eps=1e-4) for net in (model, reference)
        ]
        batcher = MicroBatcher(batch_size=4)
        for number in range(3):
            model[2].fuse.bomb = "backward" if rank == 1 and number == 1 else None
            assert step(batcher, model, SHARES[rank])[1] == (number == 1), kind
            backward_of_one(reference)
            for net in (model, reference):
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            assert furthest(model, reference) < 1e-6, kind
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def a_step_that_is_repeated_at_the_same_split_is_the_same_to_the_bit(rank, mesh):
    def train(kind, fails):
        model = sharded_as(mesh, kind)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batcher = MicroBatcher(batch_size=4, min_batch_size=4)
        batcher.training_size.smaller_than = lambda failed: 4
        for number in range(3):
            if fails and rank == 1 and number == 1:
                model[2].fuse.bomb, model[2].fuse.is_once = "backward", True
            assert step(batcher, model, SHARES[rank])[1] == (fails and number == 1)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])

    for kind in ("plain", "checkpointing", "bf16"):
        assert torch.equal(train(kind, fails=False), train(kind, fails=True)), kind


def weights_that_stay_gathered_between_parts_change_nothing(rank, mesh):
    """So that these send different things."""
    for where, part in itertools.product(("forward", "backward"), (1, 2)):
        model = sharded(mesh, reshard_after_forward=False)
        batcher = MicroBatcher(batch_size=4)
        for number in range(2):
            model.set_reshard_after_backward(False)
            if number == 1 and rank == 1:
                model[1].fuse.bomb, model[1].fuse.at = where, part
            _, repeats = step(batcher, model, SHARES[rank])
            for module in (*model[1:4], model):
                module.reshard()
            worst = worst_gradient(model)
            model.zero_grad()
        assert (repeats, worst < 1e-6) == (1, True), (where, part)


class Skips(nn.Sequential):
    """Leaves a block out in every second pass."""

    def forward(self, x):
        self.passes = getattr(self, "passes", 0) + 1
        for number, part in enumerate(self):
            x = x if number == 1 and self.passes % 2 == 0 else part(x)
        return x


class Averages(nn.Module):
    def forward(self, x):
        dist.all_reduce(x.detach().mean())
        return x


def real_memory_that_runs_out_on_one_rank_splits_the_step_of_both(rank, mesh):
    model = sharded(mesh)
    for part in model[1:4]:
        part.activation = 4 * WIDE
    batcher = MicroBatcher()
    if rank == 1:
        return_memory()  # the limit counts what the allocator keeps for later
        limit_growth(150 * MIB)
    _, repeats = step(batcher, model, SHARES[rank])
    lift_limit()
    assert worst_gradient(model) < 1e-6
    assert repeats == 1
    assert batcher.size < 5


def where_one_rank_cannot_go_on_both_end(rank, mesh):
    model = sharded(mesh)
    model[2].fuse.bomb, model[2].fuse.most = ("backward" if rank == 0 else None), 0
    with pytest.raises(RankFailure) as raised:
        step(MicroBatcher(batch_size=4, min_batch_size=2), model, SHARES[rank])
    assert (raised.value.rank, raised.value.is_elsewhere) == (0, rank == 1)
    assert all(parameter.grad is None for parameter in model.parameters())


def refused(model):
    try:
        net = model[0] if isinstance(model, list) else model
        MicroBatcher(batch_size=8).backward(lambda part: net(part[0]).mean(), data(), model)
    except UserError as error:
        return str(error)
    return "not refused"


def refusals(mesh):
    custom, other = sharded(mesh), network()
    custom[1].set_custom_all_gather(DefaultAllGather())
    custom[2].set_custom_all_gather(OwnAllGather())
    fully_shard(other[1], mesh=mesh)
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    hybrid = fully_shard(network(), mesh=both)
    beside = [sharded(mesh), DistributedDataParallel(network())]
    skips = Skips(*network())
    fully_shard(skips[1], mesh=mesh)
    fully_shard(skips, mesh=mesh)
    models = {
        "own": custom,
        "in part": other,
        "hybrid": hybrid,
        "beside": beside,
        "split": parallelize_module(network(), mesh, {"1.wide": ColwiseParallel()}),
        "first kind": FullyShardedDataParallel(network(), device_id=torch.device("cpu")),
        "skips": skips,
        "averages": nn.Sequential(sharded(mesh), Averages()),
        "averages in replicas": nn.Sequential(DistributedDataParallel(network()), Averages()),
    }
    lines = {kind: refused(model) for kind, model in models.items()}
    reset = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        return lines | {"older": refused(sharded(mesh))}
    finally:
        FSDPModule.reset_iter_state = reset


class Lines(logging.Handler):
    """Keeps the lines about splits."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def emit(self, record):
        line = record.getMessage()
        if "split" in line:
            self.kept.append(line)

    def __enter__(self):
        logging.getLogger("robust_train").addHandler(self)
        return self.kept

    def __exit__(self, *error):
        logging.getLogger("robust_train").removeHandler(self)


def squares(net, b):
    return nn.functional.mse_loss(net(b[0]), b[1])


def contrastive(net, b):
    vectors = nn.functional.normalize(net(b[0]), dim=1)
    pairs = vectors @ nn.functional.normalize(b[1], dim=1).T
    return nn.functional.cross_entropy(pairs, torch.arange(len(pairs)))


def contrastive_on_the_second(net, b):
    return contrastive(net, b) if dist.get_rank() else squares(net, b)


def masked(net, b):
    errors = (net(b[0]) - b[1]).square().mean(1)
    return (errors * b[2]).sum() / b[2].sum()


def with_gradients_on_the_second(net, b):
    loss = squares(net, b)
    if dist.get_rank() and not loss.requires_grad:
        raise ValueError("it has no gradients")
    return loss


def drawing_on_the_second(net, b):
    loss = squares(net, b)
    return loss + 0.1 * torch.randn(()) if dist.get_rank() else loss


def a_rank_whose_samples_have_no_items_adds_nothing(rank, mesh):
    """Its loss, a mean over none, is NaN."""
    x, y = data()
    mask = torch.full((13,), 1.0 - rank)

    model, reference, mine = sharded(mesh), network(), SHARES[rank]
    share = x[mine], y[mine], mask[mine]
    with Lines() as lines:
        loss = MicroBatcher(batch_size=4).backward(
            functools.partial(masked, model), share, model, count=lambda b: b[2].sum()
        )
    assert not lines
    of_first = masked(reference, (x[:8], y[:8], torch.ones(8)))
    of_first.backward()
    assert abs(loss - of_first) < 1e-6
    assert furthest(model, reference) < 1e-6


CHANGES = "splitting changes this loss: a part of"

CHECKED = (
    # the loss, the rank whose memory runs out in a part of 4, whether weights are freed after a
    # pass, and how the lines begin
    (squares, 1, False, ()),
    (contrastive, None, True, (CHANGES,)),
    (contrastive, 0, False, (CHANGES,)),
    (contrastive_on_the_second, None, True, (CHANGES,)),
    (masked, None, True, (CHANGES,)),
    (with_gradients_on_the_second, None, True, ()),
    (drawing_on_the_second, None, True, ()),
)


def a_split_is_checked_by_all_ranks_together(rank, mesh):
    """What one of them sees, or meets, counts for all."""
    x, y = data()
    mask = torch.rand(13, generator=torch.Generator().manual_seed(2))
    mine = SHARES[rank]
    for loss_of, bad, frees_weights, begins in CHECKED:
        model = sharded(mesh, reshard_after_forward=frees_weights)
        model[2].fuse.bomb = "forward" if rank == bad else None
        with Lines() as lines:
            MicroBatcher(batch_size=4).backward(
                functools.partial(loss_of, model), (x[mine], y[mine], mask[mine]), model
            )
        assert of_all_ranks(lines) == [lines, lines], (loss_of, bad)
        beginnings = tuple(line.partition(": ")[2][: len(CHANGES)] for line in lines)
        assert beginnings == begins, (loss_of, bad, lines)


def a_loss_over_the_batch_ends_the_step_of_all_ranks(rank, mesh):
    """By memory that ran out on one, if it has, and there are other remedies."""
    x, y = data()
    mine = SHARES[rank]
    model = sharded(mesh)
    with pytest.raises(UserError, match=CHANGES):
        MicroBatcher(batch_size=4, exact=True).backward(
            lambda b: contrastive(model, b), (x[mine], y[mine]), model
        )
    watch = SplitWatch(SplitRule(ends_attempt=True))
    batcher = MicroBatcher(recorder=Recorder(lambda: 1, splits=watch))
    model[2].fuse.bomb, model[2].fuse.most = ("backward" if rank else None), 4
    with pytest.raises(RankFailure) as raised, Lines() as lines:
        batcher.backward(lambda b: contrastive(model, b), (x[mine], y[mine]), model)
    assert raised.value.failure.kind.is_memory
    assert [CHANGES in line for line in lines] == [True], lines


def all_ranks_score_with_the_statistics_of_the_first(rank, mesh):
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(rank)
    share_buffers(norm)
    assert norm.running_mean.tolist() == [0.0, 0.0]


PARTS = (
    a_step_is_repeated_wherever_memory_runs_out,
    clipped_gradients_of_adamws_steps_are_those_of_one_process,
    a_step_that_is_repeated_at_the_same_split_is_the_same_to_the_bit,
    weights_that_stay_gathered_between_parts_change_nothing,
    real_memory_that_runs_out_on_one_rank_splits_the_step_of_both,
    where_one_rank_cannot_go_on_both_end,
    a_rank_whose_samples_have_no_items_adds_nothing,
    a_split_is_checked_by_all_ranks_together,
    a_loss_over_the_batch_ends_the_step_of_all_ranks,
    all_ranks_score_with_the_statistics_of_the_first,
)


def be_rank(rank, folder, is_thorough):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    if is_thorough:
        return outcomes({PARTS[0]: (rank, mesh, True)})
    return {"refused": refusals(mesh), **outcomes(dict.fromkeys(PARTS, (rank, mesh)))}


def by_the_built_in_trainer(folder):
    """One job in attempts with several numbers of ranks, sharded or not, and one left alone."""
    write_image_folder(folder / "images", per_class=14)  # 26 to train on: 24 and 2 for three
    alone, saved, told = attempt(folder / "one", 1), None, []
    for ranks, how, stop_at in ((2, "fsdp", 1), (3, "fsdp", 2), (2, "ddp", 3), (3, "fsdp", None)):
        sharding = f"training.sharding={how}"
        told.append(attempt(folder / "job", ranks, sharding, resume=saved, stop_at=stop_at))
        saved = Path(told[-1][0]["saved"][-1])
    return {"one": alone[0], "attempts": [ranks[:2] for ranks in told]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # each failure walks the heap
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_thorough = sys.argv[2] == "thorough"
    folder = Path(sys.argv[1])
    built_in = by_the_built_in_trainer(folder) if is_thorough else {}
    ranks = of_forks(2, lambda rank: be_rank(rank, sys.argv[1], is_thorough))
    print(json.dumps({"ranks": ranks, "built in": built_in}))
