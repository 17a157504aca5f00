"""Work that would hold up the event loop, on threads that nobody has to wait for.

The work may never end: a model's chat template is a program. What takes too long is interrupted and its thread
replaced; one that cannot be interrupted stays behind, and as a daemon it does not keep the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import overloaded

LEFT_BEHIND = 8  # threads that may be lost before no new ones take their place


class TookTooLong(Exception):
    """The work was given up."""


class _GivenUp(BaseException):
    """Raised inside a thread whose work is no longer wanted; a template that catches Exception does not catch this."""


class _Job:
    """Work, and two futures of the event loop that waits for it."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work, self._loop = work, asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self.wanted = True
        self.thread: int | None = None  # that runs it now

    def settle(self, future: asyncio.Future[Any], value: Any) -> None:
        """Set a future's result from any thread; nothing where nobody waits any more."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: future.done() or future.set_result(value))


class Aside:
    """`count` threads, each with what `make` returns for it, made when its first work comes."""

    def __init__(self, count: int, make: Callable[[], Any]) -> None:
        self._count, self._make = count, make
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sound = 0  # threads whose work was not given up
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._fill()

    async def run(self, work: Callable[[Any], Any], seconds: float) -> Any:
        """work(what `make` returned), first come first served. TookTooLong `seconds` after it began.

        Whatever it raises is raised here; what is no Exception, as a library's panic, as the cause of one.
        """
        if not self._sound:
            raise overloaded("earlier requests hold every thread that reads prompts")
        job = _Job(work)
        self._jobs.put(job)
        try:
            await job.begun
            result, error = await asyncio.wait_for(job.ended, seconds)
        except asyncio.TimeoutError:
            raise TookTooLong from None
        finally:
            self._give_up(job)
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(type(error).__name__) from error
        return result

    def close(self) -> None:
        """Take no more work and let the threads end."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Whether all threads have ended, after at most so long."""
        end = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0, end - time.monotonic()))
        return not self._threads

    def _fill(self) -> None:
        """Start the threads that are missing."""
        with self._lock:
            while not self._closed and self._sound < self._count and len(self._threads) < self._count + LEFT_BEHIND:
                thread = threading.Thread(target=self._serve, name="octavo-tokens", daemon=True)
                self._sound += 1
                self._threads.add(thread)
                thread.start()

    def _give_up(self, job: _Job) -> None:
        """Nobody waits for it any more; nothing happens where it has ended."""
        with self._lock:
            job.wanted = False
            if job.thread is None:
                return
            self._sound -= 1
            _raise_in(job.thread, _GivenUp)
        self._fill()

    def _serve(self) -> None:
        """A thread: one job after another until one was given up."""
        made: list[Any] = []
        try:
            while (job := self._jobs.get()) is not None and self._do(job, made):
                pass
        except _GivenUp:  # it came when the work had just ended
            pass
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
            self._fill()

    def _do(self, job: _Job, made: list[Any]) -> bool:
        """Run it and tell; False where it was given up meanwhile."""
        result, failure = None, None
        try:
            if not made:
                made.append(self._make())
            with self._lock:
                if not job.wanted:
                    return True
                job.thread = threading.get_ident()
            job.settle(job.begun, None)
            result = job.work(made[0])
        except BaseException as error:  # the request's failure, not the thread's
            failure = error
        with self._lock:
            given_up, job.thread = job.thread is not None and not job.wanted, None
        if given_up:
            _raise_in(threading.get_ident(), None)
            return False
        job.settle(job.begun, None)
        job.settle(job.ended, (result, failure))
        return True


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let `thread` raise `error` at its next bytecode (inside a library: when that returns); None: no more."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
