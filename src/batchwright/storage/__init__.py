"""Files of any size by key, in a local folder or in an object store given by URL, with counted retries."""

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
