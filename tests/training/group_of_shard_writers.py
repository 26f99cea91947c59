"""Two processes that write and read checkpoints of a sharded model: prints what fails in each.

Usage: group_of_shard_writers.py FOLDER
"""

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forked_ranks import of_forks, outcomes
from robust_train.attempt import host_copies
from robust_train.attempt.checkpoint_content import map_tensors
from robust_train.attempt.read_checkpoint import read_newest
from robust_train.attempt.run import Run, live_of
from robust_train.folder.checkpoint_writing import CheckpointError
from robust_train.folder.checkpoints import newest_checkpoint, of_job
from robust_train.model.errors import RankFailure
from robust_train.step.ranks import of_all_ranks
from robust_train.vision.sharding import create_folder_writer, create_shard_loader, shard


class Job:
    """A sharded model after one step, and its checkpoints in ``run_dir``."""

    def __init__(self, run_dir, *, keep=5):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3000), nn.BatchNorm1d(3000), nn.Linear(3000, 1))
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train(1)
        run = Run(run_dir=run_dir, rank=dist.get_rank(), world_size=2)
        self.folder = live_of(run).saves.folder(keep, write_folder=create_folder_writer())

    def train(self, seed):
        torch.manual_seed(seed)
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def content(self, step):
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        state = {"step": step, "model": model, "optimizer": optimizer, "nested": [(step,)]}
        # shards with one name, of a net that has an average and of one that is called so
        return state | {"net": {"ema.a": model["0.weight"]}, "net.ema": {"a": model["2.weight"]}}

    def read(self, path):
        share = create_shard_loader(self.model, self.optimizer)
        newest = read_newest(path, ["step"], share=share, gather=of_all_ranks)
        return None if newest is None else (newest[0].name, newest[1]["step"])


def sums(content):
    """One number for each tensor, the same for shards and whole ones."""
    states = content["optimizer"]["state"]
    tensors = [*content["model"].values(), *(t for k in sorted(states) for t in states[k].values())]
    return [float(_whole(tensor).double().abs().sum()) for tensor in tensors]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def read_alone(path):
    """What a process without shards reads, on the first rank."""
    return read_newest(path, ["step"]) if dist.get_rank() == 0 else None


def names(folder):
    dist.barrier()
    listing = sorted(item.name for item in folder.path.iterdir()) if folder.path.exists() else []
    dist.barrier()
    return listing


def listed(*folders):
    return sorted(name for folder in folders for name in (folder, f"{folder}.manifest.json"))


def each_rank_writes_its_shards_while_training_goes_on(run_dir):
    job = Job(run_dir)
    content = job.content(1)
    before = sums(content)
    job.folder.save_from_copy(content, 1)
    job.train(2)
    early = newest_checkpoint(job.folder.path, "")
    job.folder.report_written(wait=True)
    path = job.folder.path / "step-00000001"
    _, restored = read_newest(
        path, share=create_shard_loader(job.model, job.optimizer), gather=of_all_ranks
    )
    alone = read_alone(path)
    assert early is None, "it is reported between two steps"
    assert names(job.folder) == listed("step-00000001")
    assert sums(job.content(1)) != before, "it was trained in the meantime"
    assert sums(restored) == before
    assert alone is None or sums(alone[1]) == before
    assert restored["nested"] == [(1,)]
    first, last = (_whole(restored["model"][name]) for name in ("0.weight", "2.weight"))
    for copy in (restored, restored if alone is None else alone[1]):
        assert torch.equal(copy["net"]["ema.a"], first)
        assert torch.equal(copy["net.ema"]["a"], last)
    assert restored["model"]["0.weight"].to_local().shape[0] == 1500
    shards = {"__0_0.distcp", "__1_0.distcp"}
    assert {file.name for file in path.iterdir()} == {".metadata", "index.pt", "values.pt", *shards}


