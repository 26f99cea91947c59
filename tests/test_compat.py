"""Private symbols of torch and other libraries exist, and do what we use them for."""

import __future__

import ast
import contextlib
import inspect
import logging
import multiprocessing
import operator
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hydra._internal.hydra import Hydra
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

from robust_train import compat
from robust_train.cli.train import may_set_mode
from robust_train.config.schema import TrainingConfig
from robust_train.vision.sharding import write_shards
from world import ROOT

DOCUMENTED = {"_exit", "_current_frames", "_fields", "_make"}  # of os, sys and named tuples
OVERRIDES = {"supports.py"}  # it overrides methods of a class of OmegaConf


def names_in(path):
    """The private names that a module defines, and those that it reads of other objects."""
    tree, defined, read = ast.parse(path.read_text()), set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Constant(value=str(name)) if name.startswith("robust_train."):
                read.add((node.lineno, name.rpartition(".")[2]))
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "aten" | "ops")):
                pass
            case ast.Attribute(attr=name) | ast.Call(args=[_, ast.Constant(value=str(name)), *_]):
                read.add((node.lineno, name))
            case ast.ImportFrom(module=str(module), names=names):
                read |= {(node.lineno, name.name) for name in names}
                read |= {(node.lineno, part) for part in module.split(".")}
    return defined, {symbol for symbol in read if re.match("_[^_]", symbol[1])}


def test_private_symbols_are_used_here_alone():
    uses = []
    for path in (ROOT / "src/robust_train").rglob("*.py"):
        defined, read = names_in(path)
        if path.parent.name != "compat" and path.name not in OVERRIDES:
            uses += [
                (path.name, *symbol) for symbol in read if symbol[1] not in defined | DOCUMENTED
            ]
    assert uses == []


def test_tests_use_no_private_names_of_ours():
    ours = set().union(*(names_in(path)[0] for path in (ROOT / "src").rglob("*.py")))
    ours -= {"_registry", "_rank", "_repr_html_"}  # of weakref, torch and notebooks as well
    uses = []
    for path in {*(ROOT / "tests").rglob("*.py")} - {Path(__file__)}:
        defined, read = names_in(path)
        uses += [(path.name, *symbol) for symbol in read if symbol[1] in ours - defined]
    assert uses == []


def test_the_base_interpreter_is_outside_the_virtual_environment():
    assert Path(sys._base_executable).exists()
    assert compat.base_executable() == sys._base_executable


def test_the_options_of_an_interpreter_are_given_again():
    asks = "from robust_train.compat import interpreter_options as ask; print(ask())"
    command = [sys.executable, "-O", "-Werror::RuntimeWarning", "-c", asks]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {"-O", "-Werror::RuntimeWarning"} <= {*ast.literal_eval(printed)}


def test_torchs_private_names_exist_when_used():
    assert len(compat.tree_leaves({"a": [1, torch.ones(1)]})) == 2
    places = compat.tree_map_with_path(lambda path, leaf: len(path), {"a": [1, 0.5]})
    assert places == {"a": [2, 2]}
    with pytest.raises(AttributeError, match="tree_twigs"):
        compat.tree_twigs  # noqa: B018

    class Counts(compat.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counts() as counts:
        torch.ones(2).add(1)
    assert counts.calls


def test_layers_may_depend_on_batch_or_chance():
    """They may depend on passes as well."""
    assert compat.depends_on_batch(torch, torch.nn.LazyBatchNorm1d())
    assert not compat.depends_on_batch(torch, torch.nn.GroupNorm(1, 1))
    normed = torch.nn.utils.spectral_norm(torch.nn.Linear(1, 1))
    parametrized = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(1, 1))
    (iterates,) = parametrized.parametrizations.weight
    for layer in (torch.nn.Dropout2d(), torch.nn.LSTM(1, 1), normed, iterates):
        assert compat.draws_or_iterates(torch, layer)
    assert not compat.draws_or_iterates(torch, torch.nn.Linear(1, 1))
    assert compat.has_made(torch.nn.BatchNorm1d(1), "running_mean")
    assert not compat.has_made(torch.nn.BatchNorm1d(1), "momentum")


