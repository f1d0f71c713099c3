"""Pools of threads beside a model."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from visattn._support.threads import pool


def blas_threads() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))  # loads it
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_of_a_pool_compute_alone_and_leave_others_as_they_are(workers: int) -> None:
    before, blas = torch.get_num_threads(), blas_threads()
    try:
        torch.set_num_threads(2)
        with pool(workers) as threads:
            assert {threads.submit(torch.get_num_threads).result() for _ in range(8 * workers)} == {1}
            assert blas_threads() == {1}
            assert torch.get_num_threads() == 2
        assert (torch.get_num_threads(), blas_threads()) == (2, blas)
    finally:
        torch.set_num_threads(before)


def test_work_that_fails_at_once_says_nothing_of_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads are often late
    try:
        for _ in range(300):
            with pytest.raises(ValueError, match="at once"), pool(4):
                raise ValueError("at once")
    finally:
        sys.setswitchinterval(before)
    assert not caplog.records
