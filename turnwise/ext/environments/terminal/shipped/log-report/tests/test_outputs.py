"""The report of a log."""

import json


def report():
    with open("report.json") as file:
        return json.load(file)


def test_counts():
    assert report()["requests"] == 10
    assert report()["errors"] == 2
    assert report()["slowest"] == "/report"


def test_bytes():
    wanted = {"/about.html": 2048, "/export.csv": 98304, "/index.html": 10240, "/login": 764}
    assert report()["bytes_by_path"] == wanted
    assert list(report()["bytes_by_path"]) == sorted(wanted)


def test_the_log_is_untouched():
    with open("access.log") as file:
        assert len(file.read().splitlines()) == 13
