"""Masked runs over the wire, with silos made of the protocol's silo side: what is opened, for whom, and what is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import grpc
import pytest
import torch

from consilium.research.engines.in_process import local_ports
from coordinator.runs import masked_rounds
from coordinator.runs.masked_rounds import SetOpening
from coordinator.runs.withdrawal import Withdrawals
from coordinator.storage.records import RunState
from fl_core.aggregation.flat_blocks import WORDS
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import EACH, MASKS, MAX_MASKED, MODEL, Secagg
from fl_core.types.values import Bundle, Part
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.channel_options import MAX_MESSAGE_BYTES
from protos.wire.size_limits import max_object_bytes
from protos.wire.tasks import TaskKey
from service_core.audit_log.lines import REFUSED, LogEntry
from silo.worker.masks import TaskMasks
from tests.support import until
from tests.support.audit_log import entries
from tests.support.coordinator import HELLO, Clock, Line, World, events, fetch, heard, running, send
from tests.support.federations import NAMES, Failing
from tests.support.hospital import ScriptedSilo
from tests.support.masked_silo import FOUR, MaskedSilo, masked, shares_of

pytestmark = pytest.mark.integration


@cache
def _simulated(agreed: str, absent: tuple[str, ...]) -> str:
    manifest = RunManifest.from_json(agreed)
    run = RunSetup.of(manifest)
    ports = [
        Failing(port, range(manifest.rounds + 1)) if port.name in absent else port
        for port in local_ports(run, [*shares_of([m.name for m in manifest.members]).values()])
    ]
    return tensor_maps.digest(run.round_loop(ports, 1).run(run.initial_state(), Observer())["w"])


def simulated(agreed: RunManifest, *absent: str) -> str:
    """Return the digest of the model that a simulation ends in. absent: in every round."""
    return _simulated(agreed.to_json(), absent)


@contextmanager
def silos(world: World, names: Sequence[str] = NAMES, **of: dict[str, object]) -> Iterator[dict[str, MaskedSilo]]:
    made = {name: MaskedSilo(world, name, **of.get(name, {})) for name in names}  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for silo in made.values():
            silo.stop()


def restart(world: World, people: dict[str, MaskedSilo], **of: dict[str, object]) -> dict[str, MaskedSilo]:
    """Start the service and its silos again, with what their disks hold."""
    for silo in people.values():
        silo.stop()
    world.stop()
    world.start()
    again = {n: MaskedSilo(world, n, s.memory, **of.get(n, {})) for n, s in people.items()}  # type: ignore[arg-type]
    people.update(again)
    return again


def busy(offer: pb.Offer) -> str:
    del offer
    return "busy"


def without(kind: str, then: Callable[[], bool] = lambda: False) -> Callable[[pb.SiloMessage], list[pb.SiloMessage]]:
    """Swallow messages of a kind until something is true."""
    return lambda message: [] if message.WhichOneof("body") == kind and not then() else [message]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the clock by which sealed rounds wait in this test."""
    found = Clock()
    monkeypatch.setattr(masked_rounds, "SetOpening", partial(SetOpening, clock=found))
    return found


@pytest.fixture
def four(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "home", FOUR) as found:
        yield found


def recorded(world: World) -> list[LogEntry]:
    """Read the coordinator's audit log."""
    return entries(world.home)


def refusals(world: World, run_id: str) -> dict[str, str]:
    return dict(events(world, run_id, "refused"))


def seals_of(people: dict[str, MaskedSilo]) -> set[int]:
    """Count the sets that each silo was given for each task that it confirmed."""
    return {len(seals) for silo in people.values() for seals in silo.memory.confirmed.values()}


# ---- what a masked run ends in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fednh"])
def test_a_masked_run_over_the_wire_ends_in_the_model_of_its_simulation(world: World, method: str) -> None:
    agreed = masked(method=method, rounds=2)
    with silos(world) as people:
        run = world.finished(world.submit(agreed).id)
        assert run.model_digest == simulated(agreed)
        assert refusals(world, run.id) == {}
        assert seals_of(people) == {1}


@pytest.mark.parametrize("terms", [Secagg(1), Secagg(1, EACH)])
def test_a_masked_run_without_one_hospital_ends_in_the_model_of_its_simulation(four: World, terms: Secagg) -> None:
    agreed = masked(FOUR, terms, method="fednh", rounds=2)
    with silos(four, FOUR, west={"refuse": busy}):
        run = four.finished(four.submit(agreed).id)
        assert run.model_digest == simulated(agreed, "west")


