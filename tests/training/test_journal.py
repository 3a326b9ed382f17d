import re
from dataclasses import replace

import pytest

from natgrad.training.job import Job
from natgrad.training.journal import Journal
from tests.full_disk import full_disk

from .test_search import result

JOB = Job(task="tabular", learning_rate=0.1)


def test_a_finished_run_is_found_by_its_job(tmp_path):
    path = tmp_path / "deep" / "runs.jsonl"
    Journal(path).add(JOB, result(1.0, 2.0))
    again = Journal(path)
    assert again.find(JOB) == result(1.0, 2.0)
    assert again.find(replace(JOB, seed=1)) is None


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    journal = Journal(path)
    journal.add(JOB, result(1.0, 2.0))
    journal.add(replace(JOB, seed=1), result(3.0, 4.0))
    path.write_text(path.read_text()[:-20])
    again = Journal(path)
    assert again.find(JOB) == result(1.0, 2.0)
    assert again.find(replace(JOB, seed=1)) is None
    again.add(replace(JOB, seed=2), result(5.0, 6.0))
    assert Journal(path).find(replace(JOB, seed=2)) == result(5.0, 6.0)


def test_a_full_disk_names_the_file_and_leaves_it_as_it_was(tmp_path):
    path = tmp_path / "runs.jsonl"
    journal = Journal(path)
    journal.add(JOB, result(1.0, 2.0))
    before = path.read_bytes()
    with full_disk(len(before) + 100), pytest.raises(OSError, match=re.escape(repr(str(path)))):
        journal.add(replace(JOB, seed=1), result(3.0, 4.0))
    assert path.read_bytes() == before
