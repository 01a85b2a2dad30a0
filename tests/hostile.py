"""How many hostile inputs a property is tried with: a few each time, thousands in `make soak`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

many = settings(
    max_examples=2000 if "FLUXTRAIN_EXPLORE" in os.environ else 30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
