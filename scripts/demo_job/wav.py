"""16-bit mono WAV files with the standard library."""

from __future__ import annotations

import wave
from pathlib import Path

import torch


def write_wav(path: Path, samples: torch.Tensor, samples_per_second: int) -> None:
    """Write float32 [n] in -1..1; what lies outside is clipped. OSError if the file cannot be written."""
    pcm = (samples.clamp(-1.0, 1.0) * 32767.0).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(samples_per_second)
        # WAV is little-endian whatever the machine is.
        file.writeframes(pcm.numpy().astype("<i2").tobytes())
