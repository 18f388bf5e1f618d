"""The bytes that outlive a forward pass: recurrent states by slot, KV by row. Shapes come from the config's layouts.

    temporal [linear layers, slots + 1, *state.temporal]               the recurrent states
    conv     [linear layers, slots + 1, state.taps, state.channels]    the last inputs of a convolution, oldest first
    keys     [attention layers, rows + 1, *kv.keys]
    values   [attention layers, rows + 1, *kv.values]                  with a latent: its index key, or empty
    window_keys, window_values [window layers, window rows + 1, ...]   the same of sliding windows, by ids of their own

Slot 0 and rows 0 are dummies: never handed out, never written, zero. Which slot or row is whose is not known here.
"""

from collections.abc import Iterable

import torch

from milepost.model.config import ATTENTION, WINDOW, ModelConfig


class Memory:
    """Device memory for `slots` states, `rows` tokens of KV and `window_rows` of sliding windows, plus the dummies."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        rows: int,
        *,
        window_rows: int = 0,
        kv_dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
        conv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = slots
        self.rows = rows
        self.window_rows = window_rows
        self.device = torch.device(device)
        conv_dtype = conv_dtype or kv_dtype
        state, linear = config.state, len(config.linear_layers)

        def zeros(layers: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((layers, count, *shape), dtype=dtype, device=self.device)

        self.conv = zeros(linear, slots + 1, (state.taps, state.channels), conv_dtype)
        self.temporal = zeros(linear, slots + 1, state.temporal, state_dtype)
        self.kv = {}  # kind of attention -> (keys, values)
        for kind, count in ((ATTENTION, rows), (WINDOW, window_rows)):
            layers, kv = len(config.layers_with(kind)), config.kv(kind)
            self.kv[kind] = tuple(zeros(layers, count + 1, shape, kv_dtype) for shape in (kv.keys, kv.values))
        self.keys, self.values = self.kv[ATTENTION]
        self.window_keys, self.window_values = self.kv[WINDOW]

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
        """All keys and values of full attention, the dummy row's included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def window_bytes(self) -> int:
        """All keys and values of sliding windows, the dummy row's included."""
        return self.window_keys.nbytes + self.window_values.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all linear layers."""
        return (self.conv.nbytes + self.temporal.nbytes) // (self.slots + 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one KV row over all layers of full attention."""
        return self.kv_bytes // (self.rows + 1)

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one row of the window pool over all its layers."""
        return self.window_bytes // (self.window_rows + 1)

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