def test_function_modes_do_not_see_block_results():
    seen = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    tensor = torch.ones(1)
    with Sees():
        with compat.without_torch_functions(torch):
            tensor.add(1)
        assert seen == []
        tensor.add(1)
    assert len(seen) == 1


def test_compiled_code_runs_as_it_was_written():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    with compat.runs_eagerly(torch):
        assert function(torch.zeros(())) == 1
    assert compiled == []


def test_private_attributes_of_tensors_and_modules():
    tensor = torch.ones(2)
    tensor.add_(1)
    assert compat.version_of(tensor) == 1
    assert compat.versions_of([tensor]) == [(1, tensor.data_ptr())]
    with torch.inference_mode():
        many = [torch.ones(1), torch.eye(1).to_sparse(), torch.nn.UninitializedBuffer()]
        assert [version for version, _ in compat.versions_of(many)] == [-1, -1, -1]
    parameters, buffers = compat.tensors_of(torch.nn.BatchNorm1d(2))
    assert {"weight"} <= set(parameters)
    assert {"running_mean"} <= set(buffers)
    layer = torch.nn.ReLU()
    twice = torch.nn.Sequential(layer, torch.nn.Sequential(layer))
    assert set(compat.modules_below([twice, layer])) == set(twice.modules())
    compat.copy_at_once(torch, [tensor], [torch.zeros(2)])
    assert tensor.tolist() == [0, 0]
    before = tensor._version
    with compat.preserve_version_counter(torch, tensor):
        tensor.add_(1)
    assert (tensor._version, tensor.tolist()) == (before, [1, 1])
    state = torch.nn.BatchNorm1d(2).state_dict()
    copied = type(state)(state)
    compat.keep_versions(copied, state)
    assert copied._metadata[""]["version"] == 2
    compat.keep_versions(copied, {})


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_groups_of_a_process_are_listed(one_rank):
    group = dist.new_group()
    assert compat.groups_of_process(dist) == [dist.group.WORLD, group]
    assert compat.groups_of_process(SimpleNamespace(distributed_c10d=None)) == []


def test_collectives_are_counted(one_rank):
    before = compat.collectives_begun(dist.group.WORLD)
    dist.all_reduce(torch.ones(1))
    assert compat.collectives_begun(dist.group.WORLD) == before + 1
    wrapper = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert compat.hook_and_delay(wrapper) == (False, False)
    wrapper(torch.ones(1, 2)).sum().backward()
    before = compat.collectives_begun(dist.group.WORLD)
    for _ in range(2):
        compat.settle_buckets(wrapper)
        assert compat.collectives_begun(dist.group.WORLD) > before, "once"
    with wrapper.no_sync():
        before = compat.collectives_begun(dist.group.WORLD)
        wrapper(torch.ones(1, 2)).sum().backward()
    assert compat.collectives_begun(dist.group.WORLD) == before
    wrapper.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    assert compat.hook_and_delay(wrapper) == (True, False)


