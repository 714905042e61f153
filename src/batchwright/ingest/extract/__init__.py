"""Text of documents: one module for each format, chosen by the content of a document, not by its name."""
