# Recipes for everyday use; `just` alone lists them.

python := if path_exists(".venv/bin/python") == "true" { ".venv/bin/python" } else { "python" }

# quotes and spaces arrive as they were typed
set positional-arguments

_default:
    @just --list

# Table of GPUs: index, name, uuid, used/free/total MiB, processes, who holds it
check *args:
    @{{ python }} -m robust_train.cli.main gpus "$@"

# Who runs and who waits on this host, and why
queue *args:
    @{{ python }} -m robust_train.cli.main queue "$@"

# For each GPU: usable or why not; and how the queue stands
doctor *args:
    @{{ python }} -m robust_train.cli.main doctor "$@"

# report.html of a run or a sweep, made anew from its journals
report path *args:
    @{{ python }} -m robust_train.cli.main report "$@"

# The browser that the tests look at reports with, from npm's registry (68 MB; needs node)
browser:
    npm install --no-save --no-audit --no-fund --prefix build/browser @sparticuz/chromium@147.0.0

# A script in any language: just run --batch-size 64 -- python train.py --batch_size {batch_size}
run *args:
    @{{ python }} -m robust_train.cli.main run "$@"

# A new project that trains at once: just init my_project
init dir:
    @{{ python }} -m robust_train.cli.main init "$@"

# The default job: a small network on digits
train *overrides:
    {{ python }} train_robust.py "$@"

# LoRA on Oxford flowers
train-lora-flowers-robust *overrides:
    {{ python }} train_robust.py model=lora dataset=flowers102 "$@"

# A linear probe on Oxford flowers
train-linear-flowers-robust *overrides:
    {{ python }} train_robust.py model=linear_probe dataset=flowers102 "$@"

# LoRA on Caltech birds
train-lora-cub-robust *overrides:
    {{ python }} train_robust.py model=lora dataset=cub200 "$@"

# A linear probe on Caltech birds
train-linear-cub-robust *overrides:
    {{ python }} train_robust.py model=linear_probe dataset=cub200 "$@"

# Both models on both data sets, side by side, as one sweep with its table
train-all-robust *overrides:
    {{ python }} train_robust.py -m hydra/launcher=gpu_queue model=lora,linear_probe dataset=flowers102,cub200 "$@"

# Several jobs side by side, as many as there are GPUs: just sweep training.lr=1e-3,1e-4
sweep *overrides:
    {{ python }} train_robust.py -m hydra/launcher=gpu_queue "$@"

# The test suite
test *args:
    {{ python }} -m pytest "$@"

# The tests that need a GPU, one at a time on the idlest one; all others see none
test-gpu *args:
    {{ python }} -m pytest -m gpu "$@"

# What CI runs, in this environment (the tests and the linters), then the slow tests
test-all:
    .ci/run {{ python }}
    {{ python }} -m pytest -m slow

# The table of what is recovered where, in docs/several-gpus.md, from what tests say they prove
proved:
    {{ python }} tests/support/proved.py

# The values of configs/*.yaml and the tables of the pages of keys, from the schemas
keys:
    {{ python }} tests/support/keys.py

# The site, from docs/, into build/site; needs the extra [docs]
docs:
    {{ python }} -m mkdocs build --strict

# The pictures of README and docs, from real runs; needs Chromium, nbconvert and ipykernel
pictures:
    {{ python }} docs/images/make.py

# Lint, format check, types, and what may import what
lint:
    {{ python }} -m ruff check .
    {{ python }} -m ruff format --check .
    {{ python }} -m mypy
    {{ python }} -c "from importlinter.cli import lint_imports_command as lint; lint()"

# Put the sources into the house format
format:
    {{ python }} -m ruff check --fix .
    {{ python }} -m ruff format .

# Build, check in an empty environment, and tag the version in pyproject.toml; publishes nothing
release:
    .ci/release {{ python }}

# The measurements behind the figures in docs/
bench:
    {{ python }} benchmarks/startup.py
    {{ python }} benchmarks/attempt_start.py
    {{ python }} benchmarks/selection_latency.py
    {{ python }} benchmarks/sweep.py
    {{ python }} benchmarks/gpu_queue.py
    {{ python }} benchmarks/scheduler.py
    {{ python }} benchmarks/recovery.py

# On the idlest GPU: what was expected there against what is seen, as a page of docs/gpu
gpu-check *probes:
    {{ python }} benchmarks/gpu_check.py "$@"
