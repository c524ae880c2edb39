"""Adaptive class-level aggregation: each fine class's row of the heads is averaged by how well silos recognise it.

FedCD (fedcd.py), section 3.6. With P_j the prototype of fine class j and phi_k (CM, d) the head of silo k,

    s_k,j = softmax over CM of (P_j . phi_k)   at j
    v_k,j = exp(s_k,j) / sum_k exp(s_k,j)      shares are exponentiated, not logits: two weights differ by e at most
    phi_j = sum_k v_k,j phi_k,j

| mode     | P_j                   | weight of a row                                     | the server sees          |
|----------|-----------------------|-----------------------------------------------------|--------------------------|
| "server" | merged in this round  | v, made by the server                               | every silo's head        |
| "stale"  | received by the silo  | exp(s), made by the silo; its count if P_j is new   | the sum over silos       |
| "counts" | -                     | the silo's examples of the fine class               | the sum over silos       |
| "fedavg" | -                     | as the rest of the model                            | the sum over silos       |

"stale" equals the published rule where P_j stands still: the sum of exp(s) phi over that of exp(s) is its mean by v.
The rule with the merged P_j at the silos would need a second exchange in the round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_core.methods.building_blocks.fine_grained import Anchors
from fl_core.types.enums import Weighing
from fl_core.types.values import Part, PartRule

MODES = ("server", "stale", "counts", "fedavg")
PART = "fine"
HEAD = "fine.weight"


def rule(mode: str) -> PartRule:
    """Say what a silo's weight of its head, or of a row of it, is."""
    found = {"server": Weighing.ONCE, "stale": Weighing.QUALITY}
    return PartRule(found.get(mode, Weighing.EXAMPLES))


def shares(p: Tensor, phi: Tensor) -> Tensor:
    """Return s (CM,) of one head (CM, d) under prototypes (CM, d)."""
    return (p.double() @ phi.double().T).softmax(1).diagonal()


def weights(s: Tensor) -> Tensor:
    """Return v (n, CM) from the silos' shares s (n, CM)."""
    return s.softmax(0)


def outgoing(mode: str, moved: Tensor, phi: Tensor, received: Anchors, counts: Tensor) -> Part:
    """Weigh what training changed in a head (CM, d); phi is the trained head, counts (CM,) the silo's examples."""
    if mode == "server":
        return Part.of({HEAD: moved})
    weight = counts
    if mode == "stale":
        weight = torch.where(received.there, shares(received.points, phi).exp().float(), counts)
    return Part.of({HEAD: moved}, weight)


def merged(mode: str, phi: Tensor, part: Part, p: Tensor, known: Tensor) -> Tensor:
    """Return the head (CM, d) after a round; rows of weight 0, or under "server" without a prototype, stay.

    Under "server" the part holds one head per silo, (n, CM, d), and p, known are the merged prototypes.
    """
    if mode != "server":
        return phi + part.mean()[HEAD]
    moved = part.total[HEAD].double()
    if not len(moved):
        return phi
    v = weights(torch.stack([shares(p, phi.double() + change) for change in moved]))
    after = phi + (v.unsqueeze(2) * moved).sum(0).float()
    return torch.where(known.unsqueeze(1) > 0, after, phi)
