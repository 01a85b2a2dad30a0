"""Optimizer numerics: pure functions of tensors. Who owns the tensors is decided in `stream`."""

from __future__ import annotations
