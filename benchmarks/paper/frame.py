r"""What FedGELA's global model answers under its plain frame, and under the frame adapted to all silos' classes.

    python -m benchmarks.paper.frame                       # the ISIC2019 subset of fedgela_3, three seeds
    python -m benchmarks.paper.frame images=isic2019-32 --seeds 0 --data-root /path/to/images
    python -m benchmarks.paper.frame method.adapt=false

Silos train under W diag(phi_k), phi_k^c = C n_k^c / n_k, and the global model answers with W. Where the silos together
hold balanced classes the adapted frames average to W; elsewhere they average to W diag(phi), phi^c = C n^c / n over all
silos, which is the frame the features were trained to. One line of JSON per seed: accuracy and balanced accuracy of the
last round's model on all test sets, and how many of its answers are the commonest class, by way of answering:

    plain      W                    the method's own
    adapted    W diag(phi)          what the silos' frames average to
    shifted    W, + log(n^c / n)    the classes' shares as a prior
    levelled   W diag(phi), - log(n^c / n)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paper import images, tables
from benchmarks.paper.study import NewestState, runtime_and_tests, whole
from benchmarks.run_store import seeded
from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_simulation
from fl_core.methods.shared.class_vectors import adaptation
from fl_core.types.clinical import macro_mean

TABLE, SETTING, BATCH = "fedgela_3", "ISIC2019 subset, centres 1, 2, 3, 5", 500


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.frame",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="in place of the setting's own, or beside them")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args(argv)
    table = tables.load(TABLE, "small")
    setting = next(s for s in table.settings if s.name == SETTING)
    method = table.methods[table.own] or ()
    own = (f"experiment={table.experiment}", "scale=small", "personal=false", *setting.runs[0], *method)
    for seed in map(int, given.seeds.split(",")):
        found = answers(replaced(own, given.words), seed, given.data_root)
        print(json.dumps({"seed": seed, "words": given.words, **found}), flush=True)


def replaced(words: Sequence[str], given: Sequence[str]) -> list[str]:
    """Put given words in place of those with the same key."""
    keys = {word.partition("=")[0] for word in given}
    return [*(word for word in words if word.partition("=")[0] not in keys), *given]


def answers(words: Sequence[str], seed: int, data_root: Path | None) -> dict[str, dict[str, float]]:
    """Simulate FedGELA, and score every way of answering: accuracy, balanced accuracy, share of the commonest class."""
    spec = seeded(compose_simulation(images.resolved(words, data_root)), seed)
    root = images.root_of(words, data_root)
    observer = NewestState()
    runner.run(spec, root, observer)
    assert observer.server is not None
    runtime, tests = runtime_and_tests(spec, root)
    model = runtime.method.global_model(runtime.reset_model(), runtime.method.broadcast(observer.server)).eval()
    with torch.no_grad():
        logits = torch.cat([model(tests.batch(part)[0]) for part in whole(tests).split(BATCH)])
    labels = torch.cat([part.train.labels for part in runner.build_simulation(spec, root)[1]])
    counts = torch.bincount(labels, minlength=logits.shape[1]).float()
    return {name: score(found, tests.labels, counts) for name, found in ways(logits, counts).items()}


def ways(logits: Tensor, counts: Tensor) -> Mapping[str, Tensor]:
    """Return the logits (N, C) of each way of answering, from those under the plain frame and class counts (C,)."""
    prior = (counts / counts.sum()).clamp_min(1e-6).log()
    adapted = logits * adaptation(counts)
    return {"plain": logits, "adapted": adapted, "shifted": logits + prior, "levelled": adapted - prior}


def score(logits: Tensor, labels: Tensor, counts: Tensor) -> dict[str, float]:
    """Score answers: accuracy, the mean of the accuracies per class, and how many answers are the commonest class."""
    predicted = logits.argmax(1)
    per_class = [float((predicted[labels == c] == c).float().mean()) for c in labels.unique()]
    return {
        "accuracy": round(float((predicted == labels).float().mean()), 4),
        "balanced": round(macro_mean(per_class) or 0.0, 4),
        "commonest": round(float((predicted == counts.argmax()).float().mean()), 4),
    }


if __name__ == "__main__":
    main()
