"""One evaluation over several processes gives the rows of one."""

import math
import multiprocessing
import os
import signal
import time
from functools import partial

import pandas as pd
import pytest
import torch

from helpers.pictures import write_classes
from helpers.runs import in_child, on_two
from helpers.runs import status as status_of
from vitrel import cli
from vitrel.common import processes
from vitrel.evaluate import run
from vitrel.evaluate.folder import columns_of
from vitrel.evaluate.sweep import Settings

pytestmark = pytest.mark.usefixtures("brief_evaluations")
MEASURED = {"infer_samples_per_sec", "peak_memory_mb"}  # what processes may change


def same_rows(rows, others):
    """Equal in every column but the measured ones; nll to 2e-6, since logits depend on the batch in the last bits."""
    for row, other in zip(rows, others, strict=True):
        for name in row.keys() - MEASURED:
            if isinstance(row[name], float):
                assert row[name] == pytest.approx(other[name], abs=2e-6, nan_ok=True), name
            else:
                assert row[name] == other[name], name


@pytest.fixture
def unreadable(noise, monkeypatch):
    """unreadable(indices): these images of the noise are given as zeros labeled -1."""

    def mark(indices):
        read = noise.item

        def item(self, index):
            return (torch.zeros(3, *self.size), -1) if index in indices else read(self, index)

        monkeypatch.setattr(noise, "item", item)

    return mark


@pytest.mark.slow
def test_rows_are_those_of_one_process(trained, noise, pretend_world, rows_of):
    """Also where a process has no image at all; two are decoded again for the attention statistics."""
    world, n = 5, 3
    models, how = [trained(f"vitrel_vit_n8_{key}") for key in ("table", "none")], {"n": n, "attention_n": 2, "batch_size": 2}
    alone = rows_of(models, ("48x32",), **how)
    noise.decoded = 0
    pretend_world(world)
    rows = rows_of(models, ("48x32",), **how)
    same_rows(rows, alone)
    assert noise.decoded == len(rows) * (n + 2) and all(row["n"] == n for row in rows)


def test_memory_that_runs_out_halves_the_batch_of_its_process_alone(trained, noise, pretend_world, rows_of):
    model, sizes = trained("vitrel_vit_n8_none"), []

    def fail(module, inputs):
        rank = processes.rank_and_world()[0]
        if rank == 1 and len(inputs[0]) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        sizes.append((rank, len(inputs[0])))

    model.model.register_forward_pre_hook(fail)
    pretend_world(2)
    [row] = rows_of([model], [32], batch_size=6)
    assert (row["batch_size"], row["n"]) == (1, 12)  # 6, 3, 1
    assert (0, 6) in sizes and max(size for rank, size in sizes if rank == 1) <= 2


