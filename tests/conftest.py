"""What all tests share: eight virtual CPU devices, and caches of the checkout's own.

Compiling is most of the time of the tests: programs that were compiled once, by whichever process, are
read from the cache.
"""

import os
from pathlib import Path

_DEVICES = "--xla_force_host_platform_device_count"

# Before JAX starts its backend: afterwards neither variable is read.
os.environ["JAX_PLATFORMS"] = "cpu"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault(
    "HEADLAB_CACHE", str(Path(__file__).resolve().parents[1] / "build" / "test-cache")
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).resolve().parents[1] / "build" / "test-programs"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
