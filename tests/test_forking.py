"""Forked processes of the tests end when those that they belong to are gone."""

import contextlib
import os
import select
import signal
import socket

from forking import _fork_rank

GONE = 2**22 + 1  # more than any process id


def test_a_rank_whose_trainer_is_gone_ends():
    """A trainer that is killed while its rank is forked never becomes the rank's parent."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    with here, there, contextlib.suppress(ProcessLookupError):  # or it has ended by now
        pid = _fork_rank(there, fds, os.dup(fds[0]), GONE, lambda: 0)
        watched = os.pidfd_open(pid)
        try:
            assert select.select([watched], [], [], 30.0)[0], "it waits for a parent that it will never have"
        finally:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
            os.close(watched)
