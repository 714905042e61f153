"""Files of any size by key: a local folder, or an object store by URL, with retries that are counted."""

from batchwright.storage.backend import Found
from batchwright.storage.form import Field, File, FormLimits, form
from batchwright.storage.retry import OPERATIONS
from batchwright.storage.settings import StorageSettings
from batchwright.storage.store import Store, Stored, open_store

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
    "open_store",
]
