"""The trainer. Replace data and model with yours, and keep the calls of ``run``."""

import torch
from omegaconf import DictConfig
from torch import nn

from robust_train import Run


def train(cfg: DictConfig, run: Run) -> float:
    """Learn to separate two spirals; return the accuracy, which a sweep optimises."""
    device = torch.device(cfg.device)
    torch.manual_seed(cfg.seed)
    points, labels = two_spirals(cfg.spirals.samples)
    width = cfg.spirals.width
    model = nn.Sequential(
        nn.Linear(2, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 2),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch  # any part of the step's samples
        return nn.functional.cross_entropy(model(x.to(device)), y.to(device))

    first = load(run, model, optimizer)
    run.started(first)
    # samples per optimizer step: constant, also when the launcher halves the micro-batch size
    samples = (
        cfg.training.batch_size * cfg.training.gradient_accumulation_steps
    )
    draws = torch.Generator()
    for step in range(first + 1, cfg.spirals.steps + 1):
        # by the step's own seed, so that a resumed job draws what it would have drawn
        draws.manual_seed(cfg.seed * 2**32 + step)
        chosen = torch.randint(len(points), (samples,), generator=draws)
        optimizer.zero_grad()
        run.backward(
            loss_of,
            (points[chosen], labels[chosen]),
            model,
        )
        optimizer.step()
        run.progress(step, total_steps=cfg.spirals.steps)
        is_last = step == cfg.spirals.steps or run.should_stop()
        if run.should_save() or is_last:
            save(run, model, optimizer, step)
        if is_last:
            break
    with torch.no_grad():
        guessed = model(points.to(device)).argmax(1).cpu()
    return float((guessed == labels).float().mean())


def two_spirals(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of two interleaved spirals, and the spiral of each."""
    labels = torch.arange(samples) % 2
    angle = torch.rand(samples) * 6 + 1
    turned = angle + labels * torch.pi
    points = (
        torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] / 4
    )
    return points + torch.randn_like(points) * 0.02, labels


def save(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    """Write a checkpoint, whole or not at all, and report it."""
    run.checkpoint_dir.mkdir(exist_ok=True)
    path = run.checkpoint_dir / "last.pt"
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    run.checkpoint_saved(path, step)


def load(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load the last checkpoint, if there is one; return the steps done so far."""
    if run.resume_checkpoint is None:
        return 0
    state = torch.load(run.resume_checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
