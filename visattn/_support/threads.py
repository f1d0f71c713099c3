"""Pools of threads that work beside a model without slowing it down."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import torch
from threadpoolctl import threadpool_limits

from visattn._support.language import flag
from visattn.errors import ResourceError


@contextmanager
def pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool whose threads compute on one CPU each.

    Otherwise each would bring as many threads of PyTorch and of NumPy as there are CPUs, and those wait for work by spinning, on the
    CPUs that the model needs.

    Args:
        count: Threads, 1 or more.

    Yields:
        The pool. After an error, what its threads have not begun is left.

    Raises:
        ResourceError: If so many threads cannot be started.
    """
    threads, begun = torch.get_num_threads(), Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # PyTorch sets a thread's number at its first question, so the next line must not be the first
        torch.set_num_threads(1)
        begun.wait()

    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(count, initializer=begin) as found:
        try:
            for _ in range(count):
                found.submit(lambda: None)
            begun.wait()
        except BaseException as error:
            begun.abort()
            found.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, RuntimeError) and "start new thread" in str(error):
                raise ResourceError(f"{count} threads cannot be started. Pass fewer{flag('workers')}.") from error
            raise
        torch.set_num_threads(threads)  # of this thread, and of MKL for all
        try:
            yield found
        except BaseException:  # threads that have not woken yet must not find a broken barrier
            found.shutdown(wait=False, cancel_futures=True)
            raise
