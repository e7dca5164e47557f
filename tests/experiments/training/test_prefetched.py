"""Batches that are made in another thread: their order, their errors, and the end of the thread."""

import threading

import pytest

from comet_moe.experiments.training.batches import prefetched


def test_batches_come_in_their_order_from_another_thread():
    names = []

    def batches():
        for number in range(20):
            names.append(threading.current_thread().name)
            yield number

    assert list(prefetched(batches())) == list(range(20))
    assert set(names) == {"comet-moe-batches"}


def test_an_error_is_raised_where_the_batches_are_used():
    def batches():
        yield 1
        raise KeyError("broken")

    stream = prefetched(batches())
    assert next(stream) == 1
    with pytest.raises(KeyError, match="broken"):
        next(stream)


def test_the_thread_ends_with_a_loop_that_is_left_early():
    made = []

    def batches():
        for number in range(1000):
            made.append(number)
            yield number

    stream = prefetched(batches(), ahead=2)
    assert next(stream) == 0
    stream.close()
    assert len(made) < 10
    assert "comet-moe-batches" not in [thread.name for thread in threading.enumerate()]
