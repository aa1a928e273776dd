import matplotlib.image
import pytest

from vitrel.evaluate.page import plot_all
from vitrel.evaluate.results.advice import judge


@pytest.mark.slow
def test_plots_are_pictures_of_some_size(rows, tmp_path):
    paths = plot_all(judge(rows), tmp_path / "plots", "noise")
    assert [path.name for path in paths] == ["accuracy.png", "throughput.png", "tradeoff.png"]
    for path in paths:
        picture = matplotlib.image.imread(path)
        assert min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05
