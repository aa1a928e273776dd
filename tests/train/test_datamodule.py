import pytest

from vitrel.train.datamodule import EpochSampler, ImageData, pair


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = EpochSampler(range(50), seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert sorted(order(0, 0)) == list(range(50))
    assert order(0, 4) == order(0, 4)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_epoch_reaches_the_data():
    class Data(list):
        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Data(range(4))
    sampler = EpochSampler(data, 0)
    assert data.epoch == 0
    sampler.set_epoch(7)
    assert data.epoch == 7


def test_sizes_are_h_before_w():
    assert pair(64) == (64, 64) and pair((32, 48)) == (32, 48)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        pair(0)


def test_classes_are_known_before_the_data_is_built():
    data = ImageData("shapes", 64)
    assert data.num_classes == len(data.classes) > 1


def test_counts_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"data.batch_size \(0\) is at least 1"):
        ImageData("shapes", 64, batch_size=0)
    with pytest.raises(ValueError, match="data is 'shapes' or a folder"):
        ImageData(str(tmp_path), 64)
