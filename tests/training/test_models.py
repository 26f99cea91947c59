import pytest
import torch
from safetensors.torch import save_file
from training_world import (
    TINY_VIT,
    WatchedRun,
    config,
    cut_network,
    difference,
    run_to_end,
    train,
    trained_weights,
    write_image_folder,
)

from robust_train.model.errors import ConfigError, TrainingStopped
from robust_train.vision.datasets import Shape
from robust_train.vision.keys import check_config, preload_modules
from robust_train.vision.models import (
    SmallCnn,
    build_model,
    enable_gradient_checkpointing,
    set_train_mode,
    trained_state,
)


def built(*overrides, num_classes=5):
    cfg = config(*overrides)
    check_config(cfg)
    torch.manual_seed(0)
    module, _ = build_model(cfg.model, Shape(num_classes, size=8, channels=1))
    return module


def refusal_of(*overrides):
    with pytest.raises(ConfigError) as refusal:
        built(*overrides)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def trained_names(module):
    return {name for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("size", "channels"), [(1, 1), (5, 3), (8, 1), (28, 1), (32, 3), (64, 3), (150, 3)]
)
def test_the_cnn_takes_images_of_any_size(size, channels):
    model = SmallCnn(channels=channels, image_size=size, num_classes=7, width=4, dropout=0.0)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize(
    ("model", "backbone"),
    [
        ("linear_probe", "test_vit"),
        pytest.param("linear_probe", "test_resnet", marks=pytest.mark.slow),
        pytest.param("lora", "test_vit", marks=pytest.mark.slow),
        pytest.param("full_finetune", "test_convnext", marks=pytest.mark.slow),
        pytest.param("full_finetune", "test_resnet", marks=pytest.mark.slow),
    ],
)
def test_every_model_learns(tmp_path, model, backbone):
    root = write_image_folder(tmp_path / "images")
    cfg = config(
        "dataset=image_folder",
        f"dataset.root={root}",
        f"model={model}",
        *TINY_VIT,
        f"model.backbone={backbone}",
        "training.epochs=5",
        "training.batch_size=8",
        "training.num_workers=0",
    )
    run = WatchedRun(tmp_path)
    result = train(cfg, run)
    assert result["steps"] == 10
    first, *_, last = [epoch["metrics"] for epoch in run.of("epoch")]
    assert last["train_loss"] < first["train_loss"]
    assert result["objective"] == result["validation_accuracy"] == last["val_accuracy"]


def test_a_linear_probe_trains_its_last_layer_alone():
    module = built("model=linear_probe", *TINY_VIT, "model.backbone=test_resnet")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert trained_names(module) == {"head.weight", "head.bias"}
    set_train_mode(module)
    assert not any(layer.training for layer in module.backbone.modules())
    module(torch.randn(4, 3, 32, 32)).sum().backward()
    assert module.head.weight.grad is not None
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_lora_saves_only_adapters_and_classifier():
    """It trains only these, too."""
    module = built("model=lora", *TINY_VIT)
    names = trained_names(module)
    assert all("lora_" in name or "head" in name for name in names)
    assert sum("lora_A" in name for name in names) == 12
    assert any("head" in name for name in names)
    assert trained_state(module).keys() == names


def test_lora_leaves_batch_norm_statistics_alone():
    resnet = ("model.backbone=test_resnet", "model.target_modules=[conv2]")
    module = built("model=lora", *TINY_VIT, *resnet)
    set_train_mode(module)
    before = {n: v.clone() for n, v in module.state_dict().items() if "running" in n}
    assert before
    module(torch.randn(4, 3, 32, 32))
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


def test_full_finetuning_saves_every_weight_and_statistic():
    module = built("model=full_finetune", *TINY_VIT, "model.backbone=test_resnet")
    assert trained_state(module).keys() == module.state_dict().keys()


def test_lora_resumes_from_adapters_alone(tmp_path):
    data = ("dataset=image_folder", f"dataset.root={write_image_folder(tmp_path / 'images')}")
    job = ("model=lora", *TINY_VIT, *data, "training.epochs=2", "training.batch_size=8")
    cfg = config(*job, "training.num_workers=0")
    whole = run_to_end(cfg, tmp_path / "whole")
    run = WatchedRun(tmp_path / "run", stop_at_step=3)
    with pytest.raises(TrainingStopped):
        train(cfg, run)
    resumed = WatchedRun(tmp_path / "run", resume=run.last_checkpoint)
    assert difference(whole, trained_weights(train(cfg, resumed))) == 0