def test_this_torch_accepts_every_cuda_call():
    """No machine without a GPU runs most of the calls of ``torch.cuda``."""
    paths = [*(ROOT / "src").glob("**/*.py"), *(ROOT / "benchmarks").glob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    calls = [call for call in calls if re.fullmatch(r"torch\.cuda[.\w]+", ast.unparse(call.func))]
    assert len(calls) > 50
    refused = []
    for call in calls:
        name = ast.unparse(call.func)
        function = operator.attrgetter(name.removeprefix("torch."))(torch)
        named = {key.arg: None for key in call.keywords if key.arg is not None}
        try:
            inspect.signature(function).bind(*call.args, **named)
        except TypeError as error:
            refused.append(f"{ast.unparse(call)}: {error}")
    # before torch 2.8 without that argument, and asked without it then
    assert [line for line in refused if "include_traces" not in line] == []


def test_a_missing_private_function_costs_one_feature():
    if torch.version.cuda is not None:
        for name in ("clearCublasWorkspaces", "hasPrimaryContext", "isHistoryEnabled"):
            assert hasattr(torch._C, f"_cuda_{name}")
    bare = SimpleNamespace(_C=SimpleNamespace())
    assert compat.has_context(bare, 0) is True
    compat.clear_cublas_workspaces(bare)
    compat.return_pinned_memory(bare)
    assert hasattr(torch._C, "_host_emptyCache")
    compat.return_pinned_memory(torch)


@pytest.mark.parametrize(
    "name",
    ["_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"],
)
def test_allocator_settings_go_to_whichever_function_torch_has(name):
    seen = []
    fake = SimpleNamespace(_C=SimpleNamespace(**{name: seen.append}))
    compat.set_allocator_settings(fake, "expandable_segments:True")
    assert seen == ["expandable_segments:True"]


def test_optimizer_steps_are_watched_until_told_otherwise():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    steps = []
    stop = compat.watch_optimizer_steps(lambda: steps.append(1))
    optimizer.step()
    stop()
    optimizer.step()
    assert steps == [1]
    assert not _global_optimizer_post_hooks


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_figure_makes_fused_optimizers_skip_updates(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, fused=True)
    assert compat.can_skip_on_device(optimizer)
    assert not compat.can_skip_on_device(kind([weight], lr=0.1))
    for is_bad in (True, False):
        weight.grad = torch.full((3,), float("nan") if is_bad else 1.0)
        with compat.leave_out_if(optimizer, torch.tensor(is_bad)):
            optimizer.step()
        assert torch.equal(weight, torch.ones(3)) == is_bad
    assert not hasattr(optimizer, "found_inf")


class Forwarding:
    """Reads like the optimizer in it, as people write such wrappers."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_only_torchs_fused_optimizers_get_a_figure():
    weight = torch.nn.Parameter(torch.ones(3))
    fused = torch.optim.AdamW([weight], lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(fused, 1)
    assert compat.can_skip_on_device(fused), "though a scheduler counts its steps"
    others = Forwarding(fused), Own([weight], lr=0.1, fused=True)
    assert not any(map(compat.can_skip_on_device, others))
    name = "_step_supports_amp_scaling"
    for optimizer in (*others, torch.optim.SGD([weight], lr=0.1)):
        before = dict(vars(optimizer))
        with compat.decide_on_host(optimizer):
            assert not getattr(optimizer, name, False)
        assert vars(optimizer) == before
    assert getattr(others[0], name)


def test_an_overflow_is_found_in_the_scaler():
    """The scaler has recorded it."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for gradient, overflows in ((1.0, False), (float("inf"), True)):
        weight.grad = torch.full((2,), gradient)
        scaler.unscale_(optimizer)
        assert compat.found_overflow(scaler, optimizer) is overflows
        assert [*map(bool, compat.overflow_figures(scaler, optimizer))] == [overflows]
        scaler.step(optimizer)
        scaler.update()
    assert compat.found_overflow(SimpleNamespace(), optimizer) is None
    assert compat.overflow_figures(SimpleNamespace(), optimizer) is None


def test_momentum_that_begins_is_decided_on_the_host():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True)
    weights[0].grad = torch.ones(3)
    assert not compat.can_skip_on_device(optimizer)
    optimizer.step()
    assert compat.can_skip_on_device(optimizer)


def test_an_unfused_optimizer_is_decided_on_the_host():
    """Loading its state leaves the optimizer's promise, and takes away the kernel that keeps it."""
    weight = torch.nn.Parameter(torch.ones(3))
    fused = torch.optim.AdamW([weight], lr=0.1, fused=True)
    fused.load_state_dict(torch.optim.AdamW([weight], lr=0.1).state_dict())
    assert not compat.can_skip_on_device(fused)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_norm_leaves_all_gradients_unchanged(monkeypatch, is_known):
    if not is_known:  # before torch 2.6
        monkeypatch.delattr("torch.nn.utils.get_total_norm")
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    for weight, gradient in zip(weights, (3.0, 4.0), strict=False):
        weight.grad = torch.full((1,), gradient)
    assert compat.total_norm(torch, weights) == 5
    assert weights[1].grad == 4