def test_cohorts_that_are_drawn_are_masked_among_themselves(four: World) -> None:
    agreed = masked(FOUR, Secagg(1, EACH), cohort=3, rounds=3)
    with silos(four, FOUR) as people:
        run = four.finished(four.submit(agreed).id)
        assert run.model_digest == simulated(agreed)
        trained = [sum(key.round == t for s in people.values() for key in s.memory.trained) for t in range(4)]
        assert trained == [3, 3, 3, 4]


def test_nothing_of_a_single_hospital_is_kept(world: World) -> None:
    """T-62, of the database: rounds, steering and sizes hold what the manifest and the sums say."""
    agreed = masked(method="fednh", rounds=2)
    with silos(world):
        run = world.finished(world.submit(agreed).id)
        for row in world.server.store.runs.rounds(run.id):
            record = row.record
            assert (record.added, record.cut, record.medians) == ({}, {}, {})
            assert record.personal == {}
        assert world.server.store.steering.of(run.id).holds == {}
        sizes = world.server.store.runs.declared_sizes(run.id)
        assert {(name, train) for name, train, _ in sizes} == {(m.name, float(m.units)) for m in agreed.members}
        until(lambda: world.server.store.secagg.keys(run.id) is None, "the end of the run's keys")
        with world.server.store.database.read() as db:
            assert db.exec_driver_sql("SELECT count(*) FROM secagg_seals").scalar() == 0
        held = world.server.store.contributions.referenced_digests()
        assert not held & {c.object_digest for c in world.server.store.contributions.arrivals(run.id)}


def test_uploads_may_be_as_large_as_their_packages_make_them() -> None:
    agreed = masked()
    beyond = max_object_bytes(agreed) - max_object_bytes(replace(agreed, secagg=None))
    assert beyond == 3 * (66 * 3 + 16) + 64 * 3 + 32  # section 4 of the protocol: packages, commitments, salt


def test_the_packages_of_the_most_members_fit_into_one_message() -> None:
    n = MAX_MASKED
    packages = [pb.SealedPackage(index=u, salt=bytes(32), package=bytes(66 * n + 16)) for u in range(n)]
    confirmations = [pb.Confirmed(index=u, signature=bytes(64)) for u in range(n)]
    largest = pb.SecaggOpen(run_id="r" * 200, seal_hash=bytes(32), confirmations=confirmations, packages=packages)
    assert pb.CoordinatorMessage(secagg_open=largest).ByteSize() < MAX_MESSAGE_BYTES


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_an_older_silo_stops_the_run_and_is_named(world: World) -> None:
    """T-63: nothing is sent in clear where one side knows no masks."""
    old = ScriptedSilo(world, "east", shares_of(NAMES)["east"])
    with silos(world, ("north", "south")):
        run = world.ended(world.submit(masked(rounds=1)).id)
        assert run.state is RunState.PAUSED
        assert "E-RUN-36" in run.reason
        assert "east: E-WIRE-01" in run.reason
        assert world.server.store.secagg.keys(run.id) is None
        assert world.server.store.runs.round(run.id, 0) is None
    old.stop()