def test_images_that_cannot_be_read_count_nowhere(trained, noise, pretend_world, unreadable, rows_of):
    model, bad = trained("vitrel_vit_n8_rope_mixed"), {0, 2, 3, 11}
    with torch.no_grad():
        rest = [i for i in range(12) if i not in bad]
        logits = model.model(torch.stack([noise((32, 32))[i][0] for i in rest]))
    labels = torch.tensor(rest) % 3
    unreadable(bad)
    pretend_world(2)
    [row] = rows_of([model], [32], on_bad_image="count")
    assert (row["n"], row["left_out"]) == (8, 4) and set(row) == set(columns_of("classification"))
    assert row["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item(), abs=1e-4)
    assert row["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-5)


def test_nothing_readable_is_an_error(trained, noise, unreadable, rows_of):
    unreadable(set(range(12)))
    with pytest.raises(ValueError, match="none of the 12 images of noise can be read"):
        rows_of([trained("vitrel_vit_n8_none")], [32], on_bad_image="count")


def test_processes_with_other_weights_are_refused(trained, monkeypatch, rows_of):
    monkeypatch.setattr(run, "on_all", lambda work: [work(), {"models": "other weights"}])
    with pytest.raises(ValueError, match="the processes hold different weights or images: give all of them the same models"):
        rows_of([trained("vitrel_vit_n8_none")], [32])


def test_more_processes_than_gpus_are_told(monkeypatch):
    requested = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", requested.append)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(processes.dist, name, lambda *args, **how: None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, device in (("1", [torch.device("cuda", 1)]), ("3", [])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        requested.clear()
        with processes.joined():
            assert requested == device
    for device in ("auto", "cuda"):
        with pytest.raises(ValueError, match=r"no device cuda:3 .*GPUs .*visible: 2.*start at most one process for each"):
            Settings(device=device)
    Settings(device="cpu")


@pytest.fixture
def folder(tmp_path, checkpoint):
    """A folder of 5 images to evaluate on and a checkpoint of its classes, in the working directory of the processes."""
    for part in ("train", "val"):
        write_classes(tmp_path / "data" / part, ("left", "right"), ["0.png", "1.png"])
        write_classes(tmp_path / "data" / part, ("above",), ["0.png"])
    checkpoint(classes=["above", "left", "right"])
    return tmp_path


def arguments(out):
    return f"evaluate last.ckpt --data data --size 48 --device cpu --batch-size 2 --out {out} --no-report".split()


def rows_in(folder):
    path = folder / "results.csv"
    return pd.read_csv(path).to_dict("records") if path.exists() else []


@pytest.fixture
def tool(folder, capfd):
    """tool(world, out, ...): `vitrel evaluate` there in forked processes; (statuses, what they printed, its rows).

    A new process would import everything again, which takes longer than what it does.
    """

    def run_in(world, out, *more):
        there, given = (lambda: os.chdir(folder)), [*arguments(out), *more]
        capfd.readouterr()
        statuses = on_two(given, there, main=cli.main) if world == 2 else [status_of(in_child(given, there, cli.main))]
        return statuses, "".join(capfd.readouterr()), rows_in(folder / out)

    return run_in


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(folder, tool):
    """5 images over two processes with the variables that torchrun sets; the second run finds all rows and makes none."""
    statuses, text, alone = tool(1, "one")
    assert statuses == [0], text
    statuses, text, both = tool(2, "two")
    assert statuses == [0, 0], text
    same_rows(both, alone)
    assert {row["n"] for row in both} == {5} and text.count("report.html in a browser") == text.count(
        "evaluating vitrel_vit_n8_table"
    ) == 1
    stamps = [row["infer_samples_per_sec"] for row in both]
    statuses, text, again = tool(2, "two")
    assert statuses == [0, 0] and [row["infer_samples_per_sec"] for row in again] == stamps, text


@pytest.mark.slow(seconds=2)
def test_a_failure_ends_both_processes_with_its_message(folder, tool):
    """Of process 0 where a file is in the way, of process 1 where its first image is damaged: "above" comes first."""
    image = folder / "data" / "val" / "left" / "0.png"
    image.write_bytes(image.read_bytes()[:200])
    (folder / "taken").write_text("in the way")
    for out, message in (("taken", "taken: File exists"), ("out", "process 1 of 2: BadImage")):
        start = time.monotonic()
        statuses, text, _ = tool(2, out, "--attention-n", "0")  # for which process 0 reads images of the other
        assert statuses == [1, 1] and message in text and time.monotonic() - start < 200
        assert "in a browser" not in text
    assert "left/0.png" in text
    statuses, text, rows = tool(2, "out", "--on-bad-image", "count")
    assert statuses == [0, 0], text
    assert {(row["n"], row["left_out"]) for row in rows} == {(4, 1)} and not any(math.isnan(row["nll"]) for row in rows)
    assert "left out, because they could not be read: data/val/left/0.png; out/settings.json lists them" in text
    assert "left/0.png" in (folder / "out" / "settings.json").read_text()


def tell(folder):
    found = processes.on_all(lambda: (processes.rank_and_world(), torch.get_num_threads()))
    (folder / str(processes.rank_and_world()[0])).write_text(str(found))


def fail(rank, how):
    def work():
        if processes.rank_and_world()[0] == rank:
            how()

    processes.on_all(work)


def no_images():
    raise ValueError("no images")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def forked(monkeypatch):
    """Processes that `in_processes` starts are forked: new ones would take longer to import than to work."""
    monkeypatch.setattr(processes, "start_processes", partial(processes.start_processes, start_method="fork"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_processes_of_this_machine_share_the_work_and_the_threads(tmp_path):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        processes.in_processes(2, tell, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert {path.read_text() for path in tmp_path.iterdir()} == {str([((0, 2), 2), ((1, 2), 2)])}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("rank", "how", "said"),
    [
        (1, no_images, "error: process 1 of 2: ValueError: no images"),
        (1, killed, "error: another process ended before its work was done"),
        (0, killed, "error: process 0 terminated with signal SIGKILL; memory may have run out"),
    ],
)
def test_a_process_of_this_machine_that_fails_is_told(capfd, rank, how, said):
    with pytest.raises(SystemExit) as ended:
        processes.in_processes(2, fail, rank, how)
    assert said in capfd.readouterr().err + str(ended.value.code) and ended.value.code not in (0, None)
    assert not multiprocessing.active_children()


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_comes_to_started_processes_once_they_work(monkeypatch, capfd):
    """While they import, it is a traceback of each; the process that started them ends them."""
    start, handlers = processes.start_processes, []

    def started(*arguments, **options):
        handlers.append(signal.getsignal(signal.SIGINT))
        return start(*arguments, start_method="fork", **options)

    monkeypatch.setattr(processes, "start_processes", started)
    own = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        processes.in_processes(2, fail, 0, interrupted)
    assert handlers == [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) == own
    said = capfd.readouterr().err
    assert "interrupted: the same command goes on" in said and "Traceback" not in said