def test_what_a_step_runs_before_it_changes_anything():
    def closure():
        return None

    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
    makes_state = inspect.unwrap(torch.optim.SGD._init_group).__code__  # dynamo may wrap it
    first, second = optimizer.param_groups
    codes = compat.codes_before_update(optimizer, {"closure": torch.enable_grad()(closure)})
    assert codes == {closure.__code__, makes_state}
    assert compat.codes_before_update(optimizer, {"group": first}) == {makes_state}
    assert compat.codes_before_update(optimizer, {"group": second}) == set()


RUNS_THEM = """
import atexit, os, threading, time
from robust_train.compat import run_exit_handlers
atexit.register(print, "handler", flush=True)
work = lambda: (time.sleep(0.1), print("thread", flush=True))
threading.Thread(target=work).start()
run_exit_handlers()
os._exit(0)
"""


def test_exit_handlers_run_as_at_an_interpreters_end():
    program = [sys.executable, "-c", RUNS_THEM]
    assert subprocess.check_output(program, text=True, timeout=60).split() == ["thread", "handler"]


def test_known_facts_of_torch_and_handlers_hold():
    calls = []
    compat.when_cuda_starts(torch, lambda: calls.append(1))
    assert calls == ([1] if torch.cuda.is_initialized() else [])
    assert compat.torch_cuda_version() == (torch.version.cuda or "none"), "without its import"
    for platform in ("hip", "xpu"):
        assert compat.torch_built_for(platform) == getattr(torch.version, platform)
    handler = logging.StreamHandler()
    assert compat.format_of(handler) is None
    handler.setFormatter(logging.Formatter("%(message)s!"))
    assert compat.format_of(handler) == "%(message)s!"


def test_hydra_composes_once_for_command_line_sweeps():
    """If the command line alone says whether to sweep."""
    original = Hydra.get_mode
    with compat.skip_mode_lookup():
        assert Hydra.get_mode(None, "robust", []) is None
    assert Hydra.get_mode is original


def test_only_a_custom_config_may_demand_sweeps():
    """None of ours does."""
    demanding = ["hydra.mode=MULTIRUN", "hydra.searchpath=[/etc]", "--config-dir=/etc", "-cn=other"]
    given = [*demanding, "training.lr=1e-3", "--multirun"]
    assert [word for word in given if may_set_mode([word])] == demanding
    folder = ROOT / "src/robust_train/configs"
    assert not [file for file in folder.rglob("*.yaml") if "mode:" in file.read_text().split()]


def test_hydras_parser_names_what_it_does_not_know():
    given = ["-m", "--config-name", "robust", "model=lora", "--modle=lora"]
    assert compat.unknown_to_hydra(given) == ["--modle=lora"]


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (["a=1", "--cfg", "job"], ["a=1", "c=3", "--cfg", "job"]),
        (["-m", "a=1", "b=2"], ["-m", "a=1", "b=2", "c=3"]),
        (["--config-name", "a", "a", "-m"], ["--config-name", "a", "a", "c=3", "-m"]),
        (["--info"], ["c=3", "--info"]),
        ([], ["c=3"]),
    ],
)
def test_more_overrides_stand_where_the_others_are(given, whole):
    assert compat.add_overrides(given, ["c=3"]) == whole


def test_the_history_of_the_allocator_fits_this_torch():
    """It is called with the arguments that this torch has."""
    seen = []

    def noting(function):
        signature = inspect.signature(function)
        return lambda *args, **keys: seen.append(signature.bind(*args, **keys))

    fake = mock.Mock(**{"_C._cuda_isHistoryEnabled.return_value": True})
    for name in ("_record_memory_history", "_dump_snapshot"):
        setattr(fake.cuda.memory, name, noting(getattr(torch.cuda.memory, name)))
    compat.record_allocator_history(fake, 5)
    compat.dump_allocator_snapshot(fake, "a path")
    compat.end_allocator_history(fake)
    assert [call.arguments for call in seen] == [
        {"stacks": "python", "max_entries": 5},
        {"filename": "a path"},
        {"enabled": None},
    ]
    assert compat.allocator_history_is_recorded(fake) is True


