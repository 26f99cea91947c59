"""Two ranks whose model accelerate shards by FSDP2: prints what becomes of it in several attempts.

Run as a script with a folder. accelerate shards on GPUs only, so its state is set to what it is
there; gloo does the rest. The ranks are forks of one interpreter.
"""

import json
import os
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from running_out import CFG, Fuse
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from forked_ranks import of_forks, of_ranks
from robust_train.attempt.run import live_of
from robust_train.config.checks import unchecked
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.host.votes import Votes
from watched_run import WatchedRun

SAMPLES = 17
"""Two steps of eight, and one sample for two ranks."""


def prepared(net, size, ranks):
    """The accelerator and what it prepares."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if ranks > 1:
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    data = TensorDataset(torch.arange(1.0, SAMPLES + 1)[:, None] / SAMPLES)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(net, optimizer, DataLoader(data, size, shuffle=True))


def attempt(folder, ranks, fuse, size, resume=None):
    """Train two epochs in parts of ``size``; on the last rank memory runs out as ``fuse`` says."""
    from robust_train.integrations.accelerate import RobustLoop, effective_batch_size

    split = {"batch_size": size, "gradient_accumulation_steps": 8 // size // ranks}
    cfg = OmegaConf.merge(CFG, {"num_gpus": ranks, "training": split})
    cfg.training.checkpoint_every_steps = 1
    votes = Votes(ranks) if ranks > 1 else None

    def work(rank):
        run = WatchedRun(folder, resume=resume, rank=rank, world_size=ranks, flags=votes)
        live_of(run).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
        torch.manual_seed(0)
        burns = fuse if rank == ranks - 1 else Fuse()
        net = nn.Sequential(nn.Linear(1, 4), burns, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        accelerator, model, optimizer, loader = prepared(net, effective_batch_size(cfg), ranks)
        loop = RobustLoop(accelerator, model, loader, cfg=cfg, run=run)
        losses, error = [], None

        def loss_of(batch):
            x = batch[0].reshape(len(batch[0]), -1)  # fails without samples
            return ((model(x) - 1) ** 2).mean()

        try:
            for _ in loop.epochs(2):
                for batch in loop.batches():
                    losses.append(float(loop.backward(loss_of, batch)))
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        except (RuntimeError, MemoryError) as reason:
            error = str(reason)
        live_of(run).saves.finish()  # as an attempt does when its trainer has ended
        weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        return {
            "kind": type(model).__name__,
            "error": error,
            "weights": torch.cat([weight.detach().flatten() for weight in weights]).tolist(),
            "changed": [
                (e["step"], e["before"], e["after"]) for e in run.of("micro_batch_changed")
            ],
            "losses": losses,
            "started": [e["step"] for e in run.of("training_started")],
            "saved": [e["path"] for e in run.of("checkpoint")],
        }

    return of_ranks(ranks, work) if ranks > 1 else of_forks(1, work)


def main():
    folder = Path(sys.argv[1])
    exhausted = attempt(folder / "two", 2, Fuse("backward", at=4, fits=0), 4)
    saved = Path(exhausted[0]["saved"][-1])
    told = {
        "one": attempt(folder / "one", 1, Fuse(), 8),
        "forward": attempt(folder / "forward", 2, Fuse("forward", at=2), 4),
        "backward": attempt(folder / "backward", 2, Fuse("backward", at=2), 4),
        "exhausted": exhausted,
        "alone": attempt(folder / "alone", 1, Fuse(), 8, saved),
        "next": attempt(folder / "two", 2, Fuse(), 2, saved),
    }
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    main()
