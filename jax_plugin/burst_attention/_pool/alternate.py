"""Several batches in turn, so that the devices of a model and of a pool work at the same time."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from burst_attention._checks import describe

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def alternate(
    step: Callable[[Batch], Generator[object, None, Result]], batches: Iterable[Batch]
) -> list[Result]:
    """Runs a step of several batches in turn, each up to its next ``yield``.

    A device carries out programs in the order in which they are dispatched. So the layers of
    several batches must be dispatched in turn: then the model's devices compute a layer of one
    batch while a `CachePool` attends another batch. ``step`` is a generator function that yields
    between `CachePool.send` and the ``receive`` of its result::

        def step(batch):
            for layer, cache in enumerate(batch.caches):
                x, query, key, value = before(params, layer, x)
                pending, batch.caches[layer] = pool.send(cache, query, key, value, batch.lengths)
                yield
                x = after(params, layer, x, pending.receive())
            return x

        logits = ba.alternate(step, (first, second))

    Args:
      step: takes a batch and returns a generator.
      batches: the batches, usually two of equal size.

    Returns:
      What ``step`` returned for each batch, in the order of ``batches``.

    Raises:
      TypeError: if ``step`` is no generator function.
    """
    running = []
    results: dict[int, Result] = {}
    # A function that is no generator function runs when it is called, so one batch tells.
    for index, each in enumerate(map(step, batches)):
        if not isinstance(each, Generator):
            raise TypeError(
                "step must be a generator function, which yields between pool.send and the "
                f"receive of its result, got a function that returned {describe(each)}"
            )
        running.append((index, each))
    while running:
        left = []
        for index, each in running:
            try:
                next(each)
            except StopIteration as ended:
                results[index] = ended.value
            else:
                left.append((index, each))
        running = left
    return [results[index] for index in sorted(results)]
