"""Runs that begin with weights from a file of the lead's: sent once, by digest, the same bits as in a simulation."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from consilium.report.lead import export
from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from coordinator.cli import runs as lead
from coordinator.config import weights
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from coordinator.config.run_spec import RunSpec
from coordinator.lead.client import LeadClient
from coordinator.pki.leads import Leads
from coordinator.storage.weights import UNUSED
from fl_core.errors import ConfigError, ProtocolError, UnavailableError
from fl_core.models import build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.types import tensor_maps
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from protos.wire.chunks import Chunk, read_chunks
from service_core.storage.digests import file_digest, write_all
from tests.support import some, until
from tests.support.coordinator import World
from tests.support.federation import Federation, hospitals
from tests.support.federations import same, schema

pytestmark = pytest.mark.integration

SMALL = ["data=digits", "model=digits_linear", "method=fedper", "rounds=1", "train.epochs=1", "threads=1"]
SOURCE = "model.weights_source='trained in 2025, CC BY 4.0'"


def file_of(folder: Path, seed: int = 9, **facts: object) -> Path:
    """A model as `coordinator export` writes it, head and all."""
    model = build_model("digits_linear", {}, schema((1, 8, 8)), seed)
    file = folder / f"secret-{seed}.safetensors"
    facts = {"classes": [str(k) for k in range(10)], **facts}
    save_file(tensor_maps.copy_state(model), file, metadata={"consilium": json.dumps(facts)})
    return file


@pytest.fixture
def people(tmp_path: Path) -> Iterator[Federation]:
    with hospitals(tmp_path) as made:
        yield made


@pytest.fixture
def world(people: Federation) -> World:
    return people.world


@pytest.fixture
def client(world: World) -> Iterator[LeadClient]:
    client = LeadClient.open(world.home)
    yield client
    client.close()


@pytest.mark.slow
def test_hospitals_begin_with_weights_that_the_lead_sent_and_end_in_the_bits_of_a_simulation(
    people: Federation, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    people.join("hospital0", "hospital1", data="digits/p2c5")
    file = file_of(tmp_path)
    words = [*SMALL, f"model.weights={file}", SOURCE]
    lead.run(words, home=world.home, as_json=True)
    first = world.finished(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])
    simulated = runner.run(compose_spec([*words, "federation=p2c5"]))
    assert first.model_digest == simulated.model_digest  # FedPer's heads are sent by nobody: silos had the file's
    fresh = runner.run(compose_spec([*SMALL, "federation=p2c5"]))
    both = SimulationEngine(workers=2)
    assert runner.run(compose_spec([*words, "federation=p2c5"]), engine=both).model_digest == first.model_digest
    assert fresh.model_digest != simulated.model_digest
    agreed = RunManifest.from_json(first.manifest)
    assert agreed.start == simulated.manifest.start
    named = agreed.start.weights
    assert (named.source, named.fresh) == ("trained in 2025, CC BY 4.0", ())
    assert "secret" not in first.spec + first.manifest
    for where in (world.home, *(site.home.path for site in people.hospitals.values())):
        said = [p for p in where.rglob("*") if p.is_file() and b"secret-9" in p.read_bytes()]
        assert said == []
    # A run that goes on from this one needs no file, and neither does a second one with the same weights.
    file.unlink()
    lead.run(["train.lr=0.02"], start_from=first.id, home=world.home, detach=True)
    second = world.finished(world.server.store.runs.find("latest").id)
    start = RunManifest.from_json(second.manifest).start
    assert (start.run, start.weights) == (first.id, named)
    with pytest.raises(ConfigError, match=r"E-CFG-08: model\.weights cannot be used with --from"):
        lead.run([f"model.weights={file}"], start_from=first.id, home=world.home)
    capsys.readouterr()
    lead.show(second.id, home=world.home)
    said = capsys.readouterr().out
    assert f"starts from {first.id} after round 1" in said
    assert f"the first run of the lineage began with pretrained weights {named.object}" in said
    export(first.id, out=tmp_path / "models", home=world.home)
    card = " ".join((tmp_path / "models" / f"{first.id}.md").read_text().split())
    assert f"starts from pretrained weights {named.object} (SHA-256 of the file: {named.file}" in card
    assert "by the lead from 'trained in 2025, CC BY 4.0'" in card


@pytest.mark.parametrize("words", some([[], ["model.adapter=linear", "method=fedgela"]]), ids=["fedavg", "fedgela"])
def test_hospitals_train_a_head_on_the_frozen_weights_and_the_export_is_a_whole_model(
    people: Federation, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    trained = build_model("digits_cnn", {}, schema((1, 8, 8)), 9)
    save_file(tensor_maps.copy_state(trained), tmp_path / "body.safetensors")
    small = ["data=digits", "rounds=2", "train.epochs=1", "threads=1", "train.freeze=features", *words]
    words = [*small, f"model.weights={tmp_path / 'body.safetensors'}"]
    people.join("hospital0", "hospital1", data="digits/p2c5")
    lead.run(words, home=world.home, as_json=True)
    run = world.finished(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])
    export(run.id, out=tmp_path / "models", formats=["torch"], home=world.home)
    simulated = runner.run(compose_spec([*words, "federation=p2c5"]))
    assert run.model_digest == simulated.model_digest
    assert simulated.model_digest != runner.run(compose_spec([*small, "federation=p2c5"])).model_digest
    exported = load_file(tmp_path / "models" / f"{run.id}.safetensors")
    assert same(exported, dict(simulated.run.exported(simulated.server)))
    body = {n: v for n, v in tensor_maps.copy_state(trained).items() if n.startswith("body.")}
    assert same({n: v for n, v in exported.items() if n.startswith("body.")}, body)
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    program = torch.export.load(tmp_path / "models" / f"{run.id}.pt2").module()
    whole = simulated.run.classifier(simulated.server).eval()
    with torch.no_grad():
        assert torch.allclose(program(x), whole(x), atol=1e-4)
    card = " ".join((tmp_path / "models" / f"{run.id}.md").read_text().split())
    assert "Only the layers after the body were trained. The body is fixed: pretrained weights" in card


def test_a_path_is_in_no_configuration_that_is_sent_and_a_service_refuses_one(tmp_path: Path) -> None:
    spec = compose_spec([*SMALL, f"model.weights={file_of(tmp_path)}"])
    sent, taken = weights.take(spec)
    assert "secret" not in sent.to_json()
    assert RunSpec.from_json(sent.to_json()) == sent
    assert sent.weights == taken.named
    with pytest.raises(ConfigError, match=r"E-CFG-02.*by their digest"):
        manifest_from(spec, ["a", "b"])
    plain = compose_spec(SMALL)
    no_keys = {"weights", "weights_file", "weights_source"}
    assert not no_keys & set(json.loads(plain.to_json()))
    assert weights.take(plain) == (plain, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.weights_source=x"], r"E-CFG-02.*model.weights_source needs"),
        (["model.weights=3"], r"E-CFG-02.*model.weights=FILE"),
        (["model.weights=''"], r"E-CFG-02.*model.weights=FILE"),
        (["weights=x.pth"], r"E-CFG-01.*write model.weights=FILE"),
        (["weights_file=x.pth"], r"E-CFG-01.*write model.weights=FILE"),
    ],
)
def test_words_that_name_no_file_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_spec([*SMALL, *words])


def test_a_source_that_is_no_line_of_text_is_refused(tmp_path: Path) -> None:
    spec = compose_spec([*SMALL, f"model.weights={file_of(tmp_path)}"])
    for source in ("a\nb", "a\x1b[2J", "‮x", "y" * 201):
        with pytest.raises(ConfigError, match=r"E-CFG-02.*source of at most 200 visible"):
            weights.take(replace(spec, weights_source=source))


def test_existing_configurations_keep_the_digests_of_their_manifests() -> None:
    """Of models that gained an option or the weights; the numbers are those of the version before."""
    first = [f"aggregator.{key}={n}" for key, n in (("refuse_above", 5), ("clip_at", 2), ("ceiling", 2), ("rows", 3))]
    schedule = ["train.batch_size=128", "train.epochs=10"]
    for words, digest in (
        (["model=resnet18", "data=cifar10"], RESNET),
        (["model=efficientnet_b0", "data=isic2019", "data.image_size=32", *schedule], EFFICIENTNET),
    ):
        agreed = manifest_from(
            compose_spec([*words, *first, "method=fedavg", "seed=0", "rounds=3", "metrics=basic"]), ["a", "b"]
        )
        assert replace(agreed, software="").digest() == digest


RESNET = "d858b7d1fccb40a948bbe7760210a043641b840217e0babf1a5d3d9586690f7d"
EFFICIENTNET = "b6b85ed6cc86161b7251d9ad45c6eadcc8e9e2a7fb1df0f75b177dcb225bb81c"


# ---- sending --------------------------------------------------------------------------------------------------------


def written(folder: Path, seed: int = 9, numbers: int = 0) -> tuple[Path, str]:
    tensors = tensor_maps.copy_state(build_model("digits_linear", {}, schema((1, 8, 8)), seed))
    if numbers:
        tensors["filler"] = torch.full((numbers,), float(seed))
    file = folder / f"object-{seed}"
    digest, _ = codec.write_weights(tensors, file)
    return file, digest


def test_an_upload_that_was_cut_goes_on_where_it_was_also_after_a_restart(world: World, tmp_path: Path) -> None:
    file, digest = written(tmp_path, numbers=1 << 20)
    data = file.read_bytes()
    lead_stub = world.lead()
    assert lead_stub.OpenWeights(pb.OpenWeightsRequest(digest=digest, size=len(data))).have == 0
    first = pb.Chunk(object=digest, offset=0, data=data[: 1 << 20])
    assert lead_stub.PutWeights(iter([first])).have == 1 << 20
    world.stop()
    world.start()
    with pytest.raises(grpc.RpcError, match=r"E-WIRE-06.*open them first"):
        world.lead().PutWeights(iter([first]))
    assert world.lead().OpenWeights(pb.OpenWeightsRequest(digest=digest, size=len(data))).have == 1 << 20
    client = LeadClient.open(world.home)
    client.send_weights(digest, file)
    assert world.server.objects.verified(digest).read_bytes() == data
    client.send_weights(digest, file)  # is here: nothing is sent
    client.close()
    assert not [p for p in (world.home / "blobs" / "weights").rglob("*") if p.is_file()]


def test_bytes_of_another_digest_are_forgotten_and_more_than_announced_are_refused(
    world: World, client: LeadClient, tmp_path: Path
) -> None:
    file, digest = written(tmp_path)
    size = file.stat().st_size
    stub = world.lead()
    stub.OpenWeights(pb.OpenWeightsRequest(digest=digest, size=size))
    with pytest.raises(grpc.RpcError, match="E-WIRE-04"):
        stub.PutWeights(iter([pb.Chunk(object=digest, data=bytes(size))]))
    assert not world.server.objects.has(digest)
    assert stub.OpenWeights(pb.OpenWeightsRequest(digest=digest, size=size)).have == 0
    with pytest.raises(grpc.RpcError, match=r"E-WIRE-06.*more than the announced"):
        stub.PutWeights(iter([pb.Chunk(object=digest, data=bytes(size + 1))]))
    with pytest.raises(grpc.RpcError, match=r"E-WIRE-06.*a second"):
        stub.PutWeights(iter([pb.Chunk(object=digest, data=b"x"), pb.Chunk(object="a" * 64, offset=1, data=b"y")]))
    for wrong, most in (("../../x", 1), ("A" * 64, 1), (digest, 0), (digest, (2 << 30) + 1)):
        with pytest.raises(grpc.RpcError, match="E-WIRE-06"):
            stub.OpenWeights(pb.OpenWeightsRequest(digest=wrong, size=most))
    client.send_weights(digest, file)
    assert world.server.objects.verified(digest).read_bytes() == file.read_bytes()


def test_weights_that_no_run_begins_with_make_room_and_are_gone_after_a_restart(
    world: World, client: LeadClient, tmp_path: Path
) -> None:
    sent = [written(tmp_path, seed) for seed in range(UNUSED + 2)]
    for file, digest in sent:
        client.send_weights(digest, file)
    here = [world.server.objects.has(digest) for _, digest in sent]
    assert here == [False, False, *[True] * UNUSED]
    world.stop()
    world.start()
    assert not any(world.server.objects.has(digest) for _, digest in sent)


def client_of(world: World, name: str) -> LeadClient:
    assert world.server is not None
    Leads(world.home, world.server.store).add(name)
    return LeadClient.open(world.home, name)


@pytest.mark.parametrize("same", [True, False])
def test_two_leads_that_send_at_once_are_both_done_and_neither_ends_the_others_stream(
    world: World, client: LeadClient, tmp_path: Path, same: bool
) -> None:
    """Both are held after their first chunk until the other one's has arrived, then both go on."""
    assert world.server is not None
    first = written(tmp_path, 1, numbers=1 << 20)
    second = first if same else written(tmp_path, 2, numbers=1 << 20)
    other, both, lost = client_of(world, "anna"), threading.Barrier(2, timeout=60), list[BaseException]()

    def send(name: str, file: Path, digest: str) -> None:
        size, partial = file.stat().st_size, world.home / "blobs" / "weights" / "partial" / name / digest

        def chunks() -> Iterator[pb.Chunk]:
            for number, chunk in enumerate(read_chunks(file, digest, 0)):
                if number == 1:
                    until(lambda: partial.exists() and partial.stat().st_size, "the first chunk")
                    both.wait()
                yield pb.Chunk.FromString(chunk.message)

        try:
            stub = world.lead(name)
            assert stub.OpenWeights(pb.OpenWeightsRequest(digest=digest, size=size)).have == 0
            assert stub.PutWeights(chunks()).have == size
        except BaseException as error:
            lost.append(error)
            both.abort()

    uploads = (("lead", *first), ("anna", *second))
    threads = [threading.Thread(target=send, args=each) for each in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert lost == []
    for file, digest in (first, second):
        assert world.server.objects.verified(digest).read_bytes() == file.read_bytes()
    assert not [p for p in (world.home / "blobs" / "weights").rglob("*") if p.is_file()]


def test_what_a_lead_had_sent_of_weights_that_another_one_brought_whole_is_gone(
    world: World, client: LeadClient, tmp_path: Path
) -> None:
    assert world.server is not None
    file, digest = written(tmp_path, numbers=1 << 20)
    other = client_of(world, "anna")
    size, begin = file.stat().st_size, file.read_bytes()[: 1 << 20]
    opened = pb.OpenWeightsRequest(digest=digest, size=size)
    stub = world.lead("anna")
    stub.OpenWeights(opened)
    assert stub.PutWeights(iter([pb.Chunk(object=digest, data=begin)])).have == len(begin)
    client.send_weights(digest, file)
    other.send_weights(digest, file)
    other.close()
    assert world.server.objects.verified(digest).read_bytes() == file.read_bytes()
    assert not [p for p in (world.home / "blobs" / "weights").rglob("*") if p.is_file()]


def test_two_consoles_of_one_lead_that_send_the_same_weights_are_both_done(
    world: World, client: LeadClient, tmp_path: Path
) -> None:
    assert world.server is not None
    file, digest = written(tmp_path, numbers=1 << 20)
    again, ended = LeadClient.open(world.home), list[str]()

    def send(of: LeadClient) -> None:
        of.send_weights(digest, file)
        ended.append(digest)

    threads = [threading.Thread(target=send, args=(c,)) for c in (client, again)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again.close()
    assert ended == [digest, digest]
    assert world.server.objects.verified(digest).read_bytes() == file.read_bytes()


def test_a_console_whose_weights_another_one_brings_whole_before_its_first_piece_is_done(
    world: World, client: LeadClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, digest = written(tmp_path)
    again, sent = LeadClient.open(world.home), list[int]()

    def overtaken(*of: object) -> Iterator[Chunk]:
        sent.append(len(sent))
        if len(sent) == 1:
            again.send_weights(digest, file)
        return read_chunks(*of)  # type: ignore[arg-type]

    monkeypatch.setattr("coordinator.lead.client.read_chunks", overtaken)
    client.send_weights(digest, file)
    again.close()
    assert len(sent) == 2
    assert world.server.objects.verified(digest).read_bytes() == file.read_bytes()


@pytest.mark.fault(
    "a coordinator's disk", "is full while a lead uploads weights", "refused with E-STATE-63; the rest is sent later"
)
def test_a_full_disk_says_disk_and_the_upload_goes_on_where_it_was(
    world: World, client: LeadClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.server is not None
    file, digest = written(tmp_path, numbers=1 << 20)
    size, sent = file.stat().st_size, list[int]()

    def full(file: object, data: bytes) -> None:
        if sent:
            raise OSError(errno.ENOSPC, "No space left on device")
        sent.append(len(data))
        write_all(file, data)

    monkeypatch.setattr("coordinator.lead.client._WATCH_PATIENCE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("service_core.storage.object_store.write_all", full)
        with pytest.raises(UnavailableError, match=r"E-STATE-63.*is full"):
            client.send_weights(digest, file)
    assert world.lead("lead").OpenWeights(pb.OpenWeightsRequest(digest=digest, size=size)).have == sent[0]
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(UnavailableError, match=r"E-STATE-63.*is full"):
            client.send_weights(digest, file)  # all bytes are here, and cannot be made an object
    assert not world.server.objects.has(digest)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=0))
        other = written(tmp_path, 3)
        with pytest.raises(UnavailableError, match="E-RUN-38"):
            client.send_weights(other[1], other[0])
    client.send_weights(digest, file)
    assert world.server.objects.verified(digest).read_bytes() == file.read_bytes()


def submitted(world: World, client: LeadClient, named: object, **changed: object) -> str:
    """Submit a run of hospitals that are not there; returns what it is refused with."""
    spec = replace(compose_spec([*SMALL, "silos=[north,east]"]), weights=replace(named, **changed))
    try:
        client.submit(spec.to_json(), str(changed))
    except (ConfigError, ProtocolError) as error:
        return str(error)
    except Exception as error:
        return str(error)
    return ""


def test_a_lead_that_lies_about_weights_gets_no_run(
    people: Federation, world: World, client: LeadClient, tmp_path: Path
) -> None:
    people.join("north", "east", data="digits/p2c5")
    for site in people.hospitals.values():
        site.stop()
    _, taken = weights.take(compose_spec([*SMALL, f"model.weights={file_of(tmp_path)}"]))
    assert "E-STATE-22" in submitted(world, client, taken.named)  # never sent
    with weights.written(taken) as file:
        client.send_weights(taken.named.object, file)
    assert "E-WIRE-06" in submitted(world, client, taken.named, size=taken.named.size - 1)
    assert "E-WIRE-06" in submitted(world, client, taken.named, fresh=("head",))
    assert "E-CFG-02" in submitted(world, client, taken.named, object="x" * 64)
    assert "E-CFG-02" in submitted(world, client, taken.named, size=1 << 40)
    assert "E-CFG-02" in submitted(world, client, taken.named, source="a\nb")
    for number, change in enumerate(
        (
            {"head.weight": torch.full((10, 64), torch.nan)},
            {"head.weight": torch.full((10, 64), 1e38)},
            {"head.weight": torch.zeros(3)},
            {"head.weight": torch.zeros(10, 64, dtype=torch.float64)},
            {"nowhere": torch.zeros(3)},
        )
    ):
        place = tmp_path / f"lie-{number}"
        digest, size = codec.write_weights({**taken.tensors, **change}, place)
        client.send_weights(digest, place)
        assert "E-WIRE-06" in submitted(world, client, taken.named, object=digest, size=size)
    digest, size = codec.write_state({"w": dict(taken.tensors)}, place)
    client.send_weights(digest, place)
    assert "expected an object of weights" in submitted(world, client, taken.named, object=digest, size=size)
    place.write_bytes(b"x" * 100)
    client.send_weights(file_digest(place), place)
    assert "E-WIRE-06" in submitted(world, client, taken.named, object=file_digest(place), size=100)
    assert world.server.store.runs.all() == []
    with weights.written(taken) as file:  # the lies took its place
        client.send_weights(taken.named.object, file)
    assert submitted(world, client, taken.named) == ""
    (run,) = world.server.store.runs.all()
    assert world.server.store.contributions.readable(taken.named.object, "north") == run.id
    assert world.server.store.contributions.readable(taken.named.object, "stranger") is None
    world.server.runs.abort(run.id)
    world.ended(run.id)
    assert world.server.objects.has(taken.named.object)
