import pytest
import yaml

from vitrel.common.plain_yaml import load_yaml, read_mapping, read_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key a is given twice, in line 1 and in line 3"),
        ("x:\n  a: {b: 1}\n  c: [{d: 1, 'd': 2}]\n", "the key d is given twice, in line 3"),
        ("model:\n  optim:\n    lr: 1.0\n    name: sgd\n    lr: 2.0\n", "the key lr is given twice, in line 3 and in line 5"),
        ("1: a\n0: b\n1: c\n", "the key 1 is given twice, in line 1 and in line 3"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_its_line(text, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_yaml(text)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"run\.yaml: .*{said}"):
        read_yaml(path)


def test_other_yaml_is_read_as_pyyaml_reads_it(tmp_path):
    text = "a: &a {b: [1, 2.5, null, true, 2024-01-02], c: x}\nd: {<<: *a, c: y}\ne: [*a, *a]\n'f': |\n  one\n  two\n"
    text += "g: {h: &h {<<: *a, c: z}}\ni: {<<: *h, b: 3}\n1: one\n'1': text\n"
    assert load_yaml(text) == yaml.safe_load(text) and load_yaml("") is None
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n  - [1", "expected ',' or ']', .*in line 2"),
        ("a: *b", "found undefined alias 'b' in line 1"),
        ("a: 2024-13-45", "month must be in"),
        ("--- 1\n--- 2", "but found another document in line 2"),
        ("\0", "special characters are not allowed"),
        ("[" * 1000, "maximum recursion depth"),
        ("a: 1\nb: !!python/name:os.system ''", "could not determine a constructor for the tag .*os.system' in line 2"),
    ],
    ids=range(7),
)
def test_what_is_no_plain_yaml_is_refused(text, said, tmp_path):
    (tmp_path / "torn.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"torn\.yaml: this is not plain YAML: .*{said}"):
        read_yaml(tmp_path / "torn.yaml")


def test_arguments_of_a_model():
    assert read_mapping("{img_size: [160, 224]}") == {"img_size": [160, 224]}
    for text, said in (
        ("[1, 2]", "expected a mapping"),
        ("{a: 1, a: 2}", "the key a is given twice, in line 1"),
        ("{a", "not plain YAML"),
    ):
        with pytest.raises(ValueError, match=said):
            read_mapping(text)
