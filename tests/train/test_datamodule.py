import pytest

from vitrel.train.datamodule import ImageData, default_batch_size, pair


def test_sizes_are_h_before_w():
    assert pair(64) == (64, 64) and pair((32, 48)) == (32, 48)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        pair(0)


def test_classes_are_known_before_the_data_is_built():
    data = ImageData("shapes", 64)
    assert data.num_classes == len(data.classes) > 1


def test_counts_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"data.batch_size \(0\) must be at least 1"):
        ImageData("shapes", 64, batch_size=0)
    with pytest.raises(ValueError, match="data must be 'shapes', a folder"):
        ImageData(str(tmp_path), 64)


@pytest.mark.parametrize(
    ("images", "devices", "size"),
    [
        (1_281_167, 8, 64),
        (3072, 1, 64),
        (3071, 1, 32),
        (1584, 1, 32),
        (1584, 4, 8),
        (25, 1, 8),
        (7, 1, 4),
        (7, 4, 1),
        (3, 4, 1),
    ],
)
def test_batches_are_small_where_images_are_few(images, devices, size):
    assert default_batch_size(images, devices) == size
