# Recipes for everyday use; `just` alone lists them.

python := if path_exists(".venv/bin/python") == "true" { ".venv/bin/python" } else { "python" }

# With this, quotes and spaces in arguments reach the command unchanged.
set positional-arguments

_default:
    @just --list

# List GPUs: index, name, UUID, used/free/total MiB, processes, and who reserved them
check *args:
    @{{ python }} -m robust_train.cli.main gpus "$@"

# List the jobs that run or wait on this host, and why they wait
queue *args:
    @{{ python }} -m robust_train.cli.main queue "$@"

# Say which GPUs are usable, or why not, and whether the queue works
doctor *args:
    @{{ python }} -m robust_train.cli.main doctor "$@"

# Write report.html of a run or a sweep again
report path *args:
    @{{ python }} -m robust_train.cli.main report "$@"

# Install the browser in which tests open reports, from npm's registry (68 MB; needs node)
browser:
    npm install --no-save --no-audit --no-fund --prefix build/browser @sparticuz/chromium@147.0.0

# Run a script in any language: just run --batch-size 64 -- python train.py --batch_size {batch_size}
run *args:
    @{{ python }} -m robust_train.cli.main run "$@"

# Create a new project that trains at once: just init my_project
init dir:
    @{{ python }} -m robust_train.cli.main init "$@"

# Train the default job: a small network on digits
train *overrides:
    {{ python }} train_robust.py "$@"

# Train LoRA on Oxford flowers
train-lora-flowers-robust *overrides:
    {{ python }} train_robust.py model=lora dataset=flowers102 "$@"

# Train a linear probe on Oxford flowers
train-linear-flowers-robust *overrides:
    {{ python }} train_robust.py model=linear_probe dataset=flowers102 "$@"

# Train LoRA on Caltech birds
train-lora-cub-robust *overrides:
    {{ python }} train_robust.py model=lora dataset=cub200 "$@"

# Train a linear probe on Caltech birds
train-linear-cub-robust *overrides:
    {{ python }} train_robust.py model=linear_probe dataset=cub200 "$@"

# Train both models on both data sets, side by side, as one sweep with a table
train-all-robust *overrides:
    {{ python }} train_robust.py -m hydra/launcher=gpu_queue model=lora,linear_probe dataset=flowers102,cub200 "$@"

# Run several jobs side by side, as many as there are GPUs: just sweep training.lr=1e-3,1e-4
sweep *overrides:
    {{ python }} train_robust.py -m hydra/launcher=gpu_queue "$@"

# Run the test suite
test *args:
    {{ python }} -m pytest "$@"

# Run the tests that need a GPU, one at a time on the idlest GPU
test-gpu *args:
    {{ python }} -m pytest -m gpu "$@"

# Run the tests and linters that CI runs, in this environment, then the slow tests
test-all:
    .ci/run {{ python }}
    {{ python }} -m pytest -m slow

# Write the table of recovery in docs/several-gpus.md from the marks of the tests
proved:
    {{ python }} tests/support/proved.py

# Write the values of configs/*.yaml and the tables of keys in docs/ from the schemas
keys:
    {{ python }} tests/support/keys.py

# Build the site from docs/ in build/site; needs the extra [docs]
docs:
    {{ python }} -m mkdocs build --strict

# Make the pictures of README and docs from real runs; needs Chromium, nbconvert and ipykernel
pictures:
    {{ python }} docs/images/make.py

# Check lint, format, types and imports between folders
lint:
    {{ python }} -m ruff check .
    {{ python }} -m ruff format --check .
    {{ python }} -m mypy
    {{ python }} -c "from importlinter.cli import lint_imports_command as lint; lint()"

# Format the sources
format:
    {{ python }} -m ruff check --fix .
    {{ python }} -m ruff format .

# Build the version in pyproject.toml, check it in an empty environment, and tag it; publishes nothing
release:
    .ci/release {{ python }}

# Run the benchmarks behind the figures in docs/
bench:
    {{ python }} benchmarks/startup.py
    {{ python }} benchmarks/attempt_start.py
    {{ python }} benchmarks/selection_latency.py
    {{ python }} benchmarks/sweep.py
    {{ python }} benchmarks/gpu_queue.py
    {{ python }} benchmarks/scheduler.py
    {{ python }} benchmarks/recovery.py

# Compare expectation and observation on the idlest GPU, as a page in docs/gpu
gpu-check *probes:
    {{ python }} benchmarks/gpu_check.py "$@"
