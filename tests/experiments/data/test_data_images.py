import gzip
import hashlib

import numpy as np
import pytest
from raw_files import idx_bytes, write_mnist, write_svhn
from scipy.io import savemat

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare
from comet_moe.experiments.data.sets import images
from comet_moe.experiments.data.sets.images import overlay, read_idx

SMALL = {"train_size": 50, "validation_size": 20, "test_size": 10}
TRAIN_IMAGES = "train-images-idx3-ubyte.gz"


def compress(data):
    """gzip without the time of day: the bytes are part of a test's name."""
    return gzip.compress(data, mtime=0)


def read_source(folder, prefix):
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", 3)
    return images, read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", 1)


def test_overlay_is_the_maximum_of_the_two_shifted_images():
    images = np.random.default_rng(0).integers(0, 256, (2, 28, 28)).astype(np.uint8)
    both = overlay(images, np.array([0]), np.array([1]), 4)
    assert both.shape == (1, 1, 36, 36)
    first, second = np.zeros((36, 36), np.uint8), np.zeros((36, 36), np.uint8)
    first[:28, :28], second[8:, 8:] = images
    assert np.array_equal(both[0, 0], np.maximum(first, second))


@pytest.mark.parametrize("name", ["multimnist", "multifashionmnist"])
def test_each_overlay_shows_images_of_its_two_labels_from_the_source_of_its_split(tmp_path, name):
    write_mnist(tmp_path)
    dataset = prepare(name, source=tmp_path, cache=tmp_path / "c", strict=False, **SMALL)
    assert dataset.meta["image_shape"] == [1, 36, 36]
    for split, prefix in (("train", "train"), ("validation", "train"), ("test", "t10k")):
        part = getattr(dataset, split)
        assert len(part) == SMALL[f"{split}_size"]
        source, labels = read_source(tmp_path, prefix)
        image, first, second = part.features["image"], part.targets["top_left"], part.targets["bottom_right"]
        # The first 8 rows show the first image alone, the last 8 the second.
        top = (image[:, None, 0, :8, :28] == source[None, :, :8]).all(axis=(2, 3))
        bottom = (image[:, None, 0, 28:, 8:] == source[None, :, 20:]).all(axis=(2, 3))
        assert (top.sum(axis=1) == 1).all()
        assert (bottom.sum(axis=1) == 1).all()
        assert np.array_equal(labels[top.argmax(axis=1)], first)
        assert np.array_equal(labels[bottom.argmax(axis=1)], second)


def test_the_same_seed_gives_the_same_overlays_and_another_seed_others(tmp_path):
    write_mnist(tmp_path)

    def train(seed, cache):
        dataset = prepare(
            "multimnist", source=tmp_path, cache=tmp_path / cache, seed=seed, strict=False, **SMALL
        )
        return dataset.train.features["image"].tobytes()

    assert train(0, "a") == train(0, "b")
    assert train(0, "a") != train(1, "a")


def test_multidigits_needs_no_files_and_its_splits_share_no_source_digit(tmp_path):
    dataset = prepare("multidigits", source=None, cache=tmp_path)
    assert dataset.meta["image_shape"] == [1, 12, 12]
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [6000, 1500, 1500]
    corners = []
    for part in (dataset.train, dataset.validation, dataset.test):
        image = part.features["image"]
        assert image.dtype == np.uint8
        assert image.max() == 255
        assert set(np.unique(part.targets["top_left"])) == set(range(10))
        corners.append({(a.tobytes()) for a in image[:, 0, :4, :8]})  # the top half of the first digit
    # Different digits may share their top half; far fewer do than would if the sources were the same.
    assert len(corners[0] & corners[2]) < 0.1 * len(corners[2])


def test_digits_mixes_padded_mnist_and_svhn_in_the_papers_proportions(tmp_path):
    write_mnist(tmp_path, train=60, test=20)
    write_svhn(tmp_path, (40, 60, 26))
    dataset = prepare("digits", source=tmp_path, cache=tmp_path / "c", strict=False)
    # MNIST 50 / 10 / 20; SVHN 126 images, round(126 * 75,000 / 630,420) = 15 each held out.
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [146, 25, 35]
    tests, test_labels = read_source(tmp_path, "t10k")
    for name in ("train", "validation", "test"):
        part = getattr(dataset, name)
        image, digit = part.features["image"], part.targets["digit"]
        assert image.shape[1:] == (3, 32, 32)
        grey = (image == image[:, :1]).all(axis=(1, 2, 3))
        assert not image[grey][:, :, :2].any()  # padding
        assert np.array_equal(image[~grey][:, 0, 0, 0], digit[~grey])  # the label ten is the digit 0
        if name == "test":
            assert grey.sum() == 20
            match = (image[grey][:, None, 0, 2:30, 2:30] == tests[None]).all(axis=(2, 3))
            assert np.array_equal(test_labels[match.argmax(axis=1)], digit[grey])
            assert match.any(axis=0).all()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a readable IDX file|starts with nothing"),
        (compress(idx_bytes(np.zeros((60, 28, 28))))[:-20], "not a readable IDX file"),
        (b"not gzip at all", "not a readable IDX file"),
        (compress(idx_bytes(np.zeros((60, 28, 28)))[:-5]), "holds 47,035 bytes of data"),
        (compress(idx_bytes(np.zeros(60))), "starts with 00000801 where an IDX file of 3 axes"),
        (compress(idx_bytes(np.zeros((60, 20, 28)))), "images of 20x28"),
        (compress(idx_bytes(np.zeros((50, 28, 28)))), "60 labels where .* has 50 images"),
    ],
)
def test_a_damaged_idx_file_is_an_error_that_names_it(tmp_path, content, reason):
    write_mnist(tmp_path)
    (tmp_path / TRAIN_IMAGES).write_bytes(content)
    with pytest.raises(DataError, match=rf"train-.*({reason})"):
        prepare("multimnist", source=tmp_path, cache=tmp_path / "c", strict=False, **SMALL)


