"""Fewer bytes on the wire: what is sent as a change in fewer bits, rounding errors carried over to the next round.

A client sends every shared field as its change against the broadcast, v = field − broadcast + residual, rounded to
Q(v), and keeps residual = v − Q(v) for its next upload, so that no rounding error is lost for good (error feedback).
The server adds the mean of the Q(v) to its own, unrounded, fields. The broadcast may be rounded too; clients then
start from the rounded one and send changes against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.data.random import Purpose, Streams

BLOCK = 256
"""Numbers that share one scale in int8: layers differ in size by orders of magnitude."""
KINDS = ("float16", "bfloat16", "int8")
SCALE = ".scale"
"""Beside a field in int8: its scales."""
RESIDUAL = "residual."
"""Before a field's name in a client's private state: what rounding has lost so far."""
_LARGEST = {"float16": torch.finfo(torch.float16).max, "bfloat16": torch.finfo(torch.bfloat16).max}


@dataclass(frozen=True)
class Encoding:
    """How uploads and downloads are sent; an empty kind means: as they are."""

    up: str = ""
    down: str = ""

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Read "UP" or "UP/DOWN", such as int8 or int8/float16."""
        up, _, down = text.partition("/")
        if down and not up:  # the server would average points that lie near the rounded broadcast, and lose small steps
            raise NestfedError(
                f"exchange.encode = {text!r} rounds downloads only; name a kind for uploads too: int8{text}."
            )
        if (up and up not in KINDS) or (down and down not in KINDS[:2]):
            raise NestfedError(
                f"exchange.encode must be one of {', '.join(KINDS)} for uploads, perhaps followed by /float16 or /bfloat16 "
                f"for downloads, not {text!r}."
            )
        return cls(up, down)

    def broadcast(self, shared: Fields) -> Fields:
        """Return the shared fields as clients receive them."""
        return {k: round_to(self.down, v) for k, v in shared.items()} if self.down else shared

    def noise(self, seed: int, ns: Sequence[int], round: int, fields: Fields) -> dict[str, Tensor]:
        """Return the random numbers of the stochastic rounding, one row per client; the same wherever they are drawn."""
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
        """Return what is sent and the new residuals; a leading axis of clients goes through."""
        packed: dict[str, Tensor] = {}
        lost = {}
        for k, value in upload.items():
            change = value - received[k] + residual[k]
            sent = squeeze(self.up, change, noise.get(k))
            packed |= {k + suffix: part for suffix, part in sent.items()}
            lost[k] = change - expand(self.up, sent, change)
        return packed, lost

    def unpack(self, packed: Fields, old: Fields, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the fields that the server averages: its own plus the changes that were sent."""
        return {
            k: old[k] + expand(self.up, {s: packed[k + s] for s in ("", SCALE) if k + s in packed}, old[k])
            for k in names
        }

    def sizes(self, shared: Fields) -> tuple[int, int]:
        """Return the bytes of one upload and of one download."""
        return _size(self.up, shared), _size(self.down, shared)


def round_to(kind: str, value: Tensor) -> Tensor:
    """Return the nearest numbers of float16 or bfloat16, too large ones as the largest."""
    most = _LARGEST[kind]
    return value.clamp(-most, most).to(getattr(torch, kind)).to(value.dtype)


def squeeze(kind: str, change: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
    """Return a change in fewer bits: "" is the numbers, ".scale" their scales if they have some."""
    if kind != "int8":
        most = _LARGEST[kind]
        small = change.clamp(-most, most).to(getattr(torch, kind))
        return {"": small.view(torch.int16) if kind == "bfloat16" else small}  # numpy, and so the wire, has no bfloat16
    blocks = _blocks(change)
    scale = (blocks.abs().amax(-1) / 127).to(torch.float32).to(change.dtype)  # as the receiver will see it
    steps = blocks / torch.where(scale > 0, scale, torch.ones_like(scale))[..., None]
    flat = steps.flatten(-2)[..., : change.shape[-1]]
    # Rounded up with the probability of what lies above the lower neighbour: right in the mean.
    whole = torch.floor(flat + (0.5 if noise is None else noise)).clamp(-127, 127)
    return {"": whole.to(torch.int8), SCALE: scale.to(torch.float32)}


def expand(kind: str, sent: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return the change that was sent, in the dtype of `like`."""
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