@pytest.mark.parametrize("kind", ["another", "unsigned", "altered", "long"])
def test_keys_of_another_identity_stop_the_run_and_the_silo_is_named(world: World, kind: str) -> None:
    """T-49, T-50: east sends north's keys under its own name, or keys that its certificate did not sign."""
    stolen = list[pb.SecaggEntry]()

    def steal(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if message.HasField("preflight"):
            stolen.append(message.preflight.secagg_entry)
        return [message]

    def lie(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if message.HasField("preflight"):
            entry = message.preflight.secagg_entry
            if kind == "another":
                entry.CopyFrom(until(lambda: stolen and stolen[0]))
            elif kind == "unsigned":
                entry.signature = b""
            elif kind == "altered":
                entry.agree = bytes(32)
            else:
                entry.certificate_pem += b"#" * (16 << 10)
        return [message]

    with silos(world, NAMES, north={"says": steal}, east={"says": lie}):
        run = world.ended(world.submit(masked(rounds=1)).id)
        assert run.state is RunState.PAUSED
        assert "east: E-ID-33" in run.reason
        assert "north: " not in run.reason
        assert world.server.store.secagg.keys(run.id) is None


def test_a_masked_run_waits_for_the_keys_of_all_members_excluded_ones_too(four: World) -> None:
    agreed = masked(FOUR, Secagg(1, EACH), rounds=1)
    with silos(four, NAMES) as people:
        run = four.submit(agreed)
        heard(four, run.id, "ready", 3)
        four.server.runs.exclude(run.id, "west")
        assert four.server.store.secagg.keys(run.id) is None
        people["west"] = MaskedSilo(four, "west")
        assert four.finished(run.id).model_digest == simulated(agreed, "west")
        assert events(four, run.id, "keys") == [("", "the keys of 4 hospitals are fixed for this run")]
        assert people["west"].memory.trained == []


def test_no_order_leaves_a_masked_run_fewer_hospitals_than_a_sum_has(four: World) -> None:
    run = four.submit(masked(FOUR, Secagg(1, EACH), rounds=1))
    four.server.runs.exclude(run.id, "west")
    with pytest.raises(ConfigError, match=r"E-CFG-02.*3 hospitals or more to stay.*found 2 without 'east'"):
        four.server.runs.exclude(run.id, "east")
    four.server.runs.exclude(run.id, "west", readmit=True)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*quorum of at least 3, found 2"):
        four.server.runs.resume(run.id, 2)


def test_the_keys_are_one_object_which_members_alone_read(four: World, tmp_path: Path) -> None:
    held = {"says": without("secagg_confirm")}
    with silos(four, FOUR, north=held, east=held, south=held):
        run = four.submit(masked(rounds=1))
        heard(four, run.id, "sealed")
        digest = four.server.store.secagg.keys(run.id)
        entries = pb.SecaggKeys.FromString(fetch(four.transfer("east"), digest, tmp_path).read_bytes()).entries
        assert [len(e.agree) for e in entries] == [32, 32, 32]
        with pytest.raises(grpc.RpcError, match="E-WIRE-12"):
            fetch(four.transfer("west"), digest, tmp_path)
        assert four.server.store.secagg.keep_keys(run.id, "f" * 64, 1, "others") == digest  # frozen
        four.server.runs.schedule_cleanup(run.id)
        four.server.runs._cleanup.submit(lambda: None).result()
        assert four.server.objects.has(digest)
        four.server.runs.abort(run.id)
        until(lambda: not four.server.objects.has(digest), "the end of the keys with the run")


def test_a_census_waits_for_the_quorum_that_the_lead_set(four: World) -> None:
    """The run's own is two thirds, three of four: with it, the fourth would not be counted."""
    asked, counted = list[str](), threading.Event()

    def refused_at_first(message: pb.SiloMessage) -> Sequence[pb.SiloMessage]:
        if message.WhichOneof("body") == "preflight" and not asked:
            asked.append(message.preflight.run_id)
            message.preflight.ready, message.preflight.code, message.preflight.reason = False, "E-RUN-14", "busy"
            message.preflight.ClearField("secagg_entry")
        return [message]

    def late(key: TaskKey, masks: TaskMasks, update: Bundle) -> Bundle:
        assert not key.kind.census or counted.wait(60)
        return masks.cover(update)

    with silos(four, FOUR, west={"says": refused_at_first, "cover": late}):
        try:
            run = four.submit(masked(FOUR, Secagg(1, census=True), rounds=1))
            assert four.ended(run.id).state is RunState.PAUSED
            four.server.runs.resume(run.id, quorum=4)
            waiting = until(lambda: four.server.runs.waiting(run.id), "the census", 60)
            assert four.server.store.runs.round(run.id, 0).record.kind is TaskKind.CENSUS
            assert waiting.needed == 4
        finally:
            counted.set()
        four.server.runs.abort(run.id)
        four.ended(run.id)


# ---- one set ---------------------------------------------------------------------------------------------------------


def test_an_update_that_comes_after_the_seal_is_refused_and_leaves_nothing(four: World) -> None:
    """T-54: its sender counts as absent, and its own seed is not opened."""
    agreed = masked(FOUR, Secagg(1, EACH), rounds=1)
    held = {"says": without("secagg_shares", lambda: bool(late))}
    late = list[str]()
    with silos(four, FOUR, north=held, east=held, south=held, west={"refuse": busy}) as people:
        run = four.submit(agreed)
        heard(four, run.id, "sealed")
        (offer,) = (m.offer for m in people["west"].received if m.HasField("offer"))
        with pytest.raises(grpc.RpcError, match=r"E-RUN-06.*set was fixed"):
            send(four.transfer("west"), "west", offer, b"an update")
        assert four.server.uploads.all() == []
        assert "west" not in four.server.store.contributions.received(run.id, 0)
        late.append("refused")
        for name in NAMES:  # they answer once they are asked in a new session
            people[name].stop()
            people[name] = MaskedSilo(four, name, people[name].memory)
        assert four.finished(run.id).model_digest == simulated(agreed, "west")


def test_a_round_has_one_set_whatever_is_stored_later(world: World) -> None:
    """T-34, T-35: a second set is not taken, before the close and after it."""

    def first_round_only(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        return [] if message.HasField("secagg_shares") and message.secagg_shares.round == 1 else [message]

    held = {"says": first_round_only}
    with silos(world, NAMES, north=held, east=held) as people:
        run = world.submit(masked(rounds=2))
        heard(world, run.id, "sealed", 2)
        store = world.server.store.secagg
        seal = store.seal(run.id, 1, TaskKind.TRAIN)
        other = pb.SecaggSeal()
        other.CopyFrom(seal)
        del other.updates[0]
        assert store.keep_seal(other, TaskKind.TRAIN, "") == seal
        assert store.seal(run.id, 0, TaskKind.TRAIN) is None
        ((before,),) = (s for key, s in people["north"].memory.confirmed.items() if key.round == 0)
        with pytest.raises(StateError, match="E-RUN-50: round 1"):
            store.keep_seal(pb.SecaggSeal.FromString(before), TaskKind.TRAIN, "")
        again = restart(world, people)
        assert world.finished(run.id).model_digest == simulated(masked(rounds=2))
        assert seals_of(again) == {1}
        with pytest.raises(StateError, match="E-RUN-11"):
            world.server.store.secagg.keep_seal(seal, TaskKind.TRAIN, "")


def test_a_lost_update_of_a_set_is_asked_for_again(world: World) -> None:
    agreed = masked(rounds=1)
    held = {"says": without("secagg_shares")}
    with silos(world, NAMES, north=held, east=held) as people:
        run = world.submit(agreed)
        heard(world, run.id, "sealed")
        damage(world, run.id)
        restart(world, people)
        assert world.finished(run.id).model_digest == simulated(agreed)
        assert [silo for silo, _ in events(world, run.id, "lost")] == ["north"]
        assert seals_of(people) == {1}
        assert len(people["north"].memory.trained) == 2  # once for each task


def test_a_set_waits_for_its_lost_update_and_takes_no_other(four: World) -> None:
    agreed = masked(FOUR, rounds=1)
    held = {"says": without("secagg_shares")}
    with silos(four, FOUR, north=held, east=held) as people:
        run = four.submit(agreed)
        heard(four, run.id, "sealed")
        damage(four, run.id)
        restart(four, people, north={"refuse": busy})
        run = four.ended(run.id)
        assert run.state is RunState.PAUSED
        assert "E-RUN-45" in run.reason
        assert "the updates of north were lost" in run.reason
        *_, offer = (m.offer for m in people["north"].received if m.HasField("offer"))  # a slow machine offers again
        with pytest.raises(grpc.RpcError, match=r"E-RUN-06.*set was fixed"):
            send(four.transfer("north"), "north", offer, b"another update")
        people["north"].stop()
        people["north"] = MaskedSilo(four, "north", people["north"].memory)
        four.server.runs.resume(run.id)
        assert four.finished(run.id).model_digest == simulated(agreed)


def damage(world: World, run_id: str) -> None:
    """Spoil the stored update of the set's first member."""
    seal = world.server.store.secagg.seal(run_id, 0, TaskKind.TRAIN)
    world.server.objects.path(seal.updates[0].object_digest).write_bytes(b"damaged")


# ---- who answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["secagg_confirm", "secagg_shares"])
def test_two_silent_of_three_pause_the_run_which_asks_for_the_same_set_when_it_is_resumed(
    world: World, clock: Clock, kind: str
) -> None:
    agreed = masked(rounds=1)
    wakes, silent = list[str](), list[str]()

    def says(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if message.WhichOneof("body") != kind or wakes:
            return [message]
        silent.append(kind)
        return []

    with silos(world, NAMES, north={"says": says}, east={"says": says}) as people:
        run = world.submit(agreed)
        heard(world, run.id, "sealed")
        until(lambda: len(silent) == 2, "the question to the two")
        until(lambda: (w := world.server.runs.waiting(run.id)) and w.sealed and w.received == 1, "south's answer")
        waiting = world.server.runs.waiting(run.id)
        assert (waiting.needed, [a.name for a in waiting.awaited]) == (2, ["north", "east"])
        world.server.runs.extend(run.id, 1.0)
        clock.skip(agreed.deadline_s)
        assert world.run(run.id).state is RunState.RUNNING  # the hour is not over
        clock.skip(3601)
        run = world.ended(run.id)
        assert run.state is RunState.PAUSED
        assert "E-RUN-45" in run.reason
        assert "1 did. No answer from north, east" in run.reason
        wakes.append("now")
        world.server.runs.resume(run.id)
        assert world.finished(run.id).model_digest == simulated(agreed)
        assert seals_of(people) == {1}


def test_a_silo_that_comes_back_is_asked_again(world: World) -> None:
    agreed = masked(rounds=1)
    held = {"says": without("secagg_shares")}
    with silos(world, NAMES, north=held, east=held) as people:
        run = world.submit(agreed)
        heard(world, run.id, "sealed")
        people["east"].stop()
        people["east"] = MaskedSilo(world, "east", people["east"].memory)
        people["north"].stop()
        people["north"] = MaskedSilo(world, "north", people["north"].memory)
        assert world.finished(run.id).model_digest == simulated(agreed)


def test_the_end_of_a_run_ends_its_wait_at_once(world: World) -> None:
    held = {"says": without("secagg_shares")}
    with silos(world, NAMES, north=held, east=held):
        run = world.submit(masked(rounds=1))
        heard(world, run.id, "sealed")
        world.server.runs.abort(run.id)
        assert world.ended(run.id, 10).state is RunState.ABORTED
        until(lambda: world.server.store.secagg.seal(run.id, 0, TaskKind.TRAIN) is None, "the end of the set")


def test_hospitals_that_refuse_pause_the_run_and_are_named_with_their_codes(
    world: World,
) -> None:
    def refuses(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if not message.HasField("secagg_confirm"):
            return [message]
        about = {"run_id": message.secagg_confirm.run_id, "kind": message.secagg_confirm.kind}
        refusal = pb.SecaggRefusal(**about, code="E-RUN-50", reason="another set was confirmed here", blamed=[2, 77])
        return [pb.SiloMessage(secagg_refusal=refusal)] * 3

    with silos(world, NAMES, north={"says": refuses}, east={"says": refuses}):
        run = world.ended(world.submit(masked(rounds=1)).id)
        assert run.state is RunState.PAUSED
        assert "north (refused: E-RUN-50, because of south), east (refused: E-RUN-50, because of south)" in run.reason
        found = events(world, run.id, "refused")
        assert sorted(name for name, _ in found) == ["east", "north"]  # once each
        assert all("because of south: E-RUN-50: another set" in text for _, text in found)
        audited = until(lambda: [e for e in recorded(world) if e.code == "E-RUN-50"])
        assert sorted(e.who for e in audited) == ["silo://test/east", "silo://test/north"]
        assert {e.outcome for e in audited} == {REFUSED}
        (sealed,) = (e for e in recorded(world) if e.what == "sealed")
        assert sealed.about == f"run={run.id} round=1 set=east, north, south"


def test_one_silo_cannot_confirm_or_answer_for_another(world: World) -> None:
    """T-50: the session's certificate says who speaks, and the keys of the run who signed."""
    signed = list[bytes]()

    def keep(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if message.HasField("secagg_confirm"):
            signed.append(message.secagg_confirm.signature)
        return [message]

    def lie(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if message.HasField("secagg_confirm"):
            message.secagg_confirm.signature = until(lambda: signed and signed[-1])
        return [message]

    with silos(world, NAMES, north={"says": keep}, east={"says": lie}):
        agreed = masked(rounds=1)
        run = world.finished(world.submit(agreed).id)
        assert run.model_digest == simulated(agreed)
        assert {name: text.count("E-ID-33") for name, text in events(world, run.id, "refused")} == {"east": 1}


def test_a_stranger_says_nothing_about_a_set(four: World) -> None:
    """T-52: a hospital of the consortium that is no member of the run."""
    held = {"says": without("secagg_shares")}
    with silos(four, NAMES, north=held, east=held) as people:
        run = four.submit(masked(rounds=1))
        heard(four, run.id, "sealed")
        (said,) = until(lambda: people["south"].memory.confirmed)
        line = Line(four, "west", HELLO)
        about = {"run_id": run.id, "kind": said.wire_kind}
        line.say(secagg_refusal=pb.SecaggRefusal(**about, code="E-RUN-50", reason="no"))
        assert heard(four, run.id, "refused")[0][0] == "west"
        assert "E-RUN-51" in refusals(four, run.id)["west"]
        assert four.run(run.id).state is RunState.RUNNING
        line.close()


def test_a_wrong_share_is_found_named_and_done_without(four: World) -> None:
    """T-38: with t answers of which one is wrong, one more is awaited, and the sum is exact."""
    agreed, asked = masked(FOUR, rounds=1), list[int]()

    def lie(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        for share in message.secagg_shares.shares:
            share.share = bytes([share.share[0] ^ 1]) + share.share[1:]
        return [message]

    def last(message: pb.SiloMessage) -> list[pb.SiloMessage]:
        if message.HasField("secagg_shares") and not asked:
            asked.append(message.secagg_shares.round)
            until(lambda: (w := four.server.runs.waiting(run.id)) and w.sealed and w.received == 3, "three answers")
        return [message]

    with silos(four, FOUR, east={"says": lie}, west={"says": last}):
        run = four.submit(agreed)
        assert four.finished(run.id).model_digest == simulated(agreed)
        assert "is invalid: one of the two sent wrong data" in refusals(four, run.id)["east"]
        assert set(refusals(four, run.id)) == {"east"}


@pytest.mark.parametrize("what", ["a word", "the base"])
def test_masks_that_do_not_cancel_end_the_round_unmerged(world: World, what: str) -> None:
    """T-36: a vector that was changed after it was masked, and one that was masked for another model."""

    def cover(key: TaskKey, masks: TaskMasks, update: Bundle) -> Bundle:
        if what == "the base" and key.kind is TaskKind.TRAIN:
            masks = replace(masks, round=replace(masks.round, base_digest=bytes(32)))
        sent = masks.cover(update)
        if what == "a word":
            sent[MODEL].total[WORDS][0] += 1
        return sent

    with silos(world, NAMES, east={"cover": cover}):
        run = world.submit(masked(rounds=1))
        for _ in range(2):
            ended = world.ended(run.id)
            assert ended.state is RunState.PAUSED
            assert ("E-RUN-48: train of round 0" if what == "a word" else "E-RUN-48, because of east") in ended.reason
            assert world.server.store.runs.round(run.id, 0).is_open
            world.server.runs.resume(run.id)


@pytest.mark.parametrize(
    "alter",
    [
        lambda update: {name: part for name, part in update.items() if name != MASKS},
        lambda update: update | {MODEL: Part({WORDS: update[MODEL].total[WORDS][1:]}, update[MODEL].weight)},
        lambda update: update | {MODEL: Part({WORDS: update[MODEL].total[WORDS].float()}, update[MODEL].weight)},
        lambda update: update | {MODEL: Part({WORDS: update[MODEL].total[WORDS].byte()}, update[MODEL].weight.byte())},
        lambda update: update | {"count": Part({}, torch.zeros((), dtype=torch.int64))},
    ],
)
def test_an_upload_of_another_shape_is_refused_before_its_receipt(
    world: World, alter: Callable[[Bundle], Bundle]
) -> None:
    spoilt = {"cover": lambda key, masks, update: alter(dict(masks.cover(update)))}
    with silos(world, NAMES, east=spoilt):
        run = world.ended(world.submit(masked(rounds=1)).id)
        assert run.state is RunState.PAUSED  # three are the fewest of a sum
        assert "E-WIRE-06" in refusals(world, run.id)["east"]
        assert "east" not in world.server.store.contributions.received(run.id, 0)


def test_the_sums_of_a_masked_run_cannot_be_taken_out_of_it(world: World) -> None:
    agreed = masked(method="analytic", rounds=1, model="random_features", model_options={"width": 16})
    with silos(world):
        run = world.finished(world.submit(agreed).id)
        found = Withdrawals(world.server.store, world.server.runs.submit, lambda _: None)
        (touched,) = found.withdraw("east", "lead", preview=True)
        assert touched.run.id == run.id
        assert touched.by is None
        assert "under masks" in touched.reason
        assert "train again" in touched.reason
