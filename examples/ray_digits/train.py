"""A small network on scikit-learn's digits. One ``train(cfg, run)``, under the launcher::

    python train_robust.py trainer._target_=examples.ray_digits.train.train num_gpus=2

and in two workers of Ray, which places them and starts them again::

    python -m examples.ray_digits.train
"""

from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from robust_train import TrainingStopped, launch


def digits():
    """1,797 scanned digits of 8 x 8 pixels, and what they are."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def network(width):
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def accuracy(model, images, labels, cfg, run):
    """Share of the digits that are recognised, also if only a part fits into memory."""

    def hits(batch):
        x, y = (tensor.to(cfg.device) for tensor in batch)
        return (model(x).argmax(1) == y).sum().item()

    with torch.no_grad():
        return sum(run.forward(hits, (images, labels), model)) / len(labels)


def train(cfg, run):
    """Train for ``cfg.training.epochs``; the launcher and Ray call this for each attempt."""
    # Ray's workers already have a process group.
    if run.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if cfg.device == "cpu" else "nccl")
    torch.manual_seed(cfg.seed)
    images, labels = digits()
    model = network(cfg.model.width).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)
    state = {"model": model, "optimizer": optimizer}
    step = run.load(state)
    whole = DistributedDataParallel(model) if run.world_size > 1 else model
    per_step = cfg.training.batch_size * cfg.training.gradient_accumulation_steps * run.world_size
    in_epoch = -(-len(labels) // per_step)

    def loss_of(batch):
        x, y = (tensor.to(cfg.device) for tensor in batch)
        return nn.functional.cross_entropy(whole(x), y)

    while step < cfg.training.epochs * in_epoch:
        epoch, number = divmod(step, in_epoch)
        shuffled = torch.Generator().manual_seed(cfg.seed + epoch)
        order = torch.randperm(len(labels), generator=shuffled)
        mine = order[number * per_step : (number + 1) * per_step][run.rank :: run.world_size]
        loss = run.backward(loss_of, (images[mine], labels[mine]), whole)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.progress(step, loss=loss)
        stops = run.should_stop()
        if run.should_save() or stops:
            run.save(state, step)
        if stops:
            raise TrainingStopped
    run.save(state, step)
    return accuracy(model, images, labels, cfg, run)


def worker(config):
    """Run ``train`` as one of Ray's workers: one rank of the job in the run folder."""
    summary = launch(train, config["cfg"], run_dir=config["run_dir"])
    print(f"accuracy {summary.result:.3f}")


def main(run_dir="outputs/ray_digits", workers=2):
    """Train in Ray's workers; a worker that dies starts all again, up to three times."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    training = {"batch_size": 128, "gradient_accumulation_steps": 1, "epochs": 10, "lr": 1e-3}
    device = {} if torch.cuda.is_available() else {"auto_device": False, "device": "cpu"}
    trainer = TorchTrainer(
        worker,
        train_loop_config={
            "cfg": {"seed": 1, "model": {"width": 32}, "training": training, **device},
            "run_dir": str(Path(run_dir).resolve()),  # All workers have to see this disk.
        },
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