def a_rank_without_memory_for_a_copy_writes_before_it_trains_on(run_dir):
    share = host_copies.LARGEST_COPY
    if dist.get_rank():
        host_copies.LARGEST_COPY = 0.0
    each_rank_writes_its_shards_while_training_goes_on(run_dir)
    host_copies.LARGEST_COPY = share


def a_checkpoint_of_the_same_step_replaces_none(run_dir):
    job = Job(run_dir, keep=2)
    for step in (1, 1):
        job.folder.save(job.content(step), step)
    dist.barrier()
    twice = [manifest.path.name for manifest in of_job(job.folder.path, "")]
    job.folder.save(job.content(2), 2)
    assert names(job.folder) == listed("step-00000001-again", "step-00000002")
    assert twice == ["step-00000001", "step-00000001-again"]


@contextmanager
def files_limited_to(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def all_ranks_learn_that_one_has_no_space_and_can_go_on(run_dir):
    """The second rank cannot write its shards, then the first one, nor what only it writes."""
    job, said = Job(run_dir), []
    job.folder.save(job.content(1), 1)
    # its shards are larger than 20 kB, all else of the first rank's is smaller
    for rank, most, more in ((1, 20_000, 0), (0, 20_000, 0), (0, 400_000, 200_000)):
        with files_limited_to(most if dist.get_rank() == rank else resource.RLIM_INFINITY):
            try:
                job.folder.save(job.content(2) | {"more": torch.zeros(more)}, 2)
            except CheckpointError as error:
                said.append(str(error).rpartition("step-00000002")[2])
    left = names(job.folder)
    job.folder.save(job.content(3), 3)
    assert names(job.folder) == listed("step-00000001", "step-00000003")
    assert said == [f", rank {rank}: File too large" for rank in (1, 0, 0)]
    assert left == listed("step-00000001")


def a_rank_without_memory_to_write_is_known_to_all(run_dir):
    job, save = Job(run_dir), torch.save

    def no_room(*args):
        raise MemoryError("no room for a shard")

    if dist.get_rank() == 1:
        torch.save = no_room
    with pytest.raises(MemoryError if dist.get_rank() else RankFailure) as raised:
        job.folder.save(job.content(1), 1)
    torch.save = save
    assert names(job.folder) == []
    assert "in no_room" in "".join(traceback.format_exception(raised.value))
    assert getattr(raised.value, "rank", 1) == 1


def _flip(file, at):
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    file.write_bytes(data)


class RunsCode:
    def __reduce__(self):
        return os.write, (1, b"\ncode of a foreign file was run\n")


def a_damaged_folder_is_passed_over_on_all_ranks(run_dir):
    """For an older one, which is whole."""
    job = Job(run_dir)
    job.folder.save(job.content(1), 1)
    job.folder.save(job.content(2), 2)
    dist.barrier()
    path, whole = job.folder.path / "step-00000002", run_dir / "whole"
    ways = {
        "none": lambda: shutil.copytree(path, whole),
        "a flipped byte in a shard": lambda: _flip(path / "__1_0.distcp", 0.1),
        "a flipped byte in the index": lambda: _flip(path / "index.pt", 0.3),
        "no shards of a rank": (path / "__1_0.distcp").unlink,
        "code": lambda: torch.save(RunsCode(), path / "index.pt"),
        "no values": (path / "values.pt").unlink,
    }
    seen = {}
    is_first = dist.get_rank() == 0
    for name, damage in ways.items():
        if is_first:
            damage()
        dist.barrier()
        read, alone = job.read(path), read_alone(path)
        seen[name] = [read, alone and alone[0].name]
        dist.barrier()
        if is_first:
            shutil.rmtree(path)
            shutil.copytree(whole, path)
    dist.barrier()
    for name, answer in seen.items():
        step = 2 if name == "none" else 1
        folder = f"step-0000000{step}"
        assert answer == [(folder, step), folder if is_first else None], (name, answer)


def shown_late(path):
    """Where a rank finds the checkpoint ``path``, and how ranks gather: the second one does not see
    the folder that the first one has until it has looked once."""
    elsewhere = path.parent.with_name("elsewhere")

    def gather(value):
        values = of_all_ranks(value)
        if dist.get_rank() and not elsewhere.exists():
            elsewhere.symlink_to(path.parent)
        return values

    return elsewhere / path.name if dist.get_rank() else path, gather


def ranks_wait_for_a_checkpoint_that_a_network_disk_shows_later(run_dir):
    job = Job(run_dir)
    job.folder.save(job.content(1), 1)
    there, gather = shown_late(job.folder.path / "step-00000001")
    dist.barrier()
    share = create_shard_loader(job.model, job.optimizer)
    _, content = read_newest(there, ["step"], share=share, gather=gather)
    assert content["step"] == 1


def ranks_of_a_loop_go_on_from_one_checkpoint(run_dir):
    """Though one of them is late to see it."""
    rank = dist.get_rank()
    run = Run(run_dir=run_dir, rank=rank, world_size=2)
    run.save({"some": 1}, 1)
    run.finish_saving()
    newest, gather = shown_late(run.checkpoint_dir / "step-00000001.pt")
    run = Run(run_dir=run_dir, rank=rank, world_size=2, resume_checkpoint=newest)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("robust_train.step.ranks.of_all_ranks", gather)
        assert run.load({"some": 0}) == 1


def shards_are_read_from_a_file_of_whole_tensors(run_dir):
    """As one process writes it."""
    job = Job(run_dir)
    content = job.content(1)
    before = sums(content)
    content = map_tensors(lambda name, tensor: _whole(tensor), content)
    path = run_dir / "checkpoints" / "step-00000001.pt"
    if dist.get_rank() == 0:
        live_of(Run(run_dir=run_dir)).saves.folder(1).save(content, 1)
    dist.barrier()
    _, restored = read_newest(
        path, share=create_shard_loader(job.model, job.optimizer), gather=of_all_ranks
    )
    held = []

    def hold(name, tensor):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        held.append(local.untyped_storage().nbytes())

    map_tensors(hold, restored)
    assert sums(restored) == before
    assert sum(held) < 0.7 * path.stat().st_size


def killed(run_dir):
    """The first rank dies when all shards are there and the folder has no name."""
    job = Job(run_dir)
    job.folder.save(job.content(1), 1)
    dist.barrier()
    if dist.get_rank() == 0:
        rename = Path.rename

        def die_at_a_folder(path, new):
            if path.is_dir():
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(path, new)

        Path.rename = die_at_a_folder
    try:
        job.folder.save(job.content(2), 2)
    except RuntimeError as error:  # as of any lost connection
        return type(error).__name__
    return None


PARTS = (
    each_rank_writes_its_shards_while_training_goes_on,
    a_rank_without_memory_for_a_copy_writes_before_it_trains_on,
    a_checkpoint_of_the_same_step_replaces_none,
    all_ranks_learn_that_one_has_no_space_and_can_go_on,
    a_rank_without_memory_to_write_is_known_to_all,
    a_damaged_folder_is_passed_over_on_all_ranks,
    ranks_wait_for_a_checkpoint_that_a_network_disk_shows_later,
    ranks_of_a_loop_go_on_from_one_checkpoint,
    shards_are_read_from_a_file_of_whole_tensors,
)


def be_rank(rank, folder, act):
    store = dist.FileStore(str(folder / act.__name__), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return act(folder)


def all_parts(folder):
    return outcomes({part: (folder / part.__name__,) for part in PARTS})


if __name__ == "__main__":
    # once, before the forks
    for name in ("torch._dynamo", "robust_train.vision.sharding"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(sys.argv[1])
    ranks = of_forks(2, lambda rank: be_rank(rank, folder, all_parts))
    dead = of_forks(2, lambda rank: be_rank(rank, folder, killed))
    print(json.dumps({"ranks": ranks, "killed": dead}))
