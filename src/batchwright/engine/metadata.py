"""Users' own key-value pairs on their objects, within the limits that OpenAI sets."""

from __future__ import annotations

from collections.abc import Mapping

from batchwright.errors import InvalidInput

METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARACTERS_MAX = 64
METADATA_VALUE_CHARACTERS_MAX = 512


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata over the limits."""
    if len(metadata) > METADATA_PAIRS_MAX:
        raise InvalidInput(f"metadata has {len(metadata)} pairs; the limit is {METADATA_PAIRS_MAX}", param="metadata")
    for name, value in metadata.items():
        if not 0 < len(name) <= METADATA_KEY_CHARACTERS_MAX or len(value) > METADATA_VALUE_CHARACTERS_MAX:
            raise InvalidInput(
                f"metadata {name[:80]!r}: a name has 1 to {METADATA_KEY_CHARACTERS_MAX} characters, "
                f"and a value at most {METADATA_VALUE_CHARACTERS_MAX}",
                param="metadata",
            )
        if "\0" in name + value:
            raise InvalidInput(f"metadata {name!r} contains a NUL character, which cannot be stored", param="metadata")
