"""Files of any size by key: a local folder, or an object store by URL, with retries that are counted."""

from windlass.storage.backend import Found
from windlass.storage.form import Field, File, FormLimits, form
from windlass.storage.keys import hashed
from windlass.storage.retry import OPERATIONS
from windlass.storage.settings import StorageSettings
from windlass.storage.store import Store, Stored, open_store

__all__ = [
    "OPERATIONS",
    "Field",
    "File",
    "FormLimits",
    "Found",
    "StorageSettings",
    "Store",
    "Stored",
    "form",
    "hashed",
    "open_store",
]
