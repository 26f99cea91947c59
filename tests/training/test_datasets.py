import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image
from training_world import (
    config,
    cut_network,
    use_proxy,
    write_cub200,
    write_flowers102,
    write_image_folder,
)

from robust_train.config.schema import TrainingConfig
from robust_train.model.errors import ConfigError
from robust_train.vision.datasets import Images, open_data, stratified_split
from robust_train.vision.images import ImageDataset, ImageSpec, read_batches, split_into_chunks

RGB_16 = ImageSpec(16, 3, (0.5,) * 3, (0.5,) * 3)


def dataset_config(name, root, *overrides):
    return config(f"dataset={name}", f"dataset.root={root}", *overrides).dataset


def refusal_of(cfg):
    with pytest.raises(ConfigError) as refusal:
        open_data(cfg)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_every_seed_splits_digits_evenly_by_class():
    splits = open_data(config("dataset=digits").dataset)
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part.labels) for part in parts] == [1438, 179, 180]
    counts = torch.bincount(torch.tensor(splits.test.labels), minlength=10)
    assert int(counts.min()) >= 17
    assert len({name for part in parts for name in part.names}) == 1797
    assert open_data(config("dataset=digits", "seed=7").dataset) == splits


FLOWERS = [0, 0, 1, 1, 101, 101]


@pytest.mark.parametrize(
    ("name", "write", "folder", "classes", "train", "validation", "test"),
    [
        ("flowers102", write_flowers102, "flowers-102", 102, FLOWERS, FLOWERS[::2], FLOWERS[::2]),
        ("cub200", write_cub200, "CUB_200_2011", 200, [0, 199], [0, 199], [0, 0, 199, 199]),
    ],
)
def test_original_files_have_the_official_parts(
    tmp_path, name, write, folder, classes, train, validation, test
):
    splits = open_data(dataset_config(name, write(tmp_path)))
    assert splits.shape.num_classes == classes
    parts = [splits.train, splits.validation, splits.test]
    assert [list(part.labels) for part in parts] == [train, validation, test]
    assert Path(splits.train.names[0]).is_relative_to(tmp_path / folder)
    assert open_data(dataset_config(name, tmp_path / folder)) == splits


