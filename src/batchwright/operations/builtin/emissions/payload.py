"""The fields that the operations share, and the key that they form: module, type, target, method and year."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

Word = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,49}$")]
Year = Annotated[int, Field(ge=1900, le=2200)]
DataPath = Annotated[str, StringConstraints(min_length=1, max_length=500)]
PauseSeconds = Annotated[float, Field(ge=0, le=10)]

KEY = ("module", "data_type", "target", "method", "year")