def test_the_collectives_of_a_sharded_model_are_seen(one_rank):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"):
        pytest.skip("a torch that cannot reset a sharded model")
    model = torch.nn.Linear(2, 2)
    fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    seen = []

    @contextlib.contextmanager
    def noted(is_gather, *_):
        yield
        seen.append(is_gather)

    gather, scatter = compat.wrap_collectives(noted)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    assert not compat.has_own_collectives(model)
    assert not compat.sharding_has_begun(model)
    model(torch.ones(1, 2)).sum().backward()
    assert compat.sharding_has_begun(model)
    # a pass that is left without its reduction, as in the middle of a step
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    compat.reset_sharding(model)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1.0, 1.0], [1.0, 1.0]]
    gathered = torch.zeros(2)  # one rank alone has no need of its own collectives
    gather(gathered, torch.ones(2), dist.group.WORLD)
    assert (seen, gathered.tolist()) == ([True], [1, 1])
    model.set_custom_all_gather(type("OfAUser", (type(gather),), {})())
    assert compat.has_own_collectives(model)


def test_every_function_has_a_test_here():
    here = inspect.getsource(sys.modules[__name__])
    functions = [name for name, member in vars(compat).items() if inspect.isfunction(member)]
    ours = [name for name in functions if getattr(compat, name).__module__ == compat.__name__]
    assert [name for name in ours if name not in here and not name.startswith("_")] == []


@pytest.fixture
def shards(one_rank, tmp_path):
    """A folder that torch.distributed.checkpoint has written for one rank, and what is in it."""
    tensors = pytest.importorskip("torch.distributed.tensor")
    mesh = init_device_mesh("cpu", (1,))
    whole = {name: torch.randn(400, 3) for name in ("model.a", "model.b")}
    content = {
        "model": {name[-1]: tensors.DTensor.from_local(t, mesh) for name, t in whole.items()}
    }
    return write_shards(dist.group.WORLD, content, tmp_path / "saved"), whole


def test_only_undamaged_torch_files_fill_tensors(shards):
    """No flipped byte is believed."""
    folder, whole = shards

    def is_loaded():
        wanted = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
        compat.load_shards(folder, folder / "index.pt", wanted)
        return all(torch.equal(wanted[name], whole[name]) for name in whole)

    assert is_loaded()
    for file in (folder / "index.pt", folder / "__0_0.distcp"):
        data, refused = file.read_bytes(), 0
        places = range(0, len(data), 97)
        for at in places:
            file.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            try:
                is_whole = is_loaded()
            except Exception:
                refused += 1
            else:
                assert is_whole, "padding, or a field that nobody reads"
        file.write_bytes(data)
        assert refused > len(places) / 2, file


def test_a_hydra_jobs_error_is_read_unraised():
    job, error = JobReturn(status=JobStatus.FAILED), KeyError("x")
    job.return_value = error
    assert compat.unwrap_job_return(job) is error


def test_hydra_gets_a_version_without_warning(monkeypatch):
    """The version that it is to behave like, unless it warns of that."""
    import hydra

    for version, given in (("1.3.4", {"version_base": "1.3"}), ("1.4.0rc1", {})):
        monkeypatch.setattr(hydra, "__version__", version)
        with warnings.catch_warnings():
            assert compat.version_base_options("1.3") == given
            assert compat.version_base_options("1.2") == {"version_base": "1.2"}, "a project's own"


