"""Private names of other libraries, each in one place with a test in ``tests/test_compat.py``.

All processes use it. If a version of torch lacks a name, that costs a feature, never a job: each
function documents its result then. Nothing here imports torch: the module is an argument.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import inspect
import io
import logging
import multiprocessing.process
import os
import re
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_with_path as tree_map_with_path
else:
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


def when_cuda_starts(torch: Any, action: Callable[[], None]) -> None:
    """Call ``action`` when CUDA is initialised in this process, or now if it already is."""
    torch.cuda._lazy_call(action)


def preserve_version_counter(torch: Any, tensor: Any) -> AbstractContextManager[None]:
    """Hide changes of ``tensor`` within the block from autograd's version counter."""
    guard: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)
    return guard


def version_of(tensor: Any) -> int:
    """Return how often ``tensor`` was changed in place, or -1 if that is not counted: for None,
    inference tensors, and tensors of a lazy module in its first pass."""
    try:
        return int(getattr(tensor, "_version", -1))
    except (RuntimeError, ValueError):
        return -1


def versions_of(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """Return for each tensor its :func:`version_of` and the address of its values, which ``.data =
    …`` changes without a new version. A step may have a thousand tensors."""
    try:
        places = map(sys.modules["torch"].Tensor.data_ptr, tensors)
        versions = map(attrgetter("_version"), tensors)
        return list(zip(versions, places, strict=True))
    # Sparse and inference tensors, and those of a lazy module in its first pass, have no address.
    except (RuntimeError, ValueError):
        return [(version_of(tensor), 0) for tensor in tensors]


def skips_on_device(optimizer: Any) -> bool:
    """Return whether an optimizer skips an update by a figure on the device, as torch's own fused
    optimizers do.

    A wrapper around such an optimizer does not, though it may forward the attribute: the figure
    never reaches the optimizer. Nor does a fused SGD whose momentum starts in this step: torch
    leaves uninitialised memory in the momentum of a skipped update.
    """
    attributes = getattr(optimizer, "__dict__", {})
    if not attributes.get("_step_supports_amp_scaling"):
        return False
    # A loaded state has the setting of the optimizer that it was saved from.
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # An instance may have a step of its own, for example a step that a scheduler counts.
    steps = (type(optimizer).step, optimizer.step)
    is_torchs = all(step.__module__.startswith("torch.optim.") for step in steps)
    return is_torchs and not _begins_momentum(optimizer)


def _begins_momentum(optimizer: Any) -> bool:
    """Return whether a step creates the first momentum of a parameter, which Adam has at once."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            state = optimizer.state.get(parameter)
            has_momentum = state and state.get("momentum_buffer") is not None
            if not has_momentum and parameter.grad is not None:
                return True
    return False


@contextlib.contextmanager
def deciding_on_host(optimizer: Any) -> Iterator[None]:
    """Let GradScaler read its figure itself before it steps an optimizer."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False):
        yield
        return
    attributes = vars(optimizer).copy()
    setattr(optimizer, name, False)
    try:
        yield
    finally:
        if name in attributes:
            setattr(optimizer, name, attributes[name])
        else:
            delattr(optimizer, name)


def found_overflow(scaler: Any, optimizer: Any) -> bool | None:
    """Return whether a GradScaler met an overflow in the gradients that it has unscaled, or None
    for another kind of scaler. It reads the same figures, and waits for the same kernels, before it
    steps an optimizer that does not decide on the device."""
    figures = overflow_figures(scaler, optimizer)
    return None if figures is None else any(map(bool, figures))


def overflow_figures(scaler: Any, optimizer: Any) -> list[Any] | None:
    """Return a GradScaler's figures of the gradients that it has unscaled, one per device and not
    zero after an overflow, or None for another kind of scaler."""
    try:
        return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    except (AttributeError, KeyError, TypeError):
        return None


def codes_before_update(optimizer: Any, step_locals: Mapping[str, Any]) -> set[CodeType]:
    """Return the code that an optimizer's step runs before it changes weights or moments: its
    closure's code, and the code that creates the state of the first group."""
    groups = optimizer.param_groups
    candidates: list[Any] = [step_locals.get("closure")]
    if groups and step_locals.get("group", groups[0]) is groups[0]:
        candidates.append(getattr(optimizer, "_init_group", None))
    functions = [inspect.unwrap(function) for function in candidates if function is not None]
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


def total_norm(torch: Any, parameters: Sequence[Any]) -> Any:
    """Return the norm of all gradients, which stay unchanged.

    torch before 2.6 has no function for it. There, clipping to infinity multiplies the gradients by
    1.
    """
    utils = torch.nn.utils
    if not hasattr(utils, "get_total_norm"):
        return utils.clip_grad_norm_(parameters, float("inf"))
    gradients = (parameter.grad for parameter in parameters)
    return utils.get_total_norm([parameter for parameter in gradients if parameter is not None])


@contextlib.contextmanager
def leave_out_if(optimizer: Any, is_bad: Any) -> Iterator[None]:
    """Let the steps of such an optimizer change nothing if ``is_bad`` is true, as GradScaler
    does."""
    optimizer.found_inf = is_bad.float()
    optimizer.grad_scale = None
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def tensors_of(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries with a module's own parameters and buffers, by name."""
    return module._parameters, module._buffers


def modules_below(models: Sequence[Any]) -> list[Any]:
    """Return modules and all their submodules, each once. It takes a quarter of the time of
    ``Module.modules``, because each step calls it."""
    modules = list(dict.fromkeys(models))
    seen = set(modules)
    for module in modules:
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                modules.append(part)
    return modules


def keep_versions(copied: Any, state: Any) -> None:
    """Copy the versions, by which a module reads its state, from the state to its copy."""
    if hasattr(state, "_metadata"):
        copied._metadata = state._metadata


def copy_at_once(torch: Any, targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy each source into its target, with one kernel. All have the same device and dtype."""
    torch._foreach_copy_(targets, sources)


def clear_cublas_workspaces(torch: Any) -> None:
    """Return cuBLAS's workspaces (up to 32 MiB a stream) to the caching allocator, if possible.
    Never call it between replays of a CUDA graph, which embeds their addresses (pytorch#193402)."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def return_pinned_memory(torch: Any) -> None:
    """Return pinned host memory that no tensor holds to the system, if possible: torch's cache
    keeps it otherwise until the process ends."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def has_context(torch: Any, index: int) -> bool:
    """Return whether this process has a CUDA context on a GPU, or True if torch does not know."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return True if ask is None else bool(ask(index))


def set_allocator_settings(torch: Any, settings: str) -> None:
    """Apply settings to CUDA's caching allocator in this process.

    Raises:
        RuntimeError, ValueError: torch refuses them.
    """
    # torch 2.10 and later have it; before that the function is CUDA's own.
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (apply or torch._C._cuda_cudaCachingAllocator_set_allocator_settings)(settings)


def record_allocator_history(torch: Any, max_entries: int) -> None:
    """Record the origin of GPU allocations, for :func:`dump_allocator_snapshot`."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def end_allocator_history(torch: Any) -> None:
    """Undo :func:`record_allocator_history` and drop the records."""
    torch.cuda.memory._record_memory_history(enabled=None)


def allocator_history_is_recorded(torch: Any) -> bool:
    """Return whether torch records the origin of GPU allocations."""
    return bool(torch._C._cuda_isHistoryEnabled())


def dump_allocator_snapshot(torch: Any, path: str) -> None:
    """Write torch's memory snapshot, for the viewer at pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def watch_optimizer_steps(on_step: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``on_step`` after every step of every torch optimizer of this process. Returns a
    function that ends this, or None if torch is not loaded, or if others have hooks there: adding
    to them would raise in another thread that iterates over them."""
    optimizer = sys.modules.get("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is None or getattr(optimizer, "_global_optimizer_post_hooks", True):
        return None

    def step_is_done(optimizer: object, args: object, kwargs: object) -> None:
        on_step()

    remove: Callable[[], None] = register(step_is_done).remove
    return remove


def base_executable() -> str:
    """Return the interpreter behind a virtual environment. Its path names no project."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def interpreter_options() -> list[str]:
    """Return the options of this interpreter (-O, -W, -X …) for a new interpreter, as
    multiprocessing passes them on."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return options


def run_exit_handlers() -> None:
    """Do the work of an interpreter's normal exit, for a process that ends by ``os._exit``. It
    waits for threads that are not daemons, then calls the functions registered in ``atexit``."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


@contextlib.contextmanager
def mode_of_command_line() -> Iterator[None]:
    """Let Hydra sweep only with ``-m``: it then composes once less, since it does not read
    ``hydra.mode`` first.

    If Hydra reads it in another way, it still does.
    """
    from hydra._internal.hydra import Hydra

    original = getattr(Hydra, "get_mode", None)
    if original is not None:
        Hydra.get_mode = lambda *args, **keys: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if original is not None:
            Hydra.get_mode = original  # type: ignore[method-assign]


def unknown_to_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are neither Hydra's options nor overrides."""
    from hydra._internal.utils import get_args_parser

    return list(get_args_parser().parse_known_args(list(arguments))[1])


def with_overrides(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Add overrides to a command line, next to its own overrides, because Hydra accepts them in one
    place only."""
    from hydra._internal.utils import get_args_parser

    existing = get_args_parser().parse_known_args(list(arguments))[0].overrides
    place = 0
    if existing:
        # Search from behind: the value of an option in front of them may be the same word.
        place = len(arguments) - arguments[::-1].index(existing[-1])
    return [*arguments[:place], *overrides, *arguments[place:]]


def returned_or_raised(job: Any) -> Any:
    """Return or raise the outcome of a Hydra job. Its property raises the exception."""
    return job._return_value


def running_trial(study: Any, trial: Any) -> Any:
    """Return a running Optuna trial, to suggest or note more."""
    from optuna import Trial

    return Trial(study, trial._trial_id)


def suggest(trial: Any, name: str, space: Any) -> Any:
    """Return the value of an Optuna trial for a key, suggested now if necessary."""
    return trial._suggest(name, space)


def importances_of(study: Any) -> dict[str, float]:
    """Return the share of the value that each parameter of an Optuna study explains.

    The other, unused evaluator would import scikit-learn, which takes seconds.
    """
    name = "sklearn"
    is_hidden = name not in sys.modules
    if is_hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    finally:
        if is_hidden:
            del sys.modules[name]
    # Optuna warns of few trials, and of experimental functions.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = PedAnovaImportanceEvaluator()
        return dict(get_param_importances(study, evaluator=evaluator))


HYDRAS_OWN: Any = object()
"""Stands for an argument that is not passed to Hydra, which has its own default."""


def default_config_path(version_base: str | None) -> str | None:
    """Return the default config path of ``hydra.main``."""
    import hydra

    if version_base is None:
        return None
    if version_base is HYDRAS_OWN:
        # In this case 1.3 behaves like 1.1.
        is_like_1_1 = hydra.__version__.startswith("1.3")
    else:
        is_like_1_1 = version_base == "1.1"
    return "." if is_like_1_1 else None


def for_hydra(version_base: str | None) -> dict[str, Any]:
    """Return the argument ``version_base`` for Hydra's functions.

    Without it 1.3 warns. With ours 1.4 warns, also about our targets in Hydra's configuration.
    """
    import hydra

    if version_base is HYDRAS_OWN:
        return {}
    if version_base != "1.3" or hydra.__version__.startswith("1.3"):
        return {"version_base": version_base}
    targets = r"_target_='(robust_train|hydra_plugins\.robust)"
    warnings.filterwarnings("ignore", rf"hydra.utils.instantiate\(\) resolved {targets}")
    return {}


def is_importing_main() -> bool:
    """Return whether this process is importing the script of another process, as its guard expects:
    a spawned process of :mod:`multiprocessing`, or within :func:`importing_main`."""
    process = multiprocessing.process.current_process()
    return getattr(process, "_inheriting", False)


@contextlib.contextmanager
def importing_main() -> Iterator[None]:
    """Mark the import of another process's script as :mod:`multiprocessing` does. It then refuses
    to start a process, which would import the script as well, without end."""
    process: Any = multiprocessing.process.current_process()
    process._inheriting = True
    try:
        yield
    finally:
        del process._inheriting


def signature_as_written(
    function: Callable[..., Any], *, follow_wrapped: bool = True
) -> inspect.Signature:
    """Return a callable's signature with annotations as text. Python 3.14 evaluates annotations on
    access, and a name that is imported for type checkers only has no value.

    Raises:
        TypeError, ValueError: it has no signature, like some callables in C.
    """
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        options["annotation_format"] = Format.STRING
    return inspect.signature(function, follow_wrapped=follow_wrapped, **options)


def register_resolver(name: str, resolver: Callable[..., Any], *, use_cache: bool = False) -> None:
    """Register a resolver of OmegaConf, whose 2.4 gave the function the name of an older one."""
    from omegaconf import OmegaConf

    register: Any = OmegaConf.register_resolver
    if "use_cache" not in inspect.signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register(name, resolver, use_cache=use_cache, replace=True)


@contextlib.contextmanager
def resolvers_replaced(
    evaluate: Callable[[str, str, tuple[str, ...], Callable[[], Any]], Any],
) -> Iterator[None]:
    """Call ``evaluate(key, name, arguments, resolve)`` within the block whenever a registered
    resolver is evaluated. A resolver that gets the config reads more than its arguments, like
    OmegaConf's own resolvers and ``hydra``: these are left alone."""
    from omegaconf import OmegaConf
    from omegaconf.basecontainer import BaseContainer

    registered = BaseContainer._resolvers

    def replaced(name: str, resolver: Any) -> Any:
        def wrapper(config: Any, parent: Any, node: Any, values: Any, words: Any) -> Any:
            def resolve() -> Any:
                # OmegaConf's cache identifies an argument by its text, whatever it refers to.
                if any("${" in word for word in words):
                    OmegaConf.get_cache(config)[name].pop(words, None)
                return resolver(config, parent, node, values, words)

            key = str(node._get_full_key(None))
            return evaluate(key, name, tuple(map(str, values)), resolve)

        return wrapper

    BaseContainer._resolvers = {
        name: resolver
        if name == "hydra" or name.startswith("oc.") or _is_given_the_config(resolver)
        else replaced(name, resolver)
        for name, resolver in registered.items()
    }
    try:
        yield
    finally:
        BaseContainer._resolvers = registered


def _is_given_the_config(resolver: Callable[..., Any]) -> bool:
    closure = inspect.getclosurevars(resolver).nonlocals
    return any(closure.get(f"pass_{name}") for name in ("parent", "node", "root"))


def typed_nodes(config: Any) -> dict[str, object]:
    """Return a structured config's own nodes, which keep their types in another config."""
    return {name: config._get_node(name) for name in config}


def set_nodes(config: Any, nodes: Mapping[str, Any]) -> None:
    """Replace a structured config's own nodes by nodes of any types, in this order."""
    config._content.clear()
    for name, node in nodes.items():
        node._set_parent(config)
        node._set_key(name)
        config._content[name] = node


def format_of(handler: logging.Handler) -> str | None:
    """Return the format of a handler's lines, None if it is the default."""
    return getattr(handler.formatter, "_fmt", None)


def torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, ``none`` for a build without, or None if it
    is unknown. It is read from torch's ``version.py``, since importing torch takes seconds."""
    version = _version_in_torch("cuda")
    return None if version is None else version[1] or "none"


def torch_built_for(platform: str) -> str | None:
    """Return the version of ``hip`` or ``xpu`` that torch was built for, None if it was not."""
    version = _version_in_torch(platform)
    return None if version is None else version[1]


def _version_in_torch(platform: str) -> re.Match[str] | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    return re.search(rf"^{platform}\b.*= *(?:'([\d.]+)[^']*'|None)", text, re.M)


def noted_collectives(noted: Callable[..., AbstractContextManager[None]]) -> tuple[Any, Any]:
    """Return FSDP2's own all-gather and reduce-scatter, each within ``noted(is_gather, …)``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def noting(kind: Any, *, is_gather: bool) -> Any:
        class Noted(kind):  # type: ignore[misc]
            def __call__(
                self, output_tensor: Any, input_tensor: Any, group: Any, **options: Any
            ) -> Any:
                op = options.get("op")
                with noted(is_gather, output_tensor, input_tensor, group, op):
                    return super().__call__(output_tensor, input_tensor, group, **options)

        return Noted()

    return (
        noting(collectives.DefaultAllGather, is_gather=True),
        noting(collectives.DefaultReduceScatter, is_gather=False),
    )


def settle_buckets(wrapper: Any) -> None:
    """Let DistributedDataParallel exchange its grouping of gradients now. It does so once, in the
    forward pass after its first step."""
    if wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True


def hook_and_delay(wrapper: Any) -> tuple[bool, bool]:
    """Return whether DistributedDataParallel has a communication hook, and delays gradients."""
    delays = bool(getattr(wrapper, "_delay_all_reduce_params", None))
    return bool(getattr(wrapper, "_comm_hooks", None)), delays


def collectives_begun(group: Any) -> int:
    """Return how many collectives a process group has started, constant if they are not counted."""
    try:
        return int(group._get_sequence_number_for_group())
    # A wrapper around several backends may refuse.
    except (AttributeError, RuntimeError):
        return 0


def groups_of_process(dist: Any) -> list[Any]:
    """Return the process groups of this process, none if torch keeps them elsewhere."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def sharding_has_begun(module: Any) -> bool:
    """Return whether a module sharded by FSDP2 has started a pass. Before that, nothing can be
    reset."""
    return module._get_fsdp_state()._is_root is not None


def reset_sharding(root: Any) -> None:
    """Reset a model sharded by FSDP2 after an interrupted pass.

    Before torch 2.15 ``reset_iter_state`` leaves the gradients of whole weights, which the next
    pass would add to.
    """
    root.reset_iter_state()
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                # The first pass creates them.
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None


def has_own_collectives(module: Any) -> bool:
    """Return whether a module sharded by FSDP2 has user collectives."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    used = {type(c).__name__ for g in groups for c in (g._all_gather_comm, g._reduce_scatter_comm)}
    return not used <= {"DefaultAllGather", "DefaultReduceScatter", "Noted"}


def shifts_labels(trainer: Any) -> bool:
    """Return whether a transformers ``Trainer`` counts labels from each sample's second label
    on."""
    return bool(getattr(trainer, "_loss_shifts_labels", True))


def prepared_inputs(trainer: Any, data: Any) -> Any:
    """Return a batch as a transformers ``Trainer`` passes it to its model."""
    return trainer._prepare_inputs(data)


def prepares_inputs_itself(trainer: Any, base: Any) -> bool:
    """Return whether a subclass of the transformers ``Trainer`` ``base`` makes its own batches."""
    return type(trainer)._prepare_inputs is not base._prepare_inputs


TOKENS_SEEN = "_total_train_tokens"
"""The attribute in which a TRL trainer counts the tokens that it has trained on."""


def logged_of_passes(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """Return the figures that a TRL trainer has noted of each pass, by mode and name. It is empty
    for others."""
    metrics: Any = getattr(trainer, "_metrics", None)
    modes = list(metrics.values()) if isinstance(metrics, dict) else [None]
    for mode in modes:
        if not isinstance(mode, dict):
            return {}
        if not all(isinstance(values, list) for values in mode.values()):
            return {}
    lists: dict[str, dict[str, list[float]]] = metrics
    return lists


def steps_in_backward(parameter: Any) -> bool:
    """Return whether a user's hook runs as soon as a parameter has its gradient, for example an
    optimizer that steps in the backward pass. torch's own hooks there do not count."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    # torch.distributed.optim sets this attribute.
    return hasattr(parameter, "_in_backward_optimizers") or any(
        not getattr(hook, "func", hook).__module__.startswith("torch.") for hook in hooks.values()
    )


_SAVERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)


@contextlib.contextmanager
def saving_files(take: Callable[[Callable[[Any], None], Any, Path], None]) -> Iterator[None]:
    """Redirect ``torch.save`` and safetensors' ``save_file`` in this thread, within the block, to
    ``take(save, content, path)``, whose ``save`` writes a content there. Other ways of saving write
    at once."""
    thread = threading.get_ident()

    def taken(save: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            is_file = isinstance(next(iter(arguments[1:]), None), (str, os.PathLike))
            if not is_file or threading.get_ident() != thread:
                save(*arguments, **options)
                return
            content, path, *more = arguments
            take(lambda copied: save(copied, path, *more, **options), content, Path(path))

        return call

    with contextlib.ExitStack() as stack:
        for module, name in _SAVERS:
            home = sys.modules.get(module)
            save = getattr(home, name, None)
            if save is not None:
                stack.callback(setattr, home, name, save)
                setattr(home, name, taken(save))
        yield


def save_trainer(trainer: Any) -> None:
    """Let a transformers ``Trainer`` write a checkpoint now."""
    trainer._save_checkpoint(trainer.model, trial=None)


def load_best(trainer: Any) -> None:
    """Let a transformers ``Trainer`` load the weights of its best checkpoint, if it has one."""
    if trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()


def saving_through(trainer: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let a transformers ``Trainer`` call ``around(save)`` for each save."""
    write = trainer._save_checkpoint

    def save_checkpoint(*arguments: Any, **options: Any) -> None:
        around(lambda: write(*arguments, **options))

    trainer._save_checkpoint = save_checkpoint


LATEST = "_forward_cache"
"""The attribute with the last value of a torchmetrics object, or of a value that Lightning logs."""


def logged_by(trainer: Any) -> Any:
    """Return the values that a Lightning ``Trainer`` has logged in this epoch, or None if it cannot
    log."""
    return trainer._results


def accumulates_now(trainer: Any) -> bool:
    """Return whether a Lightning ``Trainer`` makes no optimizer step after this batch."""
    return bool(trainer.fit_loop._should_accumulate())


def leave_samplers(trainer: Any) -> None:
    """Keep a Lightning ``Trainer`` from replacing samplers of loaders, as
    ``use_distributed_sampler=False`` does."""
    trainer._accelerator_connector.use_distributed_sampler = False


def starts_ranks_itself(trainer: Any) -> bool:
    """Return whether a Lightning ``Trainer`` forks or spawns its ranks (``ddp_spawn`` …)."""
    start_method = getattr(trainer.strategy, "_start_method", "popen")
    return trainer.world_size > 1 and start_method != "popen"


def step_schedulers(trainer: Any) -> None:
    """Let a Lightning ``Trainer`` step ReduceLROnPlateau at the end of a resumed epoch, too."""
    trainer.fit_loop._restarting = False


def searches(trainer: Any) -> bool:
    """Return whether a Lightning ``Trainer`` belongs to a ``Tuner``, which leaves ``fit`` early."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


def prepared_schedulers(accelerator: Any) -> list[Any]:
    """Return the learning-rate schedulers that ``Accelerator.prepare`` has wrapped."""
    return list(accelerator._schedulers)


def load_shards(folder: Path, index: Path, wanted: dict[str, Any]) -> None:
    """Fill tensors from files of ``torch.distributed.checkpoint``, whose metadata are in ``index``.
    It compares checksums, unlike torch, and runs no code of a file. It raises nearly anything for
    damaged files."""
    from torch.distributed.checkpoint import api, filesystem, metadata, state_dict_loader
    from torch.serialization import _get_layout, load, safe_globals

    def check(data: Any, name: str) -> None:
        with zipfile.ZipFile(data) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile(f"a checksum in {name} is wrong")

    class CheckingReader(filesystem.FileSystemReader):
        def read_metadata(self, *args: Any, **named: Any) -> Any:
            return where

        def read_data(self, plan: Any, planner: Any) -> Any:
            for key in {item.storage_index for item in plan.items}:
                piece = self.storage_data[key]
                with (folder / piece.relative_path).open("rb") as file:
                    file.seek(piece.offset)
                    check(io.BytesIO(file.read(piece.length)), piece.relative_path)
            return super().read_data(plan, planner)

    names = "Metadata MetadataIndex ChunkStorageMetadata TensorStorageMetadata TensorProperties"
    allowed = [getattr(metadata, name) for name in (*names.split(), "_MEM_FORMAT_ENCODING")]
    check(index, index.name)
    with safe_globals([*allowed, filesystem._StorageInfo, _get_layout]), warnings.catch_warnings():
        # torch warns that it reads without the other ranks.
        warnings.simplefilter("ignore")
        where = load(index, weights_only=True)
        try:
            state_dict_loader.load(wanted, storage_reader=CheckingReader(folder), no_dist=True)
        except api.CheckpointException as failure:
            raise next(iter(failure.failures.values()))[0] from None


def depends_on_batch(torch: Any, module: Any) -> bool:
    """Return whether a layer computes statistics over the samples of a pass, like BatchNorm."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def draws_or_iterates(torch: Any, module: Any) -> bool:
    """Return whether a layer in training draws random numbers, or makes a step of its own in each
    pass, like the power iteration of spectral norm."""
    nn = torch.nn
    kinds = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    if isinstance(module, kinds) or type(module).__name__ == "_SpectralNorm":
        return True
    hooks = module._forward_pre_hooks.values()
    return any(type(hook).__name__ == "SpectralNorm" for hook in hooks)


def has_made(module: Any, name: str) -> bool:
    """Return whether a module has a parameter, a buffer or a module with this name."""
    homes = (module._parameters, module._buffers, module._modules)
    return any(name in home for home in homes)


def without_torch_functions(torch: Any) -> AbstractContextManager[object]:
    """Return a context whose operations no TorchFunctionMode sees."""
    context: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return context


def runs_eagerly(torch: Any) -> AbstractContextManager[object]:
    """Return a context in which compiled modules run as written, without compiling.

    ``torch.compiler.set_stance`` exists from torch 2.6 on; an older torch compiles. Without dynamo,
    whose import takes seconds and memory, nothing was compiled.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None or "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance
