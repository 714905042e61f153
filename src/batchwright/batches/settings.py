"""Settings of batches: limits of their input, where workers keep files, and how long data is kept after the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from batchwright.batches.plan.plan import InputLimits
from batchwright.errors import ConfigurationError
from batchwright.inference.prices import Price

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Limits of batches, and how they run."""

    requests_max: int = 50_000
    """Maximum number of requests in one input file."""
    file_bytes_max: int = 200 * MIB
    """Maximum size of one uploaded file, in bytes."""
    line_bytes_max: int = 16 * MIB
    """Maximum size of one line of an input file, in bytes."""
    embedding_inputs_max: int = 50_000
    """Maximum number of texts to embed in one input file."""
    models_max: int = 64
    """Maximum number of models in one input file."""
    work_dir: Path | None = None
    """Folder in which workers keep inputs and journals; unset, the folder `work` beside the embedded database."""
    work_dir_limit: int = 10 * 1024 * MIB
    """Bytes in the work folder above which no further batch is started on this machine."""
    work_dir_reserve: int = 64 * MIB
    """Bytes that must stay free on the disk of the work folder, in addition to the answers in flight. Below that
    nothing is sent, because its answer could not be stored."""
    cancel_grace_seconds: float = 30.0
    """How long requests in flight may continue when their batch is cancelled."""
    provider_grace_seconds: float = 600.0
    """How long a batch that is cancelled or expired waits for outside providers to cancel its jobs.
    Their results so far are paid for, and are fetched."""
    checkpoint_seconds: float = 1.0
    """How often answers are registered, so that another worker can continue from them."""
    shared_checkpoint_seconds: float = 5.0
    """The same if answers are first uploaded to the store that `storage.url` names; sooner after 8 MB."""
    segments_kept_hours: float = 1.0
    """How long answers can still be read one by one after the end of their batch."""
    failed_segments_kept_days: float = 7.0
    """The same if the files could not be written, so that `batchwright batch repair` can write them."""
    header_key_file: Path | None = None
    """The file with the key that encrypts headers of creators, 32 bytes in base64; unset, the embedded database has one
    in its folder, and with another database such headers are refused."""
    header_key_env: str | None = None
    """Environment variable with the same key."""
    prices: dict[str, Price] = field(default_factory=dict)
    """Price of the tokens of a model; `*` is for all models that are not named."""
    tenant_weights: dict[str, int] = field(default_factory=dict)
    """Number of requests of a tenant in each round among the tenants that wait for the same model; 1 for tenants that
    are not named."""

    def __post_init__(self) -> None:
        if self.header_key_file is not None and self.header_key_env is not None:
            raise ConfigurationError("batches has header_key_file and header_key_env; keep one of them")
        for tenant, weight in self.tenant_weights.items():
            if weight < 1:
                raise ConfigurationError(f"batches.tenant_weights.{tenant} is {weight}; it must be at least 1")
        for name in (
            "requests_max",
            "file_bytes_max",
            "line_bytes_max",
            "embedding_inputs_max",
            "models_max",
            "work_dir_limit",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"batches.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("checkpoint_seconds", "shared_checkpoint_seconds"):
            if not 0 < getattr(self, name) <= 60:
                raise ConfigurationError(f"batches.{name} is {getattr(self, name)}; it must be above 0, and at most 60")
        for name in (
            "work_dir_reserve",
            "cancel_grace_seconds",
            "provider_grace_seconds",
            "segments_kept_hours",
            "failed_segments_kept_days",
        ):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"batches.{name} is {getattr(self, name)}; it must not be negative")

    @property
    def limits(self) -> InputLimits:
        return InputLimits(
            bytes_max=self.file_bytes_max,
            embedding_inputs_max=self.embedding_inputs_max,
            line_bytes_max=self.line_bytes_max,
            models_max=self.models_max,
            requests_max=self.requests_max,
        )
