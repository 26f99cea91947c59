"""transformers' Trainer repeats the step in which memory runs out, in smaller parts."""

import importlib
import itertools
import operator
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import running_out
import torch
import torch.distributed as dist
from running_out import RUN_OUT, Fuse, allocate, differ_by_rounding_alone, ends_the_attempt
from torch.nn import functional

from forked_ranks import of_forks
from framework_config import SILENT
from robust_train.attempt.run import Run

transformers = pytest.importorskip(
    "transformers", reason="the extra [transformers] is not installed"
)
accelerate = pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")

from robust_train.integrations import step_recovery, transformers_loss, transformers_step  # noqa: E402


class Tagger(torch.nn.Module):
    """Labels each position; with ``sums`` it divides by the step's items."""

    def __init__(self, fuse, *, sums):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(20, 8), fuse, torch.nn.Tanh(), torch.nn.Linear(8, 5)
        )
        self.accepts_loss_kwargs = sums

    def forward(self, x, labels, num_items_in_batch=None, **others):
        logits = self.layers(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / (num_items_in_batch or labels.ne(-100).sum()), "logits": logits}


class IgnoresTheCount(Tagger):
    """Says that it takes the count, as models with ``**kwargs`` do, and has a mean nevertheless."""

    def forward(self, x, labels, num_items_in_batch=None, **others):
        return super().forward(x, labels)


def samples(count=21):
    """Sequences with many positions without loss, and not as many in each."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        x = torch.randint(0, 20, (6,), generator=generator)
        labels = x % 5
        labels[6 - number % 6 :] = -100
        rows.append({"x": x, "labels": labels})
    return rows


class Fitted(running_out.Fitted):
    def __init__(
        self,
        folder,
        model,
        batch_size=4,
        trainer=None,
        collator=None,
        first_size=None,
        count=21,
        **options,
    ):
        from robust_train.integrations.transformers import fit, training_arguments

        super().__init__(folder, model, batch_size, first_size=first_size)
        arguments = transformers.TrainingArguments(
            **training_arguments(self.cfg, self.run),
            num_train_epochs=1,
            learning_rate=0.05,
            logging_steps=1,
            **SILENT,
            **options,
        )
        data = samples(count)
        self.trainer = (trainer or transformers.Trainer)(
            model, arguments, train_dataset=data, eval_dataset=data[:7], data_collator=collator
        )
        self.result = fit(self.trainer, cfg=self.cfg, run=self.run)
        steps = [entry for entry in self.trainer.state.log_history if "loss" in entry]
        self.losses = [entry["loss"] for entry in steps]
        self.others = [(entry["grad_norm"], entry["learning_rate"]) for entry in steps]


@pytest.mark.parametrize(
    ("kind", "sums"), [(Tagger, True), (Tagger, False), (IgnoresTheCount, True)]
)
def test_memory_errors_change_neither_weights_nor_losses(tmp_path, kind, sums):
    """Wherever memory runs out, they are those of a run with enough of it."""
    whole = Fitted(tmp_path, kind(Fuse(), sums=sums))
    assert len(whole.losses) == 3
    # the third batch is the first of step 2; the last step has a short one, of one sample
    for where, at in itertools.product(("forward", "backward"), (3, 4, 5)):
        fuse = Fuse(where, at, fits=2)
        split = Fitted(tmp_path, kind(fuse, sums=sums))
        assert split.changed(training=True) == [((at + 1) // 2, 4, 2)], (where, at)
        again = at - 1 if at == 4 else at  # the step's batches so far
        split_checked = fuse.of_a_split_check(4)
        rest = [2] * 2 * (6 - again) + [1] * (at != 6)
        assert fuse.sizes[at:] == split_checked + rest, (where, at)
        differ_by_rounding_alone(split.weights, whole.weights)
        assert split.losses == pytest.approx(whole.losses, abs=1e-5), (where, at)
        for figures, other in zip(split.others, whole.others, strict=True):
            assert figures == pytest.approx(other, abs=1e-5), (where, at)
        evaluated = pytest.approx(whole.result["eval_loss"], abs=1e-5)
        assert split.result["eval_loss"] == evaluated, (where, at)


class Classifier(Tagger):
    """Has a mean over samples, and ``**kwargs`` that it ignores, as BERT for classification."""

    def forward(self, x, labels=None, **kwargs):
        logits = self.layers(x).mean(1)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _with_a_class(features):
    batch = transformers.default_data_collator(features)
    return {**batch, "labels": batch["labels"][:, 0]}


class _OwnLoss(transformers.Trainer):
    """Ignores the count that its model would take."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@pytest.mark.parametrize("trainer", [transformers.Trainer, _OwnLoss])
