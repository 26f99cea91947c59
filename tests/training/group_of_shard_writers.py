"""Two processes that write and read checkpoints of a sharded model: prints what each has seen.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forked_ranks import of_forks
from robust_train.attempt import checkpoints
from robust_train.attempt.checkpoints import CheckpointFolder, named_map, read_newest
from robust_train.attempt.run import Run
from robust_train.folder.checkpoints import CheckpointError, newest_checkpoint, of_job
from robust_train.model.errors import RankFailure
from robust_train.step.ranks import of_all_ranks
from robust_train.vision.sharding import folder_writer, shard, shares


class Job:
    """A sharded model after one step, and its checkpoints in ``run_dir``."""

    def __init__(self, run_dir, *, keep=5):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3000), nn.BatchNorm1d(3000), nn.Linear(3000, 1))
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train(1)
        run = Run(run_dir=run_dir, rank=dist.get_rank(), world_size=2)
        self.folder = CheckpointFolder(run, keep=keep, write_folder=folder_writer())

    def train(self, seed):
        torch.manual_seed(seed)
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def content(self, step):
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"step": step, "model": model, "optimizer": optimizer, "nested": [(step,)]}

    def read(self, path):
        share = shares(self.model, self.optimizer)
        found = read_newest(path, ["step"], share=share, gather=of_all_ranks)
        return None if found is None else (found[0].name, found[1]["step"])


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
    found = sorted(item.name for item in folder.path.iterdir()) if folder.path.exists() else []
    dist.barrier()
    return found


def with_one_copy(run_dir):
    """The second rank has no memory for a copy, so it writes before it trains on."""
    if dist.get_rank():
        checkpoints.LARGEST_COPY, share = 0.0, checkpoints.LARGEST_COPY
    seen = in_the_background(run_dir)
    if dist.get_rank():
        checkpoints.LARGEST_COPY = share
    return seen


def in_the_background(run_dir):
    job = Job(run_dir)
    content = job.content(1)
    before = sums(content)
    job.folder.save_from_copy(content, 1)
    job.train(2)
    early = newest_checkpoint(job.folder.path, "") is not None
    job.folder.report_written(wait=True)
    path = job.folder.path / "step-00000001"
    own = read_newest(path, share=shares(job.model, job.optimizer), gather=of_all_ranks)
    assert own is not None
    alone = read_alone(path)
    local = own[1]["model"]["0.weight"].to_local().shape
    return {
        "reported early": early,
        "changed": sums(job.content(1)) != before,
        "shards": sums(own[1]) == before,
        "rows of a shard": local[0],
        "one process": alone is None or sums(alone[1]) == before,
        "plain values": own[1]["nested"],
        "names": names(job.folder),
        "in it": sorted(item.name for item in path.iterdir()),
    }


def of_one_step(run_dir):
    """The same step twice, then a later one."""
    job = Job(run_dir, keep=2)
    for step in (1, 1):
        job.folder.save(job.content(step), step)
    dist.barrier()
    twice = [one.path.name for one in of_job(job.folder.path, "")]
    job.folder.save(job.content(2), 2)
    return {"twice": twice, "then": names(job.folder)}


@contextmanager
def files_limited_to(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def without_space(run_dir):
    """The second rank cannot write its shards, then the first one, nor what only it writes."""
    job, said = Job(run_dir), []
    job.folder.save(job.content(1), 1)
    # its shards are larger than 20 kB, all else of the first rank's is smaller
    for rank, most, more in ((1, 20_000, 0), (0, 20_000, 0), (0, 400_000, 200_000)):
        with files_limited_to(most if dist.get_rank() == rank else resource.RLIM_INFINITY):
            try:
                job.folder.save(job.content(2) | {"more": torch.zeros(more)}, 2)
            except CheckpointError as error:
                said.append(str(error))
    left = names(job.folder)
    job.folder.save(job.content(3), 3)
    return {"said": said, "left": left, "then": names(job.folder)}


def out_of_memory(run_dir):
    """The second rank runs out of memory while it writes its shards."""
    job, save = Job(run_dir), torch.save

    def no_room(*args):
        raise MemoryError("no room for a shard")

    if dist.get_rank() == 1:
        torch.save = no_room
    try:
        job.folder.save(job.content(1), 1)
    except (MemoryError, RankFailure) as error:
        text = "".join(traceback.format_exception(error))
        rank = error.rank if isinstance(error, RankFailure) else None
        return {"stack": "in no_room" in text, "rank": rank, "left": names(job.folder)}
    finally:
        torch.save = save
    return {}


def _flip(file, at):
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    file.write_bytes(data)


class RunsCode:
    def __reduce__(self):
        return os.write, (1, b"\ncode of a foreign file was run\n")


def damaged(run_dir):
    """A checkpoint is damaged in one way after the other; an older one is whole."""
    job = Job(run_dir)
    job.folder.save(job.content(1), 1)
    job.folder.save(job.content(2), 2)
    dist.barrier()
    path, whole = job.folder.path / "step-00000002", run_dir / "whole"
    ways = {
        "a flipped byte in a shard": lambda: _flip(path / "__1_0.distcp", 0.1),
        "a flipped byte in the index": lambda: _flip(path / "index.pt", 0.3),
        "no shards of a rank": (path / "__1_0.distcp").unlink,
        "code": lambda: torch.save(RunsCode(), path / "index.pt"),
        "no values": (path / "values.pt").unlink,
    }
    seen: dict[str, Any] = {}
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.copytree(path, whole)
    seen["whole"] = [job.read(path), None if (one := read_alone(path)) is None else one[0].name]
    for name, damage in ways.items():
        dist.barrier()
        if is_first:
            damage()
        dist.barrier()
        read = job.read(path)
        alone = read_alone(path)
        seen[name] = [read, None if alone is None else alone[0].name]
        dist.barrier()
        if is_first:
            shutil.rmtree(path)
            shutil.copytree(whole, path)
    dist.barrier()
    return seen


def on_other_disks(run_dir):
    """The second rank does not see the folder that the first one has until it has looked once."""
    job = Job(run_dir)
    job.folder.save(job.content(1), 1)
    path, elsewhere = job.folder.path / "step-00000001", run_dir / "elsewhere"
    there = elsewhere / path.name if dist.get_rank() else path
    dist.barrier()

    def shown_late(value):
        found = of_all_ranks(value)
        if dist.get_rank() and not elsewhere.exists():
            elsewhere.symlink_to(job.folder.path)
        return found

    share = shares(job.model, job.optimizer)
    late = read_newest(there, ["step"], share=share, gather=shown_late)
    return None if late is None else late[1]["step"]


def from_a_file(run_dir):
    """Shards from a file of whole tensors, as one process writes it."""
    job = Job(run_dir)
    content = job.content(1)
    before = sums(content)
    content = named_map(lambda name, tensor: _whole(tensor), content)
    path = run_dir / "checkpoints" / "step-00000001.pt"
    if dist.get_rank() == 0:
        CheckpointFolder(Run(run_dir=run_dir), keep=1).save(content, 1)
    dist.barrier()
    found = read_newest(path, share=shares(job.model, job.optimizer), gather=of_all_ranks)
    held = []

    def hold(name, tensor):
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        held.append(own.untyped_storage().nbytes())

    named_map(hold, found[1])
    return {"same": sums(found[1]) == before, "held": sum(held), "file": path.stat().st_size}


def killed(run_dir):
    """The first rank dies when all shards are there and the folder has no name."""
    job = Job(run_dir)
    job.folder.save(job.content(1), 1)
    dist.barrier()
    if dist.get_rank() == 0:
        rename = Path.rename
        Path.rename = lambda path, new: (
            os.kill(os.getpid(), signal.SIGKILL) if path.is_dir() else rename(path, new)
        )
    try:
        job.folder.save(job.content(2), 2)
    except RuntimeError as error:  # as of any lost connection
        return {"said": type(error).__name__}
    return {"said": "nothing"}


def be_rank(rank, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    parts = (in_the_background, with_one_copy, of_one_step, without_space, out_of_memory, damaged)
    parts += (on_other_disks, from_a_file)
    seen = {part.__name__: part(folder / part.__name__) for part in parts}
    dist.destroy_process_group()
    return seen


def die(rank, folder):
    store = dist.FileStore(str(folder / "second store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return killed(folder / "killed")


if __name__ == "__main__":
    # once, before the forks
    for name in ("torch._dynamo", "robust_train.vision.sharding"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(sys.argv[1])
    ranks = of_forks(2, lambda rank: be_rank(rank, folder))
    print(json.dumps({"ranks": ranks, "killed": of_forks(2, lambda rank: die(rank, folder))}))
