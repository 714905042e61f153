"""LlamaIndex's IngestionPipeline over a folder, in a process of its own that may be killed at any moment.

    python -m benchmarks.peers.llamaindex --papers FOLDER --storage FOLDER --url URL [--every N]

Document store, cache and vector store are kept in the storage folder, as its documentation shows: loaded at the start
if they are there, and persisted after the run; with `--every`, after every N documents. Each document that is read
is a line on the standard output, and the last line is a JSON object.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import llama_index.core
from llama_index.core import SimpleDirectoryReader
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

BATCH = 100
VECTORS = "vectors.json"


class RemoteEmbedding(BaseEmbedding):
    """The same server, with many texts in a request."""

    url: str

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        body = {"model": self.model_name, "input": texts}
        answer = httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=60)
        answer.raise_for_status()
        return [one["embedding"] for one in answer.json()["data"]]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers.llamaindex")
    parser.add_argument("--papers", type=Path, required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--every", type=int, default=0, help="documents; 0: persist once, at the end")
    arguments = parser.parse_args()
    files = sorted(map(str, arguments.papers.iterdir()))
    pipeline, is_damaged = open_pipeline(arguments.storage, arguments.url)
    step = arguments.every or len(files)
    for start in range(0, len(files), step):
        pipeline.run(documents=read(files[start : start + step]))
        persist(pipeline, arguments.storage)
    stored = len(pipeline.vector_store.data.embedding_dict)
    print(json.dumps({"stored": stored, "is_damaged": is_damaged, "version": llama_index.core.__version__}))


def open_pipeline(storage: Path, url: str) -> tuple[Any, bool]:
    """What was persisted before. A file that was cut off by a kill cannot be read; then everything starts again."""
    try:
        return make_pipeline(storage, url), False
    except ValueError:
        shutil.rmtree(storage)
        return make_pipeline(storage, url), True


def make_pipeline(storage: Path, url: str) -> Any:
    vectors = storage / VECTORS
    pipeline = IngestionPipeline(
        transformations=[
            SentenceSplitter(chunk_size=1_500, chunk_overlap=150, tokenizer=list),
            RemoteEmbedding(model_name="bench-embedding", url=url, embed_batch_size=BATCH),
        ],
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore.from_persist_path(str(vectors)) if vectors.exists() else SimpleVectorStore(),
    )
    if vectors.exists():
        pipeline.load(str(storage))
    return pipeline


def persist(pipeline: Any, storage: Path) -> None:
    """Vectors first: a document that the store knows is never processed again."""
    storage.mkdir(exist_ok=True)
    pipeline.vector_store.persist(str(storage / VECTORS))
    pipeline.persist(str(storage))


def read(files: list[str]) -> list[Any]:
    documents = SimpleDirectoryReader(input_files=files, filename_as_id=True).load_data()
    for document in documents:
        document.metadata = {}  # or it would be a part of every chunk
        print(document.id_, flush=True)
    return documents


if __name__ == "__main__":
    main()
