"""LEAF's next-character model for Shakespeare. Caldas et al. (2018), "LEAF: A Benchmark for Federated Settings"."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.models.split_model import HeadOptions, SplitModel
from fl_core.types.records import Schema

EMBEDDING, HIDDEN, LAYERS = 8, 256, 2


class LastHidden(nn.Module):
    """Characters (B, L), as numbers of the alphabet, to the last output (B, 256) of a two-layer LSTM."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, LAYERS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L) to (B, 256); examples travel as floats, which hold these whole numbers exactly.

        What is no number of the alphabet is read as the nearest: an error would tell that there is such an example.
        """
        outputs, _ = self.lstm(self.embedding(x.long().clamp(0, self.embedding.num_embeddings - 1)))
        last: Tensor = outputs[:, -1]
        return last


@dataclass(frozen=True, slots=True)
class CharLstm(HeadOptions):
    """Embedding(C, 8)-LSTM(8, 256, 2 layers)-head of the last of L characters, over an alphabet of C.

    The alphabet is the label space: the next character is one of it. 819,920 parameters with LEAF's 80 characters
    (torch counts two biases per gate, of which one is redundant).
    """

    def build(self, schema: Schema) -> SplitModel:
        if len(schema.shape) != 1 or len(schema.classes) < 2:
            raise ConfigError(
                "E-CFG-23", f"char_lstm takes sequences over an alphabet, found {schema.shape}: use data=shakespeare"
            )
        body = LastHidden(len(schema.classes))
        return self.complete(body, HIDDEN, schema)
