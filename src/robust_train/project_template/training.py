"""The trainer. Replace the data and the model with your own, and keep the calls to ``run``."""

import torch
from omegaconf import DictConfig
from torch import nn

from robust_train import Run


def train(cfg: DictConfig, run: Run) -> float:
    """Learn to separate two spirals, and return the accuracy, which a sweep optimises."""
    device = torch.device(cfg.device)
    torch.manual_seed(cfg.seed)
    points, labels = two_spirals(cfg.spirals.samples)
    width = cfg.spirals.width
    model = nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        # The batch is the whole step's, or a part of it if memory ran out.
        x, y = batch
        return nn.functional.cross_entropy(model(x.to(device)), y.to(device))

    state = {"model": model, "optimizer": optimizer}
    # 0 without a checkpoint
    last_step = run.load(state)
    # Samples per optimizer step. They stay the same if the launcher halves the micro-batch size.
    samples = cfg.training.batch_size * cfg.training.gradient_accumulation_steps
    draws = torch.Generator()
    for step in range(last_step + 1, cfg.spirals.steps + 1):
        # Each step has its own seed, so that a resumed job draws the same samples.
        draws.manual_seed(cfg.seed * 2**32 + step)
        chosen = torch.randint(len(points), (samples,), generator=draws)
        optimizer.zero_grad()
        run.backward(loss_of, (points[chosen], labels[chosen]), model)
        optimizer.step()
        run.progress(step, total_steps=cfg.spirals.steps)
        is_last = step == cfg.spirals.steps or run.should_stop()
        if run.should_save() or is_last:
            run.save(state, step)
        if is_last:
            break
    with torch.no_grad():
        guessed = model(points.to(device)).argmax(1).cpu()
    return float((guessed == labels).float().mean())


def two_spirals(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of two interleaved spirals, and for each point the number of its spiral."""
    labels = torch.arange(samples) % 2
    angle = torch.rand(samples) * 6 + 1
    turned = angle + labels * torch.pi
    points = torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] / 4
    return points + torch.randn_like(points) * 0.02, labels
