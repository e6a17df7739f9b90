"""Who goes first: the order of requests, as a key, and a queue sorted by it.

Owns: the policies. Knows nothing of budgets or blocks. The scheduler keeps its running requests in
the same order, so that whoever is last in it is the first to be preempted.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from trimaran.scheduling.request import Request

Policy = Callable[[Request, int], tuple[int, ...]]
by_order = attrgetter("order")


def first_come(request: Request, sequence: int) -> tuple[int, ...]:
    """By arrival here (clocks of front ends differ); a stream to be continued goes first."""
    return (0 if request.source.prior_output_ids else 1, sequence)


def by_priority(request: Request, sequence: int) -> tuple[int, ...]:
    """By priority, lower first, and by arrival within one."""
    return (request.source.priority, *first_come(request, sequence))


POLICIES: dict[str, Policy] = {"fcfs": first_come, "priority": by_priority}


class RequestList:
    """Requests in policy order. Insertion anywhere and removal cost a bisection and a memmove."""

    def __init__(self) -> None:
        self.items: list[Request] = []  # first to run first

    def __len__(self) -> int:
        return len(self.items)

    def add(self, request: Request) -> None:
        insort(self.items, request, key=by_order)

    def remove(self, request: Request) -> None:
        index = bisect_left(self.items, request.order, key=by_order)
        assert self.items[index] is request, f"{request.request_id} is not where it belongs"
        del self.items[index]
