"""Two processes that train a model sharded by FSDP2 over gloo: prints what each has seen.

Usage: group_of_sharded_ranks.py FOLDER few|thorough
"""

import gc
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from group_of_ranks import attempt, of_forks
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

from memory_limit import MIB, lift_limit, limit_growth
from robust_train.model.errors import UserError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.splitting import bounds
from robust_train.vision.sharding import share_buffers

SHARES = (slice(0, 8), slice(8, 13))
"""Uneven on purpose: with parts of two samples rank 1 has one part less."""

WIDE = 1 << 20
"""Numbers of one sample in a block, for a moment: 4 MiB, and the same again."""
BF16, F32 = torch.bfloat16, torch.float32
KINDS = ("plain", "checkpointing", "bf16")


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


class Block(nn.Module):
    """Runs out of memory where it is told to."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.bomb: str | None = None  # where it runs out
        self.most = 2  # samples that fit
        self.at = 1  # in which pass from now on
        self.is_once = False
        self.activation = 16

    def must_fit(self, where, samples):
        self.at -= self.bomb == where
        if self.bomb == where and self.at <= 0 and samples > self.most:
            self.bomb = None if self.is_once else where
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


def worst_gradient(model):
    one = network()
    x, y = data()
    nn.functional.mse_loss(one(x), y).backward()
    return furthest(model, one)


def furthest(model, one):
    """How far a sharded model's gradients are from those of another one."""
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)


def every_place(rank, mesh, is_thorough):
    """Memory runs out once in each place, on each rank, in the first step and in a later one."""
    seen = []
    places = list(itertools.product((True, False), ("forward", "backward"), (1, 3), (0, 1), (0, 1)))
    # each value of each of them, and each pair of the first and of the last two
    few = [places[n] for n in (0b00_0_00, 0b01_0_11, 0b10_1_01, 0b11_1_10)]
    for reshards, where, block, bad, when in places if is_thorough else few:
        model = sharded(mesh, reshard_after_forward=reshards)
        batcher = MicroBatcher(batch_size=4)
        x = data()[0][SHARES[rank]]
        with torch.no_grad():
            outputs = network()(x)
        repeats = []
        for number in range(3):
            model[block].bomb = where if rank == bad and number == when else None
            loss, repeated = step(batcher, model, SHARES[rank])
            repeats.append(repeated)
            worst, loss = worst_gradient(model), loss.item()
            model.zero_grad()
        model[block].bomb = "forward" if rank == bad else None
        kept = validate(batcher, model, SHARES[rank])
        seen.append(
            {
                "place": f"{where} of block {block} on rank {bad} in step {when}, {reshards}",
                "repeats": repeats,
                "expected": [int(number == when) for number in range(3)],
                "worst": worst,
                "loss": loss,
                "size": batcher.size,
                "validation": (kept - outputs).abs().max().item(),
            }
        )
    return seen


def sharded_as(mesh, kind):
    options = {"mp_policy": MixedPrecisionPolicy(BF16, F32)} if kind == "bf16" else {}
    model = sharded(mesh, **options)
    if kind == "checkpointing":
        for part in model[1:4]:
            checkpoint(part)
    return model


def gradient_of_one_process(model, kind, size):
    """Give ``model`` the gradient of a step; bf16's rounding is that of parts of ``size``."""
    x, y = data()
    if kind != "bf16":
        nn.functional.mse_loss(model(x), y).backward()
        return
    for share in SHARES:
        samples = share.stop - share.start
        for start, stop in bounds(samples, size):
            part = slice(share.start + start, share.start + stop)
            coarse = network().to(BF16)
            coarse.load_state_dict(model.state_dict())
            loss = nn.functional.mse_loss(coarse(x[part].to(BF16)).float(), y[part])
            # as a rank computes it: another rounding of the weight is one of bf16's digits
            (loss * (len(x[part]) / samples * (samples * 2 / len(x)))).backward()
            for mine, its in zip(model.parameters(), coarse.parameters(), strict=True):
                mine.grad = its.grad.float() / 2 + (0 if mine.grad is None else mine.grad)


