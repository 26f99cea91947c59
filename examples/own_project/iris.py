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
    in_a_step = cfg.training.batch_size * cfg.training.gradient_accumulation_steps * run.world_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)
    criterion = nn.CrossEntropyLoss()
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    step = run.load(state)

    def loss_of(batch):
        x, y = batch
        return criterion(whole(x.to(cfg.device)), y.to(cfg.device))

    for epoch in range(state["epoch"] + 1, cfg.training.epochs + 1):
        order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(in_a_step):  # A step has the same samples for any split.
            mine = chosen[run.rank :: run.world_size]
            optimizer.zero_grad()
            run.backward(loss_of, (x_train[mine], y_train[mine]), whole)
            optimizer.step()
            step += 1
            run.progress(step)
        state["epoch"] = epoch
        run.save(state, step)
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
