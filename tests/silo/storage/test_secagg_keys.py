"""Keys and rounds of masked runs on the disk of a silo, which is killed at every write (T-46)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_core.errors import FederationError
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import Secagg
from privacy.secagg.keys import OwnKeys, RunKeys
from privacy.secagg.silo_side import MaskedTaskRow
from privacy.secagg.terms import SecaggError
from silo.storage.secagg_keys import MaskedRun
from tests.silo.storage.test_crash import crash_points
from tests.support.hospital import FACTS, B, key, opened, stage

RUN = MaskedRun("run-1", "a" * 64, ("a", "b", "c"), 3, 7, 0, "ring32", Secagg(1))
OWN = OwnKeys(b"a" * 32, b"s" * 32)
READY = RunKeys(1, b"K" * 32, OWN.sign, (b"x" * 32, b"y" * 32, b"z" * 32), (b"1" * 32, b"2" * 32, b"3" * 32))
SEALED = MaskedTaskRow("train", 0, bytes.fromhex(B), b"", b"h" * 32, (0, 1, 2))


def keyed(outbox):
    assert outbox.store.secagg.entry(RUN, lambda: (OWN, b"entry")) == b"entry"


def ready(outbox):
    keyed(outbox)
    outbox.store.record_run("run-1", "small", "a" * 64, B)
    outbox.store.secagg.agree("run-1", "object", READY)


def sent(outbox):
    ready(outbox)
    return stage(outbox)


def code(call) -> str:
    with pytest.raises(FederationError) as caught:
        call()
    return caught.value.code


def test_t46_keys_that_were_sent_are_on_the_disk_and_made_once(tmp_path, monkeypatch):
    states = []
    for _, home in crash_points(tmp_path, monkeypatch, lambda o: None, keyed):
        secagg = opened(home).store.secagg
        states.append(secagg.state("run-1"))
        other = OwnKeys(b"b" * 32, b"t" * 32)
        entry = secagg.entry(RUN, lambda other=other: (other, b"other"))
        assert (entry, secagg.own_keys("run-1")) == ((b"entry", OWN) if states[-1] else (b"other", other))
    assert states[0] == ""
    assert states[-1] == "keyed"


def test_t46_a_silo_has_the_key_to_agree_or_everybodys_and_never_both_or_none(tmp_path, monkeypatch):
    states = []
    homes = crash_points(tmp_path, monkeypatch, keyed, lambda o: o.store.secagg.agree("run-1", "object", READY))
    for what, home in homes:
        secagg = opened(home).store.secagg
        states.append(secagg.state("run-1"))
        if states[-1] == "keyed":
            assert secagg.own_keys("run-1") == OWN, what
            secagg.agree("run-1", "object", READY)
        assert secagg.masked_run("run-1").keys == READY, what
        assert secagg.masked_run("run-1").terms == RUN, what
        assert code(lambda secagg=secagg: secagg.own_keys("run-1")) == "E-RUN-50"
        assert code(lambda secagg=secagg: secagg.agree("run-1", "another", READY)) == "E-RUN-50", what
    assert {*states} == {"keyed", "ready"}


def test_t46_t57_an_update_and_its_row_are_entered_together_and_once(tmp_path, monkeypatch):
    found = []
    for what, home in crash_points(tmp_path, monkeypatch, ready, stage):
        again = opened(home)
        entry, row = again.find(key(), B), again.store.secagg.row(key())
        assert (entry is None) == (row is None), what
        found.append(row is not None)
        if row is None:
            stage(again)
            row = again.store.secagg.row(key())
        kept = again.store.entry(key())
        assert row == MaskedTaskRow("train", 0, bytes.fromhex(B), bytes.fromhex(kept.object_digest)), what
        assert code(lambda again=again: stage(again, value=2.0)) == "E-RUN-49", what
        assert code(lambda again=again: stage(again, base="c" * 64)) == "E-RUN-49", what
        assert again.store.entry(key()).object_digest == kept.object_digest, what
    assert found == sorted(found)
    assert {*found} == {False, True}


def test_t46_one_set_of_a_round_is_noted_whole_and_no_other_follows(tmp_path, monkeypatch):
    def confirm(outbox):
        before = outbox.store.secagg.row(key())
        outbox.store.secagg.confirm(key(), before, replace(before, seal_hash=b"h" * 32, inside=(0, 1, 2)))

    found = []
    for what, home in crash_points(tmp_path, monkeypatch, sent, confirm):
        secagg = opened(home).store.secagg
        row = secagg.row(key())
        found.append(row.seal_hash)
        assert (row.seal_hash, row.inside) in ((b"", ()), (b"h" * 32, (0, 1, 2))), what
        stale = replace(row, seal_hash=b"", inside=())
        if row.seal_hash:
            other = replace(row, seal_hash=b"i" * 32)
            assert code(lambda secagg=secagg, a=stale, b=other: secagg.confirm(key(), a, b)) == "E-RUN-50", what
            assert secagg.row(key()) == row
    assert found == sorted(found)
    assert {*found} == {b"", b"h" * 32}


def test_t46_a_close_steps_the_keys_and_deletes_the_round_in_one_with_the_task(tmp_path, monkeypatch):
    found = []
    for what, home in crash_points(tmp_path, monkeypatch, sent, lambda o: o.store.close(key(), included=True)):
        again = opened(home)
        position = again.store.secagg.masked_run("run-1").keys.position
        found.append(position)
        assert (position, again.store.secagg.row(key()) is None, again.store.closed(key())) in (
            (0, False, False),
            (2, True, True),
        ), what
        again.store.close(key(), included=True)
        assert again.store.secagg.masked_run("run-1").keys == READY.at(2), what
    assert found == sorted(found)
    assert {*found} == {0, 2}


def test_a_round_that_is_sealed_or_closed_takes_no_update(tmp_path):
    outbox = opened(tmp_path / "home")
    ready(outbox)
    outbox.store.secagg.confirm(key(), None, SEALED)
    assert code(lambda: stage(outbox)) == "E-RUN-50"
    outbox.store.close(key(), included=False)
    assert code(lambda: stage(outbox)) == "E-RUN-50"
    assert outbox.store.outbox() == []
    assert code(lambda: outbox.store.secagg.confirm(key(), None, SEALED)) == "E-RUN-50"
    stage(outbox, 1)


def test_missed_closes_are_made_up_for_by_the_next_task_and_a_round_that_there_is_not_steps_nothing(tmp_path):
    store = opened(tmp_path / "home").store
    ready(opened(tmp_path / "home"))
    store.close(key(2**32 - 1), included=True)
    assert store.secagg.masked_run("run-1").keys == READY
    store.secagg.begin_round(key(2))
    assert store.secagg.masked_run("run-1").keys == READY.at(3)
    store.secagg.begin_round(key(1))
    assert store.secagg.masked_run("run-1").keys == READY.at(3)
    store.close(key(3, kind=TaskKind.EVALUATE), included=True)
    assert store.secagg.masked_run("run-1").keys == READY.at(5)


def test_a_run_without_masks_is_as_before(tmp_path):
    outbox = opened(tmp_path / "home")
    stage(outbox)
    stage(outbox, value=2.0)
    assert outbox.store.secagg.row(key()) is None
    assert outbox.store.secagg.state("run-1") == ""


def test_an_ended_run_is_gone_and_its_keys_are_not_made_again(tmp_path):
    outbox = opened(tmp_path / "home")
    sent(outbox)
    outbox.store.end_run("run-1", "aborted", "")
    secagg = outbox.store.secagg
    assert secagg.state("run-1") == "gone"
    assert secagg.row(key()) is None
    for call in (
        lambda: secagg.masked_run("run-1"),
        lambda: secagg.own_keys("run-1"),
        lambda: secagg.entry(RUN, lambda: (OWN, b"entry")),
        lambda: outbox.store.stage(replace(stage_entry(outbox), key=key(1)), FACTS),
    ):
        assert code(call) == "E-RUN-50"
    with pytest.raises(SecaggError):
        secagg.confirm(key(), None, SEALED)


def stage_entry(outbox):
    other = opened(outbox.store.database.path.parent.parent / "other")
    return stage(other)
