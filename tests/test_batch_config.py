"""What ``training.batch_size``, the accumulation and the effective batch ask for, and values of any
key that are refused."""

import pytest
from omegaconf import OmegaConf

from attempts import built
from robust_train.config.attempt import for_attempt, trainer_config
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.features.retry_rules.model import RetryKeys
from robust_train.model.errors import ConfigError
from robust_train.model.spec import AttemptSpec, RetryRule
from robust_train.policy.sizes import PolicySettings


def config_of(words):
    """The config of a job with these overrides."""
    return complete(OmegaConf.from_dotlist(words.split("; ") if words else []))


def of_training(**values):
    return "; ".join(f"training.{name}={value}" for name, value in values.items())


AUTO = of_training(batch_size="auto")
CHECKPOINTING = "training.gradient_checkpointing"
OF_16 = of_training(batch_size=16, effective_batch_size=64)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (False, 64, 1)),
        ("training.batch_size='24'", (False, 24, 1)),
        (of_training(batch_size=16, gradient_accumulation_steps=4), (False, 16, 4)),
        (OF_16, (False, 16, 4)),
        (f"{OF_16}; num_gpus=2", (False, 16, 2)),
        (AUTO, (True, 64, 1)),
        (f"{AUTO}; training.effective_batch_size=512", (True, 512, 1)),
        (f"{AUTO}; num_gpus=4", (True, 16, 1)),
    ],
)
def test_numbers_take_the_place_of_what_was_typed(words, expected):
    config = checked(config_of(words))
    found = (config.training.batch_size, config.training.gradient_accumulation_steps)
    assert (config.finds_batch_size, *found) == expected


OF_A_SCRIPT = "trainer.argv=[./train]; "
NO_MULTIPLE = "training.effective_batch_size=64: is not a multiple of "


def rule(text, more=""):
    return more + "retry.rules=[{" + text + "}]"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("num_gpus=${oops}", "num_gpus: Interpolation key 'oops' not found"),
        ("training.batch_size=atuo", "training.batch_size=atuo: must be an integer or auto"),
        ("training.batch_size=1.5", "training.batch_size=1.5: must be an integer or auto"),
        ("training.batch_size=true", "training.batch_size=True: must be an integer or auto"),
        ("training.batch_size=²", "training.batch_size=²: must be an integer or auto"),
        ("training.batch_size=0", "training.batch_size=0: must be 1 or more"),
        ("max_retries=1.5", "max_retries=1.5: must be an integer or auto"),
        ("stall_timeout_minutes=true", "stall_timeout_minutes=True: must be a number or auto"),
        ("training.effective_batch_size=0", "effective_batch_size=0: must be 1 or more"),
        (of_training(batch_size=24, effective_batch_size=64), f"{NO_MULTIPLE}training.batch_size="),
        (of_training(batch_size=128, effective_batch_size=64), NO_MULTIPLE),
        (f"{OF_16}; num_gpus=3", f"{NO_MULTIPLE}training.batch_size=16 × num_gpus=3"),
        (f"{AUTO}; num_gpus=3", f"{NO_MULTIPLE}num_gpus=3"),
        (f"{OF_16}; training.gradient_accumulation_steps=2", "give only one of the two"),
        (f"{AUTO}; training.gradient_accumulation_steps=4", "from training.effective_batch_size=…"),
        (f"{AUTO}; preserve_effective_batch_size=false", "would depend on the GPU"),
        (f"{AUTO}; min_batch_size=65", "min_batch_size=65: must not be above 64, the share of"),
        ("notify.command=3", "notify.command=3: must be a list"),
        ("notify.on=true", "notify.on=True: must be a list"),
        ("retry.rules=3", "retry.rules=3: must be a list like [{exit_code: 3"),
        ("retry.rules=[retry]", "retry.rules[0]=retry: must be a mapping like"),
        (rule("mesage: x, then: retry"), "rules[0].mesage: no such key; did you mean message?"),
        (rule("exception: X"), "retry.rules[0].then=…: no such action; accepted are retry, stop,"),
        (rule("exception: X, then: retri"), "then=retri: no such action; did you mean retry?"),
        (rule("then: retry"), "retry.rules[0]: needs one of exit_code, message, exception"),
        (rule("message: a(, then: stop"), "retry.rules[0].message=a(: not a regular expression"),
        (rule("message: 'a{9999999999}', then: stop"), "not a regular expression: the repetition"),
        (rule("message: 3, then: stop"), "retry.rules[0].message=3: must be a string"),
        (rule("exception: X, then: retry, times: 0"), "rules[0].times=0: must be an integer, 1 or"),
        (rule("exception: X, then: stop, times: 2"), "rules[0].times: cannot be combined with"),
        (rule("exit_code: 1, then: stop"), "retry.rules[0].exit_code: a function has none; use ex"),
        (rule("message: '${nowhere}', then: stop"), "retry.rules: Interpolation key 'nowhere'"),
        (rule("exception: X, then: stop", OF_A_SCRIPT), "rules[0].exception: a script raises none"),
        (
            rule("exit_code: -9, then: stop", OF_A_SCRIPT),
            "rules[0].exit_code=-9: must be an intege",
        ),
        (f"{CHECKPOINTING}=never", f"{CHECKPOINTING}=never: must be one of auto, true, false"),
        ("gpu_queue=queue", "gpu_queue=queue: must be true, false or a path with a slash in it"),
        ("memory.clear_after=[save, start]", "memory.clear_after=start: must be one of save, epo"),
        ("memory.clear_after=false", "memory.clear_after=False: must be a list"),
        ("gpu_queue=null", "gpu_queue=None: must be true, false or a path"),
    ],
)
def test_meaningless_batches_are_refused_with_the_key(words, line):
    """In a line that also has the remedy."""
    with pytest.raises(ConfigError) as refused:
        checked(config_of(words))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_script_has_rules_for_its_exit_codes():
    words = rule("exit_code: 7, then: retry, times: 5", OF_A_SCRIPT)
    assert checked(config_of(words)).of(RetryKeys).rules == (
        RetryRule("retry", exit_code=7, times=5),
    )


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.25), (0.5, 0.125)])
def test_a_trainer_reads_its_attempts_learning_rate(factor, expected):
    cfg = config_of(of_training(batch_size=8, lr=0.25))
    config = for_attempt(checked(cfg), built(AttemptSpec, (), 8, 1, lr_factor=factor), "cpu")
    assert trainer_config(cfg, config).training.lr == expected


@pytest.mark.parametrize(
    ("words", "at_first", "is_remedy"),
    [
        ("", False, True),
        ("training.gradient_checkpointing=auto", False, True),
        ("training.gradient_checkpointing=true", True, True),
        ("training.gradient_checkpointing=false", False, False),
    ],
)
def test_a_trainer_sees_whether_gradients_are_checkpointed(words, at_first, is_remedy):
    cfg = config_of(words)
    config = checked(cfg)
    settings = PolicySettings.of(config)
    assert config.may_checkpoint_gradients is is_remedy
    seen = trainer_config(cfg, for_attempt(config, settings.asked, "cpu"))
    assert seen.training.gradient_checkpointing is at_first
