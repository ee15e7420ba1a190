"""Python ends when the threads of gloo sleep, and not before."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time

from weft.fabric import gloo_threads

_PR_SET_NAME = 15


def as_gloo(work) -> threading.Thread:
    """A thread with the name of gloo's that does some work."""
    named = threading.Event()

    def run():
        ctypes.CDLL(None).prctl(_PR_SET_NAME, gloo_threads._NAME.encode())
        named.set()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    return thread


def test_a_thread_that_runs_is_waited_for():
    # It hashes without Python's lock, for half a second.
    thread = as_gloo(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000))
    began = time.monotonic()
    gloo_threads.settle()
    assert time.monotonic() - began > 20 * gloo_threads._NAP
    thread.join()


def test_a_thread_that_sleeps_is_not():
    wake = threading.Event()
    thread = as_gloo(wake.wait)
    began = time.monotonic()
    gloo_threads.settle()
    assert thread.is_alive()
    assert time.monotonic() - began < gloo_threads._LONGEST
    wake.set()
    thread.join()


def test_a_thread_without_end_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(gloo_threads, "_LONGEST", 0.05)
    thread = as_gloo(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000))
    gloo_threads.settle()
    assert thread.is_alive()
    thread.join()
