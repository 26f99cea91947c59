"""Private names of other libraries, each in one place with a test in ``tests/test_compat.py``.

All processes use it, and import the names from this package. Each file is about one library or one
part of torch. If a version of a library lacks a private name, a job loses a feature but does not
fail: each function documents its result in this case. Functions that need torch get it as an
argument, because the launcher must not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from robust_train.compat.accelerate import schedulers_of as schedulers_of
from robust_train.compat.cuda import allocator_history_is_recorded as allocator_history_is_recorded
from robust_train.compat.cuda import clear_cublas_workspaces as clear_cublas_workspaces
from robust_train.compat.cuda import dump_allocator_snapshot as dump_allocator_snapshot
from robust_train.compat.cuda import end_allocator_history as end_allocator_history
from robust_train.compat.cuda import has_context as has_context
from robust_train.compat.cuda import record_allocator_history as record_allocator_history
from robust_train.compat.cuda import return_pinned_memory as return_pinned_memory
from robust_train.compat.cuda import set_allocator_settings as set_allocator_settings
from robust_train.compat.cuda import torch_built_for as torch_built_for
from robust_train.compat.cuda import torch_cuda_version as torch_cuda_version
from robust_train.compat.cuda import when_cuda_starts as when_cuda_starts
from robust_train.compat.distributed import collectives_begun as collectives_begun
from robust_train.compat.distributed import groups_of_process as groups_of_process
from robust_train.compat.distributed import has_own_collectives as has_own_collectives
from robust_train.compat.distributed import hook_and_delay as hook_and_delay
from robust_train.compat.distributed import reset_sharding as reset_sharding
from robust_train.compat.distributed import settle_buckets as settle_buckets
from robust_train.compat.distributed import sharding_has_begun as sharding_has_begun
from robust_train.compat.distributed import wrap_collectives as wrap_collectives
from robust_train.compat.hydra import HYDRAS_OWN as HYDRAS_OWN
from robust_train.compat.hydra import add_overrides as add_overrides
from robust_train.compat.hydra import default_config_path as default_config_path
from robust_train.compat.hydra import intercept_resolvers as intercept_resolvers
from robust_train.compat.hydra import nodes_of as nodes_of
from robust_train.compat.hydra import register_resolver as register_resolver
from robust_train.compat.hydra import set_nodes as set_nodes
from robust_train.compat.hydra import skip_mode_lookup as skip_mode_lookup
from robust_train.compat.hydra import unknown_to_hydra as unknown_to_hydra
from robust_train.compat.hydra import unwrap_job_return as unwrap_job_return
from robust_train.compat.hydra import version_base_options as version_base_options
from robust_train.compat.lightning import LATEST as LATEST
from robust_train.compat.lightning import accumulates_now as accumulates_now
from robust_train.compat.lightning import belongs_to_tuner as belongs_to_tuner
from robust_train.compat.lightning import keep_samplers as keep_samplers
from robust_train.compat.lightning import starts_ranks_itself as starts_ranks_itself
from robust_train.compat.lightning import step_schedulers as step_schedulers
from robust_train.compat.lightning import values_logged_by as values_logged_by
from robust_train.compat.optimizers import can_skip_on_device as can_skip_on_device
from robust_train.compat.optimizers import codes_before_update as codes_before_update
from robust_train.compat.optimizers import decide_on_host as decide_on_host
from robust_train.compat.optimizers import found_overflow as found_overflow
from robust_train.compat.optimizers import has_step_in_backward as has_step_in_backward
from robust_train.compat.optimizers import leave_out_if as leave_out_if
from robust_train.compat.optimizers import overflow_figures as overflow_figures
from robust_train.compat.optimizers import total_norm as total_norm
from robust_train.compat.optimizers import watch_optimizer_steps as watch_optimizer_steps
from robust_train.compat.optuna import importances_of as importances_of
from robust_train.compat.optuna import open_trial as open_trial
from robust_train.compat.optuna import suggest as suggest
from robust_train.compat.python import base_executable as base_executable
from robust_train.compat.python import format_of as format_of
from robust_train.compat.python import importing_main as importing_main
from robust_train.compat.python import interpreter_options as interpreter_options
from robust_train.compat.python import is_importing_main as is_importing_main
from robust_train.compat.python import run_exit_handlers as run_exit_handlers
from robust_train.compat.python import signature_as_written as signature_as_written
from robust_train.compat.saving import load_shards as load_shards
from robust_train.compat.saving import redirect_savers as redirect_savers
from robust_train.compat.tensors import copy_at_once as copy_at_once
from robust_train.compat.tensors import depends_on_batch as depends_on_batch
from robust_train.compat.tensors import draws_or_iterates as draws_or_iterates
from robust_train.compat.tensors import has_made as has_made
from robust_train.compat.tensors import keep_versions as keep_versions
from robust_train.compat.tensors import modules_below as modules_below
from robust_train.compat.tensors import preserve_version_counter as preserve_version_counter
from robust_train.compat.tensors import runs_eagerly as runs_eagerly
from robust_train.compat.tensors import tensors_of as tensors_of
from robust_train.compat.tensors import version_of as version_of
from robust_train.compat.tensors import versions_of as versions_of
from robust_train.compat.tensors import without_torch_functions as without_torch_functions
from robust_train.compat.transformers import TOKENS_SEEN as TOKENS_SEEN
from robust_train.compat.transformers import figures_of_passes as figures_of_passes
from robust_train.compat.transformers import has_own_inputs as has_own_inputs
from robust_train.compat.transformers import intercept_saves as intercept_saves
from robust_train.compat.transformers import load_best as load_best
from robust_train.compat.transformers import prepare_inputs as prepare_inputs
from robust_train.compat.transformers import save_trainer as save_trainer
from robust_train.compat.transformers import shifts_labels as shifts_labels

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_with_path as tree_map_with_path
else:
    # Names of torch that are used unchanged, which are imported at their first use.
    _HOMES = {
        "TorchDispatchMode": "torch.utils._python_dispatch",
        "tree_leaves": "torch.utils._pytree",
        "tree_map_with_path": "torch.utils._pytree",
    }

    def __getattr__(name: str) -> Any:
        """Import the module of one of these names, and return the name's value."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
