"""What a round on kept features saves: the same update, faster, with the bytes of a head."""

from __future__ import annotations

from benchmarks.frozen_speed.__main__ import measure
from fl_core.models import describe
from tests.support.federations import schema


def test_a_round_on_kept_features_gives_the_update_of_the_round_through_the_body_and_sends_a_head() -> None:
    found = measure("simple_cnn", side=32, n=16, batch_size=8, turns=1)
    assert found["same_update"] is True
    assert found["kept_cpu_ms"] < found["through_body_cpu_ms"] < found["whole_model_cpu_ms"]  # type: ignore[operator]
    facts = describe("simple_cnn", schema((3, 32, 32)))
    head, whole = (4 * 2 * n for n in ((facts.feature_dim + 1) * 10, facts.total_with_buffers))  # down and up
    assert head < found["bytes_head"] < head + 4096  # type: ignore[operator]
    assert whole < found["bytes_whole"] < whole + 8192  # type: ignore[operator]
