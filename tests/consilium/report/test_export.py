"""An exported file holds all that it takes to classify as the evaluated model does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

import grpc
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from consilium.model import model_file
from consilium.report import documents
from consilium.report.export import export_model
from consilium.report.facts import training_text
from consilium.research.engines.in_process import RoundHistory, simulate
from coordinator.lead.accuracy import clinical_message
from coordinator.lead.client import LeadClient
from coordinator.lead.run_detail import check_detail
from coordinator.pki.authority import Authority
from fl_core.errors import ConfigError, ProtocolError, StateError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.clinical import clinical_counts, clinical_metrics
from fl_core.types import tensor_maps
from fl_core.types.clinical import ClinicalMetrics
from fl_core.types.values import Part, State
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.codec import write_state
from service_core.pki.identity import Address
from service_core.storage.private_files import Credentials
from tests.support.cards import lead, markdown_of
from tests.support.coordinator import running
from tests.support.federations import SCHEMA, manifest, same, shares
from tests.support.privacy import private

FILES = ["r1.card.html", "r1.card.json", "r1.md", "r1.safetensors"]
METHODS = {
    "fedavg": ("fedavg", {}),
    "fedgela": ("fedgela", {"logit_scale": 12.0}),
    "fedgela_la": ("fedgela", {"etf": False}),
    "fednh": ("fednh", {}),
    "fedcd": ("fedcd", {"acla": "stale"}),
    "fednh_fixed_scale": ("fednh", {"fix_scaling": 30.0}),
}


def exported(tmp_path: Path, name: str, options: dict[str, object]) -> tuple[State, Path]:
    run = manifest(name, options, rounds=1)
    final = simulate(RunSetup.of(run), shares(), RoundHistory())
    stored = tmp_path / "state"
    write_state(final, stored)
    info = pb.RunInfo(
        run_id="r1",
        method=name,
        model_digest=tensor_maps.digest(final["w"]),
        manifest_digest=run.digest(),
        model_object="a" * 64,
    )
    detail = pb.RunDetail(info=info, manifest_json=run.to_json())
    return final, export_model(detail, stored, tmp_path, lead(Path(mkdtemp(dir=tmp_path.parent)) / "lead")).model


@pytest.mark.parametrize("case", METHODS)
def test_a_file_alone_classifies_as_the_evaluated_model(tmp_path: Path, case: str) -> None:
    name, options = METHODS[case]
    final, file = exported(tmp_path, name, options)
    method, x = build_method(name, options), torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    evaluated = method.global_model(build_model("digits_cnn", {}, SCHEMA, 0), method.broadcast(final)).eval()
    tensors = load_file(file)
    assert same(tensors, tensor_maps.copy_state(evaluated))
    blank = method.global_model(build_model("digits_cnn", {}, SCHEMA, 1), method.broadcast(final)).eval()
    with torch.no_grad():
        for v in blank.state_dict().values():
            v.zero_()
    tensor_maps.load_state(blank, tensors)
    assert torch.equal(blank(x), evaluated(x))


def test_a_file_names_the_options_of_its_method(tmp_path: Path) -> None:
    _, file = exported(tmp_path, "fedgela", {"logit_scale": 12.0})
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["consilium"])
    assert facts["method_options"] == asdict(build_method("fedgela", {"logit_scale": 12.0}))
    assert facts["model_options"] == {}


def test_another_state_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    run = manifest("fedavg", rounds=1)
    stored = tmp_path / "state"
    write_state(simulate(RunSetup.of(run), shares(), RoundHistory()), stored)
    info = pb.RunInfo(run_id="r1", model_digest="0" * 64, manifest_digest=run.digest(), model_object="a" * 64)
    detail = pb.RunDetail(info=info, manifest_json=run.to_json())
    with pytest.raises(StateError) as caught:
        export_model(detail, stored, tmp_path, lead(tmp_path / "lead"))
    assert caught.value.code == "E-STATE-22"


@pytest.mark.parametrize(
    "lie",
    [
        {"run_id": "../../etc/cron.d/x"},
        {"run_id": "/tmp/x"},
        {"run_id": "r1\nFROM alpine"},
        {"run_id": ""},
        {"run_id": "."},
        {"run_id": "r" * 300},
        {"model_object": "../state"},
        {"model_object": "A" * 64},
        {"manifest_digest": "b" * 64},
    ],
)
@pytest.mark.fault(
    "a malicious service", "answers an export with paths, other manifests or endless bytes", "nothing is written"
)
def test_a_service_that_lies_writes_nothing(tmp_path: Path, lie: dict[str, str]) -> None:
    run = manifest("fedavg", rounds=1)
    sound = {"run_id": "r1", "manifest_digest": run.digest(), "model_object": "a" * 64}
    detail = pb.RunDetail(info=pb.RunInfo(**sound | lie), manifest_json=run.to_json())
    with pytest.raises(ProtocolError) as caught:
        export_model(detail, tmp_path / "state", tmp_path / "out", Credentials(b"", b"", b""))
    assert caught.value.code == "E-WIRE-06"
    assert list(tmp_path.iterdir()) == []
    assert check_detail(pb.RunDetail(info=pb.RunInfo(**sound), manifest_json=run.to_json())) == run


class Endless(rpc.TransferServicer):
    def Get(self, request, context):  # noqa: N802
        offset = 0
        while context.is_active():
            yield pb.Chunk(object=request.digest if offset == 0 else "", offset=offset, data=bytes(1 << 16))
            offset += 1 << 16


def test_a_fetch_ends_at_its_limit(tmp_path: Path) -> None:
    with running(tmp_path / "coordinator", []) as world:
        ca = Authority.open(world.home)
        own = ca.server_credentials()
        server = grpc.server(ThreadPoolExecutor(2))
        rpc.add_TransferServicer_to_server(Endless(), server)
        port = server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([(own.key_pem, own.cert_pem)], ca.ca_pem, True)
        )
        server.start()
        try:
            liar = LeadClient(Address("127.0.0.1", port), world.people["lead"])
            with pytest.raises(ProtocolError, match=r"E-WIRE-04.*the expected 1000000 bytes"):
                liar.fetch("a" * 64, tmp_path / "state", 1_000_000)
            liar.close()
        finally:
            server.stop(0).wait(10)


def card(found: ClinicalMetrics | None, metrics: str = "") -> str:
    run = manifest(metrics=metrics or ("clinical" if found else "basic"))
    last = pb.RoundInfo(kind=pb.EVALUATE, correct=[1, 1, 0, 0], examples=[2, 2, 0, 3])
    if found is not None:
        last.clinical.CopyFrom(clinical_message(found))
    return of_run(run, last)


def of_run(run: RunManifest, *rounds: pb.RoundInfo, software: dict[str, str] | None = None) -> str:
    info = pb.RunInfo(run_id="r1", name="test", rounds=1)
    return markdown_of(pb.RunDetail(info=info, manifest_json=run.to_json(), rounds=rounds, software=software))


def test_a_card_has_sensitivity_specificity_auc_confusion_and_reliability() -> None:
    counts = clinical_counts(torch.tensor([[2.0, 1, 0, 0], [0, 2, 1, 0], [1, 0, -3, 0]]), torch.tensor([0, 0, 1]), 4)
    found = clinical_metrics(Part(counts, counts["confusion"].sum()))
    text = card(found)
    assert "| class | test examples | recognised | specificity | AUC |" in text
    assert "| a | 2 | 50.0 % (95 %: 1.3 to 98.7 %) | 0.0 % (0.0 to 97.5) |" in text
    assert "| c | 0 | not measured | 100.0 % (29.2 to 100.0) | - |" in text
    assert "over 3 of 4 classes. Guessing reaches 33.3 %." in text
    assert "The area under the ROC curve (one class against the rest, averaged over classes)" in text
    assert "Specificity, AUC and calibration are from 3 of 7 test examples." in text
    assert "| a | 1 | 1 | 0 | 0 |" in text
    assert text.count("| 60 to 67 % |") == 1


def test_a_card_names_the_file_and_explains_a_large_calibration_error_and_a_temperature_is_written_if_asked_for(
    tmp_path: Path,
) -> None:
    """Logits of 0 and 1: all answers right, at a confidence of 48 %."""
    counts = clinical_counts(torch.eye(4).repeat(30, 1), torch.arange(4).repeat(30), 4)
    found = clinical_metrics(Part(counts, counts["confusion"].sum()))
    run = manifest("fedavg", rounds=1, metrics="clinical")
    last = pb.RoundInfo(kind=pb.EVALUATE, correct=[30] * 4, examples=[30] * 4)
    last.clinical.CopyFrom(clinical_message(found))
    state = simulate(RunSetup.of(run), shares(), RoundHistory())
    write_state(state, tmp_path / "state")
    digest = tensor_maps.digest(state["w"])
    info = pb.RunInfo(run_id="r1", model_digest=digest, manifest_digest=run.digest(), model_object="a" * 64)
    detail = pb.RunDetail(info=info, manifest_json=run.to_json(), rounds=[last])
    own = lead(tmp_path / "lead")
    file, card, *_ = export_model(detail, tmp_path / "state", tmp_path, own, temperature=True)
    text = card.read_text()
    assert "error: 52.5 points. 100 % of predictions are correct, but mean confidence is 48 %" in text
    assert sha256(file.read_bytes()).hexdigest() in text
    temperature = model_file.load(file).facts.temperature
    assert 0.05 < temperature < 0.3
    assert f"by the temperature {temperature:.4g}, which the file holds" in text
    bare = pb.RunDetail(info=info, manifest_json=manifest("fedavg", rounds=1).to_json())
    bare.info.manifest_digest = manifest("fedavg", rounds=1).digest()
    with pytest.raises(ConfigError, match=r"E-CFG-08: --temperature.*metrics=basic"):
        export_model(bare, tmp_path / "state", tmp_path, own, temperature=True)


def test_a_card_says_why_there_is_no_specificity() -> None:
    assert "Specificity, AUC and calibration were not measured (metrics=basic)." in card(None)
    assert "calibration are not measured under differential privacy." in of_run(private())
    assert "No hospital sent specificity" in card(None, metrics="clinical")


@pytest.mark.parametrize(("method", "said"), [("fedavg", "| - |"), ("fedmr", "| yes |")])
def test_a_card_says_of_prototypes_only_where_the_method_has_any_and_of_training_in_words(
    method: str, said: str
) -> None:
    card = of_run(manifest(method, rounds=1), pb.RoundInfo())
    rows = [line for line in card.splitlines() if line.startswith(f"| {manifest(method, rounds=1).members[0].name} |")]
    assert said in rows[0]
    assert "Local training: lr " in card
    assert "TrainConfig" not in card


def test_a_card_names_the_software_of_the_runs_sides_or_of_an_older_run_its_manifests() -> None:
    run, sides = manifest("fedavg", rounds=1), {"": "fl 1+a", "south": "fl 1+b"}
    assert "The coordinator ran fl 1+a; hospitals also ran fl 1+b." in of_run(run, software=sides)
    assert "The coordinator ran fl 0+c." in of_run(replace(run, software="fl 0+c"))


def test_a_closed_form_is_said_to_take_no_training_step() -> None:
    for method, steps in (("analytic", False), ("fedavg", True)):
        run = manifest(method, rounds=1)
        assert ("Local training: none: the model is solved in closed form" in of_run(run)) is not steps
        assert ("momentum" in training_text(CompiledRun(run))) is steps


def test_a_model_and_its_card_appear_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def killed(*_: object, **__: object) -> str:
        seen.append(sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".") and p.name != "state"))
        raise KeyboardInterrupt

    monkeypatch.setattr(documents, "page", killed)
    with pytest.raises(KeyboardInterrupt):
        exported(tmp_path, "fedavg", {})
    monkeypatch.undo()
    assert seen == [[]], "nothing has a name of the user's before all is written"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state"]
    exported(tmp_path, "fedavg", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [*FILES, "state"]


def test_what_a_killed_export_left_is_named_and_removed_by_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / ".export-r1.tmp"
    left.mkdir()
    (left / ".tmpAbC123").write_bytes(b"half of a model")
    exported(tmp_path, "fedavg", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [*FILES, "state"]
    assert ".export-r1.tmp" in caplog.text
