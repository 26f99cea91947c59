"""One training in each form that a trainer may have, for ``tests/conformance``.

Each form learns the same way whatever happens to it, saves every other step, and writes its final
weights. After each step it prints much, and may be held or meet what the test has chosen.
"""

import json
import os
import sys
import time
from pathlib import Path

from robust_train.attempt.run import live_of
from robust_train.folder.checkpoints import SUFFIX

STEPS, EFFECTIVE, EPOCHS = 12, 8, 4
SAMPLES = 17  # an epoch's third step has one: of two ranks the other one has none
PRINTED_CHARACTERS = 20_000  # after each step; all of them are more than a pipe holds


class Meeting:
    """What a rank meets in the job's first attempt from the first saved step on."""

    def __init__(self, *, is_here: bool = True, is_main: bool = True) -> None:
        self.what = os.environ.get("MEETS", "") if is_here else ""
        self.is_main = is_main
        self.is_met = False

    def after_step(self, *, has_saved: bool) -> None:
        """Print; once there is a checkpoint, say so, be held, and meet what there is to meet."""
        print("x" * PRINTED_CHARACTERS, flush=True)
        if not has_saved:
            return
        ready = Path(os.environ["READY_FILE"])
        if self.is_main and not ready.exists():
            ready.with_suffix(".new").write_text(str(os.getpid()))
            ready.with_suffix(".new").replace(ready)
        while self.is_main and ready.with_suffix(".hold").exists():
            time.sleep(0.02)
        if self.is_met:
            return
        self.is_met = True
        if self.what == "a bug":
            raise KeyError("a bug of mine")
        if self.what == "a hang":
            time.sleep(1000)
        if self.what == "out of memory":
            raise MemoryError


def wait_for_one(folder: Path) -> None:
    """Wait for a checkpoint: a busy machine is slow to record it."""
    until = time.monotonic() + 5.0
    while not any(folder.glob(f"*{SUFFIX}")) and time.monotonic() < until:
        time.sleep(0.02)


