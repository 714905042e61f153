"""Files and uploads as OpenAI shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchwright.api.openai import ExpiresAfter, unix
from batchwright.api.schemas import Answer, Body, Text
from batchwright.files.store import File
from batchwright.files.uploads import PARTS_MAX, Part, Upload
from batchwright.states import UploadStatus

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
FILENAME_CHARACTERS_MAX = 512
_BYTES_MAX = 2**53 - 1


class FileView(Answer):
    """A file, as OpenAI shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="Unix seconds, like all times of this object.")
    filename: str
    purpose: str
    status: Literal["processed"] = Field("processed", description="Listed files are always complete.")
    expires_at: int | None = Field(description="When the file expires; null means never.")
    status_details: None = None

    @classmethod
    def of(cls, file: File) -> FileView:
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=int(file.created_at.timestamp()),
            filename=file.filename,
            purpose=file.purpose,
            expires_at=unix(file.expires_at),
        )


class FileList(Answer):
    """A page of files; the id of the last one is `after` for the next page."""

    object: Literal["list"] = "list"
    data: list[FileView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class UploadToBe(Body):
    """A large file to be uploaded in parts."""

    filename: Annotated[Text, Field(min_length=1, max_length=FILENAME_CHARACTERS_MAX)]
    purpose: Annotated[Text, Field(max_length=64)] = Field(
        description="The purpose of the file.", json_schema_extra={"enum": [*PURPOSES]}
    )
    bytes: Annotated[int, Field(strict=True, ge=0, le=_BYTES_MAX)] = Field(
        description="Size of the file in bytes; at most `batches.file_bytes_max`."
    )
    mime_type: Annotated[Text, Field(min_length=1, max_length=255)] = Field(description="Any value; it is not checked.")
    expires_after: ExpiresAfter | None = None


class UploadToComplete(Body):
    """The parts of the file."""

    part_ids: Annotated[list[Annotated[Text, Field(max_length=100)]], Field(max_length=PARTS_MAX)] = Field(
        description="In the order in which they form the file."
    )
    md5: Annotated[Text, Field(max_length=100)] | None = Field(
        None, description="The MD5 of the whole file, as 32 hexadecimal digits; if it differs, nothing changes."
    )


class UploadPartView(Answer):
    """A stored part."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int = Field(description="Unix seconds.")
    upload_id: str

    @classmethod
    def of(cls, part: Part) -> UploadPartView:
        return cls(id=part.id, created_at=int(part.created_at.timestamp()), upload_id=part.upload_id)


class UploadView(Answer):
    """An upload, as OpenAI shows it; all times are Unix seconds."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int = Field(description="An hour after its creation; if it is not completed by then, it is `expired`.")
    filename: str
    purpose: str
    status: UploadStatus
    file: FileView | None = Field(description="The file, once it is `completed`.")

    @classmethod
    def of(cls, upload: Upload, file: File | None = None) -> UploadView:
        return cls(
            **{name: getattr(upload, name) for name in ("id", "bytes", "filename", "purpose", "status")},
            created_at=int(upload.created_at.timestamp()),
            expires_at=int(upload.expires_at.timestamp()),
            file=None if file is None else FileView.of(file),
        )
