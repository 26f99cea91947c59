"""A small transformer on scikit-learn's digits, sharded by FSDP2, under the launcher::

python train_robust.py trainer._target_=examples.fsdp2_digits.train.train num_gpus=2
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from robust_train import TrainingStopped

WHOLE = {"full_state_dict": True, "cpu_offload": True}


def digits():
    """1,797 scanned digits of 8 rows of 8 pixels, and what they are."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)


class Net(nn.Module):
    """Reads the rows of a digit."""

    def __init__(self, width, blocks=2):
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.places = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, bias=False
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.rows(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build(cfg, run):
    """Return the model, each rank with its share of the weights."""
    torch.manual_seed(cfg.seed)
    model = Net(cfg.model.width).to(cfg.device)
    if run.world_size > 1:
        dist.init_process_group("gloo" if cfg.device == "cpu" else "nccl")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def train(cfg, run):
    """The launcher calls this in every rank, for each attempt."""
    images, labels = digits()
    model = build(cfg, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)
    state = {"model": None, "optimizer": None}
    step = run.load(state)
    if step:  # Any number of ranks can resume.
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
    per_step = cfg.training.batch_size * cfg.training.gradient_accumulation_steps * run.world_size
    in_epoch = -(-len(labels) // per_step)

    def loss_of(batch):
        x, y = (tensor.to(cfg.device) for tensor in batch)
        return nn.functional.cross_entropy(model(x), y)

    def save():
        # Every rank contributes its shard, and rank 0 writes the file.
        weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**WHOLE))
        run.save({"model": weights, "optimizer": moments}, step)

    while step < cfg.training.epochs * in_epoch:
        epoch, number = divmod(step, in_epoch)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        chosen = order[number * per_step : (number + 1) * per_step]
        mine = chosen[run.rank :: run.world_size]
        loss = run.backward(loss_of, (images[mine], labels[mine]), model)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.progress(step, loss=loss)
        stops = run.should_stop()
        if run.should_save() or stops:
            save()
        if stops:
            raise TrainingStopped
    save()
    return accuracy(model, images, labels, cfg, run)


def accuracy(model, images, labels, cfg, run):
    """Share of the digits that are recognised. All ranks have equally many passes."""
    model.eval()

    def hits(batch):
        x, y = (tensor.to(cfg.device) for tensor in batch)
        return (model(x).argmax(1) == y).sum().item()

    with torch.no_grad():
        return sum(run.forward(hits, (images, labels), model)) / len(labels)