def differs_from_one_process(rank, mesh, kind):
    """How far the clipped gradients of AdamW's steps are from those of one process, the step in
    which memory runs out and those after it included."""
    model, one = sharded_as(mesh, kind), network()
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2, eps=1e-4) for net in (model, one)]
    batcher, worst = MicroBatcher(batch_size=4), 0.0
    for number in range(3):
        model[2].bomb = "backward" if rank == 1 and number == 1 else None
        assert step(batcher, model, SHARES[rank])[1] == int(number == 1)
        gradient_of_one_process(one, kind, batcher.size)
        for net in (model, one):
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        worst = max(worst, furthest(model, one))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def differs_at_the_same_split(rank, mesh, kind):
    """How far a step that is repeated at the same size is from one that is not."""

    def train(fails):
        model = sharded_as(mesh, kind)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batcher = MicroBatcher(batch_size=4, min_batch_size=4)
        batcher.training_size.smaller_than = lambda failed: 4
        for number in range(3):
            if fails and rank == 1 and number == 1:
                model[2].bomb, model[2].is_once = "backward", True
            assert step(batcher, model, SHARES[rank])[1] == int(fails and number == 1)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])

    return (train(False) - train(True)).abs().max().item()


def without_resharding(rank, mesh):
    """Weights stay gathered between the parts of a step, so that these send different things."""
    seen = []
    for where, part in itertools.product(("forward", "backward"), (1, 2)):
        model = sharded(mesh, reshard_after_forward=False)
        batcher = MicroBatcher(batch_size=4)
        for number in range(2):
            model.set_reshard_after_backward(False)
            if number == 1 and rank == 1:
                model[1].bomb, model[1].at = where, part
            _, repeated = step(batcher, model, SHARES[rank])
            for module in (*model[1:4], model):
                module.reshard()
            worst = worst_gradient(model)
            model.zero_grad()
        seen.append([f"{where} {part}", repeated, worst])
    return seen


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


def short_of_memory(rank, mesh):
    model = sharded(mesh)
    for part in model[1:4]:
        part.activation = WIDE
    batcher = MicroBatcher()
    if rank == 1:
        limit_growth(28 * MIB)
    _, repeated = step(batcher, model, SHARES[rank])
    lift_limit()
    return [repeated, batcher.size, worst_gradient(model)]


def exhausted(rank, mesh):
    model = sharded(mesh)
    model[2].bomb, model[2].most = ("backward" if rank == 0 else None), 0
    try:
        step(MicroBatcher(batch_size=4, min_batch_size=2), model, SHARES[rank])
    except Exception as error:
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        return [error.rank, error.is_elsewhere, has_gradients]
    return []


def refused(model):
    try:
        net = model[0] if isinstance(model, list) else model
        MicroBatcher(batch_size=8).backward(lambda part: net(part[0]).mean(), data(), model)
    except UserError as error:
        return str(error)
    return "not refused"


def refusals(mesh):
    own, other = sharded(mesh), network()
    own[1].set_custom_all_gather(DefaultAllGather())
    own[2].set_custom_all_gather(OwnAllGather())
    fully_shard(other[1], mesh=mesh)
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    hybrid = fully_shard(network(), mesh=both)
    beside = [sharded(mesh), DistributedDataParallel(network())]
    skips = Skips(*network())
    fully_shard(skips[1], mesh=mesh)
    fully_shard(skips, mesh=mesh)
    models = {
        "own": own,
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


def statistics(rank):
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(rank)
    share_buffers(norm)
    return norm.running_mean.tolist()


def be_rank(rank, folder, is_thorough):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    seen = {
        "places": every_place(rank, mesh, is_thorough),
        "at the same split": {kind: differs_at_the_same_split(rank, mesh, kind) for kind in KINDS},
        "from one process": {kind: differs_from_one_process(rank, mesh, kind) for kind in KINDS},
        "short_of_memory": short_of_memory(rank, mesh),
        "without resharding": without_resharding(rank, mesh),
        "exhausted": exhausted(rank, mesh),
        "refused": refusals(mesh),
        "statistics": statistics(rank),
    }
    dist.destroy_process_group()
    return seen


def by_the_built_in_trainer(folder):
    """One job in attempts with several numbers of ranks, sharded or not, and one left alone."""
    write_image_folder(folder / "images", per_class=14)  # 26 to train on: 24 and 2 for three
    one, saved, told = attempt(folder / "one", 1), None, []
    for ranks, how, stop_at in ((2, "fsdp", 1), (3, "fsdp", 2), (2, "ddp", 3), (3, "fsdp", None)):
        sharding = f"training.sharding={how}"
        told.append(attempt(folder / "job", ranks, sharding, resume=saved, stop_at=stop_at))
        saved = Path(told[-1][0]["saved"][-1])
    return {"one": one[0], "attempts": [ranks[:2] for ranks in told]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # each failure walks the heap
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_thorough = sys.argv[2] == "thorough"
    folder = Path(sys.argv[1])
    built_in = by_the_built_in_trainer(folder) if is_thorough else {}
    ranks = of_forks(2, lambda rank: be_rank(rank, sys.argv[1], is_thorough))
    print(json.dumps({"ranks": ranks, "built in": built_in}))