def meets(cfg, run) -> None:
    """Let this run's steps be watched, and meet trouble on the last rank."""
    is_fresh = run.attempt == 1 and run.resume_checkpoint is None
    is_here = is_fresh and run.rank == run.world_size - 1
    meeting = Meeting(is_here=is_here, is_main=run.is_main)
    progress = run.progress

    def then(step, **more):
        is_passed_on = progress(step, **more)
        if run.world_size > 1:
            live_of(run).saves.finish()
            # that of rank 0 may be written beside the last rank's last step
            if meeting.what and step == cfg.training.checkpoint_every_steps + 1:
                wait_for_one(run.checkpoint_dir)
        meeting.after_step(has_saved=any(run.checkpoint_dir.glob(f"*{SUFFIX}")))
        return is_passed_on

    run.progress = then
    if meeting.what in ("out of memory in a step", "losses that are not finite"):
        _watch_forward_passes(meeting, most=cfg.training.batch_size // 2)


def _watch_forward_passes(meeting, most):
    """Let each one run out of memory that has more samples, or return what is not finite, once a
    checkpoint is saved."""
    import torch

    def watch(module, given, output):
        is_last = isinstance(module, torch.nn.Linear) and torch.is_grad_enabled()
        if not (is_last and meeting.is_met):
            return None
        if meeting.what == "losses that are not finite":
            return output * float("nan")
        return torch.empty(2**46) if len(output) > most else None

    torch.nn.modules.module.register_module_forward_hook(watch)


def ends_with(run, weights) -> None:
    if run.is_main:
        Path(os.environ["WEIGHTS_FILE"]).write_text(json.dumps(weights))


def data(samples: int):
    import torch

    return torch.arange(1.0, samples + 1)[:, None] / samples


def function(cfg, run):
    """A loop of one's own, on one GPU or several."""
    import torch
    import torch.distributed as dist

    from robust_train import TrainingStopped, save_checkpoint

    meets(cfg, run)
    torch.manual_seed(0)
    model = whole = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    state = {"model": whole, "optimizer": optimizer}
    if run.world_size > 1:
        dist.init_process_group("gloo")
    done = run.load(state)
    if run.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(whole)
    for step in range(done + 1, STEPS + 1):
        everyones = torch.randn(EFFECTIVE, 1, generator=torch.Generator().manual_seed(step))
        mine = everyones[run.rank :: run.world_size]
        optimizer.zero_grad()
        run.backward(lambda part: (model(part) - 1).square().mean(), mine, model)
        optimizer.step()
        run.progress(step, total_steps=STEPS)
        is_due, stops = run.should_save(), run.should_stop()
        if run.is_main and (is_due or stops):
            path = run.checkpoint_dir / f"step-{step:03d}.pt"
            run.checkpoint_saved(save_checkpoint({**state, "step": step}, path), step)
        if stops:
            raise TrainingStopped
    if run.world_size > 1:
        dist.destroy_process_group()
    ends_with(run, [whole.weight.item(), whole.bias.item()])


def vision(cfg, run):
    import torch

    from robust_train.vision.trainer import train

    meets(cfg, run)
    result = train(cfg, run)
    if run.is_main:
        weights = torch.load(result["checkpoint"], weights_only=True)["model"]
        ends_with(run, torch.cat([weight.flatten() for weight in weights.values()]).tolist())


def _line():
    import torch

    class Line(torch.nn.Module):
        """Remembers what it is trained on; counts items as causal language models do."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def forward(self, x, labels=None, num_items_in_batch=None, **others):
            errors = (self.layer(x) - 1) ** 2
            if self.training:
                self.seen += x.flatten().tolist()
            if labels is None:
                return errors.mean()
            return {"loss": errors.sum() / (num_items_in_batch or len(x))}

    return Line()


def accelerate(cfg, run, samples=SAMPLES):
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    from robust_train.integrations.accelerate import RobustLoop, effective_batch_size

    meets(cfg, run)
    accelerator = Accelerator(cpu=True)
    line = _line()
    model, optimizer, loader = accelerator.prepare(
        line,
        torch.optim.AdamW(line.parameters(), lr=0.1),
        DataLoader(TensorDataset(data(samples)), effective_batch_size(cfg), shuffle=True),
    )
    loop = RobustLoop(accelerator, model, loader, cfg=cfg, run=run)
    for _ in loop.epochs(EPOCHS):
        for batch in loop.batches():
            loop.backward(lambda part: model(part[0]), batch)
            optimizer.step()
            optimizer.zero_grad()
    ends_with(run, [line.layer.weight.item(), line.layer.bias.item()])
    return line


def lightning(cfg, run, samples=SAMPLES, drop_last=False):
    import lightning as lightning_
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from framework_config import QUIET
    from robust_train.integrations.lightning import fit, trainer_arguments

    class Module(lightning_.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = _line()

        def training_step(self, batch):
            return self.line(batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    meets(cfg, run)
    module = Module()
    trainer = lightning_.Trainer(**trainer_arguments(cfg, run) | QUIET, max_epochs=EPOCHS)
    rows = TensorDataset(data(samples))
    loader = DataLoader(rows, cfg.training.batch_size, shuffle=True, drop_last=drop_last)
    fit(trainer, module, loader, cfg=cfg, run=run)
    ends_with(run, [module.line.layer.weight.item(), module.line.layer.bias.item()])
    return module.line


def transformers(cfg, run, samples=24):
    """transformers' Trainer, which fills the last step of ranks up with samples of the first."""
    from transformers import Trainer, TrainingArguments

    from framework_config import SILENT
    from robust_train.integrations.transformers import fit, training_arguments

    meets(cfg, run)
    line = _line()
    arguments = TrainingArguments(
        **training_arguments(cfg, run), num_train_epochs=EPOCHS, learning_rate=0.1, **SILENT
    )
    rows = [{"x": x.tolist(), "labels": [1.0]} for x in data(samples)]
    fit(Trainer(line, arguments, train_dataset=rows), cfg=cfg, run=run)
    ends_with(run, [line.layer.weight.item(), line.layer.bias.item()])
    return line


def script() -> None:
    """Learn as a program that knows nothing of ours: ``BATCH FOLDER [CHECKPOINT]``."""
    folder = Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    weights, done = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else (1, 0)
    meeting = Meeting(is_here=not done)
    for step in range(done + 1, STEPS + 1):
        weights = (weights * 6364136223846793005 + step) % 2**64
        time.sleep(0.1)  # the launcher has to see each checkpoint before it is the last
        if step % 2 == 0:
            path = folder / f"step-{step:03d}.json"
            path.with_suffix(".partial").write_text(json.dumps([weights, step]) + "\n")
            path.with_suffix(".partial").replace(path)
        if step == 2:
            wait_for_one(folder)
        meeting.after_step(has_saved=any(folder.glob(f"*{SUFFIX}")))
    Path(os.environ["WEIGHTS_FILE"]).write_text(json.dumps([weights]))


if __name__ == "__main__":
    script()
