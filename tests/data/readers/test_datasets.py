import pytest
import torch

from vitrel.data import Augmentation, Shapes, class_names, create_dataset

CFG = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def test_shapes_have_default_counts_and_their_classes():
    train = create_dataset("shapes", "train", (64, 64), **CFG)
    val = create_dataset("shapes", "val", (64, 64), **CFG)
    assert (len(train), len(val)) == (10_000, 1_000)
    assert train.classes == val.classes == class_names("shapes") == list(Shapes(1).classes)
    image, label = val[0]
    assert image.shape == (3, 64, 64) and image.dtype == torch.float32 and 0 <= label < len(val.classes)


def test_no_training_seed_is_an_evaluation_seed():
    def first(split, seed):
        images = [create_dataset("shapes", split, (64, 64), **CFG, n=4, seed=seed)[i][0] for i in range(4)]
        return torch.stack(images).numpy().tobytes()

    draws = [first(split, seed) for split in ("train", "val") for seed in range(4)]
    assert len(set(draws)) == 8
    assert first("train", 2) == first("train", 2)


@pytest.mark.parametrize("protocol", ["scale", "canvas"])
def test_shapes_at_another_size(protocol):
    data = create_dataset("shapes", "val", (48, 96), **CFG, protocol=protocol, base_size=(64, 64), n=4)
    assert data[3][0].shape == (3, 48, 96)
    trained = create_dataset("shapes", "val", (64, 64), **CFG, n=4)
    assert [data[i][1] for i in range(4)] == [trained[i][1] for i in range(4)]


def test_what_does_not_apply_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mirroring would change"):
        create_dataset("shapes", "train", (64, 64), **CFG, augment=Augmentation())
    with pytest.raises(ValueError, match="evaluation images are not augmented"):
        create_dataset(str(tmp_path), "val", (64, 64), **CFG, augment=Augmentation())
    with pytest.raises(ValueError, match="augmented images are uint8, not normalized: give std=None"):
        create_dataset(str(tmp_path), "train", (64, 64), **CFG, augment=Augmentation())
    with pytest.raises(ValueError, match="unknown split 'test'"):
        create_dataset("shapes", "test", (64, 64), **CFG)
    with pytest.raises(TypeError, match="protocl"):
        create_dataset("shapes", "val", (64, 64), **CFG, protocl="canvas")
    with pytest.raises(ValueError, match="data must be 'shapes', a folder"):
        create_dataset(str(tmp_path / "shape"), "train", (64, 64), **CFG)


def test_shapes_have_a_control_of_place_and_a_corner():
    place = create_dataset("shapes-place", "val", (64, 64), **CFG, n=300)
    assert place.classes == class_names("shapes-place") == ["upper left", "upper right", "lower left", "lower right"]
    assert set(place.scenes(range(300)).label) == {0, 1, 2, 3}
    for split in ("train", "val"):
        corner = create_dataset("shapes-corner", split, (64, 64), **CFG, n=300)
        scenes = corner.scenes(range(300))
        assert corner.classes == class_names("shapes") and (scenes.center + scenes.radius[..., None]).max() <= 48
