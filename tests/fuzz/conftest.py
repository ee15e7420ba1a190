"""How many cases fuzzing takes: few in `make test`, 10,000 of each in `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("tests", max_examples=120, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=10_000, **_COMMON)
settings.load_profile(os.environ.get("WEFT_FUZZ", "tests"))
