import csv

from vitrel.train.metrics import CSVLog


def rows(log):
    with log.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_step_are_joined(tmp_path):
    log = CSVLog(tmp_path)
    log.log_metrics({"epoch": 0, "a": 1.0}, 4)
    log.log_metrics({"epoch": 0, "b": 2.0}, 4)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)  # the rest of an epoch whose evaluation is made up for
    log.save()
    assert rows(log) == [
        {"epoch": "0", "step": "4", "a": "1.0", "b": "2.0"},
        {"epoch": "1", "step": "9", "a": "3.0", "b": ""},
    ]


def test_a_resumed_log_goes_on_where_it_is_cut(tmp_path):
    log = CSVLog(tmp_path)
    for step in (4, 9, 14):
        log.log_metrics({"a": float(step)}, step)
    log.save()
    resumed = CSVLog(tmp_path, resume=True)
    resumed.save()  # nothing logged yet: the file stays
    assert len(rows(resumed)) == 3
    del resumed.rows[1:]
    resumed.log_metrics({"a": 90.0}, 9)
    resumed.save()
    assert [(row["step"], row["a"]) for row in rows(resumed)] == [("4", "4.0"), ("9", "90.0")]
    fresh = CSVLog(tmp_path)
    fresh.log_metrics({"a": 1.0}, 0)
    fresh.save()
    assert len(rows(fresh)) == 1