@pytest.mark.parametrize(
    ("parts", "lengths"), [(("train", "test"), [14, 2, 16]), (("train",), [10, 2, 4])]
)
def test_an_image_folder_without_tests_is_split(tmp_path, parts, lengths):
    root = write_image_folder(tmp_path, parts=parts)
    cfg = dataset_config("image_folder", root, "dataset.test_fraction=0.25")
    splits = open_data(cfg)
    all_parts = (splits.train, splits.validation, splits.test)
    assert [len(part.labels) for part in all_parts] == lengths
    assert sorted(splits.validation.labels) == [0, 1]
    assert sorted(splits.test.labels) == [n // (lengths[2] // 2) for n in range(lengths[2])]
    assert len({name for part in all_parts for name in part.names}) == sum(lengths)
    assert splits.shape.num_classes == 2
    assert open_data(cfg) == splits, "the same way each time"


def test_a_split_leaves_training_samples_of_every_class():
    source = Images([str(n) for n in range(6)], [0, 1, 1, 2, 2, 2])
    train_part, test_part = stratified_split(source, 0.9)
    assert sorted([*train_part.names, *test_part.names]) == list(source.names)
    assert 0 in train_part.labels
    assert len(test_part.labels) == 3


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("flowers102", "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"),
        ("cub200", "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"),
    ],
)
def test_a_missing_network_is_one_helpful_line(tmp_path, monkeypatch, name, url):
    """It names the address and the way out."""
    cut_network(monkeypatch)
    text = refusal_of(dataset_config(name, tmp_path / "data"))
    assert url in text
    assert "dataset.root=" in text
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_the_old_files(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    def fetch(url, root, md5):
        (Path(root) / "CUB_200_2011.tgz").write_text("half")
        (Path(root) / "CUB_200_2011" / "images").mkdir(parents=True)
        (tmp_path / "somebody else's").mkdir()  # meanwhile
        raise OSError("no space left")

    monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
    (tmp_path / "CUB_200_2011").mkdir()
    (tmp_path / "CUB_200_2011" / "images.txt").write_text("mine")
    assert "no space left" in refusal_of(dataset_config("cub200", tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    mine = {"CUB_200_2011", "CUB_200_2011/images.txt"}
    assert left == {"somebody else's", *mine}


def test_a_download_completes_what_is_there(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    write_cub200(tmp_path / "server")

    def fetch(url, root, md5):
        shutil.copytree(tmp_path / "server", root, dirs_exist_ok=True)

    monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
    (root := tmp_path / "data" / "CUB_200_2011").mkdir(parents=True)
    (root / "images.txt").write_text("torn")
    open_data(dataset_config("cub200", tmp_path / "data"))
    assert [path.name for path in (tmp_path / "data").iterdir()] == [root.name]


def test_a_silent_server_cannot_block_the_download_forever(tmp_path, monkeypatch):
    from robust_train.vision import datasets

    monkeypatch.setattr(datasets, "SILENCE_SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        use_proxy(monkeypatch, server.getsockname()[1])
        text = refusal_of(dataset_config("cub200", tmp_path))
    assert "timed out" in text
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_image_is_named_in_one_line(tmp_path, workers):
    root = write_image_folder(tmp_path)
    broken = root / "train" / "dogs" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    splits = open_data(dataset_config("image_folder", root))
    dataset = ImageDataset(splits.train, RGB_16)
    with pytest.raises(ConfigError) as refusal:
        list(
            read_batches(
                dataset, split_into_chunks(range(16), 4), 0, TrainingConfig(num_workers=workers)
            )
        )
    assert str(broken) in str(refusal.value)
    assert "truncated" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_augmentation_depends_on_seed_epoch_and_sample_alone(tmp_path):
    source = open_data(dataset_config("image_folder", write_image_folder(tmp_path))).train

    def image(seed, epoch):
        torch.rand(1)
        return ImageDataset(source, RGB_16, augment="crop_flip", seed=seed)[epoch, 0][0]

    assert torch.equal(image(1, 0), image(1, 0))
    assert not torch.equal(image(1, 0), image(1, 1))
    assert not torch.equal(image(1, 0), image(2, 0))


class ShowsItsSignals:
    """White images where SIGTERM ends the process and SIGINT does nothing, black ones elsewhere."""

    labels = (0, 0)

    def image(self, index):
        handlers = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
        is_free = handlers == (signal.SIG_DFL, signal.SIG_IGN)
        return Image.new("L", (4, 4), 255 * is_free)


def test_workers_leave_signals_to_the_run():
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        dataset = ImageDataset(ShowsItsSignals(), ImageSpec(4, 1, (0.0,), (1.0,)))
        [(images, _)] = read_batches(dataset, [[0, 1]], 0, TrainingConfig(num_workers=1))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert float(images.min()) == 1


def test_photographs_are_cropped_in_the_middle(tmp_path):
    image = Image.new("RGB", (60, 40), "black")
    image.paste("white", (10, 0, 50, 40))
    image.save(tmp_path / "image.png")
    source = Images([str(tmp_path / "image.png")], [0])
    kept, _ = ImageDataset(source, RGB_16)[0, 0]
    # the filter reaches a little beyond the box
    assert float(kept.min()) > 0.5


def test_digits_become_the_images_that_a_backbone_takes():
    splits = open_data(config("dataset=digits").dataset)
    small, label = ImageDataset(splits.test, ImageSpec(8, 1, (0.0,), (1.0,)))[0, 0]
    large, same = ImageDataset(splits.test, RGB_16)[0, 0]
    assert small.shape == (1, 8, 8)
    assert large.shape == (3, 16, 16)
    assert torch.equal(large[0], large[2])
    assert label == same == splits.test.labels[0]
    from sklearn.datasets import load_digits

    number = int(splits.test.names[0].split()[1])
    original = torch.tensor(load_digits().images[number] / 16)
    torch.testing.assert_close(small[0].double(), original, rtol=0, atol=0.5 / 255)


def with_folder(name):
    return lambda root: (write_image_folder(root) / name).mkdir()


def flowers_without_an_image(root):
    (write_flowers102(root) / "flowers-102" / "jpg" / "image_00002.jpg").unlink()


def flowers_with_a_damaged_list(root):
    (write_flowers102(root) / "flowers-102" / "setid.mat").write_bytes(b"no matlab file" * 20)


def birds_with(name, old, new):
    def write(root):
        path = write_cub200(root) / "CUB_200_2011" / f"{name}.txt"
        content = path.read_text()
        assert old in content
        path.write_text(content.replace(old, new))

    return write


@pytest.mark.parametrize(
    ("job", "write", "said"),
    [
        ("image_folder", with_folder("test/mice"), "this class has no training"),
        ("image_folder", with_folder("train/eels"), "no valid file for the classes eels"),
        ("image_folder", Path.exists, "there is no folder "),
        ("digits dataset.num_classes=5", Path.exists, "digits has 10 classes"),
        ("flowers102 dataset.download=false", Path.exists, "or dataset.download=true (from "),
        ("cub200 dataset.download=false", Path.exists, "or dataset.download=true (from "),
        ("flowers102", flowers_without_an_image, "setid.mat lists "),
        ("flowers102", flowers_with_a_damaged_list, "setid.mat is not a readable MATLAB file"),
        ("flowers102", lambda root: write_flowers102(root, classes=(1, 103)), "has label 102"),
        ("cub200", birds_with("images", "\n3 ", "\n3 not_there/"), "not_there"),
        ("cub200", birds_with("images", "\n2 001", "\n2\n2x 001"), "line 2: '2' is not '<image"),
        ("cub200", birds_with("image_class_labels", "\n5 200", "\n5 201"), "has label 200"),
        ("cub200", birds_with("image_class_labels", "\n5 200", "\n5 bird"), "'5 bird' is not"),
        ("cub200", birds_with("image_class_labels", "\n5 200", ""), "'5' is not in all of"),
    ],
)
def test_unusable_data_is_refused_in_one_line(tmp_path, job, write, said):
    write(tmp_path)
    name, *overrides = job.split()
    assert said in refusal_of(dataset_config(name, tmp_path, *overrides))