@pytest.mark.parametrize("version_base", [compat.HYDRAS_OWN, None, "1.1", "1.2", "1.3"])
def test_configs_default_to_where_hydra_looks(monkeypatch, version_base):
    """No config path is given."""
    import hydra

    paths = []
    monkeypatch.setattr(sys, "argv", ["main.py"])
    monkeypatch.setattr(
        sys.modules["hydra.main"], "_run_hydra", lambda config_path, **_: paths.append(config_path)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hydra.main(**compat.version_base_options(version_base))(print)()
    assert paths == [compat.default_config_path(version_base)]


def test_a_resolver_is_registered_without_a_warning(recwarn):
    for value in (1, 2):
        compat.register_resolver("a_number_of_ours", lambda value=value: value)
        assert OmegaConf.create({"x": "${a_number_of_ours:}"}).x == value
    OmegaConf.clear_resolver("a_number_of_ours")
    assert not list(recwarn)


def test_a_signature_needs_no_values_of_annotations():
    """Deferred by Python 3.14, and by earlier ones where a file asks for it."""
    flags = 0 if sys.version_info >= (3, 14) else __future__.annotations.compiler_flag
    names = {}
    exec(compile("def step(x: NoSuchName): ...", "optim.py", "exec", flags=flags), names)
    assert str(compat.signature_as_written(names["step"])) == "(x: 'NoSuchName')"


def test_all_but_config_reading_resolvers_are_replaced():
    calls = []

    def evaluate(key, name, arguments, resolve):
        calls.append((key, name, arguments))
        return resolve()

    OmegaConf.register_new_resolver("sum_of", lambda *numbers: sum(numbers), use_cache=True)
    OmegaConf.register_new_resolver("near", lambda _parent_: _parent_.a)
    config = OmegaConf.create({"in": {"a": 1, "b": "${sum_of:${.a},2}", "c": "${near:}"}})
    config["in"]["d"] = "${oc.select:in.a}"
    config["in"]["e"] = "${hydra:job.name}"
    OmegaConf.register_new_resolver("hydra", str, replace=True)
    with compat.intercept_resolvers(evaluate):
        assert OmegaConf.to_container(config, resolve=True)["in"] == {
            "a": 1,
            "b": 3,
            "c": 1,
            "d": 1,
            "e": "job.name",
        }
        config["in"].a = 5
        assert config["in"].b == 7, "the cache knows an argument by its text alone"
    assert calls == [("in.b", "sum_of", ("1", "2")), ("in.b", "sum_of", ("5", "2"))]
    assert config["in"].b == 7
    assert len(calls) == 2
    OmegaConf.clear_resolver("sum_of")
    OmegaConf.clear_resolver("near")
    setup_globals()


def test_no_process_starts_during_another_scripts_import():
    assert not compat.is_importing_main()
    with compat.importing_main():
        assert compat.is_importing_main()
        with pytest.raises(RuntimeError, match="bootstrapping phase"):
            multiprocessing.get_context("spawn").Process(target=print).start()
    assert not compat.is_importing_main()


def test_nodes_keep_types_and_accept_any_replacement():
    with pytest.raises(ValidationError, match="could not be converted to Float"):
        OmegaConf.create(compat.nodes_of(OmegaConf.structured(TrainingConfig))).lr = "much"
    config = OmegaConf.structured(TrainingConfig)
    OmegaConf.set_readonly(config, None)  # it is of a frozen class
    (node,) = compat.nodes_of(OmegaConf.create({"a": 1})).values()
    nodes = compat.nodes_of(config)
    compat.set_nodes(config, {**nodes, "lr": node})
    assert list(config) == list(nodes)
    config.lr = "much"
    assert config.lr == "much"
    with pytest.raises(ValidationError, match="could not be converted to Integer"):
        config.epochs = "often"


def test_a_users_own_gradient_hooks_are_seen():
    layer = torch.nn.Linear(1, 1)
    assert not compat.has_step_in_backward(layer.weight)
    layer.weight.register_post_accumulate_grad_hook(torch.nn.utils.clip_grad_norm_)  # torch's own
    assert not compat.has_step_in_backward(layer.weight)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert compat.has_step_in_backward(layer.weight)
    from torch.distributed.optim import _apply_optimizer_in_backward as apply

    apply(torch.optim.SGD, [layer.bias], {"lr": 0.1})
    assert compat.has_step_in_backward(layer.bias)


def test_trl_logs_passes_by_mode_and_name():
    """It keeps them in lists."""
    notes = {"train": {"entropy": [1.0]}, "eval": {}}
    assert compat.figures_of_passes(SimpleNamespace(_metrics=notes)) is notes
    others = (None, {}, {"a": [1.0]}, {"train": {"a": 1.0}})
    assert [compat.figures_of_passes(SimpleNamespace(_metrics=metrics)) for metrics in others] == [
        {}
    ] * 4
    assert compat.figures_of_passes(object()) == {}


def test_private_names_of_transformers_are_there(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Own(transformers.Trainer):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs([value + 1 for value in inputs])

    given = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    plain, custom = (kind(torch.nn.Linear(1, 1), given) for kind in (transformers.Trainer, Own))
    assert compat.shifts_labels(plain) is False
    assert "_loss_shifts_labels" in vars(plain)
    assert compat.prepare_inputs(custom, [torch.zeros(1)]) == [torch.ones(1)]
    answers = [compat.has_own_inputs(trainer, transformers.Trainer) for trainer in (plain, custom)]
    assert answers == [False, True]
    plain.create_optimizer_and_scheduler(1)
    compat.save_trainer(plain)
    assert (tmp_path / "checkpoint-0" / "trainer_state.json").exists()
    writes = []
    compat.intercept_saves(plain, writes.append)
    compat.save_trainer(plain)
    shutil.rmtree(tmp_path / "checkpoint-0")
    writes.pop()()
    assert (tmp_path / "checkpoint-0" / "trainer_state.json").exists()
    (weight, _), best = plain.model.parameters(), str(tmp_path / "checkpoint-0")
    before = weight.item()
    for best_path, expected in ((None, 0), (best, before)):
        weight.data.zero_()
        plain.state.best_model_checkpoint = best_path
        compat.load_best(plain)
        assert weight.item() == expected
    owed = {}

    def take(save, content, path):
        owed[path.name] = lambda: save(content)

    with compat.redirect_savers(take):
        pytest.importorskip("accelerate").Accelerator(cpu=True).save_state(str(tmp_path / "other"))
        plain.save_model(str(tmp_path / "model"))
        torch.save({}, (tmp_path / "open.pt").open("wb"))
    assert {"model.safetensors", "training_args.bin"} <= owed.keys()
    assert not (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "open.pt").exists(), "a file that is open already is written"
    owed["model.safetensors"]()
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert torch.save.__module__ == "torch.serialization", "all is as before"


def test_private_names_of_lightning_are_there(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, number):
            self.log("a", 2.0 + number, on_step=True, on_epoch=True, batch_size=1)
            ((_, metric),) = compat.values_logged_by(self.trainer).items()
            seen.append((compat.accumulates_now(self.trainer), getattr(metric, compat.LATEST)))
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    keys = {"max_epochs": 1, "accumulate_grad_batches": 2, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(accelerator="cpu", **keys, **quiet)
    assert not compat.starts_ranks_itself(trainer)
    compat.keep_samplers(trainer)
    assert not trainer._data_connector._requires_distributed_sampler(None)
    two = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", **quiet)
    assert compat.starts_ranks_itself(two)
    finder = lightning.callbacks.LearningRateFinder()
    trainer.callbacks.append(finder)
    assert not compat.belongs_to_tuner(trainer)
    finder._early_exit = True
    assert compat.belongs_to_tuner(trainer)
    trainer.callbacks.remove(finder)
    trainer.fit_loop.restarting = True
    compat.step_schedulers(trainer)
    assert not trainer.fit_loop.restarting
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 1)))
    assert seen == [(True, 2.0), (False, 3.0)]


def test_accelerate_makes_a_scheduler_its_own():
    accelerate = pytest.importorskip("accelerate", reason="the extra [accelerate]")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(optimizer, schedule)
    assert compat.schedulers_of(accelerator) == [prepared[1]]


def test_a_running_optuna_trial_can_be_resumed():
    optuna = pytest.importorskip("optuna", reason="the extra [sweep]")
    study = optuna.create_study()
    study.ask()
    (running,) = study.trials
    space = optuna.distributions.FloatDistribution(0, 1)
    value = compat.suggest(compat.open_trial(study, running), "x", space)
    assert compat.suggest(compat.open_trial(study, running), "x", space) == value
    assert list(study.trials[0].params) == ["x"]


IMPORTANCES = """
import sys, optuna
from robust_train import compat
study = optuna.create_study()
study.optimize(lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_float("y", 0, 9), 20)
print(*sorted(compat.importances_of(study)), "sklearn" in sys.modules)
"""


def test_importances_import_no_scikit_learn():
    pytest.importorskip("optuna", reason="the extra [sweep]")
    program = [sys.executable, "-c", IMPORTANCES]
    assert subprocess.check_output(program, text=True) == "x y False\n"
