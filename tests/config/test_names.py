from __future__ import annotations

import re

from tidemill.config.names import LONGEST, job_name

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def test_the_name_contains_run_and_attempt() -> None:
    assert job_name("addition-3", 2) == "addition-3-a2"


def test_kuberay_accepts_every_name() -> None:
    for run in ("a", "7b-math", "x" * 63, "a-" * 31 + "b", "9" * 63):
        for attempt in (1, 12):
            name = job_name(run, attempt)
            assert len(name) <= LONGEST
            assert DNS_1035.fullmatch(name)


def test_long_names_that_differ_at_the_end_stay_different() -> None:
    assert job_name("x" * 62 + "a", 1) != job_name("x" * 62 + "b", 1)
