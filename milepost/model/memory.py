"""The bytes that outlive a forward pass: recurrent states by slot, KV by row.

    temporal [linear layers, slots + 1, value heads, key dim, value dim]   the recurrent states
    conv     [linear layers, slots + 1, kernel - 1, channels]              the last kernel - 1 inputs, oldest first
    keys     [attention layers, rows + 1, kv heads, head dim]
    values   as keys

Slot 0 and row 0 are dummies: never handed out, never written, zero. Which slot or row is whose is not known here.
"""

from collections.abc import Iterable

import torch

from milepost.model.config import ModelConfig


class Memory:
    """Device memory for `slots` states and `rows` tokens of KV, plus the dummies."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        rows: int,
        *,
        kv_dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
        conv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = slots
        self.rows = rows
        self.device = torch.device(device)
        conv_dtype = conv_dtype or kv_dtype
        linear, attention = config.linear, config.attention
        conv_shape, temporal_shape = (0, 0), (0, 0, 0)
        if linear is not None:
            conv_shape = (linear.kernel - 1, linear.channels)
            temporal_shape = (linear.value_heads, linear.key_dim, linear.value_dim)
        kv_shape = (0, 0) if attention is None else (attention.kv_heads, attention.head_dim)

        def zeros(layers: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((layers, count, *shape), dtype=dtype, device=self.device)

        self.conv = zeros(len(config.linear_layers), slots + 1, conv_shape, conv_dtype)
        self.temporal = zeros(len(config.linear_layers), slots + 1, temporal_shape, state_dtype)
        self.keys = zeros(len(config.attention_layers), rows + 1, kv_shape, kv_dtype)
        self.values = zeros(len(config.attention_layers), rows + 1, kv_shape, kv_dtype)

    @property
    def conv_bytes(self) -> int:
        """All convolution windows, the dummy's included."""
        return self.conv.nbytes

    @property
    def temporal_bytes(self) -> int:
        """All recurrent states, the dummy's included."""
        return self.temporal.nbytes

    @property
    def kv_bytes(self) -> int:
        """All keys and values, the dummy row's included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all linear layers."""
        return (self.conv.nbytes + self.temporal.nbytes) // (self.slots + 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one KV row over all attention layers."""
        return (self.keys.nbytes + self.values.nbytes) // (self.rows + 1)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy one slot, all layers."""
        self.copy_slots(((source, target),))

    def copy_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots (source, target). All sources are read before any target is written."""
        pairs = tuple(pairs)
        if not pairs:
            return
        assert all(target > 0 for _, target in pairs), f"slot 0 is nobody's target: {pairs}"
        if len(pairs) == 1:
            source, target = pairs[0]
            self.conv[:, target].copy_(self.conv[:, source])
            self.temporal[:, target].copy_(self.temporal[:, source])
            return
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        self.conv[:, targets] = self.conv[:, sources]
        self.temporal[:, targets] = self.temporal[:, sources]
