"""Sleep: an engine that stops work, gives memory back, and takes both up again (S27).

Owns: the state (awake, falling asleep, asleep at a level), who waits for it, and the requests that
arrive meanwhile. Knows nothing of threads or of who asks; the scheduler and the executor do what it
says and know nothing of it. Held by ``EngineCore``.

            Sleep                    a step without work left
    awake ---------> falling asleep --------------------------> asleep -- Sleep: deeper, never up
      ^                   | WakeUp: that Sleep fails               | WakeUp
      '-------------------'----------------------------------------'
"""

from collections.abc import Sequence
from concurrent.futures import Future

from trimaran.errors import ConflictError, InvalidRequestError
from trimaran.executor.base import Executor, ProgressCallback
from trimaran.messages import AWAKE, EngineCoreOutput, EngineCoreRequest, SchedulerStats, Sleep
from trimaran.scheduling.request import Request
from trimaran.scheduling.scheduler import Scheduler


class SleepControl:
    """Requests pass through ``add``; a step of the engine is ours where ``has_work`` says so."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, on_progress: ProgressCallback
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._on_progress = on_progress
        self._level = AWAKE
        self._asked = AWAKE  # the deepest level that ``_calls`` wait for
        self._calls: list[Future[object]] = []
        self._held: dict[str, Request] = {}  # in order of arrival
        self._last_outputs: dict[int, list[EngineCoreOutput]] = {}  # of requests ended by a sleep

    def add(self, source: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request, or hold it until we are awake; see ``Scheduler.add``.

        Raises InvalidRequestError: it can never run here.
        """
        if self._level == AWAKE and not self._calls:
            return self._scheduler.add(source)
        if source.request_id in self._held:
            raise InvalidRequestError(f"request id {source.request_id} is in use")
        request = self._scheduler.prepare(source)
        if (answer := request.answer_at_once()) is None:
            self._held[source.request_id] = request
        return answer

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop those that are held."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._last_outputs or (self._calls and not self._scheduler.has_work()))

    def step(self) -> dict[int, list[EngineCoreOutput]]:
        """What is left to say of requests that a sleep ended; after that, fall asleep."""
        if not self._last_outputs:
            self._fall_asleep()
        outputs, self._last_outputs = self._last_outputs, {}
        return outputs

    def sleep(self, operation: Sleep) -> "Future[object]":
        """The level, once asleep: after the next steps.

        The future fails with ConflictError where a ``wake_up`` comes before that.
        """
        future: Future[object] = Future()
        self._calls.append(future)
        self._asked = max(self._asked, operation.level)
        if operation.mode == "abort":
            for client_index, outputs in self._scheduler.end_all().items():
                self._last_outputs.setdefault(client_index, []).extend(outputs)
        return future

    def wake_up(self) -> None:
        """Be awake, and queue what arrived meanwhile.

        Raises what ``Executor.wake_up`` raises; still asleep then.
        """
        if self._level > 0:
            self._executor.wake_up(self._on_progress)
        self._level = AWAKE
        held, self._held = self._held, {}
        for request in held.values():
            self._scheduler.enqueue(request)
        for call in self._take_calls():
            call.set_exception(ConflictError("wake_up came before the engine slept"))

    def complete(self, stats: SchedulerStats) -> SchedulerStats:
        """``stats`` of the scheduler with what it does not know."""
        stats.num_waiting += len(self._held)
        stats.sleep_level = self._level
        stats.is_falling_asleep = bool(self._calls)
        return stats

    def _fall_asleep(self) -> None:
        level = max(self._asked, self._level)
        if self._level < 1 <= level:
            # Nobody has work, so this plan only tells the executor who left since the last one.
            plan = self._scheduler.schedule()
            self._scheduler.update(plan, self._executor.execute(plan))
            was_reset = self._scheduler.reset_prefix_cache()
            assert was_reset, "blocks are in use and no request is there"
        if self._level < level and level > 0:
            self._executor.sleep(level)
        self._level = level
        for call in self._take_calls():
            call.set_result(level)

    def _take_calls(self) -> "list[Future[object]]":
        calls, self._calls, self._asked = self._calls, [], AWAKE
        return calls
