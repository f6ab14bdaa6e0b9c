"""The checksum of a record while its states land."""

import threading

import numpy as np
from paceline.common.record import checksum
from paceline.producer.summing import Summing


def test_states_that_land_plane_by_plane():
    """Told by another thread, out of order, the head before the states and a plane that is never told of included."""
    offset, plane = 4096, 3 * 65536 + 100
    data = bytearray(offset + 5 * plane)
    data[:offset] = np.random.default_rng(0).bytes(offset)
    summing = Summing()
    running, landed = summing.begin(data, len(data), offset)

    def land():
        for i in (1, 0, 4, 2):
            data[offset + i * plane : offset + (i + 1) * plane] = np.random.default_rng(i + 1).bytes(plane)
            landed(i * plane, (i + 1) * plane)

    thread = threading.Thread(target=land)
    thread.start()
    thread.join()
    data[offset + 3 * plane : offset + 4 * plane] = np.random.default_rng(9).bytes(plane)
    assert running.result() == checksum(data, len(data))
    summing.close()
