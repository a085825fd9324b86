"""`show --stats` and `--save`: the two looks at a payload's bytes. Only here a verb comes to load torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from connector.core.errors import Gone, UnsupportedTensor, UsageError
from connector.core.names import Edge

if TYPE_CHECKING:
    import torch

    from connector.client.node import Node
    from connector.client.payload import Payload

#: Elements that are widened at once: a payload may be larger than the memory that is left.
STEP = 1 << 20
#: Dtypes that the safetensors format has.
STORABLE = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    " float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2".split()
)
INTEGERS = frozenset("bool uint8 int8 uint16 int16 uint32 int32 int64".split())
COMPLEX = frozenset({"complex32", "complex64", "complex128"})
#: The key that a safetensors file has for itself.
RESERVED = "__metadata__"


@contextmanager
def _look(node: Node, row: dict[str, Any]) -> Iterator[Payload]:
    """The payload of a listed row, held while it is looked at. Gone if another life's stands there now."""
    with node.inspect(Edge.parse(row["edge"]), row["rid"], row["index"]) as payload:
        if payload.life != row["life"]:
            facts = {"rid": row["rid"], "edge": row["edge"], "index": row["index"], "life": row["life"]}
            raise Gone("the payload of another life of this rid stands first", **facts)
        yield payload


def statistics(node: Node, row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """min, max, mean and NaN count by key; what a dtype has no numbers for is None."""
    if row["end_only"]:
        return {}
    with _look(node, row) as payload:
        dtypes = {key: dtype for key, dtype, _, _ in row["tensors"]}
        return {key: measure(payload[key], dtype) for key, dtype in dtypes.items()}


def measure(tensor: torch.Tensor, dtype: str) -> dict[str, Any]:
    """Over the elements that are no NaN: min, max, mean (a complex one as text), and how many are NaN.

    Integers up to int64 are exact; the others are taken as float64. None where nothing can be told: no elements,
    complex numbers (no order), sub-byte and raw-bit dtypes (no numbers).
    """
    if not (dtype in INTEGERS or dtype in COMPLEX or dtype == "uint64" or _is_float(dtype)):
        return {"min": None, "max": None, "mean": None, "nan": None}
    low: list[Any] = []
    high: list[Any] = []
    total, count, nans = 0j if dtype in COMPLEX else 0.0, 0, 0
    for part in tensor.reshape(-1).split(STEP):
        wide = _widened(part, dtype)
        good = wide[~wide.isnan()]
        nans += wide.numel() - good.numel()
        if good.numel() == 0:
            continue
        count += good.numel()
        total += (good if dtype in COMPLEX else good.double()).sum().item()
        if dtype not in COMPLEX:
            low.append(good.min().item())
            high.append(good.max().item())
    mean = total / count if count else None
    return {
        "min": min(low, default=None),
        "max": max(high, default=None),
        "mean": str(mean) if isinstance(mean, complex) else mean,
        "nan": nans,
    }


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat")) and not dtype.startswith("float4")


def _widened(part: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype in COMPLEX:
        return part.cdouble()  # type: ignore[attr-defined]  # torch's stubs forgot it
    return part.long() if dtype in INTEGERS else part.double()


def save(node: Node, row: dict[str, Any], path: Path) -> None:
    """Write a listed payload to a safetensors file, whole or not at all; an older file of the name is replaced.

    UsageError: safetensors is not installed, or a key that the format keeps for itself. UnsupportedTensor: a dtype
    that the format has not.
    """
    place = {"rid": row["rid"], "edge": row["edge"], "index": row["index"]}
    for key, dtype, _, _ in row["tensors"]:
        if dtype not in STORABLE:
            raise UnsupportedTensor("a safetensors file cannot hold this dtype", key=key, dtype=dtype, **place)
        if key == RESERVED:
            raise UsageError("a safetensors file keeps this key for itself", key=key, **place)
    if row["end_only"]:
        raise UsageError("END sent alone is no payload: there is nothing to save", **place)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        hint = "install it: pip install 'tensor-connector[demo]', or safetensors and numpy"
        raise UsageError(f"--save needs the safetensors package; {hint}", missing=error.name) from error
    metadata = {name: str(row[name]) for name in ("edge", "rid", "index", "life", "attempt", "writer")}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _look(node, row) as payload:
            save_file(dict(payload), part, metadata)
        os.replace(part, path)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise click.ClickException(f"cannot write {path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
