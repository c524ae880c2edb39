"""Randomness: streams that do not meet, and no global state touched."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_core import rng

pytestmark = pytest.mark.integration

steps = st.lists(st.one_of(st.integers(-5, 10**6), st.text(max_size=4)), max_size=4).map(tuple)


@given(st.tuples(st.integers(0, 50), steps), st.tuples(st.integers(0, 50), steps))
def test_different_paths_give_different_streams(a, b) -> None:  # type: ignore[no-untyped-def]
    assert (rng.derive(a[0], *a[1]) == rng.derive(b[0], *b[1])) == (a == b)


def test_encoding_is_injective_where_texts_could_meet() -> None:
    paths = [("a", 12), ("a1", 2), ("a12",), ("a", "12"), ("a", "1", "2"), ("", "a12"), (12, "a"), ()]
    assert len({rng.derive(s, *path) for path in paths for s in (0, 1, 11)}) == 3 * len(paths)
    assert rng.derive(1, 2) != rng.derive(12)


def test_seeds_fit_every_generator() -> None:
    seeds = [rng.derive(7, "x", k) for k in range(500)]
    assert all(0 <= s < 2**63 for s in seeds)
    assert len(set(seeds)) == 500
    assert len({s % 2 for s in seeds}) == 2


def test_streams_repeat_across_processes() -> None:
    code = "from fl_core import rng; print(rng.derive(3, 'round', 1, 'silo', 2, 'sgd'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == rng.derive(3, "round", 1, "silo", 2, "sgd")


def test_no_global_state_is_touched() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before, before_np = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    torch.rand(3, generator=rng.stream(0, "a"))
    rng.numpy_stream(0, "a").random(3)
    with rng.torch_scope(0, "b"):
        torch.rand(100)
    assert torch.equal(before, torch.get_rng_state())
    assert (before_np == np.random.get_state()[1]).all()  # type: ignore[index]


def test_scope_puts_the_state_back_after_an_error_and_repeats_inside() -> None:
    before, drawn = torch.get_rng_state(), []
    for _ in range(2):
        try:
            with rng.torch_scope(0, "b"):
                drawn.append(torch.rand(4))
                raise RuntimeError
        except RuntimeError:
            pass
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1])


def test_scope_draws_what_the_seed_of_torch_gives_and_leaves_nothing_behind() -> None:
    """`torch.manual_seed` keeps a traceback per call where no GPU is in use; a long simulation has a million calls."""
    queued = len(torch.cuda._queued_calls)
    with rng.torch_scope(3, "dropout"):
        drawn = torch.rand(5)
    expected = torch.rand(5, generator=torch.Generator().manual_seed(rng.derive(3, "dropout")))
    assert torch.equal(drawn, expected)
    assert len(torch.cuda._queued_calls) == queued
