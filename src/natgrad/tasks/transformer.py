"""The Transformer for translation (Vaswani et al. 2017), from PyTorch's layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

PAD, FIRST, LAST = 0, 1, 2
"""The tokens of padding, and before and after a sentence."""

_MOST_BEYOND = 50  # tokens that a translation may have beyond its source


class Transformer(nn.Module):
    """An encoder and a decoder with one table of embeddings for sources, targets and logits.

    Args:
        tokens: The size of the vocabulary.
        width: Features per position.
        heads: Attention heads.
        inner: Hidden units of the perceptrons.
        layers: Layers of the encoder, and of the decoder.
        dropout: The probability of dropout.
    """

    def __init__(
        self, tokens: int, *, width: int, heads: int, inner: int, layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "d_model": width,
            "nhead": heads,
            "dim_feedforward": inner,
            "dropout": dropout,
            "batch_first": True,
        }
        self.embedding = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        encoder, decoder = nn.TransformerEncoderLayer(**sizes), nn.TransformerDecoderLayer(**sizes)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of each next token, or translations.

        Args:
            inputs: Tokens of sources [B, S] and of the targets before each position [B, T], both padded at the end; or
                sources alone.

        Returns:
            Logits [B, T, tokens]; of sources alone their translations by the most probable tokens, each of at
            most 50 more than its source [B, at most S + 50].
        """
        if isinstance(inputs, Tensor):
            return self._translate(inputs)
        sources, targets = inputs
        logits: Tensor = self.head(self._decode(targets, *self._encode(sources)))
        return logits

    def _encode(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's outputs [B, S, width], and which positions are padding [B, S]."""
        padding = sources == PAD
        return self.encoder(self._embed(sources), src_key_padding_mask=padding), padding

    def _decode(self, targets: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return the decoder's outputs [B, T, width]; each position sees those before it."""
        later = torch.ones(targets.shape[1], targets.shape[1], dtype=torch.bool, device=targets.device).triu(1)
        outputs: Tensor = self.decoder(
            self._embed(targets), memory, tgt_mask=later, tgt_is_causal=True, memory_key_padding_mask=padding
        )
        return outputs

    def _embed(self, tokens: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        embedded: Tensor = self.dropout(self.embedding(tokens) * math.sqrt(width) + self._positions(tokens, width))
        return embedded

    def _positions(self, tokens: Tensor, width: int) -> Tensor:
        """Return sines and cosines [T, width] of wavelengths from 2π to 20000π."""
        dtype, device = self.embedding.weight.dtype, tokens.device
        frequencies = torch.exp(torch.arange(0, width, 2, device=device, dtype=dtype) * (-math.log(10000) / width))
        angles = torch.arange(tokens.shape[1], device=device, dtype=dtype)[:, None] * frequencies
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)

    def _translate(self, sources: Tensor) -> Tensor:
        encoded = self._encode(sources)
        tokens = sources.new_full((len(sources), 1), FIRST)
        most = (sources != PAD).sum(1) + _MOST_BEYOND
        ended = torch.zeros_like(most, dtype=torch.bool)
        for length in range(1, sources.shape[1] + _MOST_BEYOND + 1):
            best = self.head(self._decode(tokens, *encoded)[:, -1]).argmax(-1)
            tokens = torch.cat((tokens, best.masked_fill(ended, PAD)[:, None]), dim=1)
            ended |= (best == LAST) | (most == length)
            if ended.all():
                break
        return tokens[:, 1:]