@pytest.mark.parametrize(
    ("overrides", "channels", "size"),
    [
        (["model=cnn"], 1, 8),
        (["model=lora", *TINY_VIT, "model.lora_dropout=0"], 3, 32),
        (["model=full_finetune", *TINY_VIT], 3, 32),
    ],
)
def test_gradient_checkpointing_leaves_training_as_it_is(overrides, channels, size):
    gradients = []
    images = torch.randn(2, channels, size, size)
    for is_checkpointing in (False, True):
        module = built(*overrides, "model.dropout=0")
        if is_checkpointing:
            assert enable_gradient_checkpointing(module)
        set_train_mode(module)
        module(images).square().sum().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters() if p.requires_grad})
    assert all(g is not None for g in gradients[1].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.lora_r=0", "model.lora_r=0"),
        ("model.lora_alpha=0", "model.lora_alpha=0"),
        ("model.lora_dropout=1.0", "model.lora_dropout=1"),
        ("model.dropout=-0.1", "model.dropout=-0.1"),
        ("model.dropout=nan", "model.dropout=nan"),
        ("model.image_size=0", "model.image_size=0"),
        ("model.target_modules=[]", "model.target_modules=[]"),
        ("dataset.num_classes=1", "dataset.num_classes=1"),
        ("dataset.augment=flop", "dataset.augment=flop"),
        ("model.name=lorax", "model.name=lorax"),
        ("dataset.name=digit", "dataset.name=digit"),
        ("dataset=image_folder", r"dataset\.root=…"),
    ],
)
def test_invalid_values_are_refused_before_loading(override, key):
    with pytest.raises(ConfigError, match=key.replace("[", r"\[")):
        preload_modules(config("model=lora", override))


def test_a_missing_network_is_explained_within_seconds(tmp_path, monkeypatch):
    import huggingface_hub

    cut_network(monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    text = refusal_of("model=lora")
    assert "vit_small_patch16_224.augreg_in21k" in text
    assert "model.weights=" in text
    assert "model.pretrained=false" in text
    assert waits == []


def written(path, *overrides, num_classes=5):
    """Write the weights of a tiny model; return it, and the key that names the file."""
    source = built("model=full_finetune", *TINY_VIT, *overrides, num_classes=num_classes)
    if path.suffix == ".pt":
        torch.save({"state_dict": source.state_dict()}, path)
    else:
        save_file(source.state_dict(), path)
    return source, f"model.weights={path}"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_local_weights_load_without_a_mismatched_classifier(tmp_path, suffix):
    """The classifier of the file has other classes."""
    source, key = written(tmp_path / f"weights{suffix}", num_classes=9)
    loaded = built("model=full_finetune", *TINY_VIT, key, "model.pretrained=true")
    expected, actual = source.state_dict(), loaded.state_dict()
    for name in expected:
        assert torch.equal(expected[name], actual[name]) == (not name.startswith("head.")), name


def test_local_weights_for_another_image_size_are_resampled(tmp_path):
    source, key = written(tmp_path / "weights.pt", "model.image_size=64")
    loaded = built("model=full_finetune", *TINY_VIT, key)
    assert torch.equal(loaded.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)
    assert loaded.pos_embed.shape != source.pos_embed.shape


def test_a_linear_probe_takes_weights_with_classifier(tmp_path):
    source, key = written(tmp_path / "weights.pt")
    probe = built("model=linear_probe", *TINY_VIT, key)
    assert torch.equal(probe.backbone.pos_embed, source.pos_embed)


def test_the_final_weights_of_a_run_start_another(tmp_path):
    short = ("training.epochs=1", "training.batch_size=512")
    train(config(*short, "model.width=8"), WatchedRun(tmp_path))
    final = tmp_path / "checkpoints" / "final.pt"
    content = torch.load(final, weights_only=True)
    assert content["config"]["model"]["width"] == 8
    started = built("model.width=8", f"model.weights={final}", num_classes=10)
    for name, value in content["model"].items():
        assert torch.equal(started.state_dict()[name], value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.backbone=vit_smal_patch16_224"], "vit_small_patch16_224"),
        (["model.backbone=vit_small_patch16_224.foo"], "vit_small_patch16_224.augreg_in21k"),
        (
            [*TINY_VIT, "model.target_modules=[attn.qkv,q_proj]"],
            "no layer 'q_proj'; it has patch_embed.proj, attn.qkv",
        ),
        ([*TINY_VIT, "model.image_size=40"], "model.image_size=40: test_vit needs a multiple of"),
    ],
)
def test_an_impossible_model_is_refused_with_alternatives(overrides, said):
    assert said in refusal_of("model=lora", *overrides)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"not a file of weights", "cannot be read as weights"),
        ({"weight": torch.zeros(3)}, "lacks"),
        ([1, 2], "does not contain a state dict"),
        ({"stages.0.0.weight": torch.zeros(16, 1, 3, 3)}, "(16, 1, 3, 3)"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(tmp_path, content, said):
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    text = refusal_of("model.width=8", f"model.weights={path}")
    assert f"model.weights={path}" in text
    assert said in text
