import pytest

from vitrel.sizes import format_size, parse_size


@pytest.mark.parametrize(("text", "size"), [("96", (96, 96)), (96, (96, 96)), ("160x224", (160, 224)), ("32X48", (32, 48))])
def test_sizes_are_read_height_first(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "0", "96x", "x96", "-96", "96x96x3", "96*128", "1e2", "9.5", True, "²"])
def test_bad_sizes_are_named_with_a_valid_example(text):
    with pytest.raises(ValueError, match="is not an image size: write pixels as 96, or height x width as 160x224") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
