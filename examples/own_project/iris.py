"""The trainer: which of three species an iris is, from four lengths (R. A. Fisher, 1936)."""

import csv
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(cfg, run):
    torch.manual_seed(cfg.seed)
    x_train, y_train, x_test, y_test = read(Path(cfg.data.file), cfg.data.test_every)
    model = network(list(cfg.model.hidden)).to(cfg.device)
    whole = model
    if run.world_size > 1:
        dist.init_process_group("gloo" if cfg.device == "cpu" else "nccl")
        whole = DistributedDataParallel(model)
    in_a_step = (
        cfg.training.batch_size
        * cfg.training.gradient_accumulation_steps
        * run.world_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)
    criterion = nn.CrossEntropyLoss()
    done = resume(run, model, optimizer)
    step = done * -(-len(x_train) // in_a_step)
    run.started(step)

    def loss_of(batch):
        x, y = batch
        return criterion(whole(x.to(cfg.device)), y.to(cfg.device))

    for epoch in range(done + 1, cfg.training.epochs + 1):
        order = torch.randperm(
            len(x_train), generator=torch.Generator().manual_seed(epoch)
        )
        for chosen in order.split(in_a_step):  # the same samples however they are split
            mine = chosen[run.rank :: run.world_size]
            optimizer.zero_grad()
            run.backward(loss_of, (x_train[mine], y_train[mine]), whole)
            optimizer.step()
            step += 1
            run.progress(step)
        if run.is_main:
            save(run, model, optimizer, epoch, step)
        if run.should_stop():
            break
    with torch.no_grad():
        hits = model(x_test.to(cfg.device)).argmax(1).cpu() == y_test
    return {"objective": hits.float().mean(), "model": cfg.model.name}


def network(hidden):
    sizes = [4, *hidden, 3]
    layers = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def read(path, test_every):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    species = sorted({row["species"] for row in rows})
    y = torch.tensor([species.index(row.pop("species")) for row in rows])
    x = torch.tensor([[float(value) for value in row.values()] for row in rows])
    x = (x - x.mean(0)) / x.std(0)
    is_test = torch.arange(len(x)) % test_every == 0
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


def save(run, model, optimizer, epoch, step):
    run.checkpoint_dir.mkdir(exist_ok=True)
    path = run.checkpoint_dir / "last.pt"
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)  # whole or not at all
    run.checkpoint_saved(path, step)


def resume(run, model, optimizer):
    if run.resume_checkpoint is None:
        return 0
    state = torch.load(run.resume_checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]
