"""Stored files as a part: OpenAI's Files and Uploads, for users and for other parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.part import BodyLimit, Part, Served, Server

if TYPE_CHECKING:
    from batchwright.files.store import Files
    from batchwright.storage import Store


class FilesPart(Part):
    """Files of all tenants, in the object store."""

    name = "files"
    metrics = "batchwright.storage.metrics:STORAGE_METRICS"
    routers = ("batchwright.files.http:router", "batchwright.files.http_uploads:router")
    pages = ("batchwright.files.pages:pages",)
    bytes_max = 200 * 1024 * 1024
    """Maximum size of an uploaded file; the part for batches sets it."""

    @property
    def files(self) -> Files:
        return self.files_in(self.core.store)

    def files_in(self, store: Store) -> Files:
        """The files, with a store that counts its calls for the given caller."""
        from batchwright.files.store import Files

        return Files(self.core.queue.database, store)

    def serve(self, server: Server) -> Served:
        from batchwright.api.errors import file_too_large
        from batchwright.files.http import FILES, FORM_BYTES_MAX
        from batchwright.files.http_uploads import PART_PATH, PART_TOO_LARGE
        from batchwright.files.services import FileServices
        from batchwright.files.uploads import PART_BYTES_MAX, Uploads

        files = self.files_in(server.store)
        return Served(
            services=FileServices(files, Uploads(self.core.queue.database, files), self.bytes_max),
            body_limits=(
                BodyLimit("POST", FILES, self.bytes_max + FORM_BYTES_MAX, file_too_large(self.bytes_max), "file"),
                BodyLimit("POST", "/ui/files", self.bytes_max + FORM_BYTES_MAX, file_too_large(self.bytes_max), "file"),
                BodyLimit("POST", PART_PATH, PART_BYTES_MAX + FORM_BYTES_MAX, PART_TOO_LARGE, "data"),
            ),
        )
