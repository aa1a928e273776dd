"""Files that are damaged, or hold code, are refused: by name, with what is wrong, and without a word on how to run the code."""

import os
import pickle
import random
import traceback
import zipfile

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from vitrel import save
from vitrel.weights import load_pretrained
from vitrel.weights.read import read_file, write_safetensors

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*", "ignore:.*TorchScript.*", "ignore:Detected pickle protocol")


@pytest.fixture
def stored():
    """A small checkpoint; its first tensor has 64 kB."""
    torch.manual_seed(0)
    weights = {"model.blocks.0.weight": torch.randn(128, 128), "model.head.bias": torch.randn(3)}
    moments = {0: {"step": torch.tensor(4.0), "exp_avg": torch.randn(3, dtype=torch.bfloat16)}}
    return {"state_dict": weights, "optimizer_states": [{"state": moments}], "vitrel": {"epoch": 3, "classes": ["a", "b"]}}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list) else a == b


def place_of(path, tensor):
    """Where the bytes of a tensor begin in a file."""
    return path.read_bytes().index(tensor.numpy().tobytes())


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def zero(path, at, count=32 * 1024):
    content = bytearray(path.read_bytes())
    content[at : at + count] = bytes(count)
    path.write_bytes(content)


def test_torchscript_is_refused_without_the_way_to_run_it(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path := tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt .* was refused: it is a TorchScript archive") as refused:
        read_file(path)
    assert "weights_only" not in str(refused.value) and "copy it again" not in str(refused.value)


@pytest.mark.parametrize("damage", [flip, zero])
def test_damage_inside_a_tensor_of_a_torch_file(tmp_path, stored, damage):
    """torch reads it: the bytes are those of another, valid tensor."""
    path = tmp_path / "last.ckpt"
    torch.save(stored, path)
    damage(path, place_of(path, stored["state_dict"]["model.blocks.0.weight"]) + 1000)
    assert torch.load(path, weights_only=True)["vitrel"]["epoch"] == 3
    with pytest.raises(ValueError, match=r"last\.ckpt \([\d,]+ bytes\) is damaged: its record 'last/data/0' .*copy it again"):
        read_file(path)


def test_any_bit_of_a_file_that_is_flipped_is_noticed_or_means_nothing(tmp_path, stored):
    """In headers and directory too, where torch and the archive's reader look at different copies of the same."""
    path = tmp_path / "last.ckpt"
    torch.save(stored, path)
    whole, chance, refused = path.read_bytes(), random.Random(0), 0
    start = place_of(path, stored["state_dict"]["model.blocks.0.weight"])
    outside = [at for at in range(len(whole)) if not start <= at < start + 65536]
    for at in chance.sample(outside, 200):
        path.write_bytes(whole)
        flip(path, at, chance.randrange(8))
        try:
            found = read_file(path)
        except ValueError:
            refused += 1
        else:
            assert equal(found, stored), at
    assert refused > 60


@pytest.mark.parametrize("damage", [flip, zero])
def test_damage_inside_a_tensor_of_a_saved_model(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3)
    save(model, path)
    load_pretrained(timm.create_model("vitrel_vit_n8_table", num_classes=3), path)
    damage(path, place_of(path, model.state_dict()["blocks.1.mlp.fc1.weight"].detach()) + 100)
    with pytest.raises(ValueError, match=r"model\.safetensors .* is damaged: its tensors are not what was saved"):
        load_pretrained(timm.create_model("vitrel_vit_n8_table", num_classes=3), path)


def test_the_file_of_a_saved_model_is_safetensors(tmp_path):
    """For other readers too; an odd number of 16-bit values comes before those of 32 bits."""
    state = {"a": torch.randn(3), "b": torch.randn(3).half(), "c": torch.tensor(2), "d": torch.zeros(0, 4)}
    write_safetensors(tmp_path / "a.safetensors", state, {"model": "é"})
    assert equal(load_file(tmp_path / "a.safetensors"), state)
    assert equal(read_file(tmp_path / "a.safetensors"), {"state_dict": state, "vitrel": {"model": "é"}})


def test_files_of_others_are_read_as_before(tmp_path, stored):
    weights = stored["state_dict"]
    save_file(weights, tmp_path / "a.safetensors")
    assert equal(read_file(tmp_path / "a.safetensors")["state_dict"], weights)
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "none.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert zipfile.ZipFile(tmp_path / "none.pth").testzip() is not None  # whose checksums are none
    for name in ("old.pth", "none.pth"):
        assert equal(read_file(tmp_path / name), weights)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile(folder):
    """A file of each format that can hold code: {file: what an error calls its content}."""
    bomb = Bomb(folder / "ran")
    torch.save({"state_dict": bomb}, folder / "new.pth")
    torch.save({"state_dict": bomb}, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"model": torch.nn.Linear(2, 2)}, folder / "module.pth")
    (folder / "plain.pth").write_bytes(pickle.dumps(bomb, 2))
    return {name: r"posix\.mkdir" for name in ("new.pth", "old.pth", "plain.pth")} | {
        "module.pth": r"\.Linear",
    }


ADVICE = ("weights_only", "will likely succeed", "trusted", "allow_pickle", "add_safe_globals")


def said(error):
    """What a user sees of an error: the messages that a traceback shows, causes included."""
    lines = []
    while error is not None:
        lines += traceback.format_exception_only(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(lines)


def test_a_file_with_code_says_what_it_holds_and_not_how_to_run_it(tmp_path):
    for name, held in hostile(tmp_path).items():
        with pytest.raises(ValueError, match=rf"{name} \([\d,]+ bytes\) was refused: .*{held}.*state_dict\(\)") as caught:
            read_file(tmp_path / name)
        assert not [word for word in ADVICE if word in said(caught.value)], said(caught.value)
    assert not (tmp_path / "ran").exists()


def test_names_in_a_file_with_code_cannot_write_to_the_terminal(tmp_path):
    text = "a\x1b[31mb"
    (tmp_path / "a.pth").write_bytes(pickle.PROTO + b"\x02" + pickle.GLOBAL + f"{text}\n{text}\n".encode() + pickle.STOP)
    with pytest.raises(ValueError, match=r"was refused") as caught:
        read_file(tmp_path / "a.pth")
    assert "\x1b" not in said(caught.value) and r"\x1b[31mb" in str(caught.value)


@pytest.mark.parametrize("content", [b"hello world, this is junk", b"e\n", bytes(range(256)) * 10])
def test_a_file_that_is_no_checkpoint_is_named_by_how_it_begins(tmp_path, content):
    (tmp_path / "junk.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"junk\.pth \([\d,]+ bytes\) is no readable checkpoint: it is neither") as refused:
        read_file(tmp_path / "junk.pth")
    assert repr(content[:16]) in str(refused.value)
