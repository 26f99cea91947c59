"""``python train_robust.py --help``, instead of Hydra's list of everything."""

from __future__ import annotations

import sys
from importlib import resources

_HELP = """\
usage: {command} [KEY=VALUE ...]              one job
       {command} -m KEY=VALUE,VALUE [...]     a sweep, one job for each combination

examples:
  {command}
  {command} model=lora dataset=flowers102 training.epochs=5
  {command} training.batch_size=128 training.effective_batch_size=512
  {command} trainer._target_=my_project.training.train
  {command} -m model=lora,linear_probe training.lr=1e-3,1e-4

choices:
{groups}

keys people use{only}:
  min_gpu_memory_mb=4000         MiB that must be free before a GPU is taken
  wait_for_gpu=true              wait until a GPU has them
  gpu_wait_timeout_minutes=60    and for how long
  num_gpus=1                     GPUs for this one job, one process each
  auto_device=true device=auto   false and cuda:1, cpu or a UUID: choose the device yourself
  gpu_jobs_per_device=1          jobs that may share a GPU with this one
  allow_cpu_fallback=true        train on the CPU when no GPU will do
  training.batch_size=64         micro-batch size; auto: the largest that fits
  training.effective_batch_size  samples per optimizer step; accumulation follows from it
  min_batch_size=4               no attempt uses a smaller micro-batch
  max_retries=3                  smaller micro-batches tried on one device before the next
  memory.fraction=0.95           the most of the GPU's memory that an attempt may take
  resume=true                    resume an unfinished job in its run folder
  job_name=NAME                  how queue, tables and run folder call the job
  hydra.run.dir=FOLDER           the run folder; with an unfinished job in it: go on

more: --cfg job (every key with its value), --hydra-help (Hydra's options), --version
      -sc install=bash (shell completion), docs/configuration.md (what every key means)
"""


def help_text(name: str) -> str:
    """Return the help of ``train_robust.py`` or ``train.py``, by the command that was run."""
    configs = resources.files("robust_train.configs")
    groups = []
    for group in ("model", "dataset", "trainer"):
        found = sorted(entry.name for entry in configs.joinpath(group).iterdir())
        choices = ", ".join(one[: -len(".yaml")] for one in found if one.endswith(".yaml"))
        groups.append(f"  {group:<8} {choices}")
    only = "" if name == "train_robust" else " (those about devices and retries: train_robust.py)"
    command = sys.argv[0] if sys.argv[0].startswith("robust-train ") else f"python {name}.py"
    return _HELP.format(command=command, groups="\n".join(groups), only=only)
