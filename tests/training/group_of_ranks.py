"""Four processes that share optimizer steps over gloo: prints what fails in each.

Run as a script; the processes are forks of one interpreter, so torch is imported once.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training_world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from training_world import WatchedRun, config, write_image_folder

from forked_ranks import of_forks, of_ranks, outcomes
from memory_limit import MIB, lift_limit, limit_growth
from robust_train.folder import identity
from robust_train.model.errors import ConfigError, RankFailure, TrainingStopped, UserError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.ranks import of_all_ranks

WIDE = 1 << 18
"""Numbers that one sample's activation holds: 1 MiB."""

STEPS = ((13, 7), (2, 3), (16, 1))
"""Samples in a step, and the seed of its data: the second leaves two of four ranks without."""

RANKS = 4


class Net(nn.Module):
    """Wide for a moment, so that a batch needs memory; statistics, and a parameter never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.last = nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.only_of_first = nn.Parameter(torch.ones(1))

    def forward(self, x):
        hidden = self.first(x)
        if self.training:
            self.mean.lerp_(hidden.detach().mean(dim=0), 0.5)
        wide = hidden.repeat(1, WIDE // 8) * 2
        return self.last(wide[:, :8])


def data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


def train(batcher, net, rank=0, ranks=RANKS, *, uses_extra=False):
    """Three steps; returns losses and how often each step was repeated.

    With ``uses_extra`` the first rank uses a parameter that no other does.
    """
    model = net if ranks == 1 else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses, repeats = [], []
    for samples, seed in STEPS:
        x, y = data(samples, seed)
        least, more = divmod(samples, ranks)
        start = rank * least + min(rank, more)
        mine = slice(start, start + least + (rank < more))
        sizes: list[int] = []

        def loss_of(batch, sizes=sizes):
            inputs, wanted = batch
            sizes.append(len(inputs))
            loss = mse_loss(model(inputs), wanted)
            if uses_extra and rank == 0:
                loss = loss + net.only_of_first.sum()
            return loss.reshape(1), sizes[-1]

        optimizer.zero_grad()
        loss, kept = batcher.backward(loss_of, (x[mine], y[mine]), model)
        optimizer.step()
        losses.append(loss.item())
        repeats.append(int(len(sizes) > len(kept)))
    return losses, repeats


def is_as_alone(net):
    """Assert that it learned what one process did, and is the same on all ranks."""
    for name in ("first", "last"):
        weight, other = getattr(net, name).weight, getattr(ALONE, name).weight
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-6)
    assert net.unused.grad is None, "an optimizer would decay what nobody uses"
    seen = of_all_ranks([*net.mean.tolist(), net.only_of_first.item()])
    assert all(value == seen[0] for value in seen)


def ranks_train_as_one_process_does(rank):
    net = Net()
    losses, _ = train(MicroBatcher(), net, rank)
    assert losses == pytest.approx(ALONE.losses, abs=1e-5), "of all ranks' samples"
    is_as_alone(net)


def memory_that_runs_out_on_one_rank_splits_the_step_of_all(rank):
    batcher, net = MicroBatcher(), Net()
    if rank == 1:
        limit_growth(3 * MIB)
    _, repeats = train(batcher, net, rank, uses_extra=True)
    lift_limit()
    is_as_alone(net)
    assert net.only_of_first.item() != 1.0
    assert repeats == [int(rank == 1), 0, 0]
    (size,) = set(of_all_ranks(batcher.size))
    assert size in {1, 2, 3}


def where_one_rank_cannot_go_on_all_give_up_with_the_step_taken_back(rank):
    net = Net()
    if rank == 1:
        limit_growth(3 * MIB)
    with pytest.raises(RankFailure, match=r"^rank 1: ") as raised:
        train(MicroBatcher(min_batch_size=100), net, rank)
    lift_limit()
    assert raised.value.is_elsewhere is (rank != 1)
    assert all(p.grad is None for p in net.parameters())


def a_wish_for_smaller_parts_on_one_rank_reaches_all(rank):
    batcher = MicroBatcher(batch_size=4)
    if rank == 0:
        batcher.shrink("a test wishes it")
    train(batcher, Net(), rank)
    assert batcher.size == 2


class RunsOutInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient, None


class Deep(nn.Module):
    """Has no memory for gradients of more samples than ``most``."""

    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.most = most
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(RunsOutInBackward.apply(self.first(x).tanh(), self.most))


def wrapped(how, said, rank):
    """A step of 16 samples with a wrapper that is not the outermost module, or is not named."""
    net = Deep(2 if rank == 1 else 16)
    # a bucket for each parameter: one that is passed over pairs all that follow wrongly
    bucket_mib = 1 if how == "compiled" else 1e-5  # dynamo takes no less
    alone = dist.new_group([rank], use_local_synchronization=True) if how == "in part" else None
    shared = DistributedDataParallel(
        net, bucket_cap_mb=bucket_mib, static_graph=how == "static graph", process_group=alone
    )
    if how == "communication hook":
        shared.register_comm_hook(None, default_hooks.allreduce_hook)
    model: nn.Module = shared
    if how == "compiled":
        model = torch.compile(shared, backend="eager")
    elif how == "after a plain step":  # its next pass would communicate
        shared(data(2, 3)[0]).sum().backward()
        net.zero_grad()
    elif how == "inside of another":
        model = nn.Sequential(nn.Identity(), shared)
    elif how == "SyncBatchNorm":
        model = nn.Sequential(shared, nn.SyncBatchNorm(1))
    elif how == "sparse gradients":
        model = nn.Sequential(shared, nn.Embedding(2, 1, sparse=True))
    x, y = data(16, 5)
    mine = slice(rank * 4, rank * 4 + 4)
    named = net if how == "around the one that is named" else model
    changes: list[object] = []

    def loss_of(batch):
        return mse_loss(model(batch[0]), batch[1])

    refused = pytest.raises(UserError, match=said) if said else contextlib.nullcontext()
    with refused, torch.device("meta" if how == "another default device" else "cpu"):
        MicroBatcher(on_event=changes.append).backward(loss_of, (x[mine], y[mine]), named)
    if said:
        return
    assert len(changes) == (rank == 1), "the others wait"
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for start in range(0, 16, 2):
        share = slice(start, start + 2)
        (mse_loss(net(x[share]), y[share]) / 8).backward()
    for gradient, other in zip(gradients, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, other.grad, rtol=0, atol=1e-6, msg=how)


def ddp_is_found_at_any_depth_or_refused(rank):
    """One rank runs out of memory in its backward pass."""
    for how, said in {
        "plain": None,
        "after a plain step": None,
        "compiled": None,
        "inside of another": None,
        "around the one that is named": None,
        "another default device": None,
        "static graph": "has static_graph",
        "communication hook": "has a communication hook",
        "in part": "with some of the ranks only",
        "SyncBatchNorm": r"run.backward: 1 \(SyncBatchNorm\) gathers",
        "sparse gradients": r"run.backward: 1 \(Embedding\) has sparse gradients",
    }.items():
        wrapped(how, said, rank)


def messages_inside_the_function_are_refused_whatever_their_group(rank):
    """First of all parts, for later ones are not looked at for those of another group."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = Net()
    model = DistributedDataParallel(net)
    x, y = data(8, 5)
    mine = slice(rank * 2, rank * 2 + 2)

    def backward(send):
        def loss_of(batch):
            send(torch.ones(1))
            return mse_loss(model(batch[0]), batch[1])

        MicroBatcher().backward(loss_of, (x[mine], y[mine]), model)

    def in_a_pair(tensor):
        dist.all_reduce(tensor, group=pairs[rank // 2])

    def to_a_neighbour(tensor):
        (dist.recv if rank % 2 else dist.send)(tensor, rank ^ 1)

    backward(in_a_pair)
    with pytest.raises(UserError, match=r"over a process group of your own \(a collective, send"):
        backward(in_a_pair)
    with pytest.raises(UserError, match="a collective of your own, send or recv"):
        backward(to_a_neighbour)


PARTS = (
    messages_inside_the_function_are_refused_whatever_their_group,
    ranks_train_as_one_process_does,
    memory_that_runs_out_on_one_rank_splits_the_step_of_all,
    where_one_rank_cannot_go_on_all_give_up_with_the_step_taken_back,
    a_wish_for_smaller_parts_on_one_rank_reaches_all,
    ddp_is_found_at_any_depth_or_refused,
)
ALONE = Net()


def a_rank_that_is_alone_repeats_a_step_of_a_wrapped_model(rank):
    """In its backward pass, of which the wrappers are told nothing."""
    mesh = init_device_mesh("cpu", (1,))
    x, y = data(16, 5)
    for wrap in (lambda net: DistributedDataParallel(net), lambda net: fully_shard(net, mesh=mesh)):
        gradients = []
        for most in (16, 2):
            net, batcher = Deep(most), MicroBatcher()
            model = wrap(net)

            def loss_of(batch, model=model):
                return mse_loss(model(batch[0]), batch[1])

            for _ in range(2):  # the second one after a repeated one
                net.zero_grad()
                batcher.backward(loss_of, (x, y), net)
            assert batcher.size == (None if most == 16 else 2)
            gradients.append(
                [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()]
            )
        for gradient, other in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, other, rtol=0, atol=1e-6)


def be_rank(rank, folder):
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    return outcomes(dict.fromkeys(PARTS, (rank,)))


def be_alone(rank):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return outcomes({a_rank_that_is_alone_repeats_a_step_of_a_wrapped_model: (rank,)})


@contextlib.contextmanager
def runs_out_once(is_meant):
    """Have a pass of more than six samples run out of memory in its last layer."""

    def must_fit(module, inputs, output):
        if isinstance(module, nn.Linear) and len(output) > 6 and handles:
            handles.pop().remove()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handles = []
    if is_meant:
        handles.append(nn.modules.module.register_module_forward_hook(must_fit))
    yield


def built_in(folder, rank, ranks, resume, stop_at, *more):
    """One attempt of the built-in trainer at 24 samples a step; what this rank told and returned.

    The last step of an epoch has 8 samples, and the effective batch is the same for 1, 2, 4 ranks.
    """
    cfg = config(
        "dataset=image_folder",
        f"dataset.root={folder.parent / 'images'}",
        "model.image_size=16",
        "model.width=4",
        "model.dropout=0",
        "training.epochs=2",
        "training.num_workers=0",
        "training.mixed_precision=false",
        f"training.batch_size={24 // ranks}",
        *more,
    )
    run = WatchedRun(folder, resume=resume, stop_at_step=stop_at, rank=rank, world_size=ranks)
    result = None
    with contextlib.suppress(TrainingStopped), runs_out_once(stop_at == 1 and rank == 1):
        result = training_world.train(cfg, run)
    return {
        "result": result,
        "saved": [event["path"] for event in run.of("checkpoint")],
        "changed": [event["after"] for event in run.of("micro_batch_changed")],
        "epochs": run.of("epoch"),
    }


def attempt(folder, ranks, *more, resume=None, stop_at=None):
    """An attempt of the built-in trainer with ``ranks`` ranks, set up like the launcher does."""
    return of_ranks(ranks, lambda rank: built_in(folder, rank, ranks, resume, stop_at, *more))


def differ_in_the_checkpoint(folder, saved):
    """What two ranks do with a checkpoint of which the second has half."""
    half = folder.parent / "half" / saved.name
    half.parent.mkdir()
    half.write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])

    def resume(rank):
        identity.PAUSES_SECONDS = (0.1,)
        try:
            built_in(folder, rank, 2, half if rank else saved, 1)
        except ConfigError as error:
            return str(error)
        return "resumed"

    return of_ranks(2, resume)


def main():
    folder = Path(sys.argv[1])
    ALONE.losses, _ = train(MicroBatcher(), ALONE, ranks=1)
    ranks = of_forks(RANKS, lambda rank: be_rank(rank, folder))
    alone = of_forks(1, lambda rank: be_alone(rank))
    write_image_folder(folder / "images", per_class=16)
    single = attempt(folder / "one", 1)
    first = attempt(folder / "several", 2, stop_at=1)
    saved = Path(first[0]["saved"][-1])
    rest = attempt(folder / "several", 4, resume=saved)
    other_disk = differ_in_the_checkpoint(folder / "several", saved)
    seen = {
        "ranks": ranks,
        "alone": alone,
        "one": single,
        "first": first,
        "rest": rest,
        "other disk": other_disk,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
