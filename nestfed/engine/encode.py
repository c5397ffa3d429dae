"""Compressed uploads and downloads: changes in fewer bits, with error feedback.

A client sends every shared field as its change against the broadcast, v = field − broadcast + residual, rounded to
Q(v). It adds residual = v − Q(v) to its next upload, so rounding errors do not accumulate (error feedback). The server
adds the mean of the Q(v) to its own, unrounded fields. The broadcast may be rounded too; clients then start from the
rounded one and send changes against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.data.random import Purpose, Streams

BLOCK = 256
"""Numbers that share one scale in int8. Layers differ in magnitude, so one scale for all would lose small values."""
KINDS = ("float16", "bfloat16", "int8")
SCALE = ".scale"
"""Suffix for the scales of an int8 field."""
RESIDUAL = "residual."
"""Prefix for the rounding error of a field in a client's private state."""
_LARGEST = {"float16": torch.finfo(torch.float16).max, "bfloat16": torch.finfo(torch.bfloat16).max}


@dataclass(frozen=True)
class Encoding:
    """How uploads and downloads are sent; an empty kind sends them unchanged."""

    up: str = ""
    down: str = ""

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Read "UP" or "UP/DOWN", such as int8 or int8/float16."""
        up, _, down = text.partition("/")
        if down and not up:  # the server would average points near the rounded broadcast and lose small steps
            raise NestfedError(f"exchange.encode = {text!r} rounds downloads only; add a kind for uploads: int8{text}.")
        if (up and up not in KINDS) or (down and down not in KINDS[:2]):
            raise NestfedError(
                f"exchange.encode must be one of {', '.join(KINDS)} for uploads, optionally followed by /float16 or "
                f"/bfloat16 for downloads, not {text!r}."
            )
        return cls(up, down)

    def broadcast(self, shared: Fields) -> Fields:
        """Return the shared fields as clients receive them."""
        return {k: round_to(self.down, v) for k, v in shared.items()} if self.down else shared

    def noise(self, seed: int, ns: Sequence[int], round: int, fields: Fields) -> dict[str, Tensor]:
        """Return the random numbers for stochastic rounding, one row per client; every engine draws the same ones."""
        if self.up != "int8":
            return {}
        streams = Streams(seed)
        names = sorted(fields)
        rows: dict[str, list[Tensor]] = {k: [] for k in names}
        for n in ns:
            generator = streams.at(Purpose.ENCODE, n, round)
            for k in names:
                draw = generator.random(tuple(fields[k].shape), dtype="float32")
                rows[k].append(torch.from_numpy(draw))
        return {k: torch.stack(v).to(fields[k]) for k, v in rows.items()}

    def pack(
        self, upload: Fields, received: Fields, residual: Fields, noise: Fields
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the encoded upload and the new residuals; works with a leading axis of clients."""
        packed: dict[str, Tensor] = {}
        lost = {}
        for k, value in upload.items():
            change = value - received[k] + residual[k]
            sent = squeeze(self.up, change, noise.get(k))
            packed |= {k + suffix: part for suffix, part in sent.items()}
            lost[k] = change - expand(self.up, sent, change)
        return packed, lost

    def unpack(self, packed: Fields, old: Fields, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the fields that the server averages: its own plus the decoded changes."""
        return {
            k: old[k] + expand(self.up, {s: packed[k + s] for s in ("", SCALE) if k + s in packed}, old[k])
            for k in names
        }

    def sizes(self, shared: Fields) -> tuple[int, int]:
        """Return the bytes of one upload and of one download."""
        return _size(self.up, shared), _size(self.down, shared)


def round_to(kind: str, value: Tensor) -> Tensor:
    """Round to float16 or bfloat16; values beyond the range become the largest."""
    most = _LARGEST[kind]
    return value.clamp(-most, most).to(getattr(torch, kind)).to(value.dtype)


def squeeze(kind: str, change: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
    """Return a change in fewer bits: the key "" is the numbers, ".scale" their scales (int8 only)."""
    if kind != "int8":
        most = _LARGEST[kind]
        small = change.clamp(-most, most).to(getattr(torch, kind))
        return {"": small.view(torch.int16) if kind == "bfloat16" else small}  # numpy, and so the wire, has no bfloat16
    blocks = _blocks(change)
    scale = (blocks.abs().amax(-1) / 127).to(torch.float32).to(change.dtype)  # as the receiver sees it
    steps = blocks / torch.where(scale > 0, scale, torch.ones_like(scale))[..., None]
    flat = steps.flatten(-2)[..., : change.shape[-1]]
    # Stochastic rounding: up with the probability of the fractional part, so the mean is right.
    whole = torch.floor(flat + (0.5 if noise is None else noise)).clamp(-127, 127)
    return {"": whole.to(torch.int8), SCALE: scale.to(torch.float32)}


def expand(kind: str, sent: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Decode a change, in the dtype of `like`."""
    value = sent[""]
    if kind == "bfloat16":
        value = value.view(torch.bfloat16)
    if kind != "int8":
        return value.to(like.dtype)
    scale = sent[SCALE].to(like.dtype).repeat_interleave(BLOCK, -1)[..., : value.shape[-1]]
    return value.to(like.dtype) * scale


def wire_form(kind: str, shared: Fields) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape that each array of an upload must have."""
    form: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for k, v in shared.items():
        if not kind:
            form[k] = (v.dtype, tuple(v.shape))
        else:
            sent = squeeze(kind, torch.zeros_like(v))
            form |= {k + suffix: (part.dtype, tuple(part.shape)) for suffix, part in sent.items()}
    return form


def _blocks(value: Tensor) -> Tensor:
    d = value.shape[-1]
    return torch.nn.functional.pad(value, (0, -d % BLOCK)).unflatten(-1, (-1, BLOCK))


def _size(kind: str, shared: Fields) -> int:
    form = wire_form(kind, shared).values()
    return sum(torch.empty((), dtype=dtype).element_size() * torch.Size(shape).numel() for dtype, shape in form)
