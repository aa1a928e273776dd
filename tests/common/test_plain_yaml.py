import pytest
import yaml

from vitrel.common.plain_yaml import DEEPEST, MOST_BYTES, load_yaml, read_mapping, read_yaml

CHAIN = "{a0: &a0 [1], " + ", ".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 200)) + "}"
NINES = "{a0: &a0 [1], " + ", ".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)) + "}"
REFUSED = {
    "[" * 100_000 + "]" * 100_000: "nested too deeply",
    "[" * 100_000: "nested too deeply",
    "{a: " * 500 + "}" * 500: "nested too deeply",
    "- " * 100_000: "nested too deeply",
    "? " * 100_000: "nested too deeply",
    CHAIN: "nested too deeply",
    NINES: "more than 100,000 values, aliases counted each time",
    "a:\n" * 60_000: "more than 100,000 values",
    "&a [*a]": "&a is nested in itself",
    "{x: &a 1, y: &a {z: *a}}": "&a is nested in itself",
    "a" * (MOST_BYTES + 1): "1,000,001 characters",
    "!!python/name:os.system ''": "plain values only",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_would_crash_or_never_end_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=REFUSED[text]):
        load_yaml(text)
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        read_yaml(path)


def test_what_is_within_the_limits_is_read_as_before(tmp_path):
    text = "a: &a {b: [1, 2.5, null, true, 2024-01-02], c: x}\nd: {<<: *a, c: y}\ne: [*a, *a]\n'f': |\n  one\n  two\n"
    assert load_yaml(text) == yaml.safe_load(text) and load_yaml("") is None
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert load_yaml(deep) == yaml.safe_load(deep)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_yaml(f"[{deep}]")
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["[1", "a: *b", "a: 2024-13-45", "--- 1\n--- 2", "\0"])
def test_what_is_no_yaml_is_told_apart(text, tmp_path):
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)
    (tmp_path / "torn.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"torn\.yaml: this is not plain YAML"):
        read_yaml(tmp_path / "torn.yaml")


def test_a_large_file_is_not_read_at_all(tmp_path):
    path = tmp_path / "last.ckpt"
    with path.open("wb") as file:
        file.truncate(10**12)  # sparse: reading it would take more memory than there is
    with pytest.raises(ValueError, match=r"last\.ckpt has 1,000,000,000,000 bytes"):
        read_yaml(path)


def test_arguments_of_a_model():
    assert read_mapping("{img_size: [160, 224]}") == {"img_size": [160, 224]}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_mapping("[" * 100_000)
