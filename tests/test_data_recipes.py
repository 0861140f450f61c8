"""The example's ways to read data: every example once an epoch, the same batches on any number of processes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import data

EXAMPLES, BATCH = 50, 12


class Table:
    """Examples that are no array; grain asks for them one by one."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, indices):
        return {"x": np.asarray(indices, np.float32)[..., None] * np.ones(3), "label": np.asarray(indices)}


def make(kind, process, count):
    if kind == "grain":
        pytest.importorskip("grain")
        return data.grain_rows(Table(), BATCH, 7, process, count)
    return data.Rows(Table(), BATCH, 7, process, count)


def batches(kind, count, steps, state=None):
    """Labels of global batches, and the state after them, from as many iterators as there are processes."""
    parts = [make(kind, process, count) for process in range(count)]
    for part in parts if state is not None else ():
        part.set_state(state)
    found = [np.concatenate([next(part)["label"] for part in parts]) for _ in range(steps)]
    states = [part.get_state() for part in parts]
    assert all(each == states[0] for each in states), "one position for all"
    return found, states[0]


@pytest.mark.parametrize("kind", ["plain", "grain"])
def test_batches_are_those_of_one_process_on_any_number_and_after_a_resume_on_fewer(kind):
    alone, _ = batches(kind, 1, 11)
    for before, after in ((4, 3), (1, 6), (2, 2)):
        first, state = batches(kind, before, 5)
        second, _ = batches(kind, after, 6, state)
        for got, want in zip([*first, *second], alone, strict=True):
            assert len(got) == BATCH
            assert sorted(got) == sorted(want)
    if kind == "plain":
        np.testing.assert_array_equal(np.stack(batches(kind, 3, 11)[0]), np.stack(alone))
    else:  # the tail of an epoch and the head of the next one may share a batch
        alone = [np.concatenate(alone)[:EXAMPLES], np.concatenate(alone)[EXAMPLES : 2 * EXAMPLES]]
    epochs = [np.concatenate(alone[:4]), np.concatenate(alone[4:8])] if kind == "plain" else alone
    for epoch in epochs:
        assert len({*epoch}) == len(epoch) >= 4 * BATCH, "no example twice in an epoch"
    assert list(epochs[0]) != list(epochs[1])


@pytest.mark.parametrize("kind", ["plain", "grain"])
def test_a_manager_keeps_the_position_of_an_iterator(kind, tmp_path):
    layout = zerojax.partition({"w": jnp.ones((16, 3))}, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(min_shard_size=0))
    rows, params = make(kind, 0, 1), layout.shard({"w": jnp.ones((16, 3))})
    next(rows)
    with zerojax.CheckpointManager(tmp_path, layout) as manager:
        manager.save(1, params, data=rows)
        wanted = next(rows)
        again = make(kind, 0, 1)
        again.set_state(manager.restore().data)
    jax.tree.map(np.testing.assert_array_equal, next(again), wanted)


def test_rows_that_do_not_divide_or_do_not_suffice_are_refused():
    with pytest.raises(ValueError, match="12 rows does not divide over 5 processes"):
        data.Rows(Table(), 12, 0, 0, 5)
    with pytest.raises(ValueError, match="50 examples are less than one batch of 64"):
        data.Rows(Table(), 64, 0, 0, 1)
