"""The machine of a measurement, without anything that identifies its owner."""

import os
import platform
from pathlib import Path

import torch


def describe(device: str) -> dict[str, object]:
    """Processor, cores, memory, system and versions."""
    facts: dict[str, object] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {**facts, "gpu": torch.cuda.get_device_name()} if device == "cuda" else facts


def command(module: str, words: list[str]) -> str:
    """The command line, without the folders of this machine."""
    return " ".join(
        [
            f"python -m {module}",
            *(Path(word).name if Path(word).is_absolute() else word for word in words),
        ]
    )


def _processor() -> str:
    """The processor's name and its vector units."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = dict(
        reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line])
    )
    name = fields.get("model name") or platform.processor() or platform.machine()
    units = [unit for unit in ("avx2", "avx512f") if unit in fields.get("flags", "").split()]
    return " ".join([name, *units])