@pytest.mark.parametrize("first_size", [8, 4])
def test_a_loss_without_counts_keeps_its_weight(tmp_path, trainer, first_size, caplog):
    """The batch was halved, and the loss ignores the count of items."""
    caplog.set_level("INFO", "robust_train")
    job = {"trainer": trainer, "count": 24, "collator": _with_a_class, "optim": "sgd"}
    whole = Fitted(tmp_path, Classifier(Fuse(), sums=True), first_size, **job)
    assert "weights them like" not in caplog.text
    for size in (2, 1):
        fuse = Fuse("forward", 3 * 8 // size, fits=1)  # the last steps are repeated as well
        halved = Fitted(tmp_path, Classifier(fuse, sums=True), size, first_size=first_size, **job)
        assert bool(halved.changed(training=True)) is (size == 2)
        differ_by_rounding_alone(halved.weights, whole.weights)
        assert halved.losses == pytest.approx(whole.losses, abs=1e-5), f"{size=}"
        for figures, other in zip(halved.others, whole.others, strict=True):
            assert figures == pytest.approx(other, abs=1e-5), f"{size=}"
        evaluated = pytest.approx(whole.result["eval_loss"], abs=1e-6)
        assert halved.result["eval_loss"] == evaluated, f"{size=}"
    lines = [r.getMessage() for r in caplog.records if "weights them like" in r.getMessage()]
    assert len(lines) == 2
    assert "this attempt has 4 × 2 samples in a step" in lines[0]
    assert f"like the requested {8 // first_size} × {first_size}." in lines[0]


def test_losses_by_count_agree_in_all_attempts(tmp_path):
    """So does their evaluation."""
    whole = Fitted(tmp_path, Tagger(Fuse(), sums=True), 8)
    fuse = Fuse(training=False)
    halved = Fitted(tmp_path, Tagger(fuse, sums=True), 2, first_size=8)
    first_parts, later_parts = fuse.sizes[:2], fuse.sizes[2:6]
    parts = (first_parts, later_parts)
    assert parts == ([2, 2], [1, 2, 2, 2]), "parts of the batch that the job began with"
    differ_by_rounding_alone(halved.weights, whole.weights)
    assert halved.result["eval_loss"] == pytest.approx(whole.result["eval_loss"], abs=1e-6)


def test_an_unsplittable_evaluation_reports_its_smaller_batches(tmp_path, caplog):
    Fitted(tmp_path, Tagger(Fuse(), sums=True), 8, trainer=_OwnBatches, first_size=8)
    assert "evaluates in batches" not in caplog.text
    Fitted(tmp_path, Tagger(Fuse(), sums=True), 2, trainer=_OwnBatches, first_size=8)
    assert "evaluates in batches of 2, no longer 8, so eval_loss" in caplog.text


class _ShiftsItself(Tagger):
    """A mean over the labels from the second one on, which the Trainer does not know."""

    def forward(self, x, labels, **kwargs):
        logits = self.layers(x)
        shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": functional.cross_entropy(*shifted), "logits": logits}


def test_losses_that_shift_labels_weigh_as_counted(tmp_path):
    """The loss of a part weighs by the labels that it counts itself."""
    job = {"collator": transformers.default_data_collator, "optim": "sgd"}
    whole = Fitted(tmp_path, _ShiftsItself(Fuse(), sums=False), **job)
    split = Fitted(tmp_path, _ShiftsItself(Fuse("forward", 1, fits=1), sums=False), **job)
    assert split.changed(training=True)
    assert [norm for norm, _ in split.others] == pytest.approx(
        [norm for norm, _ in whole.others], rel=1e-5
    )
    assert split.result["eval_loss"] == pytest.approx(whole.result["eval_loss"], abs=1e-6)
    differ_by_rounding_alone(split.weights, whole.weights)


class _NotesPasses(transformers.Trainer):
    """Keeps figures of each pass until it logs their mean, as TRL's trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        tokens = inputs["labels"][:, 1:]
        right = (outputs["logits"].argmax(-1)[:, :-1] == tokens)[tokens != -100]
        notes = self._metrics["train" if model.training else "eval"]
        notes["right"].append(float(right.float().mean()) if right.numel() else 0.0)
        self._total_train_tokens += right.numel() * model.training
        notes["tokens"] = [self._total_train_tokens]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args):
        notes = self._metrics["train" if self.model.training else "eval"]
        super().log({**logs, **{name: sum(v) / len(v) for name, v in notes.items()}}, *args)
        notes.clear()


@pytest.mark.parametrize("sums", [True, False])
def test_logged_figures_show_no_split(tmp_path, sums):
    """The figures of passes are logged as if there were no parts."""

    def logged(fuse):
        fitted = Fitted(tmp_path, Tagger(fuse, sums=sums), trainer=_NotesPasses)
        assert bool(fitted.changed(training=fuse.is_for_training)) is (fuse.where != "never")
        entries = fitted.trainer.state.log_history
        return [[entry["right"], entry["tokens"]] for entry in entries if "right" in entry]

    whole = logged(Fuse())
    assert len(whole) == 4, "three steps and an evaluation"
    for fuse in (
        Fuse("forward", 3),
        Fuse("backward", 4),
        Fuse("forward", 1, fits=1, training=False),
    ):
        for figures, other in zip(logged(fuse), whole, strict=True):
            assert figures == pytest.approx(other, abs=1e-6), (fuse.where, fuse.at)


class _Layerwise(transformers.Trainer):
    """Steps as soon as a gradient exists, layer by layer, like GaLore and APOLLO."""

    def create_optimizer(self, model=None):
        def step(parameter):
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
            parameter.grad = None

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return super().create_optimizer()


def test_an_optimizer_within_backward_is_never_repeated(tmp_path, caplog):
    """Its steps are made in the backward pass."""
    model = Tagger(Fuse("backward", 3, fits=2), sums=False)
    with pytest.raises((RuntimeError, MemoryError), match=RUN_OUT):
        Fitted(tmp_path, model, trainer=_Layerwise)
    (line,) = [r.getMessage() for r in caplog.records if "no step is repeated" in r.getMessage()]
    assert "a new attempt has the same batch" in line
    assert "has a hook for its gradient (register_post_accumulate_grad_hook)" in line


def test_two_samples_without_labels_show_a_mean_too(tmp_path):
    model = IgnoresTheCount(Fuse(), sums=True)
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    )
    loss = transformers_loss.TrainersLoss(trainer)
    x = torch.zeros(4, 6, dtype=torch.int64)
    data = {"x": x, "labels": torch.cat([x[:2] - 100, x[:2]])}
    assert not loss.adds_up(model, data, torch.tensor(12))


class Shifting(Tagger):
    loss_type = "ForCausalLM"


@pytest.mark.parametrize(
    ("kind", "name"), [(Tagger, "labels"), (Shifting, "labels"), (Shifting, "shift_labels")]
)
def test_a_parts_items_are_the_trainers_count(tmp_path, kind, name):
    trainer = transformers.Trainer(
        kind(Fuse(), sums=True),
        transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
    )
    loss = transformers_loss.TrainersLoss(trainer)
    data = transformers.default_data_collator(samples(5))
    everywhere = data["labels"].ne(-100).sum()
    data[name] = data["labels"].clone()
    data[name][0, 0] = -100
    count = trainer._get_num_items_in_batch([data], torch.device("cpu"))
    assert loss.count_items(trainer.model, data, count) == count
    assert everywhere - count == (5 if (kind, name) == (Shifting, "labels") else 1)


def test_an_evaluation_repeats_the_failed_batch(tmp_path):
    """The batch in which memory ran out."""
    whole = Fitted(tmp_path, Tagger(Fuse(), sums=True))
    fuse = Fuse("forward", 1, fits=2, training=False)
    split = Fitted(tmp_path, Tagger(fuse, sums=True))
    assert fuse.sizes[:7] == [4, 2, 2, *(2, 2), 1, 2], "the loss is asked, and the rest has three"
    assert not split.changed(training=True)
    ((_, before, after),) = split.changed(training=False)
    assert (before, after) == (4, 2)
    assert split.result["eval_loss"] == pytest.approx(whole.result["eval_loss"], abs=1e-6)
    prediction, other = (fitted.trainer.predict(samples(7)) for fitted in (split, whole))
    torch.testing.assert_close(
        torch.tensor(prediction.predictions), torch.tensor(other.predictions)
    )
    assert (prediction.label_ids == other.label_ids).all()


def _ends_where_its_parts_communicate(folder):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    step_recovery.ranks = SimpleNamespace(here=lambda: "others")
    lines: list[str] = []
    recovery = step_recovery.StepRecovery(Run(run_dir=folder), "transformers")
    recovery.warn_once = lines.append
    sizes: list[int] = []

    def body(part):
        sizes.append(len(part))
        dist.all_reduce(torch.ones(1))
        allocate(len(part), 2)

    try:
        recovery.evaluate(torch.nn.Linear(1, 1), {"x": torch.zeros(4, 1)}, body)
    except (MemoryError, RuntimeError) as error:
        return [*lines, str(error), sizes]
    return []


def test_an_evaluation_whose_parts_communicate_ends_the_attempt(tmp_path):
    """Other ranks evaluate the batch once: a collective of one that repeats it has no partner."""
    ((line, message, sizes),) = of_forks(1, lambda _: _ends_where_its_parts_communicate(tmp_path))
    assert "calls the collective allreduce_" in line
    assert RUN_OUT in message
    assert sizes == [4, 2]


class _OwnBackward(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


class _OwnBatches(transformers.Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


def _with_a_number(features):
    return {**transformers.default_data_collator(features), "temperature": torch.tensor(1.0)}


def _packed(features):
    """All samples of a batch in one row, as collators without padding make it."""
    return {key: torch.cat([sample[key] for sample in features])[None] for key in features[0]}


def _looks_as_if(where, values, monkeypatch):
    """Let the integration see other values; the packages and the GPU are not there."""

    def recover(trainer, run):
        with monkeypatch.context() as patch:
            for name, value in values.items():
                patch.setattr(operator.attrgetter(where)(trainer), name, value)
            transformers_step.recover_in_steps(trainer, run)

    # by its name: another test may have imported the package anew
    module = importlib.import_module("robust_train.integrations.transformers")
    monkeypatch.setattr(module, "recover_in_steps", recover)


_KIND = accelerate.utils.DistributedType
_DEEPSPEED, _FSDP = (
    ("accelerator.state", {"distributed_type": kind}) for kind in (_KIND.DEEPSPEED, _KIND.FSDP)
)
_LOMO = ("args", {"optim": transformers.training_args.OptimizerNames.LOMO})
_GRAPHS = ("args", {"torch_compile": True, "torch_compile_mode": "reduce-overhead"})


@pytest.mark.proves("transformers", "one GPU", "refused", "batches with numbers")
@pytest.mark.proves(
    "transformers", "one GPU", "refused", "`training_step` with a backward pass of its own"
)
@pytest.mark.proves("transformers", "one GPU", "refused", "`_prepare_inputs` of your own")
@pytest.mark.proves("transformers", "one GPU", "refused", "packed sequences")
@pytest.mark.proves("transformers", "several GPUs", "refused", "DeepSpeed")
@pytest.mark.proves("transformers", "FSDP2", "refused", "every model")
@pytest.mark.proves("transformers", "one GPU", "refused", "LOMO")
@pytest.mark.proves("transformers", "one GPU", "refused", "`torch_compile_mode` with CUDA graphs")
@pytest.mark.parametrize(
    ("options", "seen", "said"),
    [
        ({"collator": _with_a_number}, None, r"batch\['temperature'\] has 0"),
        ({"trainer": _OwnBackward}, None, "does not call self.accel"),
        ({"trainer": _OwnBatches}, None, "makes its own batches"),
        ({"collator": _packed}, None, "packed into one"),
        ({}, _DEEPSPEED, "is run by DEEPSPEED"),
        ({}, _FSDP, "is run by FSDP"),
        ({}, _LOMO, "optim=lomo updates"),
        ({}, _GRAPHS, "torch_compile_mode=reduce-overhead captures"),
    ],
    ids=["numbers", "backward", "batches", "packed", "DeepSpeed", "FSDP", "LOMO", "graphs"],
)
def test_unsplittable_steps_are_reported_once(tmp_path, options, seen, said, caplog, monkeypatch):
    """The next attempt has half the batch."""
    if seen is not None:
        _looks_as_if(*seen, monkeypatch)
    packed = 6 if options.get("collator") is _packed else 0

    def fit(size):
        model = Tagger(Fuse("forward", 3, packed=packed), sums=False)
        return Fitted(tmp_path, model, batch_size=size, **options)

    assert re.search(said, ends_the_attempt(fit, caplog))
