"""The world of the trainer's tests: composed configs, runs, data sets in their true formats."""

import copy
import functools
import random
import socket
import urllib.request

import torch
from hydra import compose, initialize_config_module
from PIL import Image, ImageChops
from scipy.io import savemat

from robust_train.attempt.run import live_of
from robust_train.config.checks import unchecked
from robust_train.vision import trainer
from taking_part import guarded
from watched_run import WatchedRun

# the launcher settles `auto` for an attempt
CHECKPOINTING = "training.gradient_checkpointing=false"
TINY_VIT = ("model.backbone=test_vit", "model.pretrained=false", "model.image_size=32")


@functools.cache
def _composed(overrides):
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        return compose("config", overrides=["device=cpu", CHECKPOINTING, *overrides])


def config(*overrides):
    """The config of ``train.py`` on the CPU."""
    return copy.deepcopy(_composed(overrides))


def train(cfg, run):
    """Call the built-in trainer with the plans that an attempt sets, and with its guard."""
    live_of(run).configure(unchecked(cfg))
    guarded(run)
    return trainer.train(cfg, run)


def trained_weights(result):
    """The weights that a finished run has left."""
    content = torch.load(result["checkpoint"], weights_only=True)
    return content["model"]


def run_to_end(cfg, folder):
    return trained_weights(train(cfg, WatchedRun(folder)))


def difference(weights, other):
    """The largest difference of any weight."""
    assert weights.keys() == other.keys()
    return max(float((weights[name] - other[name]).abs().max()) for name in weights)


def write_photograph(path, label, seed, size=(48, 40)):
    """A JPEG whose colour tells its class."""
    rng = random.Random(seed)
    base = random.Random(1000 + label)
    colour = tuple(base.randrange(20, 196) for _ in range(3))
    noise = Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))
    image = ImageChops.add(
        noise.point(lambda value: value * 40 // 255), Image.new("RGB", size, colour)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=90)


def write_flowers102(root, classes=(1, 2, 102)):
    """``root/flowers-102`` as torchvision unpacks it: half of each class for training."""
    folder = root / "flowers-102"
    parts: dict[str, list[int]] = {"trnid": [], "valid": [], "tstid": []}
    labels = [label for label in classes for _ in range(4)]
    for number, label in enumerate(labels, 1):
        write_photograph(folder / "jpg" / f"image_{number:05d}.jpg", label, number)
        parts[("trnid", "trnid", "valid", "tstid")[(number - 1) % 4]].append(number)
    savemat(folder / "imagelabels.mat", {"labels": [labels]})
    savemat(folder / "setid.mat", {name: [numbers] for name, numbers in parts.items()})
    return root


def write_cub200(root):
    """``root/CUB_200_2011`` as the archive unpacks: half of each class for training."""
    folder = root / "CUB_200_2011"
    lines: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": []}
    for label, name in ((1, "001.Black_footed_Albatross"), (200, "200.Common_Yellowthroat")):
        for index in range(4):
            number = len(lines["images"]) + 1
            path = f"{name}/{name[4:]}_{index:04d}_{number}.jpg"
            write_photograph(folder / "images" / path, label, number)
            lines["images"].append(f"{number} {path}")
            lines["image_class_labels"].append(f"{number} {label}")
            lines["train_test_split"].append(f"{number} {int(index < 2)}")
    for name, content in lines.items():
        (folder / f"{name}.txt").write_text("\n".join(content) + "\n")
    return root


def write_image_folder(root, *, per_class=8, parts=("train", "test"), size=(48, 40)):
    for part in parts:
        for label, name in enumerate(("cats", "dogs")):
            for index in range(per_class):
                seed = 10_000 * (part == "test") + 100 * label + index
                write_photograph(root / part / name / f"{index}.jpg", label, seed, size)
    return root


def use_proxy(monkeypatch, port):
    """Every request over HTTP goes to a local port."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # urllib remembers the proxies of its first request
    monkeypatch.setattr(urllib.request, "_opener", None)


def cut_network(monkeypatch):
    """Every request over HTTP is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        use_proxy(monkeypatch, free.getsockname()[1])