def test_a_label_out_of_range_is_an_error_that_names_it(tmp_path):
    write_mnist(tmp_path)
    labels = compress(idx_bytes(np.full(60, 10)))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(labels)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz has the label 10"):
        prepare("multimnist", source=tmp_path, cache=tmp_path / "c", strict=False, **SMALL)


def test_a_damaged_mat_file_is_an_error_that_names_it(tmp_path):
    write_svhn(write_mnist(tmp_path))
    path = tmp_path / "extra_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"extra_32x32\.mat is not a readable SVHN \.mat file"):
        prepare("digits", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_a_mat_file_is_opened_only_if_it_is_the_publishers_or_the_user_accepts_it(tmp_path, monkeypatch):
    write_svhn(write_mnist(tmp_path))
    path = tmp_path / "train_32x32.mat"
    with pytest.raises(DataError, match=r"train_32x32\.mat has the sha256 .*; download it again.*--any-size"):
        images._read_svhn(path, "train", strict=True)
    monkeypatch.setitem(images.SVHN_SHA256, "train", hashlib.sha256(path.read_bytes()).hexdigest())
    official, accepted = (images._read_svhn(path, "train", strict=strict)[0] for strict in (True, False))
    assert np.array_equal(official, accepted)


@pytest.mark.parametrize("content", [{"X": np.array([[1.0, "a"]], dtype=object)}, {"X": "abc"}, {}])
def test_a_mat_file_of_other_content_is_an_error_that_names_it(tmp_path, content):
    savemat(tmp_path / "train_32x32.mat", content | {"y": [[1]]})
    with pytest.raises(DataError, match=r"train_32x32\.mat (has X of|is not a readable SVHN)"):
        images._read_svhn(tmp_path / "train_32x32.mat", "train", strict=False)


def test_an_unofficial_number_of_images_is_an_error(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=r"60 images where the official release has 60,000.*--any-size"):
        prepare("multimnist", source=tmp_path, cache=tmp_path / "c", **SMALL)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "many"])
def test_a_size_that_is_not_a_positive_integer_is_an_error(tmp_path, size):
    with pytest.raises(DataError, match="option train_size is"):
        prepare("multidigits", source=None, cache=tmp_path, train_size=size)


def test_half_of_the_multidigits_images_are_inverted_and_say_so(tmp_path):
    dataset = prepare("multidigits", source=None, cache=tmp_path, **SMALL)
    assert dataset.meta["groups"] == {"kind": ["plain", "inverted"]}
    for split in (dataset.train, dataset.validation, dataset.test):
        image, kind = split.features["image"], split.features["kind"]
        # The corners beside the diagonal are background.
        corner = image[:, 0, -1, 0]
        assert np.array_equal(corner, np.where(kind == 1, 255, 0))
        assert 0 < kind.mean() < 1


def write_both_kinds(folder):
    for seed, name in enumerate(("mnist", "fashion-mnist")):
        (folder / name).mkdir(parents=True)
        write_mnist(folder / name, seed=seed)
    return folder


def test_digits_and_clothes_are_mixed_half_and_half_without_repetition(tmp_path):
    source = write_both_kinds(tmp_path / "raw")
    dataset = prepare("mnist-fashion", source=source, cache=tmp_path / "c", strict=False, **SMALL)
    assert dataset.meta["classes"] == {"class": 20}
    for split, prefix in (("train", "train"), ("validation", "train"), ("test", "t10k")):
        part = getattr(dataset, split)
        kind, label = part.features["kind"], part.targets["class"]
        assert len(part) == SMALL[f"{split}_size"]
        assert kind.sum() == SMALL[f"{split}_size"] // 2
        assert np.array_equal(label // 10, kind)
        for number, name in enumerate(("mnist", "fashion-mnist")):
            images, labels = read_source(source / name, prefix)
            own = part.features["image"][kind == number, 0]
            same = (own[:, None] == images[None]).all(axis=(2, 3))
            assert (same.sum(axis=1) == 1).all()
            assert len(set(same.argmax(axis=1))) == len(own)
            assert np.array_equal(labels[same.argmax(axis=1)], label[kind == number] % 10)
    train, validation = (
        {image.tobytes() for image in getattr(dataset, split).features["image"]}
        for split in ("train", "validation")
    )
    assert not train & validation


def test_more_images_than_there_are_is_one_sentence(tmp_path):
    source = write_both_kinds(tmp_path / "raw")
    with pytest.raises(
        DataError, match="the options ask for 105 of the digits in the train files, which have 60"
    ):
        prepare(
            "mnist-fashion",
            source=source,
            cache=tmp_path / "c",
            strict=False,
            **(SMALL | {"train_size": 190}),
        )
