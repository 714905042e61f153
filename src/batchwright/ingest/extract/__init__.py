"""Text of documents: one module for each format, chosen by what a document holds and not by what it is called."""
