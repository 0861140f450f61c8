"""Each process reads its own rows, and a position that resumes on any number of processes: three ways to write it.

    rows = Rows(dataset, batch=1024, seed=0)                  # or grain_rows(dataset, batch=1024, seed=0)
    with zerojax.CheckpointManager(directory, layout, tx, every=100) as manager:
        if (found := manager.restore()) is not None:
            state = found.state
            rows.set_state(found.data)
        for step in range(int(state.step) + 1, last + 1):
            state, metrics = step_fn(state, layout.batch(next(rows)))
            manager.save(step, state, data=rows)

What makes it resume exactly, on as many processes as before or on fewer: the order of the examples is drawn for the
whole job from the seed, a batch is a stretch of that order whatever the number of processes, each of them takes its
part of it, and the position counts batches, so that all processes save the same. `data.batch` in that form:

- a plain iterator: `Rows`, over anything with a length and `[indices]`;
- grain: `grain_rows`; its iterator has `get_state` and `set_state` already, and reads ahead in threads;
- tf.data, whose iterators cannot tell their position: count batches, and skip them (the indices alone, nothing is
  read):

      order = tf.data.Dataset.range(len(dataset)).shuffle(len(dataset), seed=0).repeat().batch(1024).skip(step)
      mine = order.map(lambda batch: batch[rows_of(1024)]).map(read).prefetch(2).as_numpy_iterator()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np


class Source(Protocol):
    """Examples by number: a NumPy array, a memory-mapped file, a table."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Any, /) -> Any: ...


def rows_of(batch: int, process: int | None = None, count: int | None = None) -> slice:
    """The rows of a batch that one process reads; by default this one of the job.

    Raises:
        ValueError: the processes do not divide the batch.

    >>> rows_of(12, process=1, count=3)
    slice(4, 8, None)
    """
    process = jax.process_index() if process is None else process
    count = jax.process_count() if count is None else count
    if batch % count:
        raise ValueError(f"a batch of {batch} rows does not divide over {count} processes: choose a multiple of them")
    each = batch // count
    return slice(process * each, (process + 1) * each)


class Rows:
    """This process's rows of the batches of a job, epoch after epoch, each in an order of its own.

    Args:
        source: the examples.
        batch: rows of a batch over all processes. What is left at the end of an epoch is dropped.
        seed: of the orders.
        process: which part to read; by default this process's.
        count: of how many.

    >>> rows = Rows(np.arange(10) * 10, batch=4, seed=0)
    >>> first, position, second = next(rows), rows.get_state(), next(rows)
    >>> rows.set_state(position)
    >>> position, bool((next(rows) == second).all())
    ({'batches': 1}, True)
    """

    def __init__(
        self, source: Source, batch: int, seed: int, process: int | None = None, count: int | None = None
    ) -> None:
        self._source, self._batch, self._seed = source, batch, seed
        self._rows, self._epoch_batches = rows_of(batch, process, count), len(source) // batch
        if not self._epoch_batches:
            raise ValueError(f"{len(source)} examples are less than one batch of {batch}")
        self._position = 0
        self._order: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        epoch, number = divmod(self._position, self._epoch_batches)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._source))
        self._position += 1
        return self._source[self._order[1][number * self._batch : (number + 1) * self._batch][self._rows]]

    def get_state(self) -> dict[str, int]:
        """The position, the same on all processes."""
        return {"batches": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on from a position of this or of another number of processes."""
        self._position = int(state["batches"])


def grain_rows(source: Source, batch: int, seed: int, process: int | None = None, count: int | None = None) -> Any:
    """The same with grain (`pip install grain`): an iterator with `get_state` and `set_state`.

    Of each stretch of `batch` examples every `count`-th is this process's: batches hold the same examples on any number
    of processes, in another order.
    """
    import grain  # pyright: ignore[reportMissingImports]

    rows_of(batch, process, count)  # refuses what does not divide
    process = jax.process_index() if process is None else process
    count = jax.process_count() if count is None else count
    examples = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    return iter(examples[process::count].batch(batch // count).to_iter_dataset())
